"""The KV cache of the embedded engine in slots, one per episode, and attention over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

FAMILY_TOKENS = 256  # to read so many takes as long as the calls that a family costs


class KVSlots:
    """Keys and values of every layer, `[num_slots, KV heads, max_length, head dim]`, and the tokens
    they are of.
    """

    def __init__(
        self, config: Any, num_slots: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        shape = (num_slots, config.num_key_value_heads, max_length, head_dim)
        layers = range(config.num_hidden_layers)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.tokens = np.full((num_slots, max_length), -1, dtype=np.int64)
        self.lengths = np.zeros(num_slots, dtype=np.int64)
        self.num_slots, self.max_length, self.device = num_slots, max_length, device

    def append(self, slot: int, token_ids: list[int]) -> None:
        length = self.lengths[slot]
        self.tokens[slot, length : length + len(token_ids)] = token_ids
        self.lengths[slot] += len(token_ids)

    def match(self, token_ids: Sequence[int], prefer: int | None) -> tuple[int, int]:
        """How many leading tokens some slot holds, and that slot: `prefer` among equals.

        The last token is never matched: its logits are what the request is about.
        """
        wanted = np.asarray(token_ids[:-1])
        differs = self.tokens[:, : len(wanted)] != wanted
        first = (
            np.where(differs.any(axis=1), differs.argmax(axis=1), len(wanted)) if len(wanted) else 0
        )
        common = np.minimum(first, self.lengths)
        slot = int(common.argmax())
        if prefer is not None and common[prefer] == common[slot]:
            slot = prefer
        return int(common[slot]), slot

    def families(self, slots: list[int]) -> tuple[int, list[list[int]]]:
        """A length, and the slots that are alike up to it, chosen so that attention reads least.

        Length 0: to share is not worth it.
        """
        held = self.tokens[slots, : int(self.lengths[slots].min())]
        # Members of a group mostly stand side by side.
        neighbours = np.pad(held[1:] != held[:-1], ((0, 0), (0, 1)), constant_values=True)
        best, least = (0, [slots]), int(self.lengths[slots].sum())
        for shared in set(neighbours.argmax(axis=1).tolist()) - {0}:
            families: dict[bytes, list[int]] = {}
            for slot in slots:
                families.setdefault(self.tokens[slot, :shared].tobytes(), []).append(slot)
            own = int((self.lengths[slots] - shared).sum())
            read = own + len(families) * (shared + FAMILY_TOKENS)
            if read < least:
                best, least = (shared, list(families.values())), read
        return best

    def places(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where in `[num_slots * KV heads * max_length]` the keys of T tokens stand, KV head by
        head: [KV heads * T].
        """
        num_heads = self.keys[0].shape[1]
        heads = np.arange(num_heads)[:, None]
        return ((slots * num_heads + heads) * self.max_length + positions).ravel()

    def copy_prefix(self, source: int, slot: int, length: int) -> None:
        """Make the first `length` tokens of `source` those of `slot`, and all that `slot` holds."""
        if source != slot:
            for cache in (*self.keys, *self.values):
                cache[slot, :, :length] = cache[source, :, :length]
            self.tokens[slot, :length] = self.tokens[source, :length]
        self.lengths[slot] = length

    def clear(self) -> None:
        self.lengths[:] = 0


class SlotAttention:
    """Attention of a flat row of chunks, each over its own slot; an `agentrl.attention.Attend`.

    Chunks of one token, the decoding rows, attend together over the slots up to the highest in use;
    idle ones between them are computed and dropped, which is cheaper than to gather the cache. On a
    CPU, what a family of them begins with, such as a group's prompt, is read from memory once for
    all of it. Longer chunks attend one by one.
    """

    def __init__(self, kv: KVSlots, chunks: list[tuple[int, int, int]]) -> None:
        self.kv = kv
        slots = np.concatenate([np.full(count, slot) for slot, _, count in chunks])
        positions = np.concatenate([np.arange(start, start + n) for _, start, n in chunks])
        self.positions = torch.from_numpy(positions).to(kv.device)
        self.places = torch.from_numpy(kv.places(slots, positions)).to(kv.device)
        row = 0
        singles: dict[int, tuple[int, int]] = {}  # slot -> its row, its length with this token
        self.long: list[tuple[slice, int, int, torch.Tensor]] = []
        for slot, start, count in chunks:
            if count == 1:
                singles[slot] = row, start + 1
            else:
                mask = torch.ones(count, start + count, dtype=torch.bool, device=kv.device)
                self.long.append((slice(row, row + count), slot, start + count, mask.tril(start)))
            row += count
        self.num_singles = len(singles)
        if singles:
            self._plan_decoding(singles)

    def _plan_decoding(self, singles: dict[int, tuple[int, int]]) -> None:
        kv = self.kv
        slots = list(singles)
        self.shared, families = 0, [slots]
        if kv.device.type == "cpu":  # whose kernel tells the sums that two parts are joined by
            self.shared, families = kv.families(slots)
        slots = [slot for family in families for slot in family]
        self.slots = torch.tensor(slots, device=kv.device)
        self.rows = torch.tensor([singles[slot][0] for slot in slots], device=kv.device)
        ends = np.cumsum([len(family) for family in families]).tolist()
        self.families = [
            (slice(end - len(family), end), family[0])
            for end, family in zip(ends, families, strict=True)
        ]
        self.width = max(slots) + 1
        self.length = max(length for _, length in singles.values())
        # An idle slot shows one token, so that its softmax stays finite.
        lengths = torch.full((self.width,), self.shared + 1)
        for slot, (_, length) in singles.items():
            lengths[slot] = length
        masked = torch.arange(self.shared, self.length)[None] >= lengths[:, None]
        mask = torch.zeros(masked.shape, dtype=kv.keys[0].dtype).masked_fill_(masked, -torch.inf)
        self.mask = mask[:, None, None].to(kv.device)  # added to the scores

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        num_kv, head_dim = keys.shape[1], keys.shape[3]
        for cache, new in ((keys, key), (values, value)):
            cache.view(-1, head_dim).index_copy_(0, self.places, new.reshape(-1, head_dim))
        query = query[0].transpose(0, 1)  # [T, query heads, head dim]
        output = torch.empty_like(query)
        if self.num_singles:
            # Query heads of one KV head stand where positions would, so that no key is repeated.
            rows = query[self.rows].unflatten(1, (num_kv, -1))
            output[self.rows] = self._decode(rows, keys, values, scaling).flatten(1, 2)
        for span, slot, length, mask in self.long:
            attended = F.scaled_dot_product_attention(
                query[span].transpose(0, 1)[None],
                keys[None, slot, :, :length],
                values[None, slot, :, :length],
                attn_mask=mask,
                scale=scaling,
                enable_gqa=True,
            )
            output[span] = attended[0].transpose(0, 1)
        return output.transpose(0, 1)[None]

    def _decode(
        self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """One query position per slot, slots in the order of `self.slots`.

        Args:
            rows: [R, KV heads, query heads per KV head, head dim].
        """
        wide = rows.new_zeros(self.width, *rows.shape[1:])
        wide[self.slots] = rows
        keys_of_own = keys[: self.width, :, self.shared : self.length]
        values_of_own = values[: self.width, :, self.shared : self.length]
        if not self.shared:
            attended = F.scaled_dot_product_attention(
                wide, keys_of_own, values_of_own, attn_mask=self.mask, scale=scaling
            )
            return attended[self.slots]
        own, own_sum = _attend_on_cpu(wide, keys_of_own, values_of_own, self.mask, scaling)
        common, common_sum = [], []
        for members, slot in self.families:
            part, part_sum = _attend_on_cpu(
                rows[members].transpose(0, 1).flatten(1, 2)[None],
                keys[None, slot, :, : self.shared],
                values[None, slot, :, : self.shared],
                None,
                scaling,
            )
            common.append(part[0])
            common_sum.append(part_sum[0])

        def by_row(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(parts, dim=1).unflatten(1, (len(rows), -1)).transpose(0, 1)

        # Softmax over both parts: each weighs as much as its sum of exponentials.
        weight = torch.sigmoid(own_sum[self.slots] - by_row(common_sum))
        return torch.lerp(by_row(common), own[self.slots], weight[..., None].to(rows.dtype))


def _attend_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the log-sum-exp of its scores, which the public function keeps to itself."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=mask, scale=scaling
    )


def causal(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention of one sequence that is in no slot."""
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
