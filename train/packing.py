"""Trajectories as packed rows, in which what sequences begin with alike is computed once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from agentrl.trajectory import Trajectory, TrajectoryGroup

SHARED_BLOCK = 8
"""Tokens; beginnings are shared in multiples of it, for fewer are not worth a call of their own."""


@dataclass(frozen=True, slots=True)
class Node:
    """Tokens of a row that `children` go on from; a leaf ends a sequence."""

    num_tokens: int
    children: tuple[Node, ...] = ()


Layout = tuple[Node, ...]
"""The sequences of a row as a forest, its tokens in preorder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One packed row of T tokens, of which N are trained.

    Sequences that begin alike, the members of a group above all, share these tokens, and go on from
    them in `position_ids`, in `previous` and in attention.

    Example:
        Two members of a group, prompt 5 6, that sampled 7 8 and 9 (and SHARED_BLOCK = 1):
        input_ids [5, 6, 7, 8, 9]   position_ids [0, 1, 2, 3, 2]   previous [-1, 0, 1, 2, 1]
        trained [2, 3, 4]           layout (Node(2, (Node(2), Node(1))),)
    """

    input_ids: torch.Tensor  # [T] int64
    position_ids: torch.Tensor  # [T] int64
    previous: torch.Tensor  # [T] int64, where the token before this one stands; -1: there is none
    trained: torch.Tensor  # [N] int64, the tokens that the policy sampled
    advantages: torch.Tensor  # [N] float32
    rollout_logprobs: torch.Tensor  # [N] float32
    versions: torch.Tensor  # [N] int64
    trajectory_ids: torch.Tensor  # [N] int64, counted over the whole batch
    trajectory_tokens: torch.Tensor  # [N] float32, sampled tokens of the trajectory
    layout: Layout

    def to(self, device: torch.device) -> Self:
        tensors = {
            field.name: getattr(self, field.name).to(device, non_blocking=True)
            for field in fields(self)
            if field.name != "layout"
        }
        return replace(self, **tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The micro-batches of one optimizer step, and what the step divides by.

    The counts hold every scored trajectory with a sampled token, whether or not it is computed.
    """

    micro_batches: list[MicroBatch]
    num_loss_tokens: int
    num_trajectories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """One segment of a trajectory."""

    token_ids: np.ndarray  # [L]
    loss_mask: np.ndarray  # [L]
    logprobs: np.ndarray  # [L]
    versions: np.ndarray  # [L]
    advantage: float
    trajectory_id: int
    trajectory_tokens: int

    @property
    def first_sampled(self) -> int:
        return int(self.loss_mask.argmax())


def pack(
    groups: Sequence[TrajectoryGroup],
    advantages: Sequence[np.ndarray],
    *,
    micro_batch_tokens: int,
    keep_zero_advantages: bool = False,
    mask_truncated_completions: bool = False,
) -> Batch:
    """Lay trajectories into rows of at most `micro_batch_tokens` tokens, sorted by their prompts.

    Which row a sequence lands in changes no gradient. Unscored trajectories are left out;
    trajectories whose advantage is exactly 0 are counted but not computed, for their gradient is
    exactly 0, unless `keep_zero_advantages` (a KL term pulls at them too). With
    `mask_truncated_completions`, trajectories that a limit cut are counted but not computed.

    Args:
        advantages: per group, one number per trajectory.

    Raises:
        ValueError: one sequence alone exceeds `micro_batch_tokens`.
    """
    sequences: list[_Sequence] = []
    num_loss_tokens = num_trajectories = 0
    for group, group_advantages in zip(groups, advantages, strict=True):
        for trajectory, advantage in zip(group.trajectories, group_advantages, strict=True):
            num_tokens = trajectory.num_sampled_tokens
            reward = trajectory.reward
            if reward is None or not math.isfinite(reward) or not num_tokens:
                continue
            num_trajectories += 1
            num_loss_tokens += num_tokens
            stop = trajectory.stop_reason
            if mask_truncated_completions and stop is not None and stop.is_cut:
                continue
            if advantage != 0 or keep_zero_advantages:
                sequences += _sequences(trajectory, float(advantage), num_trajectories - 1)
    return Batch(
        micro_batches=[_row(row) for row in _rows(sequences, micro_batch_tokens)],
        num_loss_tokens=num_loss_tokens,
        num_trajectories=num_trajectories,
    )


def single_sequence(token_ids: Sequence[int]) -> MicroBatch:
    """One sequence of which every token but the first is trained, with advantage 0."""
    length = len(token_ids)
    sequence = _Sequence(
        token_ids=np.asarray(token_ids),
        loss_mask=np.arange(length) > 0,
        logprobs=np.zeros(length),
        versions=np.zeros(length, dtype=np.int64),
        advantage=0.0,
        trajectory_id=0,
        trajectory_tokens=max(length - 1, 1),
    )
    return _row([sequence])


def _sequences(trajectory: Trajectory, advantage: float, index: int) -> Iterator[_Sequence]:
    for part in trajectory.segments():
        yield _Sequence(
            token_ids=np.asarray(trajectory.token_ids[part]),
            loss_mask=np.asarray(trajectory.loss_mask[part]),
            logprobs=np.asarray(trajectory.logprobs[part]),
            versions=np.asarray(trajectory.versions[part]),
            advantage=advantage,
            trajectory_id=index,
            trajectory_tokens=trajectory.num_sampled_tokens,
        )


def _rows(sequences: list[_Sequence], budget: int) -> list[list[_Sequence]]:
    """Sequences in the order of their prompts, a new row where one would not fit any more."""
    rows: list[list[_Sequence]] = []
    room = 0
    for sequence in sorted(sequences, key=lambda s: s.token_ids[: s.first_sampled].tolist()):
        length = len(sequence.token_ids)
        if length > budget:
            raise ValueError(
                f"a sequence of {length} tokens does not fit optim.micro_batch_tokens={budget}: "
                f"raise it to at least {length}, or lower rollout.max_context_tokens"
            )
        needed = length - _num_shared(rows[-1][-1], sequence) if rows else length
        if not rows or needed > room:
            rows.append([])
            needed, room = length, budget
        rows[-1].append(sequence)
        room -= needed
    return rows


def _num_shared(a: _Sequence, b: _Sequence) -> int:
    """How many tokens, none of them sampled, both begin with, in whole blocks."""
    length = min(a.first_sampled, b.first_sampled)
    differs = np.flatnonzero(a.token_ids[:length] != b.token_ids[:length])
    same = int(differs[0]) if len(differs) else length
    return same // SHARED_BLOCK * SHARED_BLOCK


def _row(sequences: list[_Sequence]) -> MicroBatch:
    columns: dict[str, list[np.ndarray]] = {name: [] for name in _DTYPES}
    num_tokens = 0

    def append(sequence: _Sequence, start: int, stop: int, before: int) -> None:
        """Tokens [start, stop) of a sequence; `before` is where its token start - 1 stands."""
        nonlocal num_tokens
        previous = np.arange(num_tokens - 1, num_tokens + stop - start - 1)
        previous[:1] = before
        sampled = np.flatnonzero(sequence.loss_mask[start:stop])
        count = len(sampled)
        columns["input_ids"].append(sequence.token_ids[start:stop])
        columns["position_ids"].append(np.arange(start, stop))
        columns["previous"].append(previous)
        columns["trained"].append(num_tokens + sampled)
        columns["advantages"].append(np.full(count, sequence.advantage))
        columns["rollout_logprobs"].append(sequence.logprobs[start:stop][sampled])
        columns["versions"].append(sequence.versions[start:stop][sampled])
        columns["trajectory_ids"].append(np.full(count, sequence.trajectory_id))
        columns["trajectory_tokens"].append(np.full(count, sequence.trajectory_tokens))
        num_tokens += stop - start

    def lay(members: list[_Sequence], start: int, before: int) -> Layout:
        """Nodes for members that are alike up to `start`; token start - 1 stands at `before`."""
        nodes = []
        while members:
            first = members[0]
            shared = [n for m in members[1:] if (n := _num_shared(first, m)) > start]
            family, members = members[: len(shared) + 1], members[len(shared) + 1 :]
            stop = min(shared, default=len(first.token_ids))
            append(first, start, stop, before)
            children = lay(family, stop, num_tokens - 1) if shared else ()
            nodes.append(Node(stop - start, children))
        return tuple(nodes)

    layout = lay(sequences, 0, -1)
    tensors: dict[str, Any] = {
        name: torch.as_tensor(np.concatenate(parts)).to(_DTYPES[name])
        for name, parts in columns.items()
    }
    return MicroBatch(**tensors, layout=layout)


_DTYPES = {
    "input_ids": torch.int64,
    "position_ids": torch.int64,
    "previous": torch.int64,
    "trained": torch.int64,
    "advantages": torch.float32,
    "rollout_logprobs": torch.float32,
    "versions": torch.int64,
    "trajectory_ids": torch.int64,
    "trajectory_tokens": torch.float32,
}


class PackedAttention:
    """Causal attention within the sequences of a packed row (an `agentrl.attention.Attend`).

    The tokens of a node attend to the nodes above it and to themselves.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._lengths: list[int] = []
        self._masks: dict[tuple[int, int], Any] = {}
        self._prepare(layout, 0, device)

    def _prepare(self, nodes: Layout, num_above: int, device: torch.device) -> None:
        for node in nodes:
            n = node.num_tokens
            self._lengths.append(n)
            if num_above and (num_above, n) not in self._masks:
                self._masks[num_above, n] = _lower_right(n, num_above + n, device)
            self._prepare(node.children, num_above + n, device)

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        options: dict[str, Any] = {
            "scale": scaling,
            "enable_gqa": query.shape[1] != key.shape[1],
        }
        # One split, so that the backward pass is one concatenation.
        parts = zip(*(x.split(self._lengths, dim=2) for x in (query, key, value)), strict=True)
        outputs: list[torch.Tensor] = []

        def attend(nodes: Layout, above: tuple[torch.Tensor, torch.Tensor] | None) -> None:
            for node in nodes:
                q, k, v = next(parts)
                if above is None:
                    output = F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
                else:
                    mask = self._masks[above[0].shape[2], node.num_tokens]
                    k, v = torch.cat((above[0], k), dim=2), torch.cat((above[1], v), dim=2)
                    output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
                outputs.append(output)
                attend(node.children, (k, v))

        attend(self._layout, None)
        # [1, T, heads, head dim] is the order in memory that the output projection reads.
        return torch.cat([output.transpose(1, 2) for output in outputs], dim=1).transpose(1, 2)


def _lower_right(num_queries: int, num_keys: int, device: torch.device) -> Any:
    """The last query sees every key; the first sees all but the last `num_queries - 1`."""
    if device.type == "cuda":  # not a tensor, so that flash attention is used
        return causal_lower_right(num_queries, num_keys)
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return mask.tril(num_keys - num_queries)
