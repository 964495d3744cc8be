"""An event loop for tests of sandboxes, and sandboxes that are called from outside of it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import psutil
import pytest

from agentrl.shutdown import shut_down
from tools.sandbox.levels import resolve
from tools.sandbox.pool import Lease
from tools.sandbox.protocol import ExecResult, SandboxConfig, SandboxUnavailable

T = TypeVar("T")

IMAGE = os.environ.get("AGENTRL_TEST_IMAGE", "agentrl-sandbox:test")
"""Of the Docker engine, for tests; `make sandbox-image` makes it."""


class LoopThread:
    """An event loop in a thread; `close` shuts down what is shared on it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def close(self) -> None:
        self.run(shut_down())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Leased:
    """A leased sandbox with plain methods."""

    def __init__(self, loop: LoopThread, config: SandboxConfig) -> None:
        self.lease = Lease(config)
        self._loop = loop
        loop.run(self.lease.acquire())

    def exec(self, cmd: Any, **options: Any) -> ExecResult:
        return self._loop.run(self.lease.sandbox.exec(cmd, **options))

    def python(self, code: str, **options: Any) -> ExecResult:
        return self._loop.run(self.lease.sandbox.python(code, **options))

    def read_file(self, path: str, **options: Any) -> bytes:
        return self._loop.run(self.lease.sandbox.read_file(path, **options))

    def write_file(self, path: str, data: str | bytes) -> None:
        self._loop.run(self.lease.sandbox.write_file(path, data))

    def reset(self) -> None:
        self._loop.run(self.lease.sandbox.reset())

    def release(self) -> None:
        self._loop.run(self.lease.release())


def require_level(config: SandboxConfig) -> None:
    """Skip, with the reason, where the level is not to be had; where it must be, fail."""
    try:
        resolve(config)
    except SandboxUnavailable as error:
        missing(str(error))


def missing(reason: str) -> NoReturn:
    if os.environ.get("AGENTRL_REQUIRE_SANDBOXES") == "1":
        pytest.fail(f"AGENTRL_REQUIRE_SANDBOXES=1, but {reason}")
    pytest.skip(reason)


def eventually(condition: Callable[[], bool], timeout: float = 5.0) -> bool:
    """Whether it became true in time."""
    last = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > last:
            return False
        time.sleep(0.02)
    return True


def process_of(command: list[str]) -> psutil.Process:
    """The process of this machine that runs it, once there is one."""
    found: list[psutil.Process] = []

    def find() -> bool:
        found[:] = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == command]
        return bool(found)

    assert eventually(find), f"no process runs {command}"
    return found[0]
