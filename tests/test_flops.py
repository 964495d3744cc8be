"""Counted operations against those that PyTorch saw, and the peak against a clock."""

from __future__ import annotations

import numpy as np
import peft
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.test_learner import make_model, random_groups
from train.flops import matmul_peak, row_flops
from train.packing import PackedAttention, pack


def packed_row(**options):
    groups = random_groups(num_groups=2)
    num_tokens = sum(t.num_sampled_tokens for group in groups for t in group.trajectories)
    (batch,) = pack(groups, np.ones(num_tokens), micro_batch_tokens=4096, **options)
    (row,) = batch.micro_batches
    return row


class Seen:
    """Attention of which the pairs are counted, one by one."""

    def __init__(self, row):
        self.num_pairs = 0
        self._attend = PackedAttention(row.layout, row.input_ids.device)
        for token in range(len(row.input_ids)):
            while token >= 0:
                self.num_pairs += 1
                token = int(row.previous[token])

    def __call__(self, layer, query, key, value, scaling):
        _, self.heads, _, self.head_dim = query.shape
        return self._attend(layer, query, key, value, scaling)


def seen_by_pytorch(model, row):
    """Of transformers' own forward pass, and of autograd's backward."""
    attend = Seen(row)
    model.enable_input_require_grads()  # as below the first layer of a model that trains it
    with FlopCounterMode(display=False) as counter:
        hidden = model.get_decoder()(
            input_ids=row.input_ids[None],
            position_ids=row.position_ids[None],
            use_cache=False,
            attend=attend,
        ).last_hidden_state[0]
        model.get_output_embeddings()(hidden[row.previous[row.trained]]).sum().backward()
    products = counter.get_flop_counts()["Global"]
    linear = sum(products[op] for op in (torch.ops.aten.mm, torch.ops.aten.addmm) if op in products)
    # Of attention PyTorch counts masked pairs too.
    per_pair = 2 * (2 * attend.head_dim) * 3
    num_layers = model.config.num_hidden_layers
    return linear + attend.num_pairs * attend.heads * per_pair * num_layers


@pytest.mark.parametrize("freeze", ["nothing", "head", "all but adapters"])
def test_counted_operations_are_those_that_pytorch_sees(freeze):
    model = make_model(tied=False)
    if freeze == "head":
        model.get_output_embeddings().weight.requires_grad_(False)
    if freeze == "all but adapters":
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    row = packed_row()
    assert row_flops(model, row) == seen_by_pytorch(model, row)


def test_what_is_shared_is_counted_once():
    model = make_model()
    shared, apart = (packed_row(share_prefixes=share) for share in (True, False))
    assert row_flops(model, shared) < row_flops(model, apart)
    assert len(shared.trained) == len(apart.trained)


def test_the_peak_is_what_a_large_product_reaches():
    peak = matmul_peak(torch.device("cpu"), torch.float32)
    assert 1e8 < peak < 1e15
