"""The estimators once more, in plain loops over episodes, to compare train/advantage.py with."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass


@dataclass
class Played:
    """One episode: its group, and what it was rewarded with."""

    group: int
    reward: float | None  # None: masked
    turns: list[tuple[int, float]]  # sampled tokens, and the env's reward for them
    values: list[float]  # one per sampled token
    kl: list[float]  # likewise

    @property
    def num_tokens(self) -> int:
        return sum(tokens for tokens, _ in self.turns)

    def turn_rewards(self) -> list[float]:
        assert self.reward is not None
        rewards = [reward for _, reward in self.turns]
        rewards[-1] += self.reward - sum(rewards)
        return rewards

    def token_rewards(self) -> list[float]:
        rewards = []
        for (tokens, _), reward in zip(self.turns, self.turn_rewards(), strict=True):
            rewards += [0.0] * (tokens - 1) + [reward]
        return rewards


Columns = list[list[float]]  # one per episode, of one number per sampled token


def mean(numbers):
    return sum(numbers) / len(numbers)


def deviation(numbers):
    return statistics.stdev(numbers) + 1e-6


def differ(numbers):
    return len(numbers) > 1 and max(numbers) - min(numbers) > 1e-9


def of_episodes(episodes, advantage_of) -> Columns:
    """Each token gets its episode's."""
    return [
        [0.0 if episode.reward is None else advantage_of(episode)] * episode.num_tokens
        for episode in episodes
    ]


def siblings(episodes, episode):
    """All scored rewards of its group."""
    return [e.reward for e in episodes if e.group == episode.group and e.reward is not None]


def grpo(episodes, scale_rewards="group") -> Columns:
    everyone = [e.reward for e in episodes if e.reward is not None]

    def advantage(episode):
        rewards = siblings(episodes, episode)
        if not differ(rewards):
            return 0.0
        divisor = {"group": rewards, "batch": everyone, "none": None}[scale_rewards]
        return (episode.reward - mean(rewards)) / (deviation(divisor) if divisor else 1.0)

    return of_episodes(episodes, advantage)


def rloo(episodes) -> Columns:
    def advantage(episode):
        rewards = siblings(episodes, episode)
        if not differ(rewards):
            return 0.0
        rewards.remove(episode.reward)
        return episode.reward - mean(rewards)

    return of_episodes(episodes, advantage)


def reinforce_plus_plus_baseline(episodes) -> Columns:
    def centred(episode):
        rewards = siblings(episodes, episode)
        return episode.reward - mean(rewards) if differ(rewards) else 0.0

    everyone = [centred(e) for e in episodes if e.reward is not None]
    if not any(everyone):
        return of_episodes(episodes, lambda _: 0.0)
    return of_episodes(episodes, lambda e: centred(e) / deviation(everyone))


def pass_at_k(episodes, k) -> Columns:
    """Every set of k is drawn."""

    def advantage(episode):
        members = [e for e in episodes if e.group == episode.group and e.reward is not None]
        sets = list(itertools.combinations(members, k))
        bests = [max(e.reward for e in chosen) for chosen in sets]
        if not differ(bests):
            return 0.0
        with_episode = [
            best
            for best, chosen in zip(bests, sets, strict=True)
            if any(e is episode for e in chosen)
        ]
        return (mean(with_episode) - mean(bests)) / (statistics.pstdev(bests) + 1e-6)

    return of_episodes(episodes, advantage)


def turn_returns(episode, gamma):
    rewards = episode.turn_rewards()
    return [
        sum(gamma ** (later - turn) * rewards[later] for later in range(turn, len(rewards)))
        for turn in range(len(rewards))
    ]


def per_turn(episodes, gamma, scale_rewards=None) -> Columns:
    """grpo, or with `scale_rewards` None rloo, between turns of one number."""
    scored = [e for e in episodes if e.reward is not None]
    everyone = [value for e in scored for value in turn_returns(e, gamma)]
    columns = []
    for episode in episodes:
        column: list[float] = []
        for number, (tokens, _) in enumerate(episode.turns):
            advantage = 0.0
            if episode.reward is not None:
                returns = [
                    turn_returns(e, gamma)[number]
                    for e in scored
                    if e.group == episode.group and len(e.turns) > number
                ]
                own = turn_returns(episode, gamma)[number]
                if differ(returns):
                    advantage = own - mean(returns)
                    if scale_rewards is None:
                        advantage *= len(returns) / (len(returns) - 1)
                    elif scale_rewards == "group":
                        advantage /= deviation(returns)
                    elif scale_rewards == "batch":
                        advantage /= deviation(everyone)
            column += [advantage] * tokens
        columns.append(column)
    return columns


def normalised(episodes, columns) -> Columns:
    everything = [
        x
        for episode, column in zip(episodes, columns, strict=True)
        if episode.reward is not None
        for x in column
    ]
    return [
        [
            0.0
            if episode.reward is None or not differ(everything)
            else (x - mean(everything)) / deviation(everything)
            for x in column
        ]
        for episode, column in zip(episodes, columns, strict=True)
    ]


def reinforce_plus_plus(episodes, beta, gamma) -> Columns:
    columns = []
    for episode in episodes:
        column = [0.0] * episode.num_tokens
        if episode.reward is not None:
            rewards = [
                r - beta * kl for r, kl in zip(episode.token_rewards(), episode.kl, strict=True)
            ]
            for t in range(len(rewards)):
                column[t] = sum(gamma ** (u - t) * rewards[u] for u in range(t, len(rewards)))
        columns.append(column)
    return normalised(episodes, columns)


def gae(episodes, beta, gamma, lam, whiten) -> tuple[Columns, Columns]:
    advantages, returns = [], []
    for episode in episodes:
        column = [0.0] * episode.num_tokens
        if episode.reward is not None:
            rewards = episode.token_rewards()
            carried = 0.0
            for t in reversed(range(episode.num_tokens)):
                after = episode.values[t + 1] if t + 1 < episode.num_tokens else 0.0
                delta = rewards[t] - beta * episode.kl[t] + gamma * after - episode.values[t]
                carried = column[t] = delta + gamma * lam * carried
            returns.append([a + v for a, v in zip(column, episode.values, strict=True)])
        else:
            returns.append(list(column))
        advantages.append(column)
    return (normalised(episodes, advantages) if whiten else advantages), returns
