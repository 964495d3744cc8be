"""Floating-point operations that a model's update needs, and how many a device does at most."""

from __future__ import annotations

import time
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from train.packing import Layout, MicroBatch


class _Costs(NamedTuple):
    """Operations of a forward and backward pass."""

    token: int  # linear layers below the head
    trained_token: int  # the head
    pair: int  # a token that attends to one


_costs: WeakKeyDictionary[nn.Module, _Costs] = WeakKeyDictionary()


def row_flops(model: Any, micro_batch: MicroBatch) -> int:
    """Operations that the forward and backward pass of one row need; a multiply-add is two.

    Counted are the matrix products of the decoder's nn.Linear layers, adapters among them, of the
    attention that the layout asks for, and of the head where tokens are trained. A backward pass
    costs two forward passes, or one where weights are frozen. What is not counted: activations that
    are computed again, element-wise work, and layers of other kinds, such as fused experts.
    """
    if model not in _costs:
        _costs[model] = _measure(model)
    costs = _costs[model]
    return (
        costs.token * len(micro_batch.input_ids)
        + costs.trained_token * len(micro_batch.trained)
        + costs.pair * _num_pairs(micro_batch.layout)
    )


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large matrix product: the best of a few."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = torch.ones(2, size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(6):  # the first one warms up
        _wait_for(device)
        start = time.perf_counter()
        torch.mm(left, right)
        _wait_for(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _measure(model: Any) -> _Costs:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = (m for m in model.get_decoder().modules() if isinstance(m, nn.Linear))
    return _Costs(
        token=sum(_linear(layer) for layer in layers),
        trained_token=_linear(model.get_output_embeddings()),
        # A product with its key, one with its value, and two backward for each.
        pair=3 * 2 * 2 * head_dim * heads * config.num_hidden_layers,
    )


def _linear(layer: nn.Linear) -> int:
    num_products = 3 if layer.weight.requires_grad else 2
    return num_products * 2 * layer.in_features * layer.out_features


def _num_pairs(nodes: Layout, num_above: int = 0) -> int:
    """Of a token and one that it attends to, which may be itself."""
    return sum(
        node.num_tokens * num_above
        + node.num_tokens * (node.num_tokens + 1) // 2
        + _num_pairs(node.children, num_above + node.num_tokens)
        for node in nodes
    )


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
