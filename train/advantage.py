"""Advantages: how much better an episode, a turn or a token did than was to be expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.config import AdvantageConfig, RunConfig
from agentrl.trajectory import Trajectory, TrajectoryGroup
from train.packing import counts

TOLERANCE = 1e-9  # the one `TrajectoryGroup.has_signal` uses
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """What an estimator reads of one batch: E episodes and the N tokens that they sampled.

    Episodes are those that count (`train.packing.counts`), tokens stand in their order; what env
    and prompt wrote is no time step. Segments of an episode are one episode.

    Example:
        One group of two episodes, of two turns and of one:
        groups [0, 0]   rewards [1.0, 0.0]   episodes [0, 0, 0, 1]   turns [0, 0, 1, 2]
        token_rewards [0.0, 0.2, 0.8, 0.0]: the env gave 0.2 for the first turn
    """

    groups: np.ndarray  # [E] int64
    rewards: np.ndarray  # [E] float64, less the length penalty; nan: not to be learnt from
    episodes: np.ndarray  # [N] int64
    turns: np.ndarray  # [N] int64, counted over all episodes
    token_rewards: np.ndarray  # [N] float64, on the last token of each turn; they add up to rewards
    kl: np.ndarray | None = None  # [N] estimates of KL(policy || reference), with kl_in_reward
    beta: float = 0.0  # of that KL
    values: np.ndarray | None = None  # [N] before the token is drawn, with gae


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Exactly 0 for episodes that are not to be learnt from."""

    advantages: np.ndarray  # [N] float64
    returns: np.ndarray | None = None  # [N] float64 what values should have been, with gae


def advantage_inputs(groups: Sequence[TrajectoryGroup], config: RunConfig) -> AdvantageInputs:
    """Of one batch, before any forward pass."""
    episodes = [(index, t) for index, g in enumerate(groups) for t in g.trajectories if counts(t)]
    token_rewards: list[float] = []
    turns: list[int] = []
    num_turns = 0
    for _, trajectory in episodes:
        rest = _reward(trajectory, config)
        start = len(token_rewards)
        for turn in trajectory.turns:
            length = turn.end - turn.start
            turns += [num_turns] * length
            num_turns += 1
            token_rewards += [0.0] * length
            if length:
                token_rewards[-1] += turn.reward
                rest -= turn.reward
        if len(token_rewards) > start:
            token_rewards[-1] += rest
    lengths = [trajectory.num_sampled_tokens for _, trajectory in episodes]
    return AdvantageInputs(
        groups=np.array([index for index, _ in episodes], dtype=np.int64),
        rewards=np.array([_reward(t, config) for _, t in episodes], dtype=np.float64),
        episodes=np.repeat(np.arange(len(episodes)), lengths),
        turns=np.array(turns, dtype=np.int64),
        token_rewards=np.array(token_rewards, dtype=np.float64),
    )


def estimate(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """By the estimator that the config names."""
    return ESTIMATORS[config.estimator](inputs, config)


def grpo(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """(r - mean) / (std + 1e-6) within each group, or r - mean with scale_rewards=none.

    The standard deviation is the sample's (ddof 1), as in TRL. TRL adds 1e-4, which shrinks the
    advantages of rewards that differ little; here equal rewards are recognised before the division,
    so that the addend need not hide rounding. Exactly 0 in a group whose rewards are equal, and in
    a group of one. Source: DeepSeekMath, arXiv 2402.03300, section 4.1; "none" is Dr. GRPO's,
    arXiv 2503.20783.
    """
    advantages = np.zeros(len(inputs.rewards))
    for group in np.unique(inputs.groups):
        scored = (inputs.groups == group) & np.isfinite(inputs.rewards)
        members = inputs.rewards[scored]
        if len(members) < 2 or members.max() - members.min() <= TOLERANCE:
            continue
        centred = members - members.mean()
        scale = members.std(ddof=1) + _EPSILON if config.scale_rewards == "group" else 1.0
        advantages[scored] = centred / scale
    return Advantages(advantages=advantages[inputs.episodes])


Estimator = Callable[[AdvantageInputs, AdvantageConfig], Advantages]

ESTIMATORS: dict[str, Estimator] = {"grpo": grpo}


def _reward(trajectory: Trajectory, config: RunConfig) -> float:
    """A masked episode is no baseline for its siblings either."""
    stop = trajectory.stop_reason
    masked = config.loss.mask_truncated_completions and stop is not None and stop.is_cut
    assert trajectory.reward is not None
    return math.nan if masked else float(trajectory.reward)
