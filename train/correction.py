"""Weights for tokens that the engine drew with other probabilities than the learner gives them."""

from __future__ import annotations

import torch

from agentrl.config import LossConfig
from train.ratios import bounded_exp, mean_over, sum_over


def rollout_correction(
    log_ratio: torch.Tensor, sequence_ids: torch.Tensor, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor of each token's loss, which carries no gradient, by importance_sampling_mode.

    With r = learner / engine, of a token, of a sequence (the product over its tokens) or their
    geometric mean: truncate: min(r, cap). mask: r within [min, cap], else 0. Sources: truncated
    importance sampling, Ionides (2008), and Yao et al., "Your efficient RL framework secretly
    brings you off-policy RL training" (2025); token_mask: IcePop, arXiv 2510.18855; masks of
    sequences: Liu et al., "When speed kills stability" (2025).

    Args:
        log_ratio: [N] learner's less engine's logprob.
        sequence_ids: [N] int64, the tokens of a sequence standing together.

    Returns: [N] factors; [N] bool, which of them are truncated or masked.
    """
    level, action = config.importance_sampling_mode.split("_")
    if level == "sequence":
        log_ratio = sum_over(log_ratio, sequence_ids)
    elif level == "geometric":
        log_ratio = mean_over(log_ratio, sequence_ids)
    ratio = bounded_exp(log_ratio)
    above = ratio > config.importance_sampling_cap
    if action == "truncate":
        return ratio.clamp(max=config.importance_sampling_cap), above
    outside = above | (ratio < config.importance_sampling_min)
    return ratio.masked_fill(outside, 0), outside
