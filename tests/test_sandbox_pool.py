"""The pool of sandboxes: bounded, paced, in order, patient, and nothing left of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.shutdown import shut_down
from tests.processes import assert_gone, descendants
from tests.sandboxes import eventually, require_level
from tools.sandbox import pool as pools
from tools.sandbox.client import Setup
from tools.sandbox.pool import Lease, Pool, pool_for
from tools.sandbox.protocol import SandboxConfig, SandboxUnavailable
from tools.sandbox.spawned import Spawner
from tools.sandbox.spawner import find_cgroups, owner


class FakeBackend:
    """A level whose sandboxes are nothing but a count; starts take a moment, or fail."""

    level: Any = "process"

    def __init__(self, *, num_failures: int = 0) -> None:
        self.alive = self.most = self.num_started = 0
        self.num_failures = num_failures

    async def open(self) -> str:
        return "fake"

    def wall(self) -> Any:
        return FakeWall(self)

    async def close(self) -> None:
        assert self.alive == 0


class FakeWall:
    level: Any = "process"

    def __init__(self, backend: FakeBackend) -> None:
        self._backend, self._alive = backend, False

    async def start(self) -> Any:
        backend = self._backend
        if backend.num_failures:
            backend.num_failures -= 1
            raise SandboxUnavailable("no sandbox today")
        backend.alive += 1
        backend.num_started += 1
        backend.most = max(backend.most, backend.alive)
        self._alive = True
        await asyncio.sleep(0.005)
        reader = asyncio.StreamReader()
        reader.feed_data(b'{"id": 1}\n')
        return reader, Nowhere(), Setup(home="/")

    async def kill(self) -> None:
        await asyncio.sleep(0)
        self._backend.alive -= self._alive
        self._alive = False

    async def verdict(self) -> None: ...


class Nowhere:
    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


def with_pool(
    use: Callable[[Pool, FakeBackend], Awaitable[None]], *, num_failures: int = 0, **config: Any
) -> None:
    async def main() -> None:
        backend = FakeBackend(num_failures=num_failures)
        settings = {"starts_per_second": 10_000, **config}
        pool = Pool(backend, SandboxConfig(level="process", **settings))
        try:
            await use(pool, backend)
        finally:
            await pool.close()

    asyncio.run(main())


@pytest.mark.parametrize("warm", [0, 3])
def test_never_more_than_the_bound_are_alive_and_all_get_their_turn(warm: int) -> None:
    async def use(pool: Pool, backend: FakeBackend) -> None:
        async def user() -> None:
            sandbox = await pool.acquire()
            await asyncio.sleep(0.002)
            await pool.release(sandbox)

        await asyncio.gather(*(user() for _ in range(50)))
        assert backend.most == 4
        assert backend.num_started >= 50  # none was given twice

    with_pool(use, max_sandboxes=4, warm=warm)


def test_who_came_first_is_served_first() -> None:
    async def use(pool: Pool, backend: FakeBackend) -> None:
        order: list[int] = []

        async def user(number: int) -> None:
            sandbox = await pool.acquire()
            order.append(number)
            await pool.release(sandbox)

        await asyncio.gather(*(user(number) for number in range(12)))
        assert order == list(range(12))

    with_pool(use, max_sandboxes=2)


def test_spares_are_ready_before_they_are_asked_for() -> None:
    async def use(pool: Pool, backend: FakeBackend) -> None:
        first = await pool.acquire()
        await asyncio.sleep(0.05)
        assert backend.alive == 3
        start = backend.num_started
        second = await asyncio.wait_for(pool.acquire(), 0.004)  # less than a start takes
        assert second is not first
        await asyncio.sleep(0.05)
        assert (backend.alive, backend.num_started) == (4, start + 1)

    with_pool(use, max_sandboxes=8, warm=2)


def test_starts_are_paced() -> None:
    async def use(pool: Pool, backend: FakeBackend) -> None:
        start = time.monotonic()
        await asyncio.gather(*(pool.acquire() for _ in range(11)))
        assert 0.19 < time.monotonic() - start < 1

    with_pool(use, starts_per_second=50, warm=0)


def test_who_is_cancelled_while_waiting_takes_nothing() -> None:
    async def use(pool: Pool, backend: FakeBackend) -> None:
        held = await pool.acquire()
        waiting = [asyncio.create_task(pool.acquire()) for _ in range(3)]
        await asyncio.sleep(0.01)
        waiting[0].cancel()
        await pool.release(held)
        waiting[1].cancel()
        assert await waiting[2] is not None
        assert backend.most == 1

    with_pool(use, max_sandboxes=1)


def test_a_start_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "RETRY_S", (0.01, 0.02))

    async def use(pool: Pool, backend: FakeBackend) -> None:
        assert await pool.acquire() is not None

    with_pool(use, num_failures=2, warm=0)


def test_starts_that_go_on_failing_are_a_fault_and_hold_up_nobody_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F104, F105."""
    monkeypatch.setattr(pools, "RETRY_S", (0.01,))

    async def use(pool: Pool, backend: FakeBackend) -> None:
        waiting = [asyncio.create_task(pool.acquire()) for _ in range(4)]
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [SandboxUnavailable] * 4
        assert await pool.acquire() is not None  # and the next ones have their turn

    with_pool(use, num_failures=8, warm=0, max_sandboxes=4)


def test_a_pool_that_closes_sends_who_waits_away() -> None:
    async def use(pool: Pool, backend: FakeBackend) -> None:
        await pool.acquire()
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0.01)
        await pool.close()
        with pytest.raises(SandboxUnavailable, match="closed"):
            await asyncio.wait_for(waiting, 1)

    with_pool(use, max_sandboxes=1)


def config_of(**options: Any) -> SandboxConfig:
    config = SandboxConfig(level="bubblewrap", starts_per_second=100, **options)
    require_level(config)
    return config


def test_a_lease_is_a_sandbox_of_ones_own_until_it_is_released() -> None:
    config = config_of(warm=1)

    async def main() -> None:
        lease, other = Lease(config), Lease(config)
        with pytest.raises(RuntimeError, match="acquire"):
            _ = lease.sandbox
        await lease.acquire()
        first = lease.sandbox
        await lease.acquire()
        assert lease.sandbox is first
        await other.acquire()
        assert other.sandbox is not first
        assert await pool_for(config) is await pool_for(config.model_copy())
        await lease.release()
        await lease.release()
        assert not lease.held
        with pytest.raises(SandboxUnavailable, match="closed"):
            await first.exec("true")
        await shut_down()
        with pytest.raises(SandboxUnavailable, match="closed"):
            await other.sandbox.exec("true")
        await other.release()

    before = set(descendants())
    asyncio.run(main())
    assert_gone([process for process in descendants() if process not in before])


def test_a_helper_that_dies_is_a_fault_of_its_sandboxes_and_is_replaced() -> None:
    """F052: the sandboxes end with it, and later ones are there again."""
    config = config_of(warm=0)

    async def main() -> None:
        lease = Lease(config)
        await lease.acquire()
        pool = await pool_for(config)
        spawner: Spawner = pool._backend._spawner  # type: ignore[attr-defined]
        processes = psutil.Process(spawner._process.pid).children(recursive=True)
        call = asyncio.create_task(lease.sandbox.exec("sleep 60"))
        await asyncio.sleep(0.1)
        spawner._process.kill()
        with pytest.raises(SandboxUnavailable):
            await asyncio.wait_for(call, 5)
        assert_gone(processes)
        await lease.release()
        await lease.acquire()
        assert (await lease.sandbox.exec("echo back")).stdout == "back\n"
        await shut_down()

    asyncio.run(main())


INTERRUPTED = """
import asyncio
from agentrl.shutdown import shut_down
from tools.sandbox.pool import Lease
from tools.sandbox.protocol import SandboxConfig

async def main():
    lease = Lease(SandboxConfig(level="bubblewrap"))
    await lease.acquire()
    print("ready", flush=True)
    try:
        await lease.sandbox.exec("sleep 60", timeout=60)
    finally:
        await shut_down()

asyncio.run(main())
"""


def test_ctrl_c_leaves_nothing_within_seconds() -> None:
    config_of()
    command = [sys.executable, "-c", INTERRUPTED]
    root = Path(__file__).parents[1]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=root
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        processes = descendants(owner.pid)
        assert processes
        start = time.monotonic()
        os.kill(owner.pid, signal.SIGINT)
        owner.wait(10)
        assert time.monotonic() - start < 5
    assert eventually(lambda: not any(process.is_running() for process in processes))


def test_a_start_removes_what_dead_owners_left_and_nothing_else(tmp_path: Path) -> None:
    """F098: kill -9 of both the trainer and its helper, which nobody could have cleaned up."""
    config = config_of(warm=0)
    cgroups = find_cgroups()
    folders = set(cgroups.folders.values()) if cgroups is not None else set()
    dead, alive = f"agentrl-{2**22 + 1}-1-0", f"{owner()}-0"
    made = [folder / name for folder in folders for name in (dead, alive, "agentrl-notes")]
    temporary = [tmp_path / name for name in (dead, alive, "agentrl-notes")]
    for path in (*made, *temporary):
        path.mkdir()

    async def main() -> None:
        lease = Lease(config)
        await lease.acquire()
        await shut_down()

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", str(tmp_path))
            asyncio.run(main())
        assert [path.exists() for path in temporary] == [False, True, True]
        assert all(path.exists() == (path.name != dead) for path in made)
    finally:
        for path in made:
            if path.exists():
                path.rmdir()
