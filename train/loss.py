"""The clipped policy-gradient objective over trained tokens, as a sum that global counts divide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from agentrl.config import LossConfig

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What the loss reads of one micro-batch: N trained tokens, and the counts of the whole step.

    Every column is [N], float32 where nothing else is said. `logprobs` carries the gradient, as do
    `entropies` with entropy_coef > 0 and `values` with a value head. A sequence is a segment of a
    trajectory: what the model reads at once. It is never split over micro-batches.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor
    rollout_logprobs: torch.Tensor  # the engine's
    advantages: torch.Tensor
    turn_ids: torch.Tensor  # int64
    sequence_ids: torch.Tensor  # int64
    trajectory_tokens: torch.Tensor  # sampled tokens of the token's trajectory
    group_tokens: torch.Tensor  # likewise of all trajectories of its group that count
    old_logprobs: torch.Tensor | None = None  # the learner's, before the first update on this batch
    ref_logprobs: torch.Tensor | None = None  # the reference's, where beta > 0
    beta: float = 0.0  # the weight of the KL now
    values: torch.Tensor | None = None  # with advantage.estimator=gae
    old_values: torch.Tensor | None = None  # before the first update on this batch
    returns: torch.Tensor | None = None  # what values should have been
    num_loss_tokens: int  # of the optimizer step, over all ranks and micro-batches
    num_trajectories: int  # likewise
    num_groups: int  # likewise
    max_episode_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """The loss is this micro-batch's share of the step's; shares add up, as `sums` do."""

    loss: torch.Tensor  # scalar
    sums: dict[str, torch.Tensor]  # metrics summed over the N tokens, and "num_tokens" = N
    max_abs_diff: torch.Tensor  # of the learner's and the engine's logprobs


def policy_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """PPO's clipped surrogate per token, weighted for the chosen aggregation, and its metrics.

    Per token, with ratio r = exp(logprob - old), clipped to [1 - epsilon, 1 + epsilon_high]:
    w * max(-A r, -A clip(r)) + beta * KL, where w = min(exp(old - rollout), cap) corrects for the
    engine's distribution and carries no gradient. Sources: PPO arXiv 1707.06347, clip-higher (DAPO)
    2503.14476, truncated importance sampling: "Your efficient RL framework secretly brings you
    off-policy RL training" (Yao et al. 2025).
    """
    logprobs, rollout, advantages = inputs.logprobs, inputs.rollout_logprobs, inputs.advantages
    current = logprobs.detach()
    # `learner`: what the learner gives for the weights that sampled; `old`: the clip's centre.
    learner = inputs.old_logprobs if config.old_logprobs == "recompute" else current
    if learner is None:
        raise ValueError("old_logprobs=recompute needs the old logprobs")
    old = rollout if config.old_logprobs == "rollout" else learner

    ratio = _exp(logprobs - old)
    epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    clipped = ratio.clamp(1 - config.epsilon, 1 + epsilon_high)
    losses = torch.maximum(-advantages * ratio, -advantages * clipped)
    importance = _exp(learner - rollout)
    cap = config.importance_sampling_cap
    if config.importance_sampling_mode != "none" and config.old_logprobs != "rollout":
        losses = losses * importance.clamp(max=cap)
    diff = learner - rollout
    low = (ratio < 1 - config.epsilon) & (advantages < 0)
    high = (ratio > 1 + epsilon_high) & (advantages > 0)
    columns = {
        "entropy": inputs.entropies,
        "ratio": ratio,
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low | high,
        "mismatch/abs_diff": diff.abs(),
        "mismatch/kl": -diff,
        "mismatch/k3": importance - diff - 1,
        "mismatch/clip_frac": importance > cap,
        "importance": importance,
        "importance_squared": importance**2,
        "num_tokens": torch.ones_like(diff),
    }
    if inputs.ref_logprobs is not None:
        kl = kl_divergence(logprobs, inputs.ref_logprobs, config.kl_estimator)
        losses = losses + inputs.beta * kl
        columns["kl"] = kl
    return LossOutput(
        loss=(token_weights(inputs, config) * losses).sum(),
        sums={name: column.detach().float().sum() for name, column in columns.items()},
        max_abs_diff=diff.abs().max() if len(diff) else diff.sum(),
    )


def token_weights(inputs: LossInputs, config: LossConfig) -> torch.Tensor:
    """[N] weights of the tokens in the loss; they sum to at most 1 over the whole step.

    token_mean: 1 / tokens. seq_mean_token_mean: 1 / (tokens of the trajectory * trajectories).
    seq_mean_token_sum_norm: 1 / (max_episode_tokens * trajectories). prompt_mean: 1 / (tokens of
    the group * groups).
    """
    num_trajectories = max(inputs.num_trajectories, 1)
    if config.aggregation == "seq_mean_token_mean":
        return 1 / (inputs.trajectory_tokens.clamp(min=1) * num_trajectories)
    if config.aggregation == "prompt_mean":
        return 1 / (inputs.group_tokens.clamp(min=1) * max(inputs.num_groups, 1))
    if config.aggregation == "token_mean":
        divisor = max(inputs.num_loss_tokens, 1)
    else:
        divisor = inputs.max_episode_tokens * num_trajectories
    return torch.full_like(inputs.trajectory_tokens, 1 / divisor)


def kl_divergence(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    estimator: Literal["k1", "k2", "k3", "k3+"],
) -> torch.Tensor:
    """[N] estimates of KL(policy || reference) from sampled tokens.

    With d = ref - logprob: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1; k3+ has the value of k3 and
    the gradient of k2, which is the one that points down the KL. Source: Schulman, "Approximating
    KL divergence" (2020).
    """
    d = ref_logprobs - logprobs
    if estimator == "k1":
        return -d
    k2 = d**2 / 2
    if estimator == "k2":
        return k2
    bounded = d.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    k3 = bounded.exp() - bounded - 1
    return k3 if estimator == "k3" else k2 + (k3 - k2).detach()


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    # Clamped before the exponential: clamped after it, the gradient would be 0 * inf.
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
