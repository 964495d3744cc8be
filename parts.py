"""The parts of a run, each built from its config."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from agentrl.config import ConfigError, RunConfig
from agentrl.memory import num_concurrent
from agentrl.models import locate_model
from agentrl.protocols import Engine, Probe, Transport
from agentrl.renderer import Renderer
from agentrl.types import Message
from rollout.engines.local import LocalEngine
from rollout.engines.local_load import engine_dtype
from rollout.engines.sglang import SGLangEngine
from rollout.launch import context_length
from rollout.manager import RolloutManager
from rollout.server import Fleet, make_fleet
from rollout.setups import eval_draws, load_rubrics, make_setups, open_envs, train_tasks
from train.display import EpisodeCount
from train.learner import Learner
from train.model import adapter_config, load_model
from train.ranks import num_local_ranks
from train.weight_sync.adapters import AdapterTransport, require_loadable
from train.weight_sync.transports import make_transport

EngineKind = Literal["sglang", "local"]

PROBE = "A farmer's 16 hens lay an egg a day each. How many eggs is that in a week?"
PROBE_TOKENS = 16  # a CPU that cannot multiply bfloat16 takes 25 ms for each
# Mean |learner - engine| logprob, in nats, that arithmetic of another order may cause.
SYNC_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}


def choose_engine(config: RunConfig, num_gpus: int | None = None) -> EngineKind:
    """What `rollout.engine` stands for here, or with so many GPUs.

    Raises:
        ConfigError: it cannot take the weights as `lora.sync` says.
    """
    num_gpus = torch.cuda.device_count() if num_gpus is None else num_gpus
    kind = config.rollout.engine
    if kind == "auto":
        kind = "sglang" if num_gpus or config.sglang.urls else "local"
    on_cpu = not num_gpus and config.sglang.mode == "spawn"
    if config.sent_adapter and (kind == "local" or on_cpu):
        # SGLang pins memory for adapters, which torch does beside a GPU alone.
        raise ConfigError(
            f"lora.sync=adapter needs SGLang servers on GPUs, and rollout.engine="
            f"{config.rollout.engine} is here the engine {kind}{' on the CPU' * on_cpu}; write "
            "lora.sync=merged"
        )
    if config.sent_adapter:
        require_loadable(config.sent_adapter)
    return kind


def num_shards() -> int:
    """Processes that FSDP spreads the learner's weights over, as accelerate launched this one."""
    sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    return int(os.environ.get("WORLD_SIZE", "1")) if sharded else 1


def make_servers(config: RunConfig, learner: Learner, folder: Path) -> Fleet | None:
    """The servers of an SGLang engine, not started yet; None: the engine is embedded."""
    if choose_engine(config) == "local":
        return None
    model, adapter = learner.model, config.sent_adapter
    text = model.config.get_text_config()
    return make_fleet(
        config.sglang,
        model_path=locate_model(config.model.name_or_path),
        dtype=str(engine_dtype(config.rollout)).removeprefix("torch."),
        context_tokens=context_length(
            config.rollout.max_context_tokens, text.max_position_embeddings
        ),
        max_requests=num_concurrent(config),
        log_folder=folder / "logs",
        gpus=range(torch.cuda.device_count()),
        num_learner_gpus=num_local_ranks(),
        lora_rank=adapter.r if adapter else 0,
        lora_targets=sorted(model.peft_config["default"].target_modules) if adapter else (),
    )


def make_engine(config: RunConfig, learner: Learner, fleet: Fleet | None, folder: Path) -> Engine:
    rollout, model = config.rollout, learner.model
    if fleet is None:
        # Shards, and weights that adapters are added to, are no model to sample from.
        whole = not learner.is_sharded and config.lora is None
        device = learner.accelerator.device
        return LocalEngine(
            model if whole else load_model(config.model)[0].to(device),
            num_slots=rollout.max_concurrent_generations,
            max_context_tokens=rollout.max_context_tokens,
            dtype=engine_dtype(rollout),
            share_weights=whole and rollout.max_staleness == 0,
        )
    return SGLangEngine(
        fleet,
        _transport(config, learner, folder / "weights"),
        config.sglang,
        run_id=learner.run_id,
        max_context_tokens=rollout.max_context_tokens,
        max_concurrent=num_concurrent(config),
        architecture=(model.config.architectures or [None])[0],
    )


def _transport(config: RunConfig, learner: Learner, folder: Path) -> Transport:
    model = learner.model
    if config.sent_adapter:
        return AdapterTransport(config.sglang, adapter_config(model), folder)
    return make_transport(
        config.sglang,
        device=learner.accelerator.device,
        model_path=locate_model(config.model.name_or_path),
        tied=model.all_tied_weights_keys,
        folder=folder,
    )


def make_rollouts(
    config: RunConfig,
    envs: Mapping[str, Any],
    learner: Learner,
    renderers: Mapping[str, Renderer],
    folder: Path,
    on_episode: EpisodeCount,
) -> RolloutManager:
    with unfit():
        tasks = train_tasks(config, envs)
        draws = eval_draws(config, open_envs(config.eval_envs)) if config.eval.num_tasks else []
        rubrics = load_rubrics(config)
    engine = make_engine(config, learner, make_servers(config, learner, folder), folder)
    try:
        return RolloutManager(
            engine=engine,
            envs=make_setups(config, renderers, rubrics),
            config=config.rollout,
            tasks=tasks,
            eval_config=config.eval,
            eval_draws=draws,
            seed=config.seed,
            on_episode=on_episode,
        )
    except ValueError as error:
        asyncio.run(engine.close())
        raise ConfigError(str(error)) from error


def probe_tokens(config: RunConfig, renderer: Renderer) -> list[int]:
    """The begin of a chat, no longer than an engine of short contexts can score."""
    ids = renderer.prompt([Message(role="user", content=PROBE)])
    return ids[: max(2, min(PROBE_TOKENS, config.rollout.max_context_tokens // 2))]


def make_probe(config: RunConfig, learner: Learner, ids: list[int]) -> Probe:
    """What the learner says of these tokens now."""
    return Probe(token_ids=ids, logprobs=learner.logprobs(ids), tolerance=sync_tolerance(config))


def sync_tolerance(config: RunConfig) -> float:
    """Servers that are connected to may be in bfloat16, unless `engine_dtype` says otherwise."""
    if config.sglang.urls and config.rollout.engine_dtype == "auto":
        return SYNC_TOLERANCE[torch.bfloat16]
    return SYNC_TOLERANCE[engine_dtype(config.rollout)]


@contextmanager
def unfit() -> Iterator[None]:
    """Tasks, rewards and options that do not fit each other are bad input."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error
