"""The learner of a run, from its config: in one process, or in all that were launched together."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
import psutil
import torch
from accelerate.utils import DistributedDataParallelKwargs, DistributedType

from agentrl.config import ConfigError, RunConfig
from agentrl.models import locate_model
from train.learner import Learner
from train.model import load_model
from train.ranks import Ranks

SOUND_KINDS = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.FSDP,
)


def use_all_cores() -> None:
    """One thread per physical core; launchers like to set one in all."""
    torch.set_num_threads(psutil.cpu_count(logical=False) or 1)


def mixed_precision(config: RunConfig) -> str:
    """Of the learner's forward pass."""
    if config.model.mixed_precision != "auto":
        return config.model.mixed_precision
    if torch.cuda.is_available():
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if fast else "no"


def make_accelerator(config: RunConfig) -> accelerate.Accelerator:
    """Where several processes were launched, this forms their group.

    Raises:
        ConfigError: the launcher asked for a kind of sharding that the learner does not do.
    """
    accelerator = accelerate.Accelerator(
        mixed_precision=mixed_precision(config),
        log_with=list(config.report_to) or None,
        # DDP's buckets are the gradients, not copies of them.
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    kind = accelerator.distributed_type
    if kind not in SOUND_KINDS or (kind == DistributedType.FSDP and not accelerator.is_fsdp2):
        raise ConfigError(
            f"accelerate was launched for {kind.value}: the learner trains in one process, with "
            "DDP, or with FSDP2 (fsdp_version: 2, see configs/accelerate/)"
        )
    if kind == DistributedType.NO and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "several processes were launched, but Accelerate takes each for one alone, so their "
            "gradients would never meet: without GPUs, set ACCELERATE_USE_CPU=true"
        )
    plugin: Any = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin and plugin.cpu_ram_efficient_loading:
        raise ConfigError(
            "accelerate was launched with fsdp_cpu_ram_efficient_loading: true, which would untie "
            "tied embeddings; set it to false, as in configs/accelerate/"
        )
    return accelerator


def complain(text: str, error: BaseException) -> None:
    """Once: where all ranks fail alike, rank 0 says so for all of them."""
    if os.environ.get("RANK", "0") == "0":
        print(text, *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)


@contextmanager
def launched(config: RunConfig) -> Iterator[tuple[accelerate.Accelerator, Ranks]]:
    """The group of all processes that were launched together, as long as the block lasts.

    Rank 0 is the one that is interrupted; it tells the others.
    """
    accelerator = make_accelerator(config)
    ranks = Ranks()
    if not ranks.is_main:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    try:
        with ranks.watched():
            yield accelerator, ranks
    finally:
        accelerator.end_training()  # ends connections, which the others must not hear of first


def make_learner(
    config: RunConfig, accelerator: accelerate.Accelerator, ranks: Ranks
) -> tuple[Learner, Any]:
    """The learner and its tokenizer."""
    accelerate.utils.set_seed(config.seed)
    ranks.lead(lambda: locate_model(config.model.name_or_path))  # which may make it, once
    with ranks.together():
        model, tokenizer = load_model(config.model, config.lora, seed=config.seed)
    return Learner(model, config, accelerator, ranks), tokenizer
