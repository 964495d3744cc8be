"""Probability ratios from their logarithms, of tokens and of runs of tokens."""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
"""Beyond which a ratio is not told apart any more; exp(20) is 5e8, its square fits a float32."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp, at most exp(20) and at least exp(-20), with gradient 0 beyond."""
    # Clamped before the exponential: clamped after it, the gradient would be 0 * inf.
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sum_over(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[N] -> [N]: to each token the sum over the run of neighbours that have its id."""
    return _sum_over(values, _runs(ids))


def mean_over(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Likewise the mean."""
    runs = _runs(ids)
    return _sum_over(values, runs) / _sum_over(torch.ones_like(values), runs)


def _runs(ids: torch.Tensor) -> torch.Tensor:
    # Not `unique`, which makes the host wait for the number of ids.
    starts = torch.zeros_like(ids)
    starts[1:] = ids[1:] != ids[:-1]
    return starts.cumsum(0)


def _sum_over(values: torch.Tensor, runs: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(values).index_add(0, runs, values)[runs]
