"""What training left beside the weights of the model: moments, value head, random generators.

Tensors lie in safetensors files, each rank's own part of them, and are read back by any number of
ranks, sharded or not.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from train.hf_folder import FILE_BYTES
from train.ranks import Ranks
from train.weights import clean_name

_VALUE_HEAD = "value_head."


def trained_parameters(policy: Any) -> dict[str, nn.Parameter]:
    """By name, which neither wrappers nor sharding change; a tied one once."""
    named: dict[nn.Parameter, str] = {}
    for name, parameter in policy.state_dict(keep_vars=True).items():  # which puts shards in place
        if isinstance(parameter, nn.Parameter) and parameter.requires_grad:
            named.setdefault(parameter, clean_name(name))
    return {name: parameter for parameter, name in named.items()}


def save_tensors(folder: Path, policy: Any, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Write the optimizer's state and the value head, each rank its part, into `folder`.

    Raises:
        CheckpointException: by all ranks, where it fails on any.
    """
    parameters = trained_parameters(policy)
    tensors = _value_head(parameters)
    for name, parameter in parameters.items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{slot}"] = value
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_files(tensors), save_distributed=True
    )
    with _quiet():
        save(tensors, storage_writer=writer, **_among(ranks))


def load_tensors(folder: Path, policy: Any, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Read into optimizer and value head what `save_tensors` wrote; each rank takes its part.

    Raises:
        CheckpointException: by all ranks, where it fails on any.
    """
    with ranks.together():
        parameters = trained_parameters(policy)
        tensors = _value_head(parameters)
        reader = HuggingFaceStorageReader(str(folder))
        stored = reader.read_metadata().state_dict_metadata
        for key in stored.keys() - tensors.keys():
            name, _, slot = key.rpartition(".")
            parameter = parameters[name]
            shape: torch.Size = stored[key].size  # type: ignore[union-attr]
            counts_steps = shape == torch.Size([])
            value = torch.zeros((), device=parameter.device) if counts_steps else _like(parameter)
            optimizer.state[parameter][slot] = tensors[key] = value
    with _quiet():
        load(tensors, storage_reader=reader, **_among(ranks))


def random_state() -> dict[str, Any]:
    """Of this process's generators: tensors and plain values."""
    algorithm, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (algorithm, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _value_head(parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach()
        for name, parameter in parameters.items()
        if name.startswith(_VALUE_HEAD)
    }


def _like(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter, requires_grad=False)


def _files(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Which of its files each rank writes a tensor into: it holds one at a time."""
    files, size = {}, 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        files[name] = 1 + size // FILE_BYTES
    return files


def _among(ranks: Ranks) -> dict[str, Any]:
    return {"process_group": ranks.group, "no_dist": ranks.size == 1}


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
