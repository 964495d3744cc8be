"""The door: reads a config, builds the parts, and hands them to the loop in `train/loop.py`.

accelerate launch train.py --config configs/calculator_smollm2_cpu.yaml optim.learning_rate=1e-5
python train.py --dry-run --config …    says who runs where, what a step counts, whether it fits
python train.py --doctor --config …     tries everything that the run needs, once
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

# Threads that spin while they wait keep those that work from their cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import accelerate
import torch
import transformers
from rich.console import Console

from agentrl.config import ConfigError, RunConfig
from agentrl.config_file import describe_config, dump_config, fresh_folder, load_config
from agentrl.env import EnvNotFound
from agentrl.metrics import MetricsError
from agentrl.models import ModelError
from agentrl.plan import describe, require_room, require_time, time_limits, tool_limits
from agentrl.protocols import EngineError
from agentrl.renderer import Renderer, RendererError
from doctor import Gpus, dry_run, examine
from parts import (
    choose_engine,
    make_probe,
    make_rollouts,
    probe_tokens,
    unfit,
)
from rollout.launch import assign_gpus, find_interpreter
from rollout.manager import RolloutError, RolloutManager
from rollout.setups import make_renderers, open_envs, preflight
from train.checkpoint import CheckpointError, latest_checkpoint, load_checkpoint
from train.display import Display, EpisodeCount
from train.learner import TrainingError
from train.loop import train
from train.ranks import RankFailed, Ranks, num_local_ranks
from train.record import RunRecord
from train.setup import complain, launched, make_learner, use_all_cores
from train.shared_rollouts import SharedRollouts

BAD_INPUT = (ConfigError, EnvNotFound, RendererError, ModelError)
FAILED = (
    RolloutError, EngineError, TrainingError, CheckpointError, MetricsError, RankFailed, OSError
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """0: done. 1: failed on the way. 2: bad input. 130: interrupted."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.basicConfig(format="%(levelname)s %(message)s")
    transformers.utils.logging.disable_progress_bar()
    use_all_cores()
    try:
        config = load_config(options.config, options.overrides)
        if options.print_config:
            print(dump_config(config), end="")
        elif options.dry_run:
            gpus = options.assume_gpus or Gpus.here()
            dry_run(config, sound_envs(config), choose_engine(config, gpus.count), gpus)
        elif options.doctor:
            return 0 if examine(config, sound_envs(config)) else 1
        else:
            run(config, resume=options.resume)
        return 0
    except BAD_INPUT as error:
        complain(f"error: {error}", error)
        return 2
    except FAILED as error:
        complain(f"error: {error}", error)
        return 1
    except KeyboardInterrupt as error:
        complain("interrupted", error)
        return 130


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train an agent by reinforcement learning.",
        epilog=f"keys of a config, and of section.key=value:\n{describe_config()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a YAML file")
    parser.add_argument(
        "--print-config", action="store_true", help="print the config as resolved, and stop"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print who runs where, what a step counts and whether it fits, and stop",
    )
    parser.add_argument(
        "--assume-gpus",
        type=Gpus.parse,
        metavar="8x139",
        help="with --dry-run: plan for 8 GPUs of 139 GiB each instead of those here",
    )
    parser.add_argument(
        "--doctor", action="store_true", help="try everything that the run needs once, and stop"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in output_dir"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="instead of what the file says"
    )
    options = parser.parse_intermixed_args(arguments)
    if options.assume_gpus and not options.dry_run:
        parser.error("--assume-gpus only goes with --dry-run")
    return options


def run(config: RunConfig, *, resume: bool) -> None:
    with launched(config) as (accelerator, ranks):
        run_ranks(config, accelerator, ranks, resume=resume)


def run_ranks(
    config: RunConfig, accelerator: accelerate.Accelerator, ranks: Ranks, *, resume: bool
) -> None:
    """What every rank does; envs, engine and the run's folder are rank 0's alone."""
    envs: dict[str, Any] = {}

    def begin() -> tuple[RunConfig, Path | None, list[str]]:
        envs.update(sound_envs(config))
        return begin_run(config, envs, resume=resume)

    config, checkpoint, title = ranks.lead(begin)
    folder = Path(config.output_dir)
    accelerator.project_configuration.set_directories(str(folder))
    learner, tokenizer = make_learner(config, accelerator, ranks)
    renderers: dict[str, Renderer] = {}

    def render() -> list[int]:
        renderers.update(make_renderers(config, envs, tokenizer))
        probes = dict.fromkeys(renderer.probe() for renderer in renderers.values())
        title.extend(f"template {line}" for line in probes)
        return probe_tokens(config, next(iter(renderers.values())))

    probe_ids = ranks.lead(render)
    state = load_checkpoint(checkpoint, learner) if checkpoint else None
    if state:
        title.append(f"resumed after step {state.step}: {checkpoint}")
    display = Display(
        None if ranks.is_main else Console(quiet=True),
        max_steps=config.max_steps,
        title="\n".join(title),
    )
    own: list[RolloutManager] = []

    def sample() -> None:
        count = EpisodeCount(config, display)
        own.append(make_rollouts(config, envs, learner, renderers, folder, count))
        if state:
            with unfit():
                own[0].load_state_dict(state.rollouts)

    with ExitStack() as stack:
        stack.callback(lambda: [rollouts.close() for rollouts in own])
        ranks.lead(sample)
        stack.enter_context(display)
        accelerator.init_trackers("agentrl")
        record = RunRecord(folder, config, accelerator, tokenizer, state)
        rollouts = SharedRollouts(ranks, own[0] if own else None)
        try:
            probe = partial(make_probe, config, learner, probe_ids)
            train(config, learner, rollouts, record, display, state, probe)
        except BaseException as error:
            error.add_note(record.how_to_resume())
            raise
        if ranks.is_main:
            display.finish(record.summary())


def begin_run(
    config: RunConfig, envs: Mapping[str, Any], *, resume: bool
) -> tuple[RunConfig, Path | None, list[str]]:
    """The config with the folder of this run, the checkpoint it goes on from, and its title."""
    require_servers(config)
    folder = Path(config.output_dir)
    checkpoint = latest_checkpoint(folder / "checkpoints") if resume else None
    if resume and checkpoint is None:
        raise ConfigError(f"output_dir={folder} holds no complete checkpoint to resume from")
    engine = choose_engine(config)
    lines = preflight(envs, config.rollout.env_timeout_s)
    if config.eval.num_tasks and config.eval.env_kwargs:
        lines += preflight(open_envs(config.eval_envs), config.rollout.env_timeout_s)
    print(*dict.fromkeys(lines), sep="\n", end="\n" * bool(lines))
    limits = time_limits(config, engine, tool_limits(envs))
    print("time limits: " + ", ".join(f"{name} {seconds:g} s" for name, seconds, _ in limits))
    title = describe(config, engine)
    if checkpoint is None:
        folder = fresh_folder(folder, "config.yaml")
        if str(folder) != config.output_dir:
            title.append(f"{config.output_dir} holds a run already; this one lies in {folder}")
            config = config.model_copy(update={"output_dir": str(folder)})
    return config, checkpoint, title


def sound_envs(config: RunConfig) -> dict[str, Any]:
    """The envs by name, after what can be known to fail before anything is loaded."""
    require_trackers(config)
    require_room(config)
    envs = open_envs(config.envs)
    require_time(config, tool_limits(envs))
    return envs


def require_servers(config: RunConfig) -> None:
    """SGLang is installed, and has GPUs, where this run is to start it."""
    if choose_engine(config) == "sglang" and config.sglang.mode == "spawn":
        find_interpreter(config.sglang.python)
        gpus = range(torch.cuda.device_count())
        assign_gpus(config.sglang, gpus, num_learner_gpus=num_local_ranks())


def require_trackers(config: RunConfig) -> None:
    """Accelerate leaves out a tracker that is not installed without a word."""
    missing = [name for name in config.report_to if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"report_to: {' and '.join(missing)} is not installed; "
            f"pip install -e '.[{','.join(missing)}]'"
        )


if __name__ == "__main__":
    sys.exit(main())
