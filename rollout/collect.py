"""Plays training tasks of any env with any model, and keeps the episodes; nothing is trained.

python -m rollout.collect --config configs/calculator_smollm2_cpu.yaml --steps 4 \\
    --output runs/collected
python -m train.replay runs/collected/trajectories/*.jsonl --config runs/collected/config.yaml

Keys are those of a training config. Tasks, seeds and limits are those that a run with this config
would begin with; it samples in its own process.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

# Threads that spin while they wait keep those that work from their cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from agentrl.config import ConfigError
from agentrl.config_file import dump_config, fresh_folder
from agentrl.metrics import MetricLog
from agentrl.trajectory import write_groups
from rollout.embedded import add_config_arguments, embedded_rollouts, exit_code, read_config
from rollout.setups import open_envs, train_tasks


def main(arguments: list[str] | None = None) -> int:
    """0: done. 1: failed on the way. 2: bad input. 130: interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m rollout.collect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output", metavar="DIR", default="runs/collected", help="gets the episodes and metrics"
    )
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="batches (default: 1)")
    add_config_arguments(parser)
    options = parser.parse_intermixed_args(arguments)
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    return exit_code(partial(collect, options))


def collect(options: argparse.Namespace) -> None:
    config = read_config(options)
    envs = open_envs(config.envs)
    num_groups = config.rollout.prompts_per_step
    try:
        tasks = train_tasks(config, envs)
        tasks.require(num_groups, "rollout.prompts_per_step")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    folder = fresh_folder(Path(options.output), "config.yaml")
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    (folder / "trajectories").mkdir()
    log = MetricLog(folder / "metrics.jsonl")
    with embedded_rollouts(
        config,
        envs,
        # Weights that never change make nothing stale: no batch begins before the last one ends.
        rollout=config.rollout.model_copy(update={"max_staleness": 0}),
        tasks=tasks,
        num_episodes=options.steps * num_groups * config.rollout.num_generations,
    ) as rollouts:
        for step in range(1, options.steps + 1):
            groups = rollouts.next_groups(num_groups)
            assert groups is not None, "a local engine never loses its weights"
            write_groups(folder / "trajectories" / f"step-{step:06d}.jsonl", groups)
            metrics = rollouts.pop_metrics()
            log.write(step, metrics)
            print(
                f"step {step}: reward {metrics['reward']:.3f}, "
                f"{metrics['completions/mean_length']:.0f} sampled tokens and "
                f"{metrics['completions/mean_turns']:.1f} turns an episode"
            )
    print(f"episodes and metrics: {folder}")


if __name__ == "__main__":
    sys.exit(main())
