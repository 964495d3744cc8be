"""The door: reads a config, builds the parts, and hands them to the loop in `train/loop.py`.

accelerate launch train.py --config configs/calculator_smollm2_cpu.yaml optim.learning_rate=1e-5
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

# Threads that spin while they wait keep those that work from their cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import accelerate
import torch
import transformers

from agentrl.config import ConfigError, RunConfig
from agentrl.config_file import describe_config, dump_config, fresh_folder, load_config
from agentrl.env import EnvNotFound, make_env, open_env, tasks_of
from agentrl.metrics import MetricsError
from agentrl.models import ModelError
from agentrl.protocols import EngineError
from agentrl.renderer import Renderer, RendererError
from agentrl.rubric import load_rewards
from agentrl.trajectory import Trajectory
from agentrl.types import Message
from rollout.engines.local import LocalEngine
from rollout.engines.local_load import engine_dtype, fast_dtype, use_all_cores
from rollout.manager import RolloutError, RolloutManager
from rollout.tasks import TaskStream
from train.checkpoint import CheckpointError, latest_checkpoint, load_checkpoint
from train.display import Display
from train.learner import Learner, TrainingError
from train.loop import train
from train.model import load_model
from train.record import RunRecord

BAD_INPUT = (ConfigError, EnvNotFound, RendererError, ModelError)
FAILED = (
    RolloutError, EngineError, TrainingError, CheckpointError, MetricsError, OSError
)  # fmt: skip
# Mean |learner - engine| logprob, in nats, that arithmetic of another order may cause.
PROBE = (
    "A farmer's 16 hens lay an egg a day each. She eats 3, bakes with 4 and sells the rest for 2 "
    "dollars apiece. How much does she earn in a week, and what would she earn in 2048?"
)
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
        complain(f"error: {error}", error)
        return 2
    except FAILED as error:
        complain(f"error: {error}", error)
        return 1
    except KeyboardInterrupt as error:
        complain("interrupted", error)
        return 130


def complain(text: str, error: BaseException) -> None:
    print(text, *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)


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
    require_trackers(config)
    require_room(config)
    folder = Path(config.output_dir)
    checkpoint = latest_checkpoint(folder / "checkpoints") if resume else None
    if resume and checkpoint is None:
        raise ConfigError(f"output_dir={folder} holds no complete checkpoint to resume from")
    env = open_env(config.env.id, config.env.kwargs)
    print(time_limits(config, env))
    title = describe(config)
    if checkpoint is None:
        folder = fresh_folder(folder, "config.yaml")
        if str(folder) != config.output_dir:
            title.append(f"{config.output_dir} holds a run already; this one lies in {folder}")
            config = config.model_copy(update={"output_dir": str(folder)})
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
    title.append(f"template {renderer.probe()}")
    learner = Learner(model, config, accelerator)
    state = load_checkpoint(checkpoint, learner) if checkpoint else None
    if state:
        title.append(f"resumed after step {state.step}: {checkpoint}")
    display = Display(max_steps=config.max_steps, title="\n".join(title))
    rollouts = make_rollouts(config, env, learner.model, renderer, EpisodeCount(config, display))
    with rollouts, display:
        if state:
            with unfit():
                rollouts.load_state_dict(state.rollouts)
        accelerator.init_trackers("agentrl")
        record = RunRecord(folder, config, accelerator, tokenizer, state)
        probe_ids = renderer.prompt([Message(role="user", content=PROBE)])
        tolerance = SYNC_TOLERANCE[engine_dtype(config.rollout)]
        try:
            train(config, learner, rollouts, record, display, state, probe_ids, tolerance)
        except BaseException as error:
            error.add_note(record.how_to_resume())
            raise
        finally:
            accelerator.end_training()
        display.finish(record.summary())


def require_trackers(config: RunConfig) -> None:
    """Accelerate leaves out a tracker that is not installed without a word."""
    missing = [name for name in config.report_to if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"report_to: {' and '.join(missing)} is not installed; "
            f"pip install -e '.[{','.join(missing)}]'"
        )


def require_room(config: RunConfig) -> None:
    """The longest episode goes through the learner in one row."""
    rows, episode = config.optim.micro_batch_tokens, config.rollout.max_context_tokens
    if rows < episode:
        raise ConfigError(
            f"optim.micro_batch_tokens={rows} is less than one episode may have: "
            f"rollout.max_context_tokens={episode}; raise the one or lower the other"
        )


def time_limits(config: RunConfig, env: Any) -> str:
    """All of them in a line, for none may hide; a tool's must fit into the call it is part of."""
    rollout = config.rollout
    tools = [(t.name, t.timeout_s) for t in getattr(env, "tools", ()) if not t.inline]
    for name, timeout_s in tools:
        if timeout_s >= rollout.env_timeout_s:
            raise ConfigError(
                f"tool {name} may take {timeout_s:g} s, but rollout.env_timeout_s="
                f"{rollout.env_timeout_s:g} ends the env's step before; raise it over {timeout_s:g}"
            )
    limits = [
        *tools,
        ("env call", rollout.env_timeout_s),
        ("generation", rollout.generate_timeout_s),
        ("scoring", rollout.score_timeout_s),
        ("episode", rollout.episode_timeout_s),
    ]
    return "time limits: " + ", ".join(f"{name} {seconds:g} s" for name, seconds in limits)


def mixed_precision(config: RunConfig) -> str:
    """Of the learner's forward pass."""
    if config.model.mixed_precision == "auto":
        return "bf16" if fast_dtype() is torch.bfloat16 else "no"
    return config.model.mixed_precision


def make_rollouts(
    config: RunConfig, env: Any, model: Any, renderer: Renderer, on_episode: EpisodeCount
) -> RolloutManager:
    eval_kwargs = config.env.kwargs | config.eval.env_kwargs
    eval_tasks = None
    with unfit():
        tasks = TaskStream(tasks_of(env, "train"), config.seed)
        if config.eval.num_tasks:
            eval_tasks = TaskStream(tasks_of(open_env(config.env.id, eval_kwargs), "test"), 0)
        rubric = load_rewards(config.env.reward_funcs, config.env.reward_weights)
    engine = LocalEngine(
        model,
        num_slots=config.rollout.max_concurrent_generations,
        max_context_tokens=config.rollout.max_context_tokens,
        dtype=engine_dtype(config.rollout),
        share_weights=config.rollout.max_staleness == 0,
    )
    try:
        return RolloutManager(
            engine=engine,
            rubric=rubric,
            make_env=partial(make_env, config.env.id, **config.env.kwargs),
            renderer=renderer,
            config=config.rollout,
            tasks=tasks,
            eval_make_env=partial(make_env, config.env.id, **eval_kwargs),
            eval_config=config.eval,
            eval_tasks=eval_tasks,
            seed=config.seed,
            on_episode=on_episode,
        )
    except ValueError as error:
        asyncio.run(engine.close())
        raise ConfigError(str(error)) from error


@contextmanager
def unfit() -> Iterator[None]:
    """Tasks, rewards and options that do not fit each other are bad input."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


def describe(config: RunConfig) -> list[str]:
    """The run in a few lines: what is trained, and what is counted."""
    rollout, optim = config.rollout, config.optim
    num_episodes = rollout.prompts_per_step * rollout.num_generations
    num_updates = optim.num_minibatches * optim.num_iterations
    return [
        f"{config.model.name_or_path} · {config.env.id} · {config.loss.loss_type} · "
        f"{config.output_dir}",
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
