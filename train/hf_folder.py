"""A folder as Hugging Face's `from_pretrained` loads it: weights, config and tokenizer."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor

MODEL = "model"
ADAPTER = "adapter_model"

FILE_BYTES = 2 * 2**30
"""Of weights in one file: what the rank that writes holds at a time."""


def write_config(folder: Path, model: Any) -> None:
    """What `from_pretrained` reads of a model beside its weights, which are float32."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = "float32"
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def write_weights(
    folder: Path | None, weights: Iterable[tuple[str, torch.Tensor]], stem: str = MODEL
) -> None:
    """Write a stream of full tensors; an adapter is one file, a model one or several.

    Args:
        folder: None: read the stream and write nothing, as every rank but one does. Also where the
            disk refuses, each rank reads it whole: tensors are gathered from all.
    """
    stream = iter(weights)
    try:
        if folder is not None:
            _write_files(folder, stream, stem)
    finally:
        for _ in stream:
            pass


def read_weights(folder: Path, tensors: Mapping[str, torch.Tensor], stem: str = MODEL) -> None:
    """Copy weights of the files in `folder` into `tensors`, and into shards what is theirs.

    Raises:
        ValueError: names or shapes differ.
    """
    for path, names in _names(folder, stem, tensors).items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                _fill(name, tensors[name], file.get_tensor(name))


def _write_files(folder: Path, stream: Iterable[tuple[str, torch.Tensor]], stem: str) -> None:
    files: list[dict[str, int]] = []  # the bytes of each tensor in each
    held: dict[str, torch.Tensor] = {}

    def flush() -> None:
        path = folder / f"{stem}-{len(files):05d}.safetensors"
        files.append({name: tensor.nbytes for name, tensor in held.items()})
        save_file(held, path, metadata={"format": "pt"})
        held.clear()

    size = 0
    for name, tensor in stream:
        if stem == MODEL and held and size + tensor.nbytes > FILE_BYTES:
            flush()
            size = 0
        if not tensor.isfinite().all():
            raise ValueError(f"{name} holds values that are not finite")
        held[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    flush()
    weight_map: dict[str, str] = {}
    for index, names in enumerate(files):
        part = f"-{index + 1:05d}-of-{len(files):05d}" if len(files) > 1 else ""
        final = f"{stem}{part}.safetensors"
        (folder / f"{stem}-{index:05d}.safetensors").rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    if len(files) > 1:
        total = sum(sum(names.values()) for names in files)
        table = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(table, indent=2))


def _names(folder: Path, stem: str, expected: Mapping[str, Any]) -> dict[Path, list[str]]:
    """What to read from which file."""
    names = {}
    for path in sorted(folder.glob(f"{stem}*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names[path] = list(file.keys())
    if differ := {name for each in names.values() for name in each} ^ set(expected):
        raise ValueError(f"weights of another model; differing: {sorted(differ)[:5]}")
    return names


@torch.no_grad()
def _fill(name: str, target: torch.Tensor, source: torch.Tensor) -> None:
    if target.shape != source.shape:
        raise ValueError(
            f"weights of another model: {name} is {list(source.shape)}, not {list(target.shape)}"
        )
    if isinstance(target, DTensor):
        # Each rank takes its own part of what it has read: nothing is sent.
        spread = distribute_tensor(
            source, target.device_mesh, target.placements, src_data_rank=None
        )
        target.to_local().copy_(spread.to_local())
    else:
        target.copy_(source)
