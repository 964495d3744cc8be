"""Groups of trajectories as packed rows, in which the members of a group share their prompt."""

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

Layout = tuple[tuple[int, tuple[int, ...]], ...]
"""Per group of a row: the length of its shared prefix (0: none), and of each suffix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One packed row of T tokens, of which N are trained.

    A suffix goes on where its group's prefix ends: in `position_ids`, in `previous`, in attention.

    Example:
        Two members of a group, prompt 5 6, that sampled 7 8 and 9:
        input_ids [5, 6, 7, 8, 9]   position_ids [0, 1, 2, 3, 2]   previous [-1, 0, 1, 2, 1]
        trained [2, 3, 4]           layout ((2, (2, 1)),)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Sequences that begin with the same `prefix` tokens, none of them sampled."""

    prefix: int
    sequences: list[_Sequence]

    @property
    def num_tokens(self) -> int:
        return self.prefix + sum(len(s.token_ids) - self.prefix for s in self.sequences)


def pack(
    groups: Sequence[TrajectoryGroup],
    advantages: Sequence[np.ndarray],
    *,
    micro_batch_tokens: int,
    keep_zero_advantages: bool = False,
    mask_truncated_completions: bool = False,
) -> Batch:
    """Lay groups into rows of at most `micro_batch_tokens` tokens, first fit, largest first.

    Which row a sequence lands in changes no gradient. Unscored trajectories are left out;
    trajectories whose advantage is exactly 0 are counted but not computed, for their gradient is
    exactly 0, unless `keep_zero_advantages` (a KL term pulls at them too). With
    `mask_truncated_completions`, trajectories that a limit cut are counted but not computed.

    Args:
        advantages: per group, one number per trajectory.

    Raises:
        ValueError: one sequence alone exceeds `micro_batch_tokens`.
    """
    blocks: list[_Block] = []
    num_loss_tokens = num_trajectories = 0
    for group, group_advantages in zip(groups, advantages, strict=True):
        sequences: list[_Sequence] = []
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
        if sequences:
            blocks += _split(_shared_prefix(sequences), sequences, micro_batch_tokens)

    rows: list[list[_Block]] = []
    room: list[int] = []
    for block in sorted(blocks, key=lambda block: -block.num_tokens):
        index = next((i for i, left in enumerate(room) if left >= block.num_tokens), len(rows))
        if index == len(rows):
            rows.append([])
            room.append(micro_batch_tokens)
        rows[index].append(block)
        room[index] -= block.num_tokens
    return Batch(
        micro_batches=[_row(row) for row in rows],
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
    return _row([_Block(prefix=0, sequences=[sequence])])


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


def _shared_prefix(sequences: list[_Sequence]) -> int:
    length = min(sequence.first_sampled for sequence in sequences)
    heads = np.stack([sequence.token_ids[:length] for sequence in sequences])
    differs = (heads != heads[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else length


def _split(prefix: int, sequences: list[_Sequence], budget: int) -> Iterator[_Block]:
    """Blocks of at most `budget` tokens, each with the prefix once; a lone sequence needs none."""
    members: list[_Sequence] = []
    num_tokens = prefix
    for sequence in sequences:
        length = len(sequence.token_ids)
        if length > budget:
            raise ValueError(
                f"a sequence of {length} tokens does not fit optim.micro_batch_tokens={budget}: "
                f"raise it to at least {length}, or lower rollout.max_context_tokens"
            )
        if num_tokens + length - prefix > budget:
            yield _Block(prefix=prefix if len(members) > 1 else 0, sequences=members)
            members, num_tokens = [], prefix
        members.append(sequence)
        num_tokens += length - prefix
    yield _Block(prefix=prefix if len(members) > 1 else 0, sequences=members)


def _row(blocks: list[_Block]) -> MicroBatch:
    columns: dict[str, list[np.ndarray]] = {name: [] for name in _DTYPES}
    layout = []
    offset = 0

    def append(sequence: _Sequence, start: int, stop: int, before: int) -> None:
        """Tokens [start, stop) of a sequence; `before` is where its token start - 1 stands."""
        nonlocal offset
        previous = np.arange(offset - 1, offset + stop - start - 1)
        previous[:1] = before
        sampled = np.flatnonzero(sequence.loss_mask[start:stop])
        count = len(sampled)
        columns["input_ids"].append(sequence.token_ids[start:stop])
        columns["position_ids"].append(np.arange(start, stop))
        columns["previous"].append(previous)
        columns["trained"].append(offset + sampled)
        columns["advantages"].append(np.full(count, sequence.advantage))
        columns["rollout_logprobs"].append(sequence.logprobs[start:stop][sampled])
        columns["versions"].append(sequence.versions[start:stop][sampled])
        columns["trajectory_ids"].append(np.full(count, sequence.trajectory_id))
        columns["trajectory_tokens"].append(np.full(count, sequence.trajectory_tokens))
        offset += stop - start

    for block in blocks:
        if block.prefix:
            append(block.sequences[0], 0, block.prefix, -1)
        last_of_prefix = offset - 1 if block.prefix else -1
        for sequence in block.sequences:
            append(sequence, block.prefix, len(sequence.token_ids), last_of_prefix)
        suffixes = tuple(len(s.token_ids) - block.prefix for s in block.sequences)
        layout.append((block.prefix, suffixes))
    tensors: dict[str, Any] = {
        name: torch.as_tensor(np.concatenate(parts)).to(_DTYPES[name])
        for name, parts in columns.items()
    }
    return MicroBatch(**tensors, layout=tuple(layout))


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

    A prefix attends to itself; a suffix to its group's prefix and to itself.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._lengths = [n for prefix, suffixes in layout for n in (prefix, *suffixes) if n]
        self._masks: dict[tuple[int, int], Any] = {}
        for prefix, suffixes in layout:
            for n in suffixes:
                if prefix and (prefix, n) not in self._masks:
                    self._masks[prefix, n] = _lower_right(n, prefix + n, device)
        self._layout = layout

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
        outputs = []
        for prefix, suffixes in self._layout:
            prefix_key = prefix_value = None
            if prefix:
                q, prefix_key, prefix_value = next(parts)
                outputs.append(
                    F.scaled_dot_product_attention(
                        q, prefix_key, prefix_value, is_causal=True, **options
                    )
                )
            for n in suffixes:
                q, k, v = next(parts)
                if prefix_key is None or prefix_value is None:
                    output = F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
                else:
                    output = F.scaled_dot_product_attention(
                        q,
                        torch.cat((prefix_key, k), dim=2),
                        torch.cat((prefix_value, v), dim=2),
                        attn_mask=self._masks[prefix, n],
                        **options,
                    )
                outputs.append(output)
        # [1, T, heads, head dim] is the order in memory that the output projection reads.
        return torch.cat([output.transpose(1, 2) for output in outputs], dim=1).transpose(1, 2)


def _lower_right(num_queries: int, num_keys: int, device: torch.device) -> Any:
    """The last query sees every key; the first sees all but the last `num_queries - 1`."""
    if device.type == "cuda":  # not a tensor, so that flash attention is used
        return causal_lower_right(num_queries, num_keys)
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return mask.tril(num_keys - num_queries)
