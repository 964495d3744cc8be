"""A server's side of a weight update, in this process: takes tensors as SGLang does."""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import torch
import torch.distributed as dist
from aiohttp import web
from safetensors.torch import load_file
from torch._C._distributed_c10d import PrefixStore, TCPStore

from rollout.engines.sglang_server import SGLangServer

# What SGLang 0.5.23 lets a payload name, as far as it concerns tensors in shared memory.
ALLOWED = {
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.storage", "UntypedStorage"),
    ("torch", "Tensor"),
    ("torch", "Size"),
    ("torch", "uint8"),
    ("torch", "int64"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("types", "SimpleNamespace"),
}


class SafeUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in ALLOWED:
            raise RuntimeError(f"blocked {module_name}.{global_name}")
        return super().find_class(module_name, global_name)


class Receiver:
    """Its answers can be changed by `spoil[path]`, a function that returns another one."""

    def __init__(self, *, num_ranks: int = 1, dtype: str = "bfloat16", begin_end: bool = False):
        self.num_ranks, self.dtype = num_ranks, dtype
        self.weights: list[dict[str, torch.Tensor]] = [{} for _ in range(num_ranks)]
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.spoil: dict[str, Callable[[], Any]] = {}
        self.groups: dict[str, list[Any]] = {}
        self.in_session = False
        self.begin_end = begin_end

    async def serve(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(request.path)
        self.bodies.append(body)
        if request.path in self.spoil:
            answer = self.spoil[request.path]()
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer is not None:
                return web.json_response(answer)
        try:
            updates = "update_weights_from_tensor", "update_weights_from_distributed"
            if self.begin_end and request.path[1:] in updates and not self.in_session:
                raise RuntimeError("begin_weight_update comes first")
            await getattr(self, request.path[1:])(**body)
        except Exception as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return web.json_response({"success": True, "message": "Success"})

    async def begin_weight_update(self) -> None:
        if self.in_session:
            raise RuntimeError("a weight-update session is already open")
        self.in_session = True

    async def end_weight_update(self) -> None:
        self.in_session = False

    async def update_weights_from_tensor(
        self, serialized_named_tensors: list[str], load_format: str, flush_cache: bool
    ) -> None:
        assert load_format == "flattened_bucket" and flush_cache is False
        for rank, payload in enumerate(serialized_named_tensors):
            loaded = SafeUnpickler(io.BytesIO(base64.b64decode(payload))).load()
            for meta in loaded["metadata"]:
                part = loaded["flattened_tensor"][meta.start_idx : meta.end_idx]
                tensor = part.view(meta.dtype).reshape(meta.shape).clone()
                self.weights[rank][meta.name] = tensor

    async def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        def join(rank: int) -> Any:
            patience = timedelta(seconds=20)
            store = TCPStore(master_address, master_port, world_size, False, patience)
            for prefix in (group_name, f"{group_name}/", "cpu/"):
                store = PrefixStore(prefix, store)
            return dist.ProcessGroupGloo(store, rank, world_size, patience)

        assert backend == "gloo"
        ranks = range(rank_offset, rank_offset + self.num_ranks)
        self.groups[group_name] = await asyncio.gather(
            *[asyncio.to_thread(join, rank) for rank in ranks]
        )

    async def destroy_weights_update_group(self, group_name: str) -> None:
        def leave() -> None:  # waits for a broadcast that goes on
            del self.groups[group_name]

        await asyncio.to_thread(leave)

    async def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        load_format: str,
        flush_cache: bool,
    ) -> None:
        assert load_format == "flattened_bucket" and flush_cache is False
        sizes = [
            torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]

        def receive(group: Any) -> torch.Tensor:
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            group.broadcast([flat], options).wait()
            return flat

        flats = await asyncio.gather(
            *[asyncio.to_thread(receive, group) for group in self.groups[group_name]]
        )
        for rank, flat in enumerate(flats):
            parts = zip(names, dtypes, shapes, flat.split(sizes), strict=True)
            for name, dtype, shape, part in parts:
                self.weights[rank][name] = part.view(getattr(torch, dtype)).view(shape)

    async def update_weights_from_disk(
        self, model_path: str, load_format: str, flush_cache: bool
    ) -> None:
        assert load_format == "auto" and flush_cache is False
        for path in Path(model_path).glob("*.safetensors"):
            for weights in self.weights:
                weights |= load_file(path)

    async def load_lora_adapter(self, lora_name: str, lora_path: str) -> None:
        if lora_name in self.adapters:
            raise RuntimeError(f"adapter {lora_name} is already loaded")
        assert (Path(lora_path) / "adapter_config.json").is_file()
        self.adapters[lora_name] = load_file(Path(lora_path) / "adapter_model.safetensors")

    async def unload_lora_adapter(self, lora_name: str) -> None:
        del self.adapters[lora_name]


@asynccontextmanager
async def receiving(*receivers: Receiver) -> AsyncIterator[list[SGLangServer]]:
    """The receivers, as a transport sees them."""
    runners = []
    async with aiohttp.ClientSession() as http:
        servers = []
        for receiver in receivers:
            app = web.Application(client_max_size=10**9)
            app.router.add_post("/{path}", receiver.serve)
            runner = web.AppRunner(app, shutdown_timeout=1.0)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            runners.append(runner)
            host, port = runner.addresses[0][:2]
            server = SGLangServer(f"http://{host}:{port}", http)
            server.num_ranks, server.dtype, server.life = receiver.num_ranks, receiver.dtype, 1
            routes = {"/destroy_weights_update_group"}
            if receiver.begin_end:
                routes |= {"/begin_weight_update", "/end_weight_update"}
            server.routes = frozenset(routes)
            servers.append(server)
        try:
            yield servers
        finally:
            for runner in runners:
                await runner.cleanup()
