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
    idle ones between them are computed and dropped, which is cheaper than to gather the cache. What
    all of them begin with, such as the demonstrations of a prompt, is read from memory once. Longer
    chunks attend one by one.
    """

    def __init__(self, kv: KVSlots, chunks: list[tuple[int, int, int]]) -> None:
        self.kv = kv
        slots = np.concatenate([np.full(count, slot) for slot, _, count in chunks])
        positions = np.concatenate([np.arange(start, start + n) for _, start, n in chunks])
        self.slots = torch.from_numpy(slots).to(kv.device)
        self.positions = torch.from_numpy(positions).to(kv.device)
        offset, single_rows, single_slots, single_ends = 0, [], [], []
        self.long: list[tuple[slice, int, int, torch.Tensor]] = []
        for slot, start, count in chunks:
            if count == 1:
                single_rows.append(offset)
                single_slots.append(slot)
                single_ends.append(start + 1)
            else:
                mask = torch.ones(count, start + count, dtype=torch.bool, device=kv.device)
                self.long.append(
                    (slice(offset, offset + count), slot, start + count, mask.tril(start))
                )
            offset += count
        self.single_rows = torch.tensor(single_rows, device=kv.device)
        self.single_slots = torch.tensor(single_slots, device=kv.device)
        if single_rows:
            self.width = max(single_slots) + 1
            self.length = max(single_ends)
            # An idle row sees one token, so that its softmax stays finite.
            ends = torch.ones(self.width, dtype=torch.long)
            ends[single_slots] = torch.tensor(single_ends)
            visible = torch.arange(self.length)[None] < ends[:, None]
            self.mask = visible[:, None, None].to(kv.device)
            self.shared, self.families = kv.families(single_slots)

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        keys[self.slots, :, self.positions] = key[0].transpose(0, 1)
        values[self.slots, :, self.positions] = value[0].transpose(0, 1)
        query = query[0].transpose(0, 1)  # [T, query heads, head dim]
        num_kv, head_dim = keys.shape[1], keys.shape[3]
        output = torch.empty_like(query)
        if len(self.single_rows):
            # Query heads of one KV head stand where positions would, so that no key is repeated.
            rows = query[self.single_rows].view(len(self.single_rows), num_kv, -1, head_dim)
            wide = rows.new_zeros(self.width, *rows.shape[1:])
            wide[self.single_slots] = rows
            decode = self._decode_shared if self.shared else self._decode
            attended = decode(
                wide,
                keys[: self.width, :, : self.length],
                values[: self.width, :, : self.length],
                scaling,
            )
            output[self.single_rows] = attended[self.single_slots].reshape(len(rows), -1, head_dim)
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
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """One query position per slot: [slots, KV heads, query heads per KV head, head dim]."""
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=self.mask, scale=scaling
        )

    def _decode_shared(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """The same, with the shared tokens of one slot for all of its family."""
        width, num_kv, group, _ = query.shape
        shared = self.shared

        def by_head(family: torch.Tensor) -> torch.Tensor:
            return family.transpose(0, 1).reshape(num_kv, -1, family.shape[3])

        def by_slot(family: torch.Tensor) -> torch.Tensor:
            return family.view(num_kv, -1, group, family.shape[2]).transpose(0, 1)

        common = query.new_zeros(width, num_kv, group, shared)
        for family in self.families:
            shared_keys = keys[family[0], :, :shared].transpose(1, 2)
            common[family] = by_slot(by_head(query[family]) @ shared_keys)
        own = query @ keys[:, :, shared:].transpose(2, 3)
        scores = torch.cat((common, own), dim=-1).float().mul_(scaling)
        weights = scores.masked_fill_(~self.mask, float("-inf")).softmax(dim=-1).to(query.dtype)
        output = weights[..., shared:] @ values[:, :, shared:]
        for family in self.families:
            of_family = by_head(weights[family][..., :shared])
            output[family] += by_slot(of_family @ values[family[0], :, :shared])
        return output


def causal(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention of one sequence that is in no slot."""
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
