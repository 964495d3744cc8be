"""Who may go on when: requests to the engine, and episodes on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

INTERRUPT_EVERY_S = 0.2


class Gate:
    """The door to the engine: so many requests at once, and none while its weights are updated.

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
        self.num_queued = self.in_flight = 0
        self.times_shut = 0

    def locked(self) -> bool:
        """Whether a request would have to wait."""
        return self._slots.locked() or not self._open.is_set()

    async def __aenter__(self) -> None:
        self.num_queued += 1
        try:
            await self._slots.acquire()
            try:
                while not self._open.is_set():  # it may be shut again before this wakes
                    await self._open.wait()
            except BaseException:
                self._slots.release()
                raise
        finally:
            self.num_queued -= 1
        self.in_flight += 1
        self._empty.clear()

    async def __aexit__(self, *error: Any) -> None:
        self.in_flight -= 1
        self._slots.release()
        if not self.in_flight:
            self._empty.set()

    @asynccontextmanager
    async def shut(
        self, timeout_s: float, interrupt: Callable[[], Awaitable[None]] | None = None
    ) -> AsyncIterator[None]:
        """Let nobody in, and wait until everybody is out; after an error the gate stays shut.

        `interrupt` asks those inside to leave. It is called again and again, for a request that was
        on its way when it was called has not heard it.

        Raises:
            TimeoutError: a request is still in flight after `timeout_s` seconds.
        """
        self._open.clear()
        self.times_shut += 1
        async with asyncio.timeout(timeout_s):
            while interrupt is not None and self.in_flight:
                await interrupt()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._empty.wait(), INTERRUPT_EVERY_S)
            await self._empty.wait()
        yield
        self._open.set()


class Turnstile:
    """Lets episodes compute one at a time, so that the loop serves others in between.

    Many become ready at once (a batch starts, an engine answers a whole batch of requests); without
    this the loop would run all of them before it looked at a socket or a timer.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def pass_through(self) -> None:
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._let_one_pass, loop)
        await turn

    def _let_one_pass(self, loop: asyncio.AbstractEventLoop) -> None:
        turn = self._waiting.popleft()
        if not turn.done():  # cancelled
            turn.set_result(None)
        if self._waiting:
            loop.call_soon(self._let_one_pass, loop)
