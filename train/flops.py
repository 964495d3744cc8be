"""Floating-point operations that a model's update needs, and how many a device does at most."""

from __future__ import annotations

from typing import Any

import torch

from train.packing import MicroBatch


def row_flops(model: Any, micro_batch: MicroBatch) -> float:
    """Operations of the forward and backward pass of one row."""
    return 1.0  # written next


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large matrix product, measured."""
    return 1.0  # written next
