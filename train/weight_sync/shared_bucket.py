"""Buckets in memory that a server maps: what SGLang takes for a flattened bucket."""

from __future__ import annotations

import base64
import functools
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from agentrl.protocols import SyncError
from train.weight_sync.buckets import Bucket

SHARED_MEMORY = Path("/dev/shm")
_DEVICE = 6  # the argument of `rebuild_cuda_tensor` that numbers the device


def shared_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory that `serialize` can share: [num_bytes] uint8.

    Raises:
        SyncError: there is too little shared memory.
    """
    if device.type == "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < num_bytes:  # else writing to it would end the process
        raise SyncError(
            f"{SHARED_MEMORY} has {free >> 20} MiB left, a bucket takes {num_bytes >> 20}: "
            "give the container more (--shm-size), or lower sglang.bucket_mb"
        )
    _start_manager()
    storage = torch.UntypedStorage._new_using_filename_cpu(num_bytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class _Reduced:
    """Is unpickled by a call of `function`, whatever it is here."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._reduced = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._reduced


@functools.cache
def _start_manager() -> None:
    """Let PyTorch start its manager of shared memory without a hold on this process's stderr.

    It lives as long as the servers that read from it, and whoever reads the output of this process
    through a pipe would wait for all of them.
    """
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        torch.UntypedStorage._new_using_filename_cpu(1)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def serialize(bucket: Bucket, num_ranks: int) -> list[str]:
    """Where the bucket lies, for each rank of a server: each counts as a reader of its own.

    SGLang's own classes cannot be imported here; it takes whatever has their attributes.
    """
    metadata = [
        SimpleNamespace(
            name=name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            start_idx=start,
            end_idx=start + tensor.nbytes,
            numel=tensor.nbytes,
        )
        for (name, tensor), start in zip(bucket.tensors(), bucket.starts, strict=True)
    ]
    share = _share_cuda if bucket.flat.is_cuda else _share_cpu
    return [
        base64.b64encode(
            pickle.dumps({"flattened_tensor": share(bucket.flat), "metadata": metadata})
        ).decode()
        for _ in range(num_ranks)
    ]


def _share_cpu(flat: torch.Tensor) -> _Reduced:
    """As PyTorch's sharing strategy `file_system` does, without setting it for the process."""
    storage = flat.untyped_storage()
    place = storage._share_filename_cpu_()
    storage._shared_incref()
    untyped = _Reduced(reductions.rebuild_storage_filename, (torch.UntypedStorage, *place))
    typed = _Reduced(reductions.rebuild_typed_storage, (untyped, flat.dtype))
    layout = flat.storage_offset(), flat.size(), flat.stride(), False
    return _Reduced(reductions.rebuild_tensor, (torch.Tensor, typed, layout))


def _share_cuda(flat: torch.Tensor) -> _Reduced:
    """By CUDA IPC; SGLang looks the device up by its UUID, since processes number them apart."""
    function, args = reductions.reduce_tensor(flat)
    uuid = str(torch.cuda.get_device_properties(flat.device).uuid)
    return _Reduced(function, (*args[:_DEVICE], uuid, *args[_DEVICE + 1 :]))
