"""The learner's side of a weight update against a bare copy of the same bytes to another process.

Both send 269 MB (SmolLM2-135M in bfloat16) to one process that copies them out and answers over
HTTP: the transport gathers, casts float32 weights, serializes and sends them; the bare way copies
bytes that are ready, through shared memory or by a gloo broadcast. They take turns; medians.

    python -m benchmarks.weight_sync                             # against the process
    python -m benchmarks.weight_sync --sglang .venv-sglang/bin/python   # and a real server
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import multiprocessing
import pickle
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from agentrl.config import SGLangConfig
from agentrl.models import SMOLLM2, locate_model
from rollout.engines.sglang_server import SGLangServer, open_http
from rollout.server import SpawnedFleet
from tests.weight_receiver import Receiver, receiving
from train.weight_sync.buckets import Bucket
from train.weight_sync.shared_bucket import serialize, shared_buffer
from train.weight_sync.transports import make_transport
from train.weight_sync.update_group import UpdateGroup
from train.weights import full_weights

CPU = torch.device("cpu")
PROBE = list(range(1000, 1016))


class Peer(Receiver):
    """Copies what it gets into memory that it has, as a server copies into its parameters."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8)

    async def update_weights_from_tensor(self, serialized_named_tensors: list[str], **_: Any):
        payload = base64.b64decode(serialized_named_tensors[0])
        flat = pickle.load(io.BytesIO(payload))["flattened_tensor"]
        self._memory[: len(flat)].copy_(flat)

    async def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        **_: Any,
    ):
        size = sum(
            torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        await asyncio.to_thread(broadcast, self.groups[group_name][0], self._memory[:size])


def broadcast(group: Any, flat: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([flat], options).wait()


def serve(num_bytes: int, pipe: Any) -> None:
    torch.set_num_threads(1)

    async def main() -> None:
        async with receiving(Peer(num_bytes)) as [server]:
            pipe.send(server.url)
            await asyncio.to_thread(pipe.recv)

    asyncio.run(main())


async def measure(
    send: Callable[[], Awaitable[Any]], bare: Callable[[], Awaitable[Any]], runs: int
) -> tuple[float, float]:
    """The median seconds of each; the first two of each warm up."""
    times: tuple[list[float], list[float]] = [], []
    for _ in range(runs + 2):
        for function, seconds in zip((send, bare), times, strict=True):
            start = time.perf_counter()
            await function()
            seconds.append(time.perf_counter() - start)
    return statistics.median(times[0][2:]), statistics.median(times[1][2:])


async def against_bare(model: Any, url: str, options: argparse.Namespace) -> None:
    http, _ = open_http(8)
    async with http:
        server = SGLangServer(url, http)
        server.dtype, server.life = "bfloat16", 1
        ready = torch.cat(
            [t.to(torch.bfloat16).flatten().view(torch.uint8) for _, t in full_weights(model)]
        )
        buffer = shared_buffer(len(ready), CPU)
        group = UpdateGroup([server], CPU, 60.0)
        await asyncio.gather(
            server.post("/init_weights_update_group", group.invitation(server)),
            asyncio.to_thread(group.form, 60.0),
        )

        async def copy() -> None:
            await asyncio.to_thread(buffer.copy_, ready)
            whole = Bucket(
                flat=buffer,
                names=["all"],
                dtypes=[torch.uint8],
                shapes=[buffer.shape],
                starts=[0],
            )
            body = {"serialized_named_tensors": serialize(whole, 1)}
            await server.post("/update_weights_from_tensor", body)

        async def cast() -> None:
            body = {"names": ["all"], "dtypes": ["uint8"], "shapes": [list(ready.shape)]}
            await asyncio.gather(
                server.post("/update_weights_from_distributed", body | {"group_name": group.name}),
                asyncio.to_thread(lambda: group.broadcast(ready).wait()),
            )

        for kind, bare in (("tensor", copy), ("distributed", cast)):
            transport = transport_of(kind, model, options)

            async def send(transport: Any = transport) -> None:
                sent = await transport.send(full_weights(model), [server])
                assert not sent.failed and sent.num_bytes == len(ready), sent

            ours, theirs = await measure(send, bare, options.runs)
            await transport.close()
            print(
                f"{kind:12} learner's side {ours:.3f} s, bare copy {theirs:.3f} s: "
                f"ratio {ours / theirs:.2f} (bar: 2)"
            )
        group.abort()


async def against_sglang(model: Any, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fleet = SpawnedFleet(
            SGLangConfig(python=options.sglang),
            model_path=locate_model(SMOLLM2),
            dtype="bfloat16",
            context_tokens=2048,
            max_requests=8,
            log_folder=Path(folder),
        )
        http, _ = open_http(8)
        try:
            await fleet.start()
            async with http:
                server = SGLangServer(fleet.urls[0], http)
                await server.describe()
                for kind in ("tensor", "distributed", "disk"):
                    await one_transport(kind, model, server, options)
        finally:
            await fleet.close()


async def one_transport(
    kind: str, model: Any, server: SGLangServer, options: argparse.Namespace
) -> None:
    transport = transport_of(kind, model, options)
    columns: dict[str, list[float]] = {}
    for number in range(options.runs + 1):
        marks = [time.perf_counter()]
        sent = await transport.send(full_weights(model), [server])
        assert not sent.failed, sent
        marks.append(time.perf_counter())
        assert await server.flush_cache()
        marks.append(time.perf_counter())
        version = await server.weight_version()
        await server.score(PROBE, rid=f"{kind}{number}.", weight_version=version)
        marks.append(time.perf_counter())
        seconds = {
            "send": marks[1] - marks[0],
            "flush": marks[2] - marks[1],
            "probe": marks[3] - marks[2],
            "in all": marks[3] - marks[0],
        }
        for name, value in (seconds | {f"({n})": s for n, s in sent.seconds.items()}).items():
            if number:  # the first makes the buffers and the group
                columns.setdefault(name, []).append(value)
    medians = {name: statistics.median(values) for name, values in columns.items()}
    print(f"{kind:12} SGLang: " + ", ".join(f"{n} {v:.3f}" for n, v in medians.items()) + " s")
    await transport.close()


def transport_of(kind: str, model: Any, options: argparse.Namespace) -> Any:
    return make_transport(
        SGLangConfig.model_validate({"weight_sync": kind, "bucket_mb": options.bucket_mb}),
        device=CPU,
        model_path=locate_model(SMOLLM2),
        tied=model.all_tied_weights_keys,
        folder=tempfile.gettempdir(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--sglang", metavar="PYTHON", help="the interpreter of a real SGLang")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(locate_model(SMOLLM2), dtype=torch.float32)
    num_bytes = 2 * sum(tensor.numel() for _, tensor in full_weights(model))
    pipe, other = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    peer = context.Process(target=serve, args=(num_bytes, other), daemon=True)
    peer.start()
    print(f"{num_bytes / 1e6:.0f} MB in bfloat16, bucket_mb {options.bucket_mb}", flush=True)
    try:
        asyncio.run(against_bare(model, pipe.recv(), options))
    finally:
        pipe.send(None)
        peer.join(10)
    if options.sglang:
        asyncio.run(against_sglang(model, options))


if __name__ == "__main__":
    main()
