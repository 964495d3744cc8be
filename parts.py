"""The parts of a run, each built from its config."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import accelerate
import torch
from accelerate.utils import DistributedType

from agentrl.config import ConfigError, RunConfig
from agentrl.memory import num_concurrent
from agentrl.models import locate_model
from agentrl.protocols import Engine, Probe
from agentrl.renderer import Renderer
from agentrl.types import Message
from rollout.engines.local import LocalEngine
from rollout.engines.local_load import engine_dtype, fast_dtype
from rollout.engines.sglang import SGLangEngine
from rollout.launch import context_length
from rollout.manager import RolloutManager
from rollout.server import Fleet, make_fleet
from rollout.setups import eval_draws, load_rubrics, make_setups, open_envs, train_tasks
from train.display import EpisodeCount
from train.learner import Learner
from train.model import load_model
from train.ranks import Ranks
from train.weight_sync.transports import make_transport

EngineKind = Literal["sglang", "local"]

SOUND_KINDS = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.FSDP,
)

PROBE = "A farmer's 16 hens lay an egg a day each. How many eggs is that in a week?"
PROBE_TOKENS = 16  # a CPU that cannot multiply bfloat16 takes 25 ms for each
# Mean |learner - engine| logprob, in nats, that arithmetic of another order may cause.
SYNC_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}


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


def make_accelerator(config: RunConfig) -> accelerate.Accelerator:
    """Where several processes were launched, this forms their group.

    Raises:
        ConfigError: the launcher asked for a kind of sharding that the learner does not do.
    """
    accelerator = accelerate.Accelerator(
        mixed_precision=mixed_precision(config), log_with=list(config.report_to) or None
    )
    kind = accelerator.distributed_type
    if kind not in SOUND_KINDS or (kind == DistributedType.FSDP and not accelerator.is_fsdp2):
        raise ConfigError(
            f"accelerate was launched for {kind.value}: the learner trains in one process, with "
            "DDP, or with FSDP2 (fsdp_version: 2, see configs/accelerate/)"
        )
    return accelerator


def num_local_ranks() -> int:
    """Processes of the learner on this machine; on a GPU each."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def make_learner(
    config: RunConfig, accelerator: accelerate.Accelerator, ranks: Ranks
) -> tuple[Learner, Any]:
    """The learner and its tokenizer."""
    accelerate.utils.set_seed(config.seed)
    ranks.lead(lambda: locate_model(config.model.name_or_path))  # fetched once
    with ranks.together():
        model, tokenizer = load_model(config.model, config.lora, seed=config.seed)
    return Learner(model, config, accelerator, ranks), tokenizer


def make_servers(config: RunConfig, learner: Learner, folder: Path) -> Fleet | None:
    """The servers of an SGLang engine, not started yet; None: the engine is embedded."""
    if choose_engine(config) == "local":
        return None
    text = learner.model.config.get_text_config()
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
    )


def make_engine(config: RunConfig, learner: Learner, fleet: Fleet | None, folder: Path) -> Engine:
    rollout, model = config.rollout, learner.model
    if fleet is None:
        # Shards, and weights that adapters are added to, are no model to sample from.
        whole = not learner.is_sharded and config.lora is None
        return LocalEngine(
            model if whole else load_model(config.model, None, seed=config.seed)[0],
            num_slots=rollout.max_concurrent_generations,
            max_context_tokens=rollout.max_context_tokens,
            dtype=engine_dtype(rollout),
            share_weights=whole and rollout.max_staleness == 0,
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
