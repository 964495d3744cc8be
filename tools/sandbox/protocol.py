"""What a sandbox is to a tool, however it is walled off, and what it is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import Field

from agentrl.config import Section
from agentrl.tool import Unavailable

Level = Literal["docker", "bubblewrap", "process"]


class SandboxUnavailable(Unavailable):
    """No sandbox to be had, or one that was lost through no fault of what ran in it."""


class SandboxConfig(Section):
    """How an env's sandboxes are walled off, and what each may use."""

    level: Literal["auto", "docker", "bubblewrap", "process"] = "auto"
    """auto: docker where an engine answers and has the image, else bubblewrap. process walls off
    next to nothing and is never chosen by itself.
    """
    image: str = "python:3.11-slim"
    """For docker: the name of an image that has python3, a Dockerfile or its folder, or the tar of
    a root file system.
    """
    memory_mb: int = Field(default=512, ge=64)
    """Of all its processes and files together."""
    max_processes: int = Field(default=64, ge=8)
    cpus: float = Field(default=1.0, gt=0)
    disk_mb: int = Field(default=128, ge=1)
    """Of the work folder, and as much again of /tmp; both are in memory."""
    max_output_kb: int = Field(default=64, ge=1)
    """Kept of each of stdout and stderr: head and tail."""
    warm: int = Field(default=2, ge=0)
    """Sandboxes kept ready beyond those in use."""
    max_sandboxes: int = Field(default=256, ge=1)
    """At once; further episodes wait for their turn before they begin."""
    starts_per_second: float = Field(default=20.0, gt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What came of a command, or of a piece of Python.

    Output is decoded once, with replacement characters for what is not UTF-8.
    """

    exit_code: int  # -n: ended by signal n
    stdout: str
    stderr: str
    timed_out: bool = False  # the output so far is there
    truncated: bool = False  # the middle of stdout or stderr was left out; a marker says how much
    lost_state: bool = False  # the interpreter ended: its variables are gone
    lost_files: bool = False  # the sandbox was started anew: all of its state is gone


class Sandbox(Protocol):
    """The sandbox of one trajectory; calls are answered one after another.

    Paths are relative to the work folder, which is also the default of `cwd`. Times are seconds.
    Whatever runs in it can fail in an `ExecResult` only; all methods raise SandboxUnavailable where
    the sandbox itself is lost, and within seconds.
    """

    level: Level

    async def exec(
        self,
        cmd: str | Sequence[str],
        *,
        input: str | bytes = b"",
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        timeout: float = 30.0,
    ) -> ExecResult:
        """Run a command, by the shell where it is a string.

        At the time-out every process in the sandbox is killed; files stay.
        """
        ...

    async def python(self, code: str, *, timeout: float = 30.0) -> ExecResult:
        """Run code in the sandbox's one persistent interpreter, as a notebook does.

        `stdout` is what it and its processes wrote, in order, and the value of a last expression;
        `stderr` the traceback, without what is not the code's own; exit_code 1 where it raised. At
        the time-out it is interrupted, and killed if it goes on.
        """
        ...

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """The first `max_bytes`. Raises OSError as `open` does, also for a path that leads out."""
        ...

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Create or replace, with the folders above. Raises OSError as `read_file` does."""
        ...

    async def reset(self) -> None:
        """As new: no process, file or variable of before."""
        ...

    async def close(self) -> None:
        """Nothing is left of it; may be called twice."""
        ...
