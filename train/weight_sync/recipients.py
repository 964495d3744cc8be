"""The servers of one update: who still takes part, who failed, and why."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agentrl.protocols import EngineError, Server

SHARE = 0.8  # of `sync_timeout_s`; the rest is left to flush and to verify
CLEANING_S = 5.0  # for a server to take back what it was told before


class Recipients:
    """The servers of one update, of which one that fails is out."""

    def __init__(self, servers: Sequence[Server], timeout_s: float) -> None:
        self.alive = list(servers)
        self.failed: dict[str, str] = {}
        self._deadline = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return max(0.1, self._deadline - time.monotonic())

    async def post(self, path: str, body: Callable[[Server], dict[str, Any]]) -> None:
        """Ask each of them, side by side."""

        async def ask(server: Server) -> None:
            try:
                await accepted(server, path, body(server), self.left_s)
            except EngineError as error:
                self.fail(server, str(error))

        await asyncio.gather(*[ask(server) for server in self.alive])

    async def post_together(self, path: str, body: Callable[[Server], dict[str, Any]]) -> None:
        """Ask all of them; when one fails, none of the other answers is waited for.

        Raises:
            EngineError: of the one that failed first, which is out.
        """

        async def ask(server: Server) -> None:
            try:
                await accepted(server, path, body(server), self.left_s)
            except EngineError as error:
                self.fail(server, str(error))
                raise

        tasks = [asyncio.create_task(ask(server)) for server in self.alive]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def fail(self, server: Server, why: str) -> None:
        self.failed[server.url] = why
        self.alive.remove(server)

    def fail_all(self, why: str) -> None:
        for server in list(self.alive):
            self.fail(server, why)

    @asynccontextmanager
    async def loading(self) -> AsyncIterator[None]:
        """Between begin and end, for the releases that want to be told (from 0.5.22 on)."""
        told = [server for server in self.alive if "/begin_weight_update" in server.routes]
        await asyncio.gather(*[self._begin(server) for server in told])
        told = [server for server in told if server in self.alive]
        try:
            yield
        finally:  # also where the update failed, so that the next one can begin
            await asyncio.gather(*[self._end(server) for server in told])

    async def _begin(self, server: Server) -> None:
        try:
            try:
                await accepted(server, "/begin_weight_update", {}, self.left_s)
            except EngineError as error:
                if "already open" not in str(error):
                    raise
                # Whoever began that one is gone.
                await accepted(server, "/end_weight_update", {}, self.left_s)
                await accepted(server, "/begin_weight_update", {}, self.left_s)
        except EngineError as error:
            self.fail(server, str(error))

    async def _end(self, server: Server) -> None:
        timeout_s = self.left_s if server in self.alive else CLEANING_S
        try:
            await accepted(server, "/end_weight_update", {}, timeout_s)
        except EngineError as error:
            if server in self.alive:
                self.fail(server, str(error))


async def accepted(server: Server, path: str, body: dict[str, Any], timeout_s: float) -> None:
    """Post, and read the answer.

    Raises:
        EngineError: the server does not say that it succeeded.
    """
    reply = await server.post(path, body, timeout_s=timeout_s)
    if not isinstance(reply, dict) or reply.get("success") is not True:
        message = reply
        if isinstance(reply, dict):
            message = reply.get("message") or reply.get("error_message") or reply
        raise EngineError(f"{server.url}{path}: {message}")
