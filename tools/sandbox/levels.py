"""Which level of sandbox there is on this machine: tried for real, and never chosen in silence."""

from __future__ import annotations

import threading
from typing import Protocol

from agentrl.threads import run_apart
from tools.sandbox.client import Wall, WorkerSandbox
from tools.sandbox.protocol import Level, SandboxConfig, SandboxUnavailable


class Backend(Protocol):
    """A level on an event loop: what is shared by all sandboxes of one config."""

    level: Level

    async def open(self) -> str:
        """Prepare, and remove what dead owners left; one line that says what is walled off.

        Raises:
            SandboxUnavailable: the level cannot be had here; says what to do.
        """
        ...

    def wall(self) -> Wall:
        """For one sandbox, which is not started yet."""
        ...

    async def close(self) -> None: ...


def make_backend(level: Level, config: SandboxConfig) -> Backend:
    match level:
        case "docker":
            from tools.sandbox.docker import Docker

            return Docker(config)
        case "bubblewrap":
            from tools.sandbox.bubblewrap import Bubblewrap

            return Bubblewrap(config)
        case "process":
            from tools.sandbox.process import Process

            return Process(config)


_lock = threading.Lock()
_resolved: dict[SandboxConfig, tuple[Level, str]] = {}


def resolve(config: SandboxConfig) -> tuple[Level, str]:
    """The level that `config` means on this machine, and the line that says what it walls off.

    Blocks for about a second; the answer is kept.

    Raises:
        SandboxUnavailable: there is none; says what was tried and what to do.
    """
    with _lock:
        if config not in _resolved:
            _resolved[config] = run_apart(_resolve(config))
        return _resolved[config]


async def _resolve(config: SandboxConfig) -> tuple[Level, str]:
    if config.level != "auto":
        return config.level, await _try(config.level, config)
    tried = []
    for level in ("docker", "bubblewrap"):
        try:
            return level, "; ".join([await _try(level, config), *tried])
        except SandboxUnavailable as error:
            tried.append(f"not {level}: {error}")
    raise SandboxUnavailable(
        f"no sandbox: {'; '.join(tried)}. Make one of them work, or set sandbox.level to "
        "process, which does not isolate what the model writes"
    )


async def _try(level: Level, config: SandboxConfig) -> str:
    """Start a sandbox and run something in it."""
    backend = make_backend(level, config)
    try:
        line = await backend.open()
        sandbox = WorkerSandbox(backend.wall(), config)
        await sandbox.start()
        try:
            result = await sandbox.exec("echo $((40 + 2)) | cat")
        finally:
            await sandbox.close()
    finally:
        await backend.close()
    if result.stdout != "42\n":
        raise SandboxUnavailable(f"a command in a {level} sandbox fails: {result.stderr[-300:]}")
    return line
