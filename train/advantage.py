"""Advantages: how much better an episode, a turn or a token did than was to be expected.

Formulas, sources and worked numbers: docs/estimators.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
    rewards: np.ndarray  # [E] float64, with the length penalty; nan: not to be learnt from
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
    group_ids = np.array([index for index, _ in episodes], dtype=np.int64)
    lengths = np.array([t.num_sampled_tokens for _, t in episodes], dtype=np.int64)
    rewards = np.array([_reward(t, config) for _, t in episodes], dtype=np.float64)
    rewards = rewards + _length_penalty(lengths, rewards, group_ids, config)
    token_rewards: list[float] = []
    turns: list[int] = []
    num_turns = 0
    for (_, trajectory), rest in zip(episodes, rewards.tolist(), strict=True):
        for turn in trajectory.turns:
            length = turn.end - turn.start
            turns += [num_turns] * length
            num_turns += 1
            token_rewards += [0.0] * length
            if length:
                token_rewards[-1] = turn.reward
                rest -= turn.reward
        token_rewards[-1] += rest
    return AdvantageInputs(
        groups=group_ids,
        rewards=rewards,
        episodes=np.repeat(np.arange(len(episodes)), lengths),
        turns=np.array(turns, dtype=np.int64),
        token_rewards=np.array(token_rewards, dtype=np.float64),
    )


def estimate(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """By the estimator that the config names."""
    return ESTIMATORS[config.estimator](inputs, config)


def grpo(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """(r - mean) / (std + 1e-6), mean over the group, std over the group, the batch, or left out.

    The standard deviation is the sample's (ddof 1), as in TRL. TRL adds 1e-4, which shrinks the
    advantages of rewards that differ little; here equal rewards are recognised before the division,
    so that the addend need not hide rounding. Sources: DeepSeekMath, arXiv 2402.03300, section
    4.1.2; "batch": arXiv 2508.08221; "none": Dr. GRPO, arXiv 2503.20783.
    """
    values, siblings, unit = _units(inputs, config)
    advantages = np.zeros(len(values))
    for members in _comparable(siblings, values):
        own = values[members]
        scale = own.std(ddof=1) + _EPSILON if config.scale_rewards == "group" else 1.0
        advantages[members] = (own - own.mean()) / scale
    if config.scale_rewards == "batch" and advantages.any():
        advantages /= values[np.isfinite(values)].std(ddof=1) + _EPSILON
    return Advantages(advantages=advantages[unit])


def rloo(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """r - the mean of the others in the group. Source: RLOO, arXiv 2402.14740."""
    values, siblings, unit = _units(inputs, config)
    advantages = np.zeros(len(values))
    for members in _comparable(siblings, values):
        own = values[members]
        others = (own.sum() - own) / (len(own) - 1)
        advantages[members] = own - others
    return Advantages(advantages=advantages[unit])


def reinforce_plus_plus(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Each token's rewards less beta * KL from it on, normalised over the batch's tokens.

    No group is looked at. Source: REINFORCE++, arXiv 2501.03262.
    """
    scored = np.isfinite(inputs.rewards)[inputs.episodes]
    returns = _discounted_sums(_rewards_less_kl(inputs, scored), inputs.episodes, config.gamma)
    return Advantages(advantages=_normalised(returns, scored))


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """(r - mean of the group) / the standard deviation of that over the batch's episodes.

    Over episodes its mean is 0 already, so that a group without signal stays at exactly 0. Source:
    REINFORCE++ with baseline, arXiv 2501.03262.
    """
    advantages = np.zeros(len(inputs.rewards))
    for members in _comparable(inputs.groups, inputs.rewards):
        own = inputs.rewards[members]
        advantages[members] = own - own.mean()
    if advantages.any():
        advantages /= advantages[np.isfinite(inputs.rewards)].std(ddof=1) + _EPSILON
    return Advantages(advantages=advantages[inputs.episodes])


def pass_at_k(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """What an episode adds to the best of `pass_k` episodes, over that best one's deviation.

    With B the mean, over all sets of k of the n episodes of a group, of the set's best reward, and
    B_i that over the sets with episode i: (B_i - B) / (std of the best rewards + 1e-6). Exactly 0
    where every set has an equal best, and in a group of at most k episodes. Sources: the analytical
    derivation of "Pass@k Training", arXiv 2508.10751, for right and wrong; rewards between them
    enter by their rank, as in PKPO, arXiv 2505.15201.
    """
    k = config.pass_k
    advantages = np.zeros(len(inputs.rewards))
    for members in _comparable(inputs.groups, inputs.rewards):
        ordered = members[np.argsort(inputs.rewards[members], kind="stable")]
        own, n = inputs.rewards[ordered], len(ordered)
        if n <= k or np.ptp(own[k - 1 :]) <= TOLERANCE:
            continue
        chances = _chances_to_be_best(n, k)
        best = chances @ own
        scale = math.sqrt(chances @ (own - best) ** 2) + _EPSILON
        without = _chances_to_be_best(n - 1, k)
        best_without = np.array([without @ np.delete(own, i) for i in range(n)])
        # Of all sets, k / n hold episode i: B = k / n * B_i + (n - k) / n * best_without.
        advantages[ordered] = (n - k) / k * (best - best_without) / scale
    return Advantages(advantages=advantages[inputs.episodes])


def gae(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Sums of (gamma * lam)^i * delta, delta = reward - beta * KL + gamma * next value - value.

    The next value is that before the next sampled token, however much the env wrote between. After
    an episode's last token it is 0, also where a limit cut the episode. Returns are advantages plus
    values, before any whitening. Source: arXiv 1506.02438, section 3.
    """
    assert inputs.values is not None
    scored = np.isfinite(inputs.rewards)[inputs.episodes]
    goes_on = np.diff(inputs.episodes, append=-1) == 0
    next_values = np.where(goes_on, np.roll(inputs.values, -1), 0.0)
    deltas = _rewards_less_kl(inputs, scored) + config.gamma * next_values - inputs.values
    advantages = _discounted_sums(deltas, inputs.episodes, config.gamma * config.lam)
    returns = np.where(scored, advantages + inputs.values, 0.0)
    if config.whiten_advantages:
        advantages = _normalised(advantages, scored)
    return Advantages(advantages=np.where(scored, advantages, 0.0), returns=returns)


Estimator = Callable[[AdvantageInputs, AdvantageConfig], Advantages]

ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "pass_at_k": pass_at_k,
    "gae": gae,
}


def overlong_penalty(lengths: np.ndarray, max_tokens: int, buffer_tokens: int) -> np.ndarray:
    """[E], 0 up to `max_tokens - buffer_tokens` sampled tokens, from there linear to -1.

    Source: DAPO, arXiv 2503.14476, eq. 13.
    """
    return -np.clip((lengths - (max_tokens - buffer_tokens)) / buffer_tokens, 0.0, 1.0)


def relative_penalty(lengths: np.ndarray, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """[E], from 0.5 for the shortest episode of a group to -0.5 for the longest.

    Only episodes above the group's mean reward gain by being short; the others get at most 0.
    Source: Kimi k1.5, arXiv 2501.12599, section 2.3.3, where right answers are those that gain.
    """
    penalty = np.zeros(len(lengths))
    for members in _scored_members(groups, rewards):
        own, span = lengths[members], np.ptp(lengths[members])
        if span:
            shortness = 0.5 - (own - own.min()) / span
            above = rewards[members] > rewards[members].mean() + TOLERANCE
            penalty[members] = np.where(above, shortness, np.minimum(shortness, 0.0))
    return penalty


def _length_penalty(
    lengths: np.ndarray, rewards: np.ndarray, groups: np.ndarray, config: RunConfig
) -> np.ndarray:
    advantage = config.advantage
    if advantage.length_penalty == "none":
        return np.zeros(len(lengths))
    if advantage.length_penalty == "overlong":
        max_tokens = config.rollout.max_episode_tokens
        penalty = overlong_penalty(lengths, max_tokens, advantage.overlong_buffer_tokens)
    else:
        penalty = relative_penalty(lengths, rewards, groups)
    return advantage.length_penalty_weight * penalty


def _reward(trajectory: Trajectory, config: RunConfig) -> float:
    """A masked episode is no baseline for its siblings either."""
    masked = config.loss.mask_truncated_completions and trajectory.is_cut
    assert trajectory.reward is not None
    return math.nan if masked else float(trajectory.reward)


def _units(
    inputs: AdvantageInputs, config: AdvantageConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What is compared, episodes or turns.

    Returns: the units' values [U], labels [U] that are equal for those to be compared with each
        other, and the unit of each token [N].
    """
    if config.level == "episode":
        return inputs.rewards, inputs.groups, inputs.episodes
    first_tokens = np.flatnonzero(np.diff(inputs.turns, prepend=-1))
    episodes = inputs.episodes[first_tokens]
    rewards = np.add.reduceat(inputs.token_rewards, first_tokens)
    returns = _discounted_sums(rewards, episodes, config.gamma)
    numbers = _places(episodes)
    labels = inputs.groups[episodes] * (numbers.max(initial=0) + 1) + numbers
    unit = np.repeat(np.arange(len(first_tokens)), np.diff(first_tokens, append=len(inputs.turns)))
    return returns, labels, unit


def _scored_members(labels: np.ndarray, values: np.ndarray) -> Iterator[np.ndarray]:
    """Indices of all finite values of one label, for each label that has any."""
    scored = np.flatnonzero(np.isfinite(values))
    ordered = scored[np.argsort(labels[scored], kind="stable")]
    bounds = np.flatnonzero(np.diff(labels[ordered])) + 1
    return (members for members in np.split(ordered, bounds) if len(members))


def _comparable(labels: np.ndarray, values: np.ndarray) -> Iterator[np.ndarray]:
    """Likewise where these differ: what rounding alone makes of equal ones is no advantage."""
    return (m for m in _scored_members(labels, values) if np.ptp(values[m]) > TOLERANCE)


def _rewards_less_kl(inputs: AdvantageInputs, scored: np.ndarray) -> np.ndarray:
    rewards = np.where(scored, inputs.token_rewards, 0.0)
    return rewards if inputs.kl is None else rewards - inputs.beta * inputs.kl


def _discounted_sums(values: np.ndarray, episodes: np.ndarray, factor: float) -> np.ndarray:
    """Of each value and those after it in its episode, each step of distance by `factor`."""
    places = _places(episodes)
    table = np.zeros((episodes.max(initial=-1) + 1, places.max(initial=-1) + 1))
    table[episodes, places] = values
    for place in range(table.shape[1] - 2, -1, -1):
        table[:, place] += factor * table[:, place + 1]
    return table[episodes, places]


def _places(episodes: np.ndarray) -> np.ndarray:
    """The how manieth of its episode each one is, from 0."""
    _, starts, lengths = np.unique(episodes, return_index=True, return_counts=True)
    return np.arange(len(episodes)) - np.repeat(starts, lengths)


def _normalised(advantages: np.ndarray, scored: np.ndarray) -> np.ndarray:
    """To mean 0 and standard deviation 1 over the scored tokens; all 0 where they are equal."""
    own = advantages[scored]
    result = np.zeros(len(advantages))
    if len(own) and np.ptp(own) > TOLERANCE:
        result[scored] = (own - own.mean()) / (own.std(ddof=1) + _EPSILON)
    return result


def _chances_to_be_best(n: int, k: int) -> np.ndarray:
    """[n], for each of n ordered values that of a random set of k it is the largest."""
    return np.array([math.comb(below, k - 1) / math.comb(n, k) for below in range(n)])
