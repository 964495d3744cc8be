"""Weights from the learner to SGLang servers: through memory, a process group, or a folder.

    weights -> names checked -> buckets, cast (one thread) -> servers, while the next is read

Requests to a server are refused by status or by body, and both are read: `Sent.failed` names each
server that did not take every tensor. Nothing here flushes a cache or sets a version; whoever
sends does both, and compares logprobs.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import psutil
import torch
from safetensors.torch import save_file

from agentrl.config import SGLangConfig
from agentrl.protocols import EngineError, Sent, Server, SyncError, Transport, Weights
from train.weight_sync.buckets import Bucket, BucketReader, deliver_each
from train.weight_sync.recipients import CLEANING_S, SHARE, Recipients, accepted
from train.weight_sync.shared_bucket import SHARED_MEMORY, serialize, shared_buffer
from train.weight_sync.update_group import UpdateGroup
from train.weights import checkpoint_shapes, require_names

logger = logging.getLogger("agentrl")

FORMING_S = 30.0  # for all ranks to meet
_OLD_S = 3600.0  # no update takes so long


def make_transport(
    config: SGLangConfig,
    *,
    device: torch.device,
    model_path: str,
    tied: Collection[str],
    folder: str | Path,
) -> Transport:
    """The transport that `weight_sync` names.

    Args:
        device: where the learner's weights are.
        model_path: the hub id or folder that servers load, whose names are those to send.
        tied: the names that stand for another tensor, of the model's `all_tied_weights_keys`.
        folder: of the run; the place for weights on disk.
    """
    path = Path(model_path)
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        path = Path(
            snapshot_download(model_path, allow_patterns=["*.safetensors"], local_files_only=True)
        )
    expected = checkpoint_shapes(path, tied)
    kind = choose_transport(config)
    if kind == "disk":
        return DiskTransport(config, expected, folder)
    transport = TensorTransport if kind == "tensor" else DistributedTransport
    return transport(config, expected, device)


def choose_transport(config: SGLangConfig) -> Literal["tensor", "distributed", "disk"]:
    """What `weight_sync` stands for here."""
    if config.weight_sync != "auto":
        return config.weight_sync
    local = all(is_local(url) for url in config.urls)  # those that are spawned have no urls
    return "tensor" if local else "distributed"


def is_local(url: str) -> bool:
    """Whether the host of `url` is this machine."""
    host = urlsplit(url).hostname or ""
    addresses = {a.address for entries in psutil.net_if_addrs().values() for a in entries}
    return host in {"localhost", "::1"} or host.startswith("127.") or host in addresses


class _BucketTransport:
    """What the three have in common: names, dtype, buffers, and the time that is left."""

    adapter: str | None = None

    def __init__(
        self, config: SGLangConfig, expected: Mapping[str, list[int]], device: torch.device
    ) -> None:
        self._config, self._expected, self._device = config, expected, device
        self._buffers: list[torch.Tensor] | None = []

    async def send(self, weights: Weights, servers: Sequence[Server]) -> Sent:
        """Let each server load all tensors; `weights` is read once, in a thread of its own.

        Raises:
            SyncError: the weights are not those of the servers' model.
        """
        start = time.perf_counter()
        to = Recipients(servers, SHARE * self._config.sync_timeout_s)
        reader = BucketReader(
            require_names(weights, self._expected),
            dtype=common_dtype(servers),
            max_bytes=self._config.bucket_mb * 10**6,
            new_buffer=self._new_buffer,
            buffers=self._buffers,
        )
        await self._send(reader, to)
        return Sent(
            num_tensors=reader.num_tensors,
            num_bytes=reader.num_bytes,
            seconds={**reader.seconds, "total": time.perf_counter() - start},
            failed=to.failed,
        )

    def _new_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    async def _send(self, reader: BucketReader, to: Recipients) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        self._buffers = []


class TensorTransport(_BucketTransport):
    """To servers on this machine: they map the learner's buffer and copy out of it.

    On a GPU a buffer is shared by CUDA IPC: the server's processes must see the learner's GPU.
    """

    def __init__(
        self, config: SGLangConfig, expected: Mapping[str, list[int]], device: torch.device
    ) -> None:
        super().__init__(config, expected, device)
        if device.type == "cuda":
            # Each bucket gets new memory, which PyTorch keeps until no server has it mapped.
            self._buffers = None

    async def _send(self, reader: BucketReader, to: Recipients) -> None:
        async def deliver(bucket: Bucket) -> None:
            payloads = {
                server.url: await asyncio.to_thread(serialize, bucket, server.num_ranks)
                for server in to.alive
            }
            await to.post(
                "/update_weights_from_tensor",
                lambda server: {
                    "serialized_named_tensors": payloads[server.url],
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                },
            )

        async with to.loading():
            await deliver_each(reader, deliver, lambda: bool(to.alive), self._device)

    def _new_buffer(self, num_bytes: int) -> torch.Tensor:
        return shared_buffer(num_bytes, self._device)


class DistributedTransport(_BucketTransport):
    """To servers anywhere: NCCL, or gloo without a GPU, broadcasts each bucket from this rank.

    The group lasts as long as the servers are the same. One that fails takes the others with it.
    """

    def __init__(
        self, config: SGLangConfig, expected: Mapping[str, list[int]], device: torch.device
    ) -> None:
        super().__init__(config, expected, device)
        self._group: UpdateGroup | None = None

    async def _send(self, reader: BucketReader, to: Recipients) -> None:
        start = time.perf_counter()
        await self._meet(to)
        reader.seconds["form"] = time.perf_counter() - start
        async with to.loading():
            await deliver_each(
                reader,
                lambda bucket: self._deliver(bucket, to),
                lambda: bool(to.alive),
                self._device,
            )

    async def close(self) -> None:
        await super().close()
        await self._part()

    async def _meet(self, to: Recipients) -> None:
        """A group with exactly these servers, or all of them failed."""
        if not to.alive:
            return
        if self._group is not None and self._group.holds(to.alive):
            return
        await self._part()
        timeout_s = min(FORMING_S, to.left_s)
        self._group = group = await asyncio.to_thread(
            UpdateGroup, to.alive, self._device, self._config.sync_timeout_s
        )
        inviting = asyncio.create_task(to.post("/init_weights_update_group", group.invitation))
        try:
            await asyncio.to_thread(group.form, timeout_s)
            await asyncio.wait_for(inviting, timeout_s)
            if to.failed:
                raise SyncError(f"{group} did not form: {to.failed}")
        except (SyncError, TimeoutError) as error:
            inviting.cancel()
            await asyncio.wait([inviting])
            to.fail_all(str(error) or f"{group} did not form within {timeout_s:g} s")
            await self._part()

    async def _deliver(self, bucket: Bucket, to: Recipients) -> None:
        group = self._group
        assert group is not None
        body = {
            "names": bucket.names,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in bucket.dtypes],
            "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": group.name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        sending = asyncio.create_task(asyncio.to_thread(group.broadcast, bucket.flat))
        try:
            await to.post_together("/update_weights_from_distributed", lambda _: body)
            await asyncio.to_thread((await sending).wait)
        except (EngineError, RuntimeError) as error:
            to.fail_all(f"{group} broke: {error}")
            await self._part()
        except asyncio.CancelledError:  # nobody knows how far the servers are
            self._group = None
            group.abort()
            raise

    async def _part(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        group.abort()
        route = "/destroy_weights_update_group"

        async def leave(server: Server) -> None:
            try:
                await accepted(server, route, {"group_name": group.name}, CLEANING_S)
            except EngineError as error:  # it is dead, or was never in the group
                logger.info("%s", error)

        await asyncio.gather(*[leave(s) for s in group.servers if route in s.routes])


class DiskTransport(_BucketTransport):
    """To servers that see the same folder: safetensors, removed when all have read them.

    Args:
        folder: where to write, unless servers are on this machine and its memory has room.
    """

    def __init__(
        self, config: SGLangConfig, expected: Mapping[str, list[int]], folder: str | Path
    ) -> None:
        super().__init__(config, expected, torch.device("cpu"))
        self._folder = Path(folder)

    async def _send(self, reader: BucketReader, to: Recipients) -> None:
        async with own_folder(self._place(to.alive)) as folder:
            number = 0

            async def write(bucket: Bucket) -> None:
                nonlocal number
                path = folder / f"model-{number:05d}.safetensors"
                await asyncio.to_thread(save_file, dict(bucket.tensors()), path)
                number += 1

            await deliver_each(reader, write, lambda: True, self._device)
            start = time.perf_counter()
            await to.post(
                "/update_weights_from_disk",
                lambda _: {"model_path": str(folder), "load_format": "auto", "flush_cache": False},
            )
            reader.seconds["load"] = time.perf_counter() - start

    def _place(self, servers: Sequence[Server]) -> Path:
        num_bytes = common_dtype(servers).itemsize * sum(
            torch.Size(shape).numel() for shape in self._expected.values()
        )
        in_memory = all(is_local(server.url) for server in servers)
        if in_memory and shutil.disk_usage(SHARED_MEMORY).free > 2 * num_bytes:
            return SHARED_MEMORY
        return self._folder


def common_dtype(servers: Sequence[Server]) -> torch.dtype:
    """That of all servers, or float32, which each rounds to its own."""
    names = {server.dtype for server in servers}
    return getattr(torch, names.pop()) if len(names) == 1 else torch.float32


@asynccontextmanager
async def own_folder(parent: Path) -> AsyncIterator[Path]:
    """A new folder in `parent` that servers can read, gone afterwards.

    What killed processes left there is removed first.
    """

    def make() -> Path:
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob("agentrl-weights-*"):
            if time.time() - left.stat().st_mtime > _OLD_S:
                shutil.rmtree(left, ignore_errors=True)
        path = Path(tempfile.mkdtemp(prefix="agentrl-weights-", dir=parent.absolute()))
        path.chmod(0o755)
        return path

    path = await asyncio.to_thread(make)
    try:
        yield path
    finally:
        await asyncio.to_thread(shutil.rmtree, path)
