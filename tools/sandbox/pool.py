"""Sandboxes kept ready: each is one trajectory's, then killed; how many and how fast is bounded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from weakref import WeakKeyDictionary

from agentrl.shutdown import at_shutdown
from agentrl.threads import run_in_thread
from tools.sandbox.client import WorkerSandbox
from tools.sandbox.levels import Backend, make_backend, resolve
from tools.sandbox.protocol import SandboxConfig, SandboxUnavailable

logger = logging.getLogger("agentrl")

RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # after a start that failed; a daemon may be coming back


class Pool:
    """The sandboxes of one config on one event loop.

    Those in use, ready and being started are never more than `max_sandboxes`.
    """

    def __init__(self, backend: Backend, config: SandboxConfig) -> None:
        self._backend = backend
        self._config = config
        self._turns = asyncio.Semaphore(config.max_sandboxes)
        self._waiting: deque[asyncio.Future[WorkerSandbox]] = deque()
        self._ready: list[WorkerSandbox] = []
        self._leased: set[WorkerSandbox] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._next_start = 0.0
        self._closed = False

    async def acquire(self) -> WorkerSandbox:
        """A sandbox of one's own; waits, in turn, while `max_sandboxes` are in use.

        Raises:
            SandboxUnavailable: none has started within some tries, or the pool is closed.
        """
        await self._turns.acquire()
        mine: asyncio.Future[WorkerSandbox] = asyncio.get_running_loop().create_future()
        try:
            if self._closed:
                raise SandboxUnavailable("the pool of sandboxes is closed")
            self._waiting.append(mine)
            self._serve()
            return await mine
        except BaseException:
            if mine in self._waiting:
                self._waiting.remove(mine)
            if mine.done() and not mine.cancelled() and mine.exception() is None:
                self._leased.discard(mine.result())
                self._ready.append(mine.result())
            self._turns.release()
            self._serve()
            raise

    async def release(self, sandbox: WorkerSandbox) -> None:
        """Kill it, and start another where fewer than `warm` are ready."""
        if sandbox not in self._leased:
            return
        self._leased.discard(sandbox)
        try:
            await asyncio.shield(asyncio.ensure_future(sandbox.close()))
        finally:
            self._turns.release()
            self._serve()

    async def close(self) -> None:
        """Nothing is left of its sandboxes."""
        self._closed = True
        while waiting := self._first_in_line():
            waiting.set_exception(SandboxUnavailable("the pool of sandboxes is closed"))
        for start in self._starting:
            start.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        sandboxes = [*self._ready, *self._leased]
        for _ in self._leased:  # who waits for a turn shall hear of it
            self._turns.release()
        self._ready.clear()
        self._leased.clear()
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes), *self._closing)
        await self._backend.close()

    def _serve(self) -> None:
        """Hand out what is ready, and start what is missing."""
        for sandbox in [sandbox for sandbox in self._ready if sandbox.lost]:
            self._ready.remove(sandbox)
            closing = asyncio.create_task(sandbox.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        while self._ready and (waiting := self._first_in_line()):
            sandbox = self._ready.pop()
            self._leased.add(sandbox)
            waiting.set_result(sandbox)
        alive = len(self._leased) + len(self._ready) + len(self._starting)
        room = self._config.max_sandboxes - alive
        wanted = len(self._waiting) + self._config.warm - len(self._ready) - len(self._starting)
        for _ in range(0 if self._closed else min(wanted, room)):
            start = asyncio.create_task(self._start())
            self._starting.add(start)
            start.add_done_callback(self._started)

    def _first_in_line(self) -> asyncio.Future[WorkerSandbox] | None:
        while self._waiting:
            if not (waiting := self._waiting.popleft()).done():  # it may have been cancelled
                return waiting
        return None

    def _started(self, start: asyncio.Task[None]) -> None:
        self._starting.discard(start)
        if start.cancelled():
            return
        if error := start.exception():
            if waiting := self._first_in_line():
                waiting.set_exception(error)
            else:
                logger.warning("no sandbox to keep ready: %s", error)
        if self._waiting:
            self._serve()

    async def _start(self) -> None:
        """Start a sandbox, patiently."""
        for delay in (*RETRY_S, None):
            sandbox = WorkerSandbox(self._backend.wall(), self._config)
            await self._pace()
            try:
                await sandbox.start()
            except SandboxUnavailable as error:
                if delay is None:
                    raise
                logger.warning("%s; another try in %g s", error, delay)
                await asyncio.sleep(delay)
            else:
                self._ready.append(sandbox)
                self._serve()
                return

    async def _pace(self) -> None:
        now = time.monotonic()
        mine = max(now, self._next_start)
        self._next_start = mine + 1 / self._config.starts_per_second
        await asyncio.sleep(mine - now)


_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[SandboxConfig, asyncio.Task[Pool]]] = (
    WeakKeyDictionary()
)


async def pool_for(config: SandboxConfig) -> Pool:
    """The running event loop's pool of `config`, opened by the first who asks.

    Raises:
        SandboxUnavailable: there is no such sandbox on this machine.
    """
    pools = _pools.setdefault(asyncio.get_running_loop(), {})
    if config not in pools:
        pools[config] = asyncio.create_task(_open(config))
    opening = pools[config]
    try:
        return await asyncio.shield(opening)
    except SandboxUnavailable:
        if pools.get(config) is opening:
            del pools[config]  # the next one tries again
        raise


async def _open(config: SandboxConfig) -> Pool:
    level, _ = await run_in_thread(resolve, config)
    backend = make_backend(level, config)
    try:
        await backend.open()
    except BaseException:
        await backend.close()
        raise
    pool = Pool(backend, config)

    async def close() -> None:
        _pools.get(asyncio.get_running_loop(), {}).pop(config, None)
        await pool.close()

    at_shutdown(close)
    return pool


class Lease:
    """The right to a sandbox of one's own, from `acquire` to `release`.

    Example:
        lease = Lease(SandboxConfig())
        await lease.acquire()
        result = await lease.sandbox.python("1 + 1")
        await lease.release()
    """

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.wait_s = 0.0  # that the last `acquire` took
        self._held: tuple[Pool, WorkerSandbox] | None = None

    @property
    def held(self) -> bool:
        return self._held is not None

    @property
    def sandbox(self) -> WorkerSandbox:
        """Raises RuntimeError where none is held."""
        if self._held is None:
            raise RuntimeError("no sandbox is held: await lease.acquire() first")
        return self._held[1]

    async def acquire(self) -> None:
        """Wait for a sandbox; nothing where one is held.

        Raises:
            SandboxUnavailable: there is none to be had; says what was tried.
        """
        if self._held is None:
            start = time.monotonic()
            pool = await pool_for(self.config)
            self._held = pool, await pool.acquire()
            self.wait_s = time.monotonic() - start

    async def release(self) -> None:
        """Kill the sandbox; nothing where none is held."""
        held, self._held = self._held, None
        if held is not None:
            await held[0].release(held[1])
