"""The door: reads a config, builds the parts, and hands them to the loop in `train/loop.py`.

accelerate launch train.py --config configs/calculator_smollm2_cpu.yaml optim.learning_rate=1e-5
python train.py --dry-run --config …    says who runs where, what a step counts, whether it fits
python train.py --doctor --config …     tries everything that the run needs, once
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
from agentrl.memory import num_concurrent
from agentrl.metrics import MetricsError
from agentrl.models import ModelError, locate_model
from agentrl.plan import describe, list_time_limits, require_room
from agentrl.protocols import Engine, EngineError, Probe
from agentrl.renderer import Renderer, RendererError
from agentrl.rubric import load_rewards
from agentrl.types import Message
from doctor import Builders, EngineKind, Gpus, dry_run, examine
from rollout.engines.local import LocalEngine
from rollout.engines.local_load import engine_dtype, fast_dtype, use_all_cores
from rollout.engines.sglang import SGLangEngine
from rollout.launch import assign_gpus, find_interpreter
from rollout.manager import RolloutError, RolloutManager
from rollout.server import Fleet, make_fleet
from rollout.tasks import TaskStream
from train.checkpoint import CheckpointError, latest_checkpoint, load_checkpoint
from train.display import Display, EpisodeCount
from train.learner import Learner, TrainingError
from train.loop import train
from train.model import load_model
from train.record import RunRecord
from train.weight_sync import make_transport

BAD_INPUT = (ConfigError, EnvNotFound, RendererError, ModelError)
FAILED = (
    RolloutError, EngineError, TrainingError, CheckpointError, MetricsError, OSError
)  # fmt: skip
PROBE = (
    "A farmer's 16 hens lay an egg a day each. She eats 3, bakes with 4 and sells the rest for 2 "
    "dollars apiece. How much does she earn in a week, and what would she earn in 2048?"
)
UNUSED_CONTEXT_TOKENS = 8  # of SGLang: it refuses prompts that come so near to its context's end
# Mean |learner - engine| logprob, in nats, that arithmetic of another order may cause.
SYNC_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}


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
            dry_run(config, sound_env(config), choose_engine(config, gpus.count), gpus)
        elif options.doctor:
            env = sound_env(config)
            return 0 if examine(config, env, choose_engine(config), BUILDERS) else 1
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
    return parser.parse_intermixed_args(arguments)


def run(config: RunConfig, *, resume: bool) -> None:
    env = sound_env(config)
    require_servers(config)
    folder = Path(config.output_dir)
    checkpoint = latest_checkpoint(folder / "checkpoints") if resume else None
    if resume and checkpoint is None:
        raise ConfigError(f"output_dir={folder} holds no complete checkpoint to resume from")
    print(list_time_limits(config, env))
    title = describe(config, choose_engine(config))
    if checkpoint is None:
        folder = fresh_folder(folder, "config.yaml")
        if str(folder) != config.output_dir:
            title.append(f"{config.output_dir} holds a run already; this one lies in {folder}")
            config = config.model_copy(update={"output_dir": str(folder)})
    learner, tokenizer = make_learner(config, folder)
    renderer = make_renderer(config, env, tokenizer)
    title.append(f"template {renderer.probe()}")
    state = load_checkpoint(checkpoint, learner) if checkpoint else None
    if state:
        title.append(f"resumed after step {state.step}: {checkpoint}")
    display = Display(max_steps=config.max_steps, title="\n".join(title))
    rollouts = make_rollouts(config, env, learner, renderer, folder, EpisodeCount(config, display))
    accelerator = learner.accelerator
    with rollouts, display:
        if state:
            with unfit():
                rollouts.load_state_dict(state.rollouts)
        accelerator.init_trackers("agentrl")
        record = RunRecord(folder, config, accelerator, tokenizer, state)
        probe_ids, tolerance = probe_tokens(config, renderer), sync_tolerance(config)
        try:
            train(config, learner, rollouts, record, display, state, probe_ids, tolerance)
        except BaseException as error:
            error.add_note(record.how_to_resume())
            raise
        finally:
            accelerator.end_training()
        display.finish(record.summary())


def sound_env(config: RunConfig) -> Any:
    """The env, after what can be known to fail before anything is loaded."""
    require_one_process()
    require_trackers(config)
    require_room(config)
    env = open_env(config.env.id, config.env.kwargs)
    list_time_limits(config, env)
    return env


def require_one_process() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "one process trains so far: accelerate launch --num_processes 1 --num_machines 1 …"
        )


def require_servers(config: RunConfig) -> None:
    """SGLang is installed, and has GPUs, where this run is to start it."""
    if choose_engine(config) == "sglang" and config.sglang.mode == "spawn":
        find_interpreter(config.sglang.python)
        gpus = range(torch.cuda.device_count())
        assign_gpus(config.sglang, gpus, num_learner_gpus=1)


def require_trackers(config: RunConfig) -> None:
    """Accelerate leaves out a tracker that is not installed without a word."""
    missing = [name for name in config.report_to if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"report_to: {' and '.join(missing)} is not installed; "
            f"pip install -e '.[{','.join(missing)}]'"
        )


def mixed_precision(config: RunConfig) -> str:
    """Of the learner's forward pass."""
    if config.model.mixed_precision == "auto":
        return "bf16" if fast_dtype() is torch.bfloat16 else "no"
    return config.model.mixed_precision


def choose_engine(config: RunConfig, num_gpus: int | None = None) -> EngineKind:
    """What `rollout.engine` stands for here, or with so many GPUs."""
    if config.rollout.engine != "auto":
        return config.rollout.engine
    num_gpus = torch.cuda.device_count() if num_gpus is None else num_gpus
    return "sglang" if num_gpus or config.sglang.urls else "local"


def make_learner(config: RunConfig, folder: Path) -> tuple[Learner, Any]:
    """The learner and its tokenizer."""
    accelerator = accelerate.Accelerator(
        mixed_precision=mixed_precision(config),
        log_with=list(config.report_to) or None,
        project_dir=str(folder),
    )
    accelerate.utils.set_seed(config.seed)
    model, tokenizer = load_model(config.model, seed=config.seed)
    return Learner(model, config, accelerator), tokenizer


def make_renderer(config: RunConfig, env: Any, tokenizer: Any) -> Renderer:
    return Renderer(
        tokenizer,
        tool_format=config.rollout.tool_format,
        tools=[tool.schema for tool in getattr(env, "tools", ())],
        history=config.rollout.history,
    )


def make_servers(config: RunConfig, learner: Learner, folder: Path) -> Fleet | None:
    """The servers of an SGLang engine, not started yet; None: the engine is embedded."""
    if choose_engine(config) == "local":
        return None
    longest = learner.model.config.get_text_config().max_position_embeddings
    return make_fleet(
        config.sglang,
        model_path=locate_model(config.model.name_or_path),
        dtype=str(engine_dtype(config.rollout)).removeprefix("torch."),
        context_tokens=min(config.rollout.max_context_tokens + UNUSED_CONTEXT_TOKENS, longest),
        max_requests=num_concurrent(config),
        log_folder=folder / "logs",
        gpus=range(torch.cuda.device_count()),
        num_learner_gpus=learner.accelerator.num_processes,
    )


def make_engine(config: RunConfig, learner: Learner, fleet: Fleet | None, folder: Path) -> Engine:
    rollout, model = config.rollout, learner.model
    if fleet is None:
        return LocalEngine(
            model,
            num_slots=rollout.max_concurrent_generations,
            max_context_tokens=rollout.max_context_tokens,
            dtype=engine_dtype(rollout),
            share_weights=rollout.max_staleness == 0,
        )
    transport = make_transport(
        config.sglang,
        device=learner.accelerator.device,
        model_path=locate_model(config.model.name_or_path),
        tied=model.all_tied_weights_keys,
        folder=folder / "weights",
    )
    return SGLangEngine(
        fleet,
        transport,
        config.sglang,
        run_id=learner.run_id,
        max_context_tokens=rollout.max_context_tokens,
        max_concurrent=num_concurrent(config),
        architecture=(model.config.architectures or [None])[0],
    )


def make_rollouts(
    config: RunConfig,
    env: Any,
    learner: Learner,
    renderer: Renderer,
    folder: Path,
    on_episode: EpisodeCount,
) -> RolloutManager:
    eval_kwargs = config.env.kwargs | config.eval.env_kwargs
    eval_tasks = None
    with unfit():
        tasks = TaskStream(tasks_of(env, "train"), config.seed)
        if config.eval.num_tasks:
            eval_tasks = TaskStream(tasks_of(open_env(config.env.id, eval_kwargs), "test"), 0)
        rubric = load_rewards(config.env.reward_funcs, config.env.reward_weights)
    engine = make_engine(config, learner, make_servers(config, learner, folder), folder)
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


def probe_tokens(config: RunConfig, renderer: Renderer) -> list[int]:
    """Of a text, as many as an engine of short contexts can score."""
    ids = renderer.prompt([Message(role="user", content=PROBE)])
    return ids[: max(2, config.rollout.max_context_tokens // 2)]


def make_probe(config: RunConfig, learner: Learner, renderer: Renderer) -> Probe:
    ids = probe_tokens(config, renderer)
    return Probe(token_ids=ids, logprobs=learner.logprobs(ids), tolerance=sync_tolerance(config))


def sync_tolerance(config: RunConfig) -> float:
    """Servers that are connected to may be in bfloat16, unless `engine_dtype` says otherwise."""
    if config.sglang.urls and config.rollout.engine_dtype == "auto":
        return SYNC_TOLERANCE[torch.bfloat16]
    return SYNC_TOLERANCE[engine_dtype(config.rollout)]


BUILDERS = Builders(
    learner=make_learner,
    renderer=make_renderer,
    servers=make_servers,
    engine=make_engine,
    probe=make_probe,
)


@contextmanager
def unfit() -> Iterator[None]:
    """Tasks, rewards and options that do not fit each other are bad input."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
