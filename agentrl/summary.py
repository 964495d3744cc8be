"""What a list of groups amounts to, as metrics: of training batches and of evaluations alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import stdev

from agentrl.metrics import MeanMetrics
from agentrl.trajectory import TrajectoryGroup


def mixed_envs(metrics: Iterable[str]) -> list[str]:
    """The envs of a mix, by the names of the metrics of a batch of it."""
    return [
        name.removeprefix("mix/").removesuffix("/share")
        for name in metrics
        if name.startswith("mix/") and name.endswith("/share")
    ]


def summarize(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Means over the scored episodes of `groups`; `stop/<reason>` are fractions of all episodes.

    Each named reward and metric is a mean over the episodes that have it. Lengths count tokens:
    `completions/mean_length` the sampled ones, `completions/mean_env_tokens` those that an env
    wrote between them. Where tasks name their env, all of it is there as `<env>/…` too.
    """
    metrics = _means(groups)
    for env in {group.task.env for group in groups} - {""}:
        of_env = _means([group for group in groups if group.task.env == env])
        metrics |= {f"{env}/{name}": value for name, value in of_env.items()}
    return metrics


def _means(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    metrics = MeanMetrics()
    reasons = {t.stop_reason for group in groups for t in group.trajectories if t.stop_reason}
    for group in groups:
        rewards = [reward for reward in group.rewards if reward is not None]
        if len(rewards) > 1:
            metrics.add("reward_std", stdev(rewards))
            metrics.add("frac_reward_zero_std", float(not group.has_signal))
        for tape in group.trajectories:
            for reason in reasons:
                metrics.add(f"stop/{reason}", float(tape.stop_reason is reason))
            if tape.reward is None:
                continue
            metrics.update(tape.metrics | tape.rewards | {"reward": tape.reward})
            num_sampled = tape.num_sampled_tokens
            span = tape.turns[-1].end - tape.turns[0].start if tape.turns else 0
            metrics.add("completions/mean_length", num_sampled)
            metrics.add("completions/mean_env_tokens", span - num_sampled)
            metrics.add("completions/mean_turns", len(tape.turns))
    return metrics.pop()
