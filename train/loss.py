"""The objective over trained tokens, as a sum that the counts of the whole step divide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from agentrl.config import LossConfig
from train.correction import rollout_correction
from train.ratios import MAX_LOG_RATIO, bounded_exp, mean_over

Columns = dict[str, torch.Tensor]
"""Metrics by name, one number per token: each [N]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What the loss reads of one micro-batch: N trained tokens, and the counts of the whole step.

    Every column is [N], float32 where nothing else is said. `logprobs` carries the gradient, as do
    `entropies` with entropy_coef > 0 and `values` with a value head. A sequence is a segment of a
    trajectory: what the model reads at once. It is never split over micro-batches, and its tokens
    stand together in their order.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor
    rollout_logprobs: torch.Tensor  # the engine's
    advantages: torch.Tensor
    turn_ids: torch.Tensor  # int64
    sequence_ids: torch.Tensor  # int64
    trajectory_tokens: torch.Tensor  # sampled tokens of the token's trajectory, all segments
    group_tokens: torch.Tensor  # likewise of all trajectories of its group that count
    old_logprobs: torch.Tensor | None = None  # the learner's, before the first update on this batch
    ref_logprobs: torch.Tensor | None = None  # the reference's, where beta > 0
    beta: float = 0.0  # the weight of the KL in the loss now; 0 where it is part of the reward
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
    sums: Columns  # metrics summed over the N tokens, and "num_tokens" = N; scalars
    max_abs_diff: torch.Tensor  # of the learner's and the engine's logprobs


def policy_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """This micro-batch's share of the step's loss, and its metrics over all of its tokens.

    Per token: correction * loss of `LOSSES` + beta * KL - entropy_coef * entropy
    + vf_coef * value loss, then weighted by `token_weights`. A token that the correction masks
    still counts in the weights, for otherwise the other ones would weigh more.
    """
    rollout = inputs.rollout_logprobs
    learner = _learner_logprobs(inputs, config)
    diff = learner - rollout
    importance = bounded_exp(diff)
    losses, columns = LOSSES[config.loss_type](inputs, config)
    columns |= {
        "entropy": inputs.entropies,
        "mismatch/abs_diff": diff.abs(),
        "mismatch/kl": -diff,
        "mismatch/k3": importance - diff - 1,
        "importance": importance,
        "importance_squared": importance**2,
        "num_tokens": torch.ones_like(diff),
    }
    # With old_logprobs=rollout the ratio is to the engine already; a weight would count it twice.
    if config.importance_sampling_mode != "none" and config.old_logprobs != "rollout":
        weights, columns["mismatch/clip_frac"] = rollout_correction(
            diff, inputs.sequence_ids, config
        )
        losses = losses * weights
    if inputs.ref_logprobs is not None:
        kl = kl_divergence(inputs.logprobs, inputs.ref_logprobs, config.kl_estimator)
        losses = losses + inputs.beta * kl
        columns["kl"] = kl
    if config.entropy_coef:
        losses = losses - config.entropy_coef * inputs.entropies
    if inputs.values is not None:
        value_losses, value_columns = value_loss(inputs, config)
        losses = losses + config.vf_coef * value_losses
        columns |= value_columns
    return LossOutput(
        loss=(token_weights(inputs, config) * losses).sum(),
        sums={name: column.detach().float().sum() for name, column in columns.items()},
        max_abs_diff=diff.abs().max() if len(diff) else diff.sum(),
    )


def ppo(inputs: LossInputs, config: LossConfig) -> tuple[torch.Tensor, Columns]:
    """max(-A r, -A clip(r, 1 - epsilon, 1 + epsilon_high)); with delta at most -A delta for A < 0.

    Sources: PPO, arXiv 1707.06347, equation 7; epsilon_high: DAPO, 2503.14476, section 3.1; delta:
    dual-clip PPO, 1912.09729; GSPO, where a sequence has one ratio: 2507.18071.
    """
    ratio, advantages = _ratio(inputs, config), inputs.advantages
    lowest, highest = _clip_range(config)
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(lowest, highest))
    if config.delta is not None:
        bounded = torch.minimum(losses, -advantages * config.delta)
        losses = torch.where(advantages < 0, bounded, losses)
    low = (ratio < lowest) & (advantages < 0)
    high = (ratio > highest) & (advantages > 0)
    return losses, {
        "ratio": ratio,
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low | high,
    }


def cispo(inputs: LossInputs, config: LossConfig) -> tuple[torch.Tensor, Columns]:
    """-min(r, 1 + epsilon_high) A logprob, where the bounded ratio carries no gradient.

    Source: MiniMax-M1, arXiv 2506.13585, section 3.1, which does not bound the ratio below either.
    """
    ratio = _ratio(inputs, config).detach()
    _, highest = _clip_range(config)
    losses = -ratio.clamp(max=highest) * inputs.advantages * inputs.logprobs
    return losses, {"ratio": ratio, "clip_ratio/high_mean": ratio > highest}


def sapo(inputs: LossInputs, config: LossConfig) -> tuple[torch.Tensor, Columns]:
    """-A sigmoid(t (r - 1)) 4 / t, whose gradient at r = 1 is that of -A r and fades from there.

    t is sapo_temperature_pos for A > 0, else sapo_temperature_neg. Source: Soft Adaptive Policy
    Optimization, arXiv 2511.20347, section 3.
    """
    ratio, advantages = _ratio(inputs, config), inputs.advantages
    positive, negative = config.sapo_temperature_pos, config.sapo_temperature_neg
    temperatures = torch.full_like(advantages, negative).masked_fill(advantages > 0, positive)
    gates = torch.sigmoid(temperatures * (ratio - 1)) * 4 / temperatures
    return -advantages * gates, {"ratio": ratio}


def reinforce(inputs: LossInputs, config: LossConfig) -> tuple[torch.Tensor, Columns]:
    """-A logprob. Source: Williams, "Simple statistical gradient-following algorithms" (1992)."""
    return -inputs.advantages * inputs.logprobs, {}


Loss = Callable[[LossInputs, LossConfig], tuple[torch.Tensor, Columns]]
"""Of one micro-batch: the losses of its tokens [N], and metrics of its own."""

LOSSES: dict[str, Loss] = {"ppo": ppo, "cispo": cispo, "sapo": sapo, "reinforce": reinforce}


def token_weights(inputs: LossInputs, config: LossConfig) -> torch.Tensor:
    """[N] weights of the tokens in the loss; they sum to at most 1 over the whole step.

    token_mean: 1 / tokens. seq_mean_token_mean: 1 / (tokens of the trajectory * trajectories).
    seq_mean_token_sum_norm: 1 / (max_episode_tokens * trajectories). prompt_mean: 1 / (tokens of
    the group * groups). Segments of a trajectory share one denominator.
    """
    if config.aggregation == "seq_mean_token_mean":
        return 1 / (inputs.trajectory_tokens * inputs.num_trajectories)
    if config.aggregation == "prompt_mean":
        return 1 / (inputs.group_tokens * inputs.num_groups)
    if config.aggregation == "token_mean":
        divisor = inputs.num_loss_tokens
    else:
        divisor = inputs.max_episode_tokens * inputs.num_trajectories
    return torch.full_like(inputs.trajectory_tokens, 1 / max(divisor, 1))


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
    if estimator == "k2":
        return d**2 / 2
    if estimator == "k3":
        return _k3(d)
    k2 = d**2 / 2
    return _k3(d.detach()) + (k2 - k2.detach())


def value_loss(inputs: LossInputs, config: LossConfig) -> tuple[torch.Tensor, Columns]:
    """[N] max((v - return)^2, (v' - return)^2) / 2, v' within cliprange_value of the old value.

    Source: OpenAI's baselines, as described in "The 37 implementation details of PPO" (2022).
    """
    values, old, returns = inputs.values, inputs.old_values, inputs.returns
    assert values is not None and old is not None and returns is not None
    near = torch.clamp(values, old - config.cliprange_value, old + config.cliprange_value)
    free, clipped = (values - returns) ** 2, (near - returns) ** 2
    losses = torch.maximum(free, clipped) / 2
    return losses, {"value_loss": losses, "value_clip_ratio": clipped > free}


def _ratio(inputs: LossInputs, config: LossConfig) -> torch.Tensor:
    """[N] policy / old, of what importance_sampling_level says has a ratio of its own.

    A turn or a sequence has the geometric mean of its tokens' ratios. Each of its tokens has that
    value, and the gradient of its own logprob: GSPO-token, arXiv 2507.18071, section 4.3.
    """
    on_engine = config.old_logprobs == "rollout"
    old = inputs.rollout_logprobs if on_engine else _learner_logprobs(inputs, config)
    log_ratio = inputs.logprobs - old
    if config.importance_sampling_level == "token":
        return bounded_exp(log_ratio)
    by_turn = config.importance_sampling_level == "turn"
    shared = mean_over(log_ratio.detach(), inputs.turn_ids if by_turn else inputs.sequence_ids)
    return bounded_exp(shared + (inputs.logprobs - inputs.logprobs.detach()))


def _learner_logprobs(inputs: LossInputs, config: LossConfig) -> torch.Tensor:
    """[N] before the first update on this batch; where that was not recomputed, now."""
    if config.old_logprobs != "recompute":
        return inputs.logprobs.detach()
    assert inputs.old_logprobs is not None
    return inputs.old_logprobs


def _clip_range(config: LossConfig) -> tuple[float, float]:
    epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    return 1 - config.epsilon, 1 + epsilon_high


def _k3(d: torch.Tensor) -> torch.Tensor:
    bounded = d.clamp(max=MAX_LOG_RATIO)
    return bounded.expm1() - bounded
