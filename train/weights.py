"""A model's weights as a stream of full tensors, under the names of its checkpoint.

No tensor is made before it is asked for, and none is kept: a reader that drops each one after use
holds one full tensor at a time, however the model is sharded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from agentrl.protocols import SyncError, Weights

_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "base_layer"}
_PEFT = "base_model.model."
_COMPUTED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def clean_name(name: str) -> str:
    """The name without what DDP, `torch.compile`, checkpointing and peft add to it.

    Example:
        clean_name("base_model.model.model.layers.0._orig_mod.q_proj.base_layer.weight")
        # "model.layers.0.q_proj.weight"
    """
    parts = name.removeprefix("module.").removeprefix(_PEFT).split(".")
    return ".".join(part for part in parts if part not in _WRAPPERS)


def full_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and full tensors of a transformers model; a tied tensor comes once.

    Every rank of a sharded model must read all of them, in this order: each is gathered from all.
    """
    for name, tensor in own_weights(model).items():
        yield name, _full(tensor)


def own_weights(model: Any) -> dict[str, torch.Tensor]:
    """The same names, with what this rank itself has of each: the tensors of the model."""
    tied = {clean_name(name) for name in model.all_tied_weights_keys}
    named = {clean_name(name): tensor for name, tensor in model.state_dict().items()}
    return {name: tensor for name, tensor in named.items() if name not in tied}


def merged_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a peft model with its active LoRA adapters added to them.

    Each sum is a new tensor: the model's own stay as they are, bit for bit. Every rank must read
    all of them.
    """
    layers = {name: m for name, m in model.named_modules() if hasattr(m, "lora_A")}
    tied = {clean_name(name) for name in model.all_tied_weights_keys}
    for wrapped, tensor in model.state_dict().items():
        name = clean_name(wrapped)
        if _is_adapter(wrapped) or name in tied:
            continue
        weight = _full(tensor)
        layer = layers.get(wrapped.removesuffix(".base_layer.weight"))
        if layer is not None:
            for adapter in layer.active_adapters:
                weight = weight + _delta(layer, adapter).to(weight.dtype)
        yield name, weight


def adapter_weights(model: Any, adapter: str = "default") -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of one LoRA adapter alone, as peft names them in `adapter_model.safetensors`."""
    for name, tensor in own_adapter(model, adapter).items():
        yield name, _full(tensor)


def own_adapter(model: Any, adapter: str = "default") -> dict[str, torch.Tensor]:
    """The same names, with what this rank itself has of each: the tensors of the model."""
    named = {}
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        if _is_adapter(name) and adapter in parts:
            parts.remove(adapter)
            named[".".join(part for part in parts if part not in _WRAPPERS)] = tensor
    return named


def checkpoint_shapes(folder: str | Path, tied: Collection[str] = ()) -> dict[str, list[int]]:
    """Name and shape of each tensor that a server reads from the safetensors files in `folder`.

    Args:
        tied: names that stand for another tensor; a checkpoint may hold them, a server needs none.

    Raises:
        FileNotFoundError: there are none.
    """
    shapes: dict[str, list[int]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                if name not in tied and not name.endswith(_COMPUTED):
                    shapes[name] = file.get_slice(name).get_shape()
    if not shapes:
        raise FileNotFoundError(f"{folder} holds no *.safetensors to compare names with")
    return shapes


def require_names(weights: Weights, expected: Mapping[str, list[int]]) -> Iterator[tuple[str, Any]]:
    """The same weights, if they are exactly those that servers load.

    A server skips a name that it does not know, and keeps what it is not sent, without a word.

    Raises:
        SyncError: at the first unknown name or wrong shape, or at the end if any is missing.
    """
    missing = dict(expected)
    for name, tensor in weights:
        shape = missing.pop(name, None)
        if shape is None:
            raise SyncError(f"the servers' checkpoint has no tensor {name!r}, or it came twice")
        if list(tensor.shape) != shape:
            raise SyncError(f"{name!r} has shape {list(tensor.shape)}, the checkpoint's is {shape}")
        yield name, tensor
    if missing:
        raise SyncError(f"{len(missing)} tensors did not come: {sorted(missing)[:5]}")


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: its shard, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _full(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        # Shards that are offloaded to the CPU are gathered where the ranks can meet.
        here: Any = tensor.to(tensor.device_mesh.device_type)
        return here.full_tensor()
    return tensor


def _is_adapter(name: str) -> bool:
    return any(part.startswith("lora_") for part in name.split("."))


@torch.no_grad()
def _delta(layer: Any, adapter: str) -> torch.Tensor:
    if adapter in layer.lora_variant:
        raise SyncError(f"adapter {adapter!r} is more than plain LoRA; it cannot be merged")
    # Whole before they are multiplied: a product of shards is a sum that is yet to be made.
    down, up = (_full(part[adapter].weight) for part in (layer.lora_A, layer.lora_B))
    delta = up @ down * layer.scaling[adapter]
    return delta.T if layer.fan_in_fan_out else delta
