"""Plays the held-out tasks of any env with any model, and says how good it is.

python -m rollout.evaluate model.name_or_path=runs/calculator/checkpoints/checkpoint-000012 \\
    env.id=agentrl/GSM8K-v0 eval.num_tasks=100 eval.num_generations=4 eval.temperature=1.0

Keys are those of a training config, which `--config` takes too. It samples in its own process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev

# Threads that spin while they wait keep those that work from their cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from rich.console import Console
from rich.table import Table

from agentrl.config import ConfigError, RunConfig
from agentrl.config_file import fresh_folder
from agentrl.summary import summarize
from agentrl.trajectory import TrajectoryGroup, write_groups
from rollout.embedded import add_config_arguments, embedded_rollouts, exit_code, read_config
from rollout.faults import RolloutError
from rollout.setups import eval_draws, open_envs
from rollout.tasks import TaskStream


def main(arguments: list[str] | None = None) -> int:
    """0: done. 1: failed on the way. 2: bad input. 130: interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m rollout.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output", metavar="DIR", default="runs/evaluation", help="gets the figures and episodes"
    )
    parser.add_argument("--pass-reward", type=float, default=1.0, help="an episode's, to pass")
    add_config_arguments(parser)
    options = parser.parse_intermixed_args(arguments)
    return exit_code(partial(evaluate, options))


def evaluate(options: argparse.Namespace) -> None:
    config = read_config(options)
    if config.eval.num_tasks == 0:
        raise ConfigError("eval.num_tasks is 0: say how many tasks to play")
    folder = fresh_folder(Path(options.output), "evaluation.json")
    groups = play(config)
    figures = evaluation(groups, options.pass_reward)
    (folder / "evaluation.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    write_groups(folder / "trajectories.jsonl", groups)
    ids = " + ".join(env.id for env in config.envs.values())
    table = Table(title=f"{config.model.name_or_path} on {ids}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}")
    console = Console()
    console.print(table)
    console.print(f"episodes and figures: {folder}")


def play(config: RunConfig) -> list[TrajectoryGroup]:
    """The groups of the held-out tasks, one per task."""
    envs = open_envs(config.eval_envs)
    try:
        draws = eval_draws(config, envs)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with embedded_rollouts(
        config,
        envs,
        rollout=config.rollout.model_copy(update={"prompts_per_step": 1, "oversampling": 1.0}),
        tasks=TaskStream(None, 0),  # never drawn from
        eval_draws=draws,
        num_episodes=config.eval.num_tasks * config.eval.num_generations,
    ) as rollouts:
        groups = rollouts.evaluate()
    assert groups is not None, "a local engine never loses its weights"
    episodes = [episode for group in groups for episode in group.trajectories]
    if all(episode.reward is None for episode in episodes):
        reason, count = Counter(e.stop_reason for e in episodes).most_common(1)[0]
        error = next(e.error for e in episodes if e.stop_reason is reason)
        raise RolloutError(f"no episode could be played; {count} of {len(episodes)}: {error}")
    return groups


def evaluation(groups: Sequence[TrajectoryGroup], pass_reward: float) -> dict[str, float]:
    """Means over tasks, the standard error of the mean reward, and pass@k for k = 1, 2, 4, ….

    Episodes of one task are not independent, so the standard error is that of the tasks' means.
    """
    figures = summarize(groups)
    by_task = [[reward for reward in group.rewards if reward is not None] for group in groups]
    by_task = [rewards for rewards in by_task if rewards]
    means = [mean(rewards) for rewards in by_task]
    if len(means) > 1:
        figures["reward_standard_error"] = stdev(means) / math.sqrt(len(means))
    k = 1
    while by_task and k <= min(map(len, by_task)):
        figures[f"pass@{k}"] = mean(
            pass_at_k(len(rewards), sum(reward >= pass_reward for reward in rewards), k)
            for rewards in by_task
        )
        k *= 2
    return figures


def pass_at_k(n: int, num_passed: int, k: int) -> float:
    """The chance that one of `k` episodes drawn from these `n` passed (Chen et al. 2021, eq. 1)."""
    return 1.0 - math.comb(n - num_passed, k) / math.comb(n, k)


if __name__ == "__main__":
    sys.exit(main())
