"""The door: reads a config, builds the parts, and hands them to the loop in `train/loop.py`.

accelerate launch train.py --config configs/calculator_smollm2_cpu.yaml optim.learning_rate=1e-5
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

# Threads that spin while they wait keep those that work from their cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import accelerate
import torch
import transformers

from agentrl.config import ConfigError, RunConfig, describe_config, dump_config, load_config
from agentrl.env import EnvNotFound, make_env
from agentrl.models import ModelError
from agentrl.protocols import EngineDied
from agentrl.renderer import Renderer, RendererError
from agentrl.rubric import load_rewards
from agentrl.trajectory import Trajectory
from rollout.engines.local import LocalEngine, engine_dtype, fast_dtype, use_all_cores
from rollout.manager import RolloutError, RolloutManager
from rollout.tasks import TaskStream
from train.checkpoint import CheckpointError, latest_checkpoint, load_checkpoint
from train.display import Display
from train.learner import Learner, TrainingError
from train.loop import SyncError, train
from train.model import load_model
from train.record import RunRecord, fresh_folder

BAD_INPUT = (ConfigError, EnvNotFound, RendererError, ModelError)
FAILED = (RolloutError, EngineDied, TrainingError, SyncError, CheckpointError)
# Mean |learner - engine| logprob, in nats, that arithmetic of another order may cause.
SYNC_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}


def main(arguments: list[str] | None = None) -> int:
    """0: done. 1: failed on the way. 2: bad input. 130: interrupted."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.basicConfig(format="%(levelname)s %(message)s")
    try:
        config = load_config(options.config, options.overrides)
        if options.print_config:
            print(dump_config(config), end="")
            return 0
        run(config, resume=options.resume)
        return 0
    except BAD_INPUT as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FAILED as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command with --resume goes on from here", file=sys.stderr)
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
        "--resume", action="store_true", help="go on from the newest checkpoint in output_dir"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="instead of what the file says"
    )
    return parser.parse_intermixed_args(arguments)


def run(config: RunConfig, *, resume: bool) -> None:
    use_all_cores()
    transformers.utils.logging.disable_progress_bar()
    folder = Path(config.output_dir)
    checkpoint = latest_checkpoint(folder / "checkpoints") if resume else None
    if resume and checkpoint is None:
        raise ConfigError(f"output_dir={folder} holds no complete checkpoint to resume from")
    if not resume:
        folder = fresh_folder(folder)
    env = make_env(config.env.id, **config.env.kwargs).unwrapped
    accelerator = accelerate.Accelerator(
        mixed_precision=mixed_precision(config),
        log_with=list(config.report_to) or None,
        project_dir=str(folder),
    )
    accelerate.utils.set_seed(config.seed)
    model, tokenizer = load_model(config.model, seed=config.seed)
    renderer = Renderer(
        tokenizer,
        tool_format=config.rollout.tool_format,
        tools=[tool.schema for tool in getattr(env, "tools", ())],
        history=config.rollout.history,
    )
    verdict = renderer.probe()
    learner = Learner(model, config, accelerator)
    state = load_checkpoint(checkpoint, learner) if checkpoint else None
    record = RunRecord(folder, config, accelerator, tokenizer, state)
    dtype = engine_dtype(config.rollout)
    engine = LocalEngine(
        learner.model,
        num_slots=config.rollout.max_concurrent_generations,
        max_context_tokens=config.rollout.max_context_tokens,
        dtype=dtype,
        share_weights=config.rollout.max_staleness == 0,
    )
    title = "\n".join([*describe(config, folder), f"template {verdict}"])
    with Display(max_steps=config.max_steps, title=title) as display:
        rollouts = make_rollouts(config, env, engine, renderer, EpisodeCount(config, display))
        try:
            train(config, learner, rollouts, record, display, state, SYNC_TOLERANCE[dtype])
        finally:
            rollouts.close()
            accelerator.end_training()
        display.finish(record.summary())


def mixed_precision(config: RunConfig) -> str:
    """Of the learner's forward pass."""
    if config.model.mixed_precision == "auto":
        return "bf16" if fast_dtype() is torch.bfloat16 else "no"
    return config.model.mixed_precision


def make_rollouts(
    config: RunConfig, env: Any, engine: LocalEngine, renderer: Renderer, on_episode: EpisodeCount
) -> RolloutManager:
    eval_kwargs = config.env.kwargs | config.eval.env_kwargs
    tasks = getattr(env, "tasks", lambda split: None)
    try:
        return RolloutManager(
            engine=engine,
            make_env=partial(make_env, config.env.id, **config.env.kwargs),
            renderer=renderer,
            config=config.rollout,
            tasks=TaskStream(tasks("train"), config.seed),
            eval_make_env=partial(make_env, config.env.id, **eval_kwargs),
            eval_config=config.eval,
            eval_tasks=TaskStream(tasks("test"), 0) if config.eval.num_tasks else None,
            rubric=load_rewards(config.env.reward_funcs, config.env.reward_weights),
            seed=config.seed,
            on_episode=on_episode,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def describe(config: RunConfig, folder: Path) -> list[str]:
    """The run in a few lines: what is counted, and where it lies."""
    rollout, optim = config.rollout, config.optim
    num_episodes = rollout.prompts_per_step * rollout.num_generations
    num_updates = optim.num_minibatches * optim.num_iterations
    return [
        f"{config.model.name_or_path} · {config.env.id} · {config.loss.loss_type} · {folder}",
        f"a step: {rollout.prompts_per_step} prompts x {rollout.num_generations} episodes = "
        f"{num_episodes} episodes, {num_updates} optimizer step{'s' * (num_updates > 1)}",
    ]


class EpisodeCount:
    """Shows how many episodes of the batch or the evaluation are over."""

    def __init__(self, config: RunConfig, display: Display) -> None:
        rollout, evaluation = config.rollout, config.eval
        self._display = display
        self._totals = {
            "rollout": rollout.prompts_per_step * rollout.num_generations,
            "evaluation": evaluation.num_tasks * evaluation.num_generations,
        }
        self._phase, self._done = "", 0

    def __call__(self, trajectory: Trajectory) -> None:
        phase = self._display.current_phase
        self._done = self._done + 1 if phase == self._phase else 1
        self._phase = phase
        if phase in self._totals:
            self._display.progress(self._done, max(self._done, self._totals[phase]))


if __name__ == "__main__":
    sys.exit(main())
