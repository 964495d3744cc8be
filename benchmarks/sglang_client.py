"""What one request costs this process: the SGLang engine in front of a server that answers at once.

The server is a process of its own, that says the same bytes to everything and computes nothing, so
that the client is what is measured; how busy it was is printed. On a machine that others use,
requests per second of the client's CPU time are the honest figure.

    python benchmarks/sglang_client.py [--in-flight 1024] [--prompt-tokens 512] [--new-tokens 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agentrl.config import SGLangConfig
from agentrl.protocols import Probe, Sent
from agentrl.types import Sampling
from rollout.engines.sglang import SGLangEngine
from rollout.engines.sglang_server import ROUTES


def answers(num_prompt: int, num_new: int) -> dict[str, bytes]:
    """By the first line of a request, up to its second space."""
    meta = {
        "finish_reason": {"type": "length", "length": num_new},
        "prompt_tokens": num_prompt,
        "weight_version": "bench/0",
        "output_token_logprobs": [[-1.0625, 1000 + n, None] for n in range(num_new)],
        "completion_tokens": num_new,
        "cached_tokens": num_prompt - 1,
        "e2e_latency": 0.0,
    }
    ids = [1000 + n for n in range(num_new)]
    bodies: dict[str, Any] = {
        "POST /generate": {"text": "word " * num_new, "output_ids": ids, "meta_info": meta},
        "GET /model_info": {"model_path": "m", "architectures": [], "weight_version": "bench/0"},
        "GET /server_info": {
            "version": "0.5.23",
            "dtype": "bfloat16",
            "tp_size": 1,
            "context_length": 32768,
            "max_total_num_tokens": 10**6,
        },
        "GET /openapi.json": {"paths": {route: {} for route in ROUTES}},
        "GET /v1/loads": {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]},
    }
    return {start: http(json.dumps(body).encode()) for start, body in bodies.items()}


def http(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


class Instant(asyncio.Protocol):
    """Just enough HTTP: one request at a time per connection, each with a Content-Length."""

    replies: dict[str, bytes]

    def connection_made(self, transport: Any) -> None:
        self.transport, self.buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self.buffer = self.buffer + data if self.buffer else data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        at = self.buffer.find(b"Content-Length: ", 0, end)
        length = int(self.buffer[at + 16 : self.buffer.find(b"\r\n", at)]) if at >= 0 else 0
        if len(self.buffer) < end + 4 + length:
            return
        start = b" ".join(self.buffer[: self.buffer.find(b"\r\n")].split(b" ")[:2]).decode()
        self.buffer = b""
        self.transport.write(self.replies.get(start, http(b"{}")))


def serve(num_prompt: int, num_new: int, pipe: Any) -> None:
    Instant.replies = answers(num_prompt, num_new)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Instant, "127.0.0.1", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


class One:
    """A fleet of the one server that is there."""

    def __init__(self, url: str) -> None:
        self.urls = [url]

    async def start(self) -> None: ...

    async def ended(self, url: str) -> str:
        return await asyncio.get_running_loop().create_future()

    async def recover(self, url: str) -> None: ...

    async def close(self) -> None: ...


class Nothing:
    """A transport of no weights."""

    adapter: str | None = None

    async def send(self, weights: Any, servers: Any) -> Sent:
        return Sent(num_tensors=0, num_bytes=0, seconds={}, failed={})

    async def close(self) -> None: ...


class Agreeing(Probe):
    def check(self, logprobs: Any, version: int, where: str) -> float:
        return 0.0


async def measure(port: int, server: psutil.Process, options: argparse.Namespace) -> None:
    engine = SGLangEngine(
        One(f"http://127.0.0.1:{port}"),
        Nothing(),
        SGLangConfig(),
        run_id="bench",
        max_context_tokens=32768,
        max_concurrent=options.in_flight,
    )
    await engine.start()
    # It is not asked to score: it has one answer, which has no such logprobs.
    engine._pool.members[0].version = 0
    prompt = [1000 + n for n in range(options.prompt_tokens)]
    sampling = Sampling(max_new_tokens=options.new_tokens, stop_token_ids=(2,))
    left = options.requests
    lags: list[float] = []

    async def play(session: str) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await engine.generate(prompt, sampling, session=session)
        await engine.release(session)

    async def watch_lag() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.005)
            lags.append(time.perf_counter() - began - 0.005)

    lag = asyncio.create_task(watch_lag())
    own, wall = time.process_time(), time.perf_counter()
    theirs = sum(server.cpu_times()[:2])
    await asyncio.gather(*(play(f"s{n}") for n in range(options.in_flight)))
    own, wall = time.process_time() - own, time.perf_counter() - wall
    theirs = sum(server.cpu_times()[:2]) - theirs
    lag.cancel()
    lags.sort()
    n = options.requests
    print(
        f"{n} requests of {options.prompt_tokens} + {options.new_tokens} tokens, "
        f"{options.in_flight} in flight\n"
        f"{n / wall:8.0f} requests/s of wall clock\n"
        f"{n / own:8.0f} requests per CPU-second of the client ({own / n * 1e6:.0f} us each)\n"
        f"{own / wall:8.0%} of a core was the client's, {theirs / wall:.0%} the server's\n"
        f"{lags[len(lags) * 99 // 100] * 1e3:8.1f} ms of loop lag at p99, "
        f"{lags[-1] * 1e3:.1f} ms at most, of {len(lags)}"
    )
    await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--in-flight", type=int, default=1024)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(
        target=serve, args=(options.prompt_tokens, options.new_tokens, there), daemon=True
    )
    process.start()
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {0})
        os.sched_setaffinity(process.pid or 0, {1})
    asyncio.run(measure(here.recv(), psutil.Process(process.pid), options))
    process.kill()


if __name__ == "__main__":
    main()
