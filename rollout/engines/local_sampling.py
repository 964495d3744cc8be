"""Drawing one token per row of logits, with one hashed number each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from agentrl.types import Sampling


def sample(
    logits: torch.Tensor, samplings: Sequence[Sampling], indices: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Draw one token per row by inverting the cumulative distribution at one number hashed from
    (seed, index).

    Multinomial and Gumbel sampling draw a number for each entry of the vocabulary, which on a CPU
    costs more than the model's MLPs. Greedy rows (temperature 0) report the logprob at temperature
    1.

    Args:
        logits: [R, V] float32, overwritten.
        samplings: [R]
        indices: [R] of the token within its request.

    Returns:
        Tokens [R] and their log probabilities [R] under the distribution they were drawn from.
    """
    greedy = torch.tensor([s.temperature == 0 for s in samplings], device=logits.device)
    temperatures = [s.temperature or 1.0 for s in samplings]
    if any(t != 1.0 for t in temperatures):
        logits.div_(torch.tensor(temperatures, device=logits.device)[:, None])
    for row, s in enumerate(samplings):
        if s.temperature > 0 and (s.top_k > 0 or s.top_p < 1):
            _truncate(logits[row], s.top_k, s.top_p)
    uniform = torch.tensor(
        [_uniform(s.seed, index) for s, index in zip(samplings, indices, strict=True)],
        device=logits.device,
    )
    all_logprobs = logits.log_softmax(dim=-1)
    cumulative = all_logprobs.exp().cumsum_(dim=-1)
    total = cumulative[:, -1:]
    # Below the total in floating point too, so that no token of zero probability is ever found
    # behind it.
    target = torch.minimum(
        uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total))
    )
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    if greedy.any():
        tokens[greedy] = logits[greedy].argmax(dim=-1)
    logprobs = all_logprobs.gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), logprobs.tolist()


def _uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that is the same on every replay, whatever else is in the batch."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=4).digest()
    return (int.from_bytes(digest, "little") >> 8) / 2**24  # exact in float32


def _truncate(logits: torch.Tensor, top_k: int, top_p: float) -> None:
    """Set to -inf all but the `top_k` likeliest tokens, and of those all but the first that reach
    `top_p` [V].
    """
    values, order = logits.sort(descending=True)
    keep = len(values) if top_k == 0 else min(top_k, len(values))
    if top_p < 1:
        before = values[:keep].softmax(0).cumsum(0) - values[:keep].softmax(0)
        keep = max(1, int((before < top_p).sum()))
    logits[order[keep:]] = float("-inf")
