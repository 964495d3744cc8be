"""What an SGLang engine needs beside servers: a fleet, a transport, and an engine made of them."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from agentrl.config import SGLangConfig
from agentrl.protocols import EngineDied, Sent
from agentrl.types import Sampling
from rollout.engines.sglang import SGLangEngine
from tests.fake_sglang import FakeSGLang, probe_of

WEIGHTS = {"a": 0.3, "b": 0.1}


@dataclass(eq=False)
class FakeFleet:
    """Servers that a test may kill, and that come back when the test lets them."""

    servers: list[FakeSGLang]
    recovers: bool = True
    recovered: list[str] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self.urls = [server.url for server in self.servers]
        self.may_recover = asyncio.Event()
        self.may_recover.set()
        self._ended: dict[str, asyncio.Event] = {url: asyncio.Event() for url in self.urls}

    async def start(self) -> None: ...

    async def ended(self, url: str) -> str:
        await self._ended[url].wait()
        return f"{url} ended"

    async def kill(self, server: FakeSGLang) -> None:
        await server.die()
        self._ended[server.url].set()

    async def recover(self, url: str) -> None:
        await self.may_recover.wait()
        if not self.recovers:
            raise EngineDied(f"{url} does not come back")
        await next(server for server in self.servers if server.url == url).restart()
        self._ended[url].clear()
        self.recovered.append(url)

    async def close(self) -> None:
        self.closed = True
        for server in self.servers:
            await server.die()


@dataclass(eq=False)
class FakeTransport:
    """Sends each weight in a bucket of its own."""

    adapter: str | None = None
    num_sends: int = 0
    closed: bool = False

    async def send(self, weights: Any, servers: Any) -> Sent:
        self.num_sends += 1
        buckets = [dict([pair]) for pair in weights]
        failed: dict[str, str] = {}
        for server in servers:
            try:
                for bucket in buckets:
                    data = base64.b64encode(json.dumps(bucket).encode()).decode()
                    answer = await server.post(
                        "/update_weights_from_tensor",
                        {"serialized_named_tensors": [data], "flush_cache": False},
                        timeout_s=5,
                    )
                    if not answer["success"]:
                        raise RuntimeError(answer["message"])
            except RuntimeError as error:
                failed[server.url] = str(error)
        return Sent(
            num_tensors=len(buckets), num_bytes=8 * len(buckets), seconds={"send": 0.0},
            failed=failed,
        )  # fmt: skip

    async def close(self) -> None:
        self.closed = True


@dataclass(eq=False)
class Rig:
    """An engine with its servers."""

    engine: SGLangEngine
    servers: list[FakeSGLang]
    fleet: FakeFleet
    transport: FakeTransport

    async def sync(self, version: int, weights: dict[str, float] = WEIGHTS) -> dict[str, float]:
        return await self.engine.update_weights(weights.items(), version, probe_of(weights))


@asynccontextmanager
async def rig(
    num_servers: int = 1,
    *,
    synced: bool = True,
    max_concurrent: int = 64,
    transport: FakeTransport | None = None,
    config: dict[str, Any] | None = None,
    servers: list[FakeSGLang] | None = None,
) -> AsyncIterator[Rig]:
    """Started, and with `WEIGHTS` under version 0 unless `synced` is false."""
    servers = servers or [FakeSGLang() for _ in range(num_servers)]
    for server in servers:
        await server.start()
    fleet, transport = FakeFleet(servers), transport or FakeTransport()
    engine = SGLangEngine(
        fleet,
        transport,
        SGLangConfig.model_validate(
            {"start_timeout_s": 5.0, "sync_timeout_s": 5.0} | (config or {})
        ),
        run_id="run",
        max_context_tokens=1024,
        max_concurrent=max_concurrent,
    )
    made = Rig(engine, servers, fleet, transport)
    try:
        await engine.start()
        if synced:
            await made.sync(0)
        yield made
    finally:
        await engine.close()
        for server in servers:
            await server.die()


def sampling(max_new_tokens: int = 8, **values: Any) -> Sampling:
    return Sampling(max_new_tokens=max_new_tokens, **values)
