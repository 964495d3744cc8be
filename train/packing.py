"""Trajectories as packed rows, in which what sequences begin with alike is computed once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from agentrl.config import ConfigError
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
        sampled_index [0, 1, 2]     sequence_ids [0, 0, 1]   turn_ids [0, 0, 1]
    """

    input_ids: torch.Tensor  # [T] int64
    position_ids: torch.Tensor  # [T] int64
    previous: torch.Tensor  # [T] int64, where the token before this one stands; -1: there is none
    trained: torch.Tensor  # [N] int64, the tokens that the policy sampled
    sampled_index: torch.Tensor  # [N] int64, which of all tokens that were sampled
    advantages: torch.Tensor  # [N] float32
    rollout_logprobs: torch.Tensor  # [N] float32
    turn_ids: torch.Tensor  # [N] int64, counted over all turns
    sequence_ids: torch.Tensor  # [N] int64, likewise over all segments of trajectories
    trajectory_tokens: torch.Tensor  # [N] float32, sampled tokens of the trajectory
    group_tokens: torch.Tensor  # [N] float32, likewise of all its group's that count
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
    """One rank's micro-batches of one optimizer step, and what the step divides by.

    The counts are those of all ranks. They hold every scored trajectory with a sampled token,
    whether or not it is computed.
    """

    micro_batches: list[MicroBatch]  # as many on every rank
    num_loss_tokens: int
    num_trajectories: int
    num_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """One segment of a trajectory."""

    token_ids: np.ndarray  # [L]
    loss_mask: np.ndarray  # [L]
    first_sampled: int
    # Of its tokens that were sampled:
    advantages: np.ndarray  # [n]
    logprobs: np.ndarray  # [n]
    turn_ids: np.ndarray  # [n]
    sampled_index: np.ndarray  # [n]
    sequence_id: int
    trajectory_tokens: int
    group_tokens: int


def counts(trajectory: Trajectory) -> bool:
    """Whether a trajectory is part of what a step divides by: scored, with a sampled token."""
    reward = trajectory.reward
    return reward is not None and math.isfinite(reward) and trajectory.num_sampled_tokens > 0


def pack(
    groups: Sequence[TrajectoryGroup],
    advantages: np.ndarray,
    *,
    micro_batch_tokens: int,
    num_ranks: int = 1,
    first_index: int = 0,
    keep_zero_advantages: bool = False,
    mask_truncated_completions: bool = False,
    share_prefixes: bool = True,
) -> list[Batch]:
    """Lay trajectories into rows of at most `micro_batch_tokens` tokens, sorted by their prompts.

    Each rank gets about as many tokens, and as many rows; which rank and row a sequence lands in
    changes no gradient. Trajectories that do not count are left out. Those whose advantages are
    all exactly 0 are counted but not computed, for their gradient is exactly 0, unless
    `keep_zero_advantages` (a KL term pulls at them too). With `mask_truncated_completions`,
    trajectories that a limit cut are counted but not computed.

    Args:
        advantages: [n or more], of all sampled tokens of the trajectories that count, in their
            order; those behind are of later groups.
        first_index: what `sampled_index` of the first of them is.

    Returns: [num_ranks].

    Raises:
        ConfigError: one sequence alone exceeds `micro_batch_tokens`.
    """
    sequences: list[_Sequence] = []
    num_loss_tokens = num_trajectories = num_groups = turn_id = 0
    for group in groups:
        members = [trajectory for trajectory in group.trajectories if counts(trajectory)]
        group_tokens = sum(trajectory.num_sampled_tokens for trajectory in members)
        num_groups += bool(members)
        num_trajectories += len(members)
        for trajectory in members:
            start = num_loss_tokens
            num_loss_tokens += trajectory.num_sampled_tokens
            own = advantages[start:num_loss_tokens]
            masked = mask_truncated_completions and trajectory.is_cut
            if not masked and (keep_zero_advantages or own.any()):
                index = first_index + start
                sequences += _sequences(
                    trajectory, own, index, turn_id, len(sequences), group_tokens
                )
            turn_id += len(trajectory.turns)
    block = SHARED_BLOCK if share_prefixes else 0
    rows = [
        [_row(row, block) for row in _rows(shard, micro_batch_tokens, block)]
        for shard in _shards(sequences, num_ranks, block)
    ]
    most = max(len(shard) for shard in rows)
    return [
        Batch(
            # A rank with less to do computes rows without trained tokens beside the others.
            micro_batches=shard + [single_sequence([0])] * (most - len(shard)),
            num_loss_tokens=num_loss_tokens,
            num_trajectories=num_trajectories,
            num_groups=num_groups,
        )
        for shard in rows
    ]


def single_sequence(token_ids: Sequence[int]) -> MicroBatch:
    """One sequence of which every token but the first is trained, with advantage 0."""
    length = len(token_ids)
    sequence = _Sequence(
        token_ids=np.asarray(token_ids),
        loss_mask=np.arange(length) > 0,
        first_sampled=0,
        advantages=np.zeros(length - 1),
        logprobs=np.zeros(length - 1),
        turn_ids=np.zeros(length - 1),
        sampled_index=np.arange(length - 1),
        sequence_id=0,
        trajectory_tokens=max(length - 1, 1),
        group_tokens=max(length - 1, 1),
    )
    return _row([sequence], 0)


def _sequences(
    trajectory: Trajectory,
    advantages: np.ndarray,
    first_index: int,
    first_turn: int,
    first_sequence: int,
    group_tokens: int,
) -> Iterator[_Sequence]:
    mask = np.asarray(trajectory.loss_mask)
    logprobs = np.asarray(trajectory.logprobs)[mask]
    turns = np.repeat(
        np.arange(len(trajectory.turns)), [turn.end - turn.start for turn in trajectory.turns]
    )
    start = 0
    for number, part in enumerate(trajectory.segments()):
        own = mask[part]
        stop = start + int(own.sum())
        yield _Sequence(
            token_ids=np.asarray(trajectory.token_ids[part]),
            loss_mask=own,
            first_sampled=int(own.argmax()),
            advantages=advantages[start:stop],
            logprobs=logprobs[start:stop],
            turn_ids=first_turn + turns[start:stop],
            sampled_index=first_index + np.arange(start, stop),
            sequence_id=first_sequence + number,
            trajectory_tokens=trajectory.num_sampled_tokens,
            group_tokens=group_tokens,
        )
        start = stop


def _shards(sequences: list[_Sequence], num_ranks: int, block: int) -> list[list[_Sequence]]:
    """Sequences in the order of their prompts, cut into parts of about as many tokens."""
    ordered = sorted(sequences, key=lambda s: s.token_ids[: s.first_sampled].tolist())
    shards: list[list[_Sequence]] = [[] for _ in range(num_ranks)]
    if ordered:
        shared = [0, *(_num_shared(a, b, block) for a, b in pairwise(ordered))]
        costs = np.array([len(s.token_ids) for s in ordered]) - shared
        middles = costs.cumsum() - costs / 2
        ranks = (middles * num_ranks / costs.sum()).astype(int)
        for rank, sequence in zip(ranks, ordered, strict=True):
            shards[rank].append(sequence)
    return shards


def _rows(sequences: list[_Sequence], budget: int, block: int) -> list[list[_Sequence]]:
    """A new row where a sequence would not fit any more."""
    rows: list[list[_Sequence]] = []
    room = 0
    for sequence in sequences:
        length = len(sequence.token_ids)
        if length > budget:
            raise ConfigError(
                f"a sequence of {length} tokens does not fit optim.micro_batch_tokens={budget}: "
                f"raise it to at least {length}, or lower rollout.max_context_tokens"
            )
        needed = length - _num_shared(rows[-1][-1], sequence, block) if rows else length
        if not rows or needed > room:
            rows.append([])
            needed, room = length, budget
        rows[-1].append(sequence)
        room -= needed
    return rows


def _num_shared(a: _Sequence, b: _Sequence, block: int) -> int:
    """How many tokens, none of them sampled, both begin with, in whole blocks."""
    if block == 0:  # nothing is shared
        return 0
    length = min(a.first_sampled, b.first_sampled)
    differs = np.flatnonzero(a.token_ids[:length] != b.token_ids[:length])
    same = int(differs[0]) if len(differs) else length
    return same // block * block


def _row(sequences: list[_Sequence], block: int) -> MicroBatch:
    columns: dict[str, list[np.ndarray]] = {name: [] for name in _DTYPES}
    num_tokens = 0

    def append(sequence: _Sequence, start: int, stop: int, before: int) -> None:
        """Tokens [start, stop) of a sequence; `before` is where its token start - 1 stands."""
        nonlocal num_tokens
        previous = np.arange(num_tokens - 1, num_tokens + stop - start - 1)
        previous[:1] = before
        columns["input_ids"].append(sequence.token_ids[start:stop])
        columns["position_ids"].append(np.arange(start, stop))
        columns["previous"].append(previous)
        if stop > sequence.first_sampled:  # what is shared ends before
            sampled = np.flatnonzero(sequence.loss_mask[start:stop])
            columns["trained"].append(num_tokens + sampled)
            columns["sampled_index"].append(sequence.sampled_index)
            columns["advantages"].append(sequence.advantages)
            columns["rollout_logprobs"].append(sequence.logprobs)
            columns["turn_ids"].append(sequence.turn_ids)
            for name in ("sequence_id", "trajectory_tokens", "group_tokens"):
                column = np.full(len(sampled), getattr(sequence, name))
                columns[name.replace("_id", "_ids")].append(column)
        num_tokens += stop - start

    def lay(members: list[_Sequence], start: int, before: int) -> Layout:
        """Nodes for members that are alike up to `start`; token start - 1 stands at `before`."""
        nodes = []
        while members:
            first = members[0]
            shared = [n for m in members[1:] if (n := _num_shared(first, m, block)) > start]
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
    "sampled_index": torch.int64,
    "advantages": torch.float32,
    "rollout_logprobs": torch.float32,
    "turn_ids": torch.int64,
    "sequence_ids": torch.int64,
    "trajectory_tokens": torch.float32,
    "group_tokens": torch.float32,
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

    @torch.compiler.disable  # a compiled layer would be compiled anew for every layout
    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        # Rotary embeddings are float32 under autocast, and a causal bias takes one dtype alone.
        query, key = query.to(value.dtype), key.to(value.dtype)
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
