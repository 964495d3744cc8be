"""Log probabilities and entropies from hidden states, without ever holding their logits."""

from __future__ import annotations

from typing import Any

import torch

_CHUNK_ELEMENTS = 2**24  # of logits at once: 64 MiB in float32


def head_logprobs(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(hidden @ head.T / temperature) at `targets`, without keeping any logits.

    Args:
        hidden: [N, D].
        head: [V, D].
        targets: [N] int64.

    Returns:
        logprobs [N] and entropies [N], float32.
    """
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else head.dtype
    with_grad = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    return _HeadLogprobs.apply(hidden, head, targets, temperature, dtype, with_grad)  # type: ignore


class _HeadLogprobs(torch.autograd.Function):
    """Log p of row i depends on row i alone, so its derivative is saved as one row of D numbers.

    d log p_i / d hidden_i = (head[target_i] - sum_v p_iv head[v]) / T: the logits are needed again
    in the backward pass only where the head itself is trained.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        dtype: torch.dtype,
        with_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows = len(hidden)
        logprobs = hidden.new_empty(num_rows, dtype=torch.float32)
        entropies = torch.empty_like(logprobs)
        derivative = torch.empty_like(hidden) if with_grad else None
        weight = head.to(dtype)
        for rows in _chunks(num_rows, len(head)):
            log_p = _log_softmax(hidden[rows], weight, temperature)
            logprobs[rows] = log_p.gather(1, targets[rows, None])[:, 0]
            p = log_p.exp()
            entropies[rows] = -torch.bmm(p[:, None], log_p[:, :, None])[:, 0, 0]
            if derivative is not None:
                mean_weight = p.to(dtype) @ weight
                derivative[rows] = (weight[targets[rows]] - mean_weight) / temperature
        ctx.save_for_backward(hidden, head, targets, derivative)
        ctx.temperature, ctx.dtype = temperature, dtype
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = grads[0]
        hidden, head, targets, derivative = ctx.saved_tensors
        grad_head = None
        if ctx.needs_input_grad[1]:
            grad_head = torch.zeros_like(head)
            weight = head.to(ctx.dtype)
            for rows in _chunks(len(hidden), len(head)):
                g = grad[rows, None] / ctx.temperature
                error = _log_softmax(hidden[rows], weight, ctx.temperature).exp_().mul_(-g)
                error.scatter_add_(1, targets[rows, None], g)
                grad_head.addmm_(error.T, hidden[rows].to(grad_head.dtype))
        return (grad[:, None] * derivative).to(hidden.dtype), grad_head, None, None, None, None


def _log_softmax(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = (hidden.to(weight.dtype) @ weight.T).float()
    if temperature != 1.0:
        logits /= temperature
    return torch.log_softmax(logits, dim=-1)


def _chunks(num_rows: int, vocab_size: int) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // vocab_size)
    return [slice(start, start + size) for start in range(0, num_rows, size)]
