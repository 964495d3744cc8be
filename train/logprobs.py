"""Log probabilities and entropies from hidden states, without ever holding their logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_TILE_SIDE = {"cpu": 2**10, "cuda": 2**12}
"""The square root of how many logits live at once: a CPU's cache holds them, a GPU is busy with
them.
"""


def head_logprobs(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(hidden @ head.T / temperature) at `targets`, a tile of the logits at a time.

    Products are made in the dtype of `head`, or in autocast's; softmax and sums in float32, or in
    float64 where the products are.

    Args:
        hidden: [N, D].
        head: [V, D].
        targets: [N] int64.
        entropy_gradient: whether the entropies carry a gradient, for which one more [N, D] is kept.

    Returns:
        logprobs [N] and entropies [N] in nats, in the dtype of the sums.
    """
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else head.dtype
    with_grad = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    return _HeadLogprobs.apply(  # type: ignore[return-value]
        hidden, head, targets, temperature, dtype, with_grad, with_grad and entropy_gradient
    )


class _HeadLogprobs(torch.autograd.Function):
    """The softmax of a row is added up over tiles of the vocabulary, relative to the largest logit
    so far, as flash attention adds up its own over keys (Dao et al. 2022, arXiv 2205.14135).

    For logits l = hidden @ head.T / T, p = softmax(l), H its entropy, w = head, target t, and E the
    mean under p:
        d log p_t / d hidden = (w_t - E[w]) / T           d log p_t / d l_v = (v == t) - p_v
        d H / d hidden = (E[l] E[w] - E[l w]) / T         d H / d l_v = -p_v (log p_v + H)
    These means are of one row each, so they are kept from the forward pass: the backward pass makes
    the logits again only where the head itself is trained.
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
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows, width = hidden.shape
        of_sums: Any = {"dtype": torch.promote_types(dtype, torch.float32), "device": hidden.device}
        target_logits, total, total_z = torch.zeros(3, num_rows, **of_sums)
        largest = torch.full_like(total, torch.finfo(total.dtype).min)
        # With z = l - largest, the sums over v of exp z, z exp z, w exp z and z w exp z.
        total_w = torch.zeros(num_rows, width, **of_sums) if with_grad else None
        total_zw = torch.zeros_like(total_w) if total_w is not None and entropy_gradient else None
        inputs = hidden.to(dtype)
        for vocabulary, tiles in _tiles(num_rows, head):
            weight = head[vocabulary].to(dtype)
            for rows in tiles:
                logits = _logits(inputs[rows], weight, temperature, total.dtype)
                is_here, column = _find(targets[rows], vocabulary)
                target_logits[rows] += logits.gather(1, column)[:, 0] * is_here
                now = torch.maximum(largest[rows], logits.amax(1))
                rise, largest[rows] = now - largest[rows], now
                z = logits.sub_(now[:, None])
                p = z.exp()  # but for its divisor
                # What was summed so far, relative to a logit that is larger by `rise`.
                fade = (-rise).exp()
                total_z[rows] -= rise * total[rows]
                total_z[rows] = total_z[rows] * fade + (p * z).sum(1)
                total[rows] = total[rows] * fade + p.sum(1)
                if total_w is not None:
                    if total_zw is not None:
                        total_zw[rows] -= rise[:, None] * total_w[rows]
                        total_zw[rows] *= fade[:, None]
                        _add_product(total_zw[rows], (p * z).to(dtype), weight)
                    total_w[rows] *= fade[:, None]
                    _add_product(total_w[rows], p.to(dtype), weight)

        log_total = total.log()
        entropies = log_total - total_z / total
        by_hidden = entropy_by_hidden = None
        if total_w is not None:
            mean_w = total_w / total[:, None]
            by_hidden = ((head[targets].to(dtype) - mean_w) / temperature).to(hidden.dtype)
            if total_zw is not None:
                covariance = (total_zw - total_z[:, None] * mean_w) / total[:, None]
                entropy_by_hidden = (-covariance / temperature).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            kept = hidden, head, targets, largest + log_total, entropies
        else:
            kept = ()
        ctx.save_for_backward(by_hidden, entropy_by_hidden, *kept)
        ctx.temperature, ctx.dtype = temperature, dtype
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return target_logits - largest - log_total, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad, entropy_grad = (g[:, None] for g in grads)
        by_hidden, entropy_by_hidden, *kept = ctx.saved_tensors
        grad_hidden = grad * by_hidden
        if entropy_by_hidden is not None:
            grad_hidden += entropy_grad * entropy_by_hidden
        grad_head = None
        if ctx.needs_input_grad[1]:
            hidden, head, targets, log_sums, entropies = kept
            grad_head = torch.empty_like(head)
            inputs = hidden.to(ctx.dtype)
            for vocabulary, tiles in _tiles(len(hidden), head):
                weight = head[vocabulary].to(ctx.dtype)
                total = torch.zeros(weight.shape, dtype=grad.dtype, device=grad.device)
                for rows in tiles:
                    log_p = _logits(inputs[rows], weight, ctx.temperature, grad.dtype)
                    log_p -= log_sums[rows, None]
                    p = log_p.exp()
                    if entropy_by_hidden is None:
                        by_logit = p.mul_(-grad[rows])
                    else:
                        log_p += entropies[rows, None]
                        by_logit = p.mul_(log_p.mul_(entropy_grad[rows]).add_(grad[rows]).neg_())
                    is_here, column = _find(targets[rows], vocabulary)
                    by_logit.scatter_add_(1, column, grad[rows] * is_here[:, None])
                    by_logit /= ctx.temperature
                    _add_product(total, by_logit.T.to(ctx.dtype), inputs[rows])
                grad_head[vocabulary] = total
        return grad_hidden.to(by_hidden.dtype), grad_head, None, None, None, None, None


def _tiles(num_rows: int, head: torch.Tensor) -> Iterator[tuple[slice, list[slice]]]:
    """Parts of the vocabulary, each with the parts of the rows."""
    vocab_size, width = head.shape
    side = _TILE_SIDE[head.device.type]
    num_columns = max(1, side**2 // max(1, min(num_rows, side), width))
    rows = _parts(num_rows, side)
    for vocabulary in _parts(vocab_size, num_columns):
        yield vocabulary, rows


def _parts(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _logits(
    inputs: torch.Tensor, weight: torch.Tensor, temperature: float, dtype: torch.dtype
) -> torch.Tensor:
    logits = (inputs @ weight.T).to(dtype)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _find(targets: torch.Tensor, vocabulary: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Which targets are in this part of the vocabulary [n], and the column there [n, 1]."""
    is_here = (targets >= vocabulary.start) & (targets < vocabulary.stop)
    return is_here, torch.where(is_here, targets - vocabulary.start, 0)[:, None]


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
