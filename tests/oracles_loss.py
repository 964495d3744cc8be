"""The loss of a micro-batch and its gradient by hand: float64, one token after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from agentrl.config import LossConfig


def loss_and_gradients(
    inputs: Mapping[str, Any], config: LossConfig
) -> tuple[float, dict[str, np.ndarray]]:
    """
    Args:
        inputs: the fields of `train.loss.LossInputs`, with numpy arrays for tensors; no log ratio
            is over 20, or under -20.

    Returns: the loss; its derivatives by logprobs, entropies and (if there are any) values, [N].
    """
    num_tokens = len(inputs["logprobs"])
    loss = 0.0
    gradients = {"logprobs": np.zeros(num_tokens), "entropies": np.zeros(num_tokens)}
    if "values" in inputs:
        gradients["values"] = np.zeros(num_tokens)
    for t in range(num_tokens):
        weight = _token_weight(inputs, config, t)
        value, slope = _policy_term(inputs, config, t)
        factor = _correction(inputs, config, t)
        value, slope = factor * value, factor * slope
        if "ref_logprobs" in inputs:
            kl, kl_slope = _kl(inputs["logprobs"][t], inputs["ref_logprobs"][t], config)
            value += inputs["beta"] * kl
            slope += inputs["beta"] * kl_slope
        value -= config.entropy_coef * inputs["entropies"][t]
        gradients["entropies"][t] = -weight * config.entropy_coef
        if "values" in inputs:
            error, error_slope = _value_term(inputs, config, t)
            value += config.vf_coef * error
            gradients["values"][t] = weight * config.vf_coef * error_slope
        loss += weight * value
        gradients["logprobs"][t] = weight * slope
    return loss, gradients


def _token_weight(inputs: Mapping[str, Any], config: LossConfig, t: int) -> float:
    if config.aggregation == "token_mean":
        return 1 / inputs["num_loss_tokens"]
    if config.aggregation == "seq_mean_token_mean":
        return 1 / inputs["trajectory_tokens"][t] / inputs["num_trajectories"]
    if config.aggregation == "prompt_mean":
        return 1 / inputs["group_tokens"][t] / inputs["num_groups"]
    return 1 / inputs["max_episode_tokens"] / inputs["num_trajectories"]


def _learner(inputs: Mapping[str, Any], config: LossConfig, t: int) -> float:
    return inputs["old_logprobs" if config.old_logprobs == "recompute" else "logprobs"][t]


def _ratio(inputs: Mapping[str, Any], config: LossConfig, t: int) -> float:
    if config.importance_sampling_level == "token":
        members = [t]
    else:
        ids = inputs[f"{config.importance_sampling_level}_ids"]
        members = [s for s in range(len(ids)) if ids[s] == ids[t]]
    total = 0.0
    for s in members:
        on_engine = config.old_logprobs == "rollout"
        old = inputs["rollout_logprobs"][s] if on_engine else _learner(inputs, config, s)
        total += inputs["logprobs"][s] - old
    return float(np.exp(total / len(members)))


def _policy_term(inputs: Mapping[str, Any], config: LossConfig, t: int) -> tuple[float, float]:
    """A token's loss, and its slope along its own logprob, along which a ratio r has slope r."""
    advantage, logprob = inputs["advantages"][t], inputs["logprobs"][t]
    if config.loss_type == "reinforce":
        return -advantage * logprob, -advantage
    ratio = _ratio(inputs, config, t)
    lowest = 1 - config.epsilon
    highest = 1 + (config.epsilon_high or config.epsilon)
    if config.loss_type == "cispo":
        weight = min(ratio, highest)
        return -weight * advantage * logprob, -weight * advantage
    if config.loss_type == "sapo":
        steepness = config.sapo_temperature_pos if advantage > 0 else config.sapo_temperature_neg
        gate = 1 / (1 + np.exp(-steepness * (ratio - 1)))
        return -advantage * gate * 4 / steepness, -advantage * 4 * gate * (1 - gate) * ratio
    if advantage > 0 and ratio > highest:
        return -advantage * highest, 0.0
    if advantage < 0 and ratio < lowest:
        return -advantage * lowest, 0.0
    if advantage < 0 and config.delta is not None and ratio > config.delta:
        return -advantage * config.delta, 0.0
    return -advantage * ratio, -advantage * ratio


def _correction(inputs: Mapping[str, Any], config: LossConfig, t: int) -> float:
    mode, cap = config.importance_sampling_mode, config.importance_sampling_cap
    if mode == "none" or config.old_logprobs == "rollout":
        return 1.0
    ids = inputs["sequence_ids"]
    members = [t] if mode.startswith("token") else [s for s in range(len(ids)) if ids[s] == ids[t]]
    total = sum(_learner(inputs, config, s) - inputs["rollout_logprobs"][s] for s in members)
    ratio = float(np.exp(total / len(members) if mode.startswith("geometric") else total))
    if mode.endswith("truncate"):
        return min(ratio, cap)
    return ratio if config.importance_sampling_min <= ratio <= cap else 0.0


def _kl(logprob: float, reference: float, config: LossConfig) -> tuple[float, float]:
    difference = logprob - reference
    k3 = np.exp(-difference) - 1 + difference
    return {
        "k1": (difference, 1.0),
        "k2": (difference**2 / 2, difference),
        "k3": (k3, 1 - np.exp(-difference)),
        "k3+": (k3, difference),
    }[config.kl_estimator]


def _value_term(inputs: Mapping[str, Any], config: LossConfig, t: int) -> tuple[float, float]:
    value, old, wanted = inputs["values"][t], inputs["old_values"][t], inputs["returns"][t]
    near = min(max(value, old - config.cliprange_value), old + config.cliprange_value)
    if near != value and (near - wanted) ** 2 > (value - wanted) ** 2:
        return (near - wanted) ** 2 / 2, 0.0
    return (value - wanted) ** 2 / 2, value - wanted
