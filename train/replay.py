"""Trains on recorded episodes, a batch a file, without engine and envs.

python -m train.replay runs/calculator/trajectories/step-*.jsonl \\
    --config runs/calculator/config.yaml --output runs/replay

From the weights that the recorded run began with, the metrics of the learner are that run's, bit by
bit on the same machine. `model.name_or_path=runs/…/checkpoint-000012` starts from those of a
checkpoint. Held-out episodes, in `eval-*.jsonl`, are left out. Runs under `accelerate launch …
-m train.replay …` too.
"""

from __future__ import annotations

import argparse
import logging
import re
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import transformers

from agentrl.config import ConfigError, RunConfig
from agentrl.config_file import dump_config, fresh_folder, load_config
from agentrl.metrics import MetricLog, MetricsError
from agentrl.models import ModelError
from agentrl.summary import summarize
from agentrl.trajectory import TrajectoryFileError, TrajectoryGroup, read_groups
from train.learner import Learner, TrainingError
from train.ranks import RankFailed
from train.setup import complain, launched, make_learner, use_all_cores

_SHOWN = ("reward", "loss", "grad_norm", "kl", "entropy", "mismatch/abs_diff", "num_tokens")


def main(arguments: list[str] | None = None) -> int:
    """0: done. 1: failed on the way. 2: bad input. 130: interrupted."""
    config_path, files, folder, overrides = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.basicConfig(format="%(levelname)s %(message)s")
    transformers.utils.logging.disable_progress_bar()
    use_all_cores()
    try:
        run(load_config(config_path, overrides), files, folder)
        return 0
    except (ConfigError, ModelError, TrajectoryFileError) as error:
        complain(f"error: {error}", error)
        return 2
    except (TrainingError, MetricsError, RankFailed, OSError) as error:
        complain(f"error: {error}", error)
        return 1
    except KeyboardInterrupt as error:
        complain("interrupted", error)
        return 130


def parse(arguments: list[str] | None) -> tuple[Path, list[Path], Path, list[str]]:
    """The config's path, the files, the folder and the overrides."""
    parser = argparse.ArgumentParser(
        prog="python -m train.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="a YAML file")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default="runs/replay", help="gets the metrics"
    )
    parser.add_argument("inputs", nargs="+", metavar="FILE.jsonl | section.key=value")
    options = parser.parse_intermixed_args(arguments)
    overrides = [text for text in options.inputs if re.match(r"[\w.-]+=", text)]
    files = [Path(text) for text in options.inputs if text not in overrides]
    files = [file for file in files if not file.name.startswith("eval-")]  # held-out episodes
    if not files:
        parser.error("no file of trajectories was given that a run trained on")
    return options.config, files, options.output, overrides


def run(config: RunConfig, files: Sequence[Path], folder: Path) -> None:
    with launched(config) as (accelerator, ranks):
        log = ranks.lead(partial(begin, config, files, folder))
        learner, _ = make_learner(config, accelerator, ranks)
        replay(learner, files, log)
        if ranks.is_main:
            print(f"metrics: {log.path}")


def begin(config: RunConfig, files: Sequence[Path], folder: Path) -> MetricLog:
    """
    Raises:
        ConfigError: a file is missing, or the folder cannot be written to.
    """
    for file in files:
        if not file.is_file():
            raise ConfigError(f"there is no file {file}")
    folder = fresh_folder(folder, "config.yaml")
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    return MetricLog(folder / "metrics.jsonl")


def replay(learner: Learner, files: Sequence[Path], log: MetricLog) -> None:
    """Update on each file in turn; rank 0 reads them and writes the metrics."""
    ranks = learner.ranks
    for step, file in enumerate(files, start=1):
        started = time.perf_counter()
        groups: list[TrajectoryGroup] = []
        with ranks.together():
            if ranks.is_main:
                groups = read_groups(file)
                require_vocabulary(groups, learner, file)
        metrics = learner.update(groups)
        if ranks.is_main:
            metrics = summarize(groups) | metrics
            metrics["step_time"] = time.perf_counter() - started
            log.write(step, metrics)
            shown = [f"{name} {metrics[name]:.4g}" for name in _SHOWN if name in metrics]
            print(f"{file.name}: {', '.join(shown)}, {metrics['step_time']:.2f} s", flush=True)


def require_vocabulary(groups: Sequence[TrajectoryGroup], learner: Learner, file: Path) -> None:
    """
    Raises:
        ConfigError: the model has no such tokens.
    """
    size = learner.model.config.get_text_config().vocab_size
    tapes = [tape for group in groups for tape in group.trajectories]
    largest = max((max(tape.token_ids, default=0) for tape in tapes), default=0)
    if largest >= size:
        raise ConfigError(
            f"{file} holds the token {largest}, the vocabulary of "
            f"model.name_or_path={learner.config.model.name_or_path} ends before {size}: another "
            "model recorded it"
        )


if __name__ == "__main__":
    sys.exit(main())
