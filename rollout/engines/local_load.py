"""What the embedded engine computes with here, and an engine with a model of its own."""

from __future__ import annotations

from typing import Any

import psutil
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.attention import register_attention
from agentrl.config import RolloutConfig
from agentrl.models import ModelError, locate_model, require_plain
from rollout.engines.local import LocalEngine


def use_all_cores() -> None:
    """One thread per physical core; launchers like to set one in all."""
    torch.set_num_threads(psutil.cpu_count(logical=False) or 1)


def fast_dtype() -> torch.dtype:
    """bfloat16 where the hardware multiplies it, else float32."""
    if torch.cuda.is_available():
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def engine_dtype(config: RolloutConfig) -> torch.dtype:
    """What `config.engine_dtype` stands for here."""
    return fast_dtype() if config.engine_dtype == "auto" else getattr(torch, config.engine_dtype)


def load_engine(name_or_path: str, config: RolloutConfig) -> tuple[LocalEngine, Any]:
    """An engine with a model of its own, and the model's tokenizer.

    Raises:
        ModelError: the model cannot be loaded.
    """
    use_all_cores()
    transformers.utils.logging.disable_progress_bar()
    path = locate_model(name_or_path)
    dtype = engine_dtype(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=register_attention()
        )
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.name_or_path={name_or_path!r} cannot be loaded: {error}"
        ) from error
    require_plain(model, name_or_path)
    if torch.cuda.is_available():
        model.cuda()
    engine = LocalEngine(
        model,
        num_slots=config.max_concurrent_generations,
        max_context_tokens=config.max_context_tokens,
    )
    return engine, tokenizer
