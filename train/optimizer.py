"""The optimizer, its schedule, and the norm of a gradient however it is sharded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from agentrl.config import OptimConfig
from train.weights import own_part


def make_optimizer(parameters: Sequence[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable ones of the parameters, of which only matrices decay."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


class Schedule:
    """The factor of the learning rate by optimizer step: linear warm-up, then the named decay."""

    def __init__(self, config: OptimConfig, max_steps: int) -> None:
        self._kind = config.lr_scheduler_type
        self._warmup = config.warmup_steps
        self._total = max_steps * config.num_iterations * config.num_minibatches

    def __call__(self, step: int) -> float:
        if step < self._warmup:
            return (step + 1) / (self._warmup + 1)  # a first step with rate 0 would be wasted
        if self._kind == "constant":
            return 1.0
        done = min(1.0, (step - self._warmup) / max(1, self._total - self._warmup))
        return 1 - done if self._kind == "linear" else (1 + math.cos(math.pi * done)) / 2


def resume_schedule(scheduler: torch.optim.lr_scheduler.LambdaLR, num_steps: int) -> None:
    """Go on after so many optimizer steps, with the rates of this run's config."""
    rates = [
        base * factor(num_steps)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler.last_epoch = num_steps
    scheduler._last_lr = rates


def clip_grad_norm(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """Scale the gradients down to a norm of at most `max_norm`; returns the norm before.

    It is the norm of the whole gradient, over all ranks that hold a part of it.
    """
    norm: Any = torch.nn.utils.get_total_norm(
        [p.grad for p in parameters if p.grad is not None], error_if_nonfinite=False
    )
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)


def sample(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """A few hundred entries of what this rank holds of each parameter."""
    parts = []
    for parameter in parameters:
        own = own_part(parameter).detach().flatten()
        parts.append(own[:: max(1, own.numel() // 256)])
    return torch.cat(parts)
