"""The door to the engine: at most so many requests at once, and none while its weights are updated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class Gate:
    """A semaphore that can be shut.

    Example:
        async with gate:            # a request
            await engine.generate(...)
        async with gate.shut(60):   # nothing is in flight here
            await engine.update_weights(...)
    """

    def __init__(self, limit: int) -> None:
        self._slots = asyncio.Semaphore(limit)
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.in_flight = 0

    def locked(self) -> bool:
        """Whether a request would have to wait."""
        return self._slots.locked() or not self._open.is_set()

    async def __aenter__(self) -> None:
        await self._slots.acquire()
        try:
            await self._open.wait()
        except BaseException:
            self._slots.release()
            raise
        self.in_flight += 1
        self._empty.clear()

    async def __aexit__(self, *error: Any) -> None:
        self.in_flight -= 1
        self._slots.release()
        if not self.in_flight:
            self._empty.set()

    @asynccontextmanager
    async def shut(self, timeout_s: float) -> AsyncIterator[None]:
        """Let nobody in, and wait until everybody is out.

        Raises:
            TimeoutError: a request is still in flight after `timeout_s` seconds.
        """
        self._open.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
            yield
        finally:
            self._open.set()
