"""Sandboxes that a helper process of this machine starts: the trainer's side of `spawner.py`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.sandbox.client import BOOT, MAX_LINE, Setup, limits_of_processes
from tools.sandbox.protocol import Level, SandboxConfig, SandboxUnavailable

KILL_S = 10.0
SPARE_THREADS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a sandbox ended, as its helper saw it."""

    code: int | None  # -n: by signal n; None: it was not started
    oom_kills: int  # processes of it that the kernel ended at its memory limit
    error: str  # the last of its stderr


class Spawner:
    """The connection to one helper process."""

    def __init__(self, control: socket.socket, process: asyncio.subprocess.Process) -> None:
        self.cgroup: int | None = None  # the version of cgroups that bounds the sandboxes
        self.root = False  # whether each sandbox has a uid of its own
        self.alive = True
        self._control = control
        self._process = process
        self._ids = itertools.count(1)
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._started: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ended: dict[int, asyncio.Future[Ended]] = {}
        self._streams: dict[int, socket.socket] = {}
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def open(cls, *, python: str = sys.executable, user: int | None = None) -> Spawner:
        """Start a helper; `user` is a uid for it, where it should not have this process's."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(python, "-I", "-S", str(Path(__file__).parent / "spawner.py")),
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env={
                    "PATH": os.defpath,
                    **({"TMPDIR": t} if (t := os.environ.get("TMPDIR")) else {}),
                },
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        spawner = cls(ours, process)
        try:
            async with asyncio.timeout(30):
                await spawner._ready
        except BaseException:
            await spawner.close()
            raise
        return spawner

    async def start(self, message: Mapping[str, Any]) -> tuple[int, socket.socket, dict[str, Any]]:
        """Start a sandbox; its id, the socket that is its stdin and stdout, and where it is.

        Raises:
            SandboxUnavailable: it did not start; says why.
        """
        id = next(self._ids)
        loop = asyncio.get_running_loop()
        self._started[id], self._ended[id] = loop.create_future(), loop.create_future()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                await self._send({"op": "start", "id": id, **message}, theirs)
            await asyncio.wait(
                (self._started[id], self._ended[id]), return_when=asyncio.FIRST_COMPLETED
            )
            if not self._started[id].done():
                raise SandboxUnavailable(
                    f"a sandbox did not start: {self._ended[id].result().error}"
                )
            self._streams[id] = ours
            return id, ours, self._started[id].result()
        except BaseException:
            ours.close()
            raise

    async def kill(self, id: int) -> None:
        """End a sandbox and wait until nothing is left of it."""
        ended = self._ended.get(id)
        if ended is not None and not ended.done():
            await self._send({"op": "kill", "id": id})
            await self.ended(id)
        for known in (self._started, self._ended, self._streams):
            known.pop(id, None)

    async def ended(self, id: int) -> Ended | None:
        """How a sandbox ended, once it has; None: its helper ended, or it does not end."""
        await asyncio.wait((self._ended[id],), timeout=KILL_S)
        future = self._ended[id]
        return future.result() if future.done() and self.alive else None

    async def close(self) -> None:
        """End the helper, with all that it has started."""
        self._control.close()
        try:
            async with asyncio.timeout(KILL_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)

    async def _send(self, message: Mapping[str, Any], stream: socket.socket | None = None) -> None:
        data, fds = json.dumps(message).encode(), [stream.fileno()] if stream else []
        while self.alive:
            try:
                socket.send_fds(self._control, [data], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(0.005)
            except OSError:
                break
        raise SandboxUnavailable("the process that starts sandboxes has ended")

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            with contextlib.suppress(OSError):
                while data := await loop.sock_recv(self._control, 1 << 16):
                    self._hear(json.loads(data))
        finally:
            self.alive = False
            gone = Ended(
                code=None, oom_kills=0, error="the process that starts sandboxes has ended"
            )
            for future in self._ended.values():
                if not future.done():
                    future.set_result(gone)
            for stream in self._streams.values():  # a worker that reads its end ends too
                with contextlib.suppress(OSError):
                    stream.shutdown(socket.SHUT_RDWR)
            if not self._ready.done():
                self._ready.set_exception(SandboxUnavailable(gone.error))

    def _hear(self, message: dict[str, Any]) -> None:
        match message.pop("event"):
            case "ready":
                self.cgroup, self.root = message["cgroup"], message["root"]
                self._ready.set_result(None)
            case "started" if (future := self._started.get(message["id"])) is not None:
                if not future.done():
                    future.set_result(message)
            case "ended" if (future := self._ended.get(message.pop("id"))) is not None:
                if not future.done():
                    future.set_result(Ended(**message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the helper starts the worker of a level."""

    argv: list[str]
    env: dict[str, str]
    limits: dict[str, int] = field(default_factory=dict)
    home: str | None = None  # the work folder; None: a new folder of this machine


class SpawnedBackend:
    """A level whose sandboxes a helper starts; its subclasses say how."""

    level: Level

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self._opening = asyncio.Lock()
        self._spawner: Spawner | None = None

    def recipe(self, spawner: Spawner) -> Recipe:
        raise NotImplementedError

    def describe(self, spawner: Spawner) -> str:
        """One line: what the level walls off here, and what not."""
        raise NotImplementedError

    def blame(self, ended: Ended) -> str | None:
        """What the code in a sandbox did to end its worker, if it did."""
        if ended.oom_kills and ended.code in (-9, 137):
            return f"it used more than its {self.config.memory_mb} MB of memory"
        return None

    async def open(self) -> str:
        return self.describe(await self.spawner())

    async def spawner(self) -> Spawner:
        """The helper, started anew where it has ended."""
        async with self._opening:
            if self._spawner is None or not self._spawner.alive:
                if self._spawner is not None:
                    await self._spawner.close()
                self._spawner = await Spawner.open()
            return self._spawner

    def wall(self) -> SpawnedWall:
        return SpawnedWall(self)

    async def close(self) -> None:
        if self._spawner is not None:
            await self._spawner.close()

    def limits(self, spawner: Spawner) -> dict[str, int]:
        """Of each process: beside a cgroup, or in place of one."""
        limits = limits_of_processes(self.config)
        if spawner.cgroup:
            return limits
        del limits["RLIMIT_DATA"]
        memory = self.config.memory_mb << 20
        return limits | {"RLIMIT_AS": memory, "RLIMIT_NPROC": self.config.max_processes}


class SpawnedWall:
    """The `Wall` of a sandbox that a helper starts."""

    def __init__(self, backend: SpawnedBackend) -> None:
        self.level: Level = backend.level
        self._backend = backend
        self._box: tuple[Spawner, int] | None = None

    async def start(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Setup]:
        backend, config = self._backend, self._backend.config
        spawner = await backend.spawner()
        recipe = backend.recipe(spawner)
        # Two more than the sandbox's own: the worker, and what bwrap leaves outside.
        bounds = [config.memory_mb << 20, config.max_processes + 2, config.cpus]
        id, stream, where = await spawner.start(
            {
                "argv": [*recipe.argv, "-I", "-c", BOOT],
                "env": recipe.env,
                "folder": recipe.home is None,
                "bounds": bounds,
            }
        )
        self._box = spawner, id
        reader, writer = await asyncio.open_connection(sock=stream, limit=MAX_LINE)
        home = recipe.home or where["folder"]
        env = {"HOME": home} | ({"TMPDIR": home} if recipe.home is None else {})
        limits = dict(recipe.limits)
        if where["num_threads"]:  # the limit counts all of this user's, which come and go
            limits["RLIMIT_NPROC"] += where["num_threads"] + SPARE_THREADS
        return reader, writer, Setup(home=home, uid=where["uid"], limits=limits, env=env)

    async def resume(self) -> None:
        """The stream ends with the worker alone."""
        return None

    async def kill(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            # A helper that has ended has taken its sandboxes with it.
            with contextlib.suppress(SandboxUnavailable):
                await box[0].kill(box[1])

    async def verdict(self) -> str | None:
        assert self._box is not None
        ended = await self._box[0].ended(self._box[1])
        return self._backend.blame(ended) if ended is not None else None
