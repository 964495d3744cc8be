"""A sandbox as its user sees it: requests to the worker inside, and what follows when it ends."""

from __future__ import annotations

import asyncio
import base64
import codecs
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tools.sandbox.protocol import ExecResult, Level, SandboxConfig, SandboxUnavailable

SOURCE = (Path(__file__).parent / "worker.py").read_bytes()
NOTEBOOK = (Path(__file__).parent / "notebook.py").read_text()

BOOT = """\
import os
size, source = int(os.read(0, 8)), b""
while len(source) < size:
    source += os.read(0, size - len(source))
exec(compile(source, "worker", "exec"))
"""
"""What a sandbox's own interpreter starts with, `python3 -I -c BOOT`; the rest comes by stdin."""

START_S = 30.0  # for a sandbox to start, on a busy machine
GRACE_S = 10.0  # beyond its deadline, for a worker to say what came of a request
CHUNK = 1 << 20  # bytes of a file or of input in one message
MAX_LINE = 16 << 20  # bytes of one answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a worker is told as it starts."""

    home: str  # the work folder, as an absolute path without links
    uid: int | None = None  # to become, where it is started as root
    limits: Mapping[str, int] | None = None  # RLIMIT_… of each process it starts
    env: Mapping[str, str] | None = None  # of each process, beside the worker's own


def limits_of_processes(config: SandboxConfig) -> dict[str, int]:
    """RLIMIT_… of each process, where a cgroup bounds the memory and the number of all."""
    return {
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": 1024,
        "RLIMIT_FSIZE": config.disk_mb << 20,
        # A little less than the cgroup's, so that one that asks for more hears of it.
        "RLIMIT_DATA": (config.memory_mb << 20) * 7 // 8,
    }


class Wall(Protocol):
    """How one sandbox of a level is started and ended; `WorkerSandbox` does the talking."""

    level: Level

    async def start(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Setup]:
        """Start a worker in a new sandbox; raises SandboxUnavailable, or OSError."""
        ...

    async def resume(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """New streams to a worker whose own have ended, while it had nothing to do.

        None: it has ended too. Raises SandboxUnavailable where that cannot be known.
        """
        ...

    async def kill(self) -> None:
        """End all that is in the sandbox, at once; may be called at any time and twice."""
        ...

    async def verdict(self) -> str | None:
        """After the worker has ended by itself: what the code in the sandbox did to end it.

        None: it did nothing of the kind, so the fault is the infrastructure's.
        """
        ...


class WorkerSandbox:
    """A `Sandbox` over a worker behind a wall.

    A worker that ended by the doing of what ran in it (`Wall.verdict`), or that does not answer
    long after a deadline, is replaced: that is a result with exit code -9, and the files are gone.
    Any other end is SandboxUnavailable, also for every later call.
    """

    def __init__(self, wall: Wall, config: SandboxConfig) -> None:
        self.level: Level = wall.level
        self.num_restarts = 0
        self._wall = wall
        self._config = config
        self._ids = itertools.count(1)
        self._lock = asyncio.Lock()
        self._calls: set[asyncio.Task[Any]] = set()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._closed = False

    @property
    def lost(self) -> bool:
        """Whether the streams to its worker have ended."""
        return self._streams is None or self._streams[0].at_eof()

    async def start(self) -> None:
        """Raises SandboxUnavailable."""
        try:
            async with asyncio.timeout(START_S):
                reader, writer, setup = await self._wall.start()
                self._streams = reader, writer
                writer.write(b"%8d%b" % (len(SOURCE), SOURCE))
                await self._exchange(
                    {
                        "home": setup.home,
                        "uid": setup.uid,
                        "notebook": NOTEBOOK,
                        "keep": self._config.max_output_kb << 10,
                        "limits": dict(setup.limits or {}),
                        "env": dict(setup.env or {}),
                    }
                )
        except TimeoutError:
            await self._kill()
            raise SandboxUnavailable(f"no {self.level} sandbox within {START_S:g} s") from None
        except (OSError, EOFError) as error:
            await self._kill()
            raise SandboxUnavailable(f"a {self.level} sandbox does not start: {error}") from error
        except BaseException:
            await self._kill()
            raise

    async def exec(
        self,
        cmd: str | Sequence[str],
        *,
        input: str | bytes = b"",
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        timeout: float = 30.0,
    ) -> ExecResult:
        request = {"op": "exec", "cmd": cmd if isinstance(cmd, str) else list(cmd), "cwd": cwd}
        reply = await self._call(request | {"env": dict(env or {})}, to_bytes(input), timeout)
        return to_result(reply)

    async def python(self, code: str, *, timeout: float = 30.0) -> ExecResult:
        return to_result(await self._call({"op": "python", "code": code}, b"", timeout))

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        data = b""
        while len(data) < max_bytes:
            size = min(max_bytes - len(data), CHUNK)
            reply = await self._file(
                {"op": "read", "path": path, "offset": len(data), "size": size}
            )
            piece = base64.b64decode(reply["out"][0]) + base64.b64decode(reply["out"][2])
            data += piece
            if len(piece) < size:
                break
        return data

    async def write_file(self, path: str, data: str | bytes) -> None:
        await self._file({"op": "write", "path": path}, to_bytes(data))

    async def reset(self) -> None:
        async with self._lock:
            self._check()
            await self._restart()

    async def close(self) -> None:
        self._closed = True
        await self._kill()  # what runs in it ends now
        async with self._lock:
            await self._kill()  # what was being started meanwhile

    async def _file(self, request: dict[str, Any], data: bytes = b"") -> dict[str, Any]:
        reply = await self._call(request, data, 30.0)
        if reply["code"] == 0:
            return reply
        text = decode(reply["err"])
        try:
            number, reason = json.loads(text)
        except ValueError:
            number, reason = 5, text.strip() or "the sandbox ended the process that did it"
        raise OSError(number, reason, request["path"])

    async def _call(self, request: dict[str, Any], data: bytes, timeout: float) -> dict[str, Any]:
        """One request to its end, even where the caller is cancelled: the next one comes after."""
        await self._lock.acquire()
        call = asyncio.create_task(self._run(request, data, timeout))
        self._calls.add(call)
        call.add_done_callback(self._finish)
        return await asyncio.shield(call)

    def _finish(self, call: asyncio.Task[Any]) -> None:
        self._calls.discard(call)
        self._lock.release()
        if not call.cancelled():
            call.exception()  # seen, also where nobody waits any more

    async def _run(self, request: dict[str, Any], data: bytes, timeout: float) -> dict[str, Any]:
        self._check()
        request = request | {"timeout": timeout, "input": bool(data)}
        try:
            if self.lost:
                await self._resume()
            async with asyncio.timeout(timeout + GRACE_S):
                return await self._exchange(request, data)
        except TimeoutError:
            return await self._replace("it did not end what it had started", timed_out=True)
        except (OSError, EOFError) as error:
            self._check()
            verdict = await self._wall.verdict()
            if verdict is None:
                await self._kill()
                raise SandboxUnavailable(f"the {self.level} sandbox was lost: {error}") from error
            return await self._replace(verdict, timed_out=False)

    async def _resume(self) -> None:
        assert self._streams is not None
        streams = await self._wall.resume()
        if streams is None:
            raise EOFError("its worker ended")
        self._streams[1].close()
        self._streams = streams

    async def _replace(self, cause: str, *, timed_out: bool) -> dict[str, Any]:
        await self._restart()
        text = f"The sandbox was started anew, without its files: {cause}.\n".encode()
        nothing = ["", 0, ""]
        return {
            "code": -9,
            "out": nothing,
            "err": [base64.b64encode(text).decode(), 0, ""],
            "timed_out": timed_out,
            "lost": True,
            "lost_files": True,
        }

    async def _restart(self) -> None:
        await self._kill()
        self.num_restarts += 1
        await self.start()

    async def _kill(self) -> None:
        streams, self._streams = self._streams, None
        await self._wall.kill()
        if streams is not None:
            streams[1].close()

    def _check(self) -> None:
        if self._closed or self._streams is None:
            raise SandboxUnavailable(f"the {self.level} sandbox is closed")

    async def _exchange(self, request: dict[str, Any], data: bytes = b"") -> dict[str, Any]:
        """Send a request with its input, and wait for the answer that has its id."""
        assert self._streams is not None
        reader, writer = self._streams
        id = next(self._ids)
        writer.write(encode({"id": id, **request}))
        feeding = asyncio.create_task(feed(writer, id, data)) if data else None
        try:
            while True:
                try:
                    line = await reader.readuntil()
                except asyncio.IncompleteReadError as error:
                    raise EOFError("its worker ended") from error
                except asyncio.LimitOverrunError as error:
                    raise EOFError(f"an answer of over {MAX_LINE >> 20} MiB") from error
                reply = json.loads(line)
                if reply["id"] == id:
                    return reply
        except ValueError as error:
            raise EOFError(f"an answer that is no JSON: {line[:80]!r}") from error
        finally:
            if feeding is not None:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)


async def feed(writer: asyncio.StreamWriter, id: int, data: bytes) -> None:
    """Send input piece by piece, an empty one last; may be cancelled between two of them."""
    for start in range(0, len(data), CHUNK):
        piece = base64.b64encode(data[start : start + CHUNK]).decode()
        writer.write(encode({"id": id, "input": piece}))
        await writer.drain()
    writer.write(encode({"id": id, "input": ""}))


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def to_bytes(data: str | bytes) -> bytes:
    return data.encode(errors="replace") if isinstance(data, str) else data


def to_result(reply: dict[str, Any]) -> ExecResult:
    return ExecResult(
        exit_code=reply["code"],
        stdout=decode(reply["out"]),
        stderr=decode(reply["err"]),
        timed_out=reply["timed_out"],
        truncated=reply["out"][1] > 0 or reply["err"][1] > 0,
        lost_state=reply["lost"],
        lost_files=reply.get("lost_files", False),
    )


def decode(output: Sequence[Any]) -> str:
    """Head, number of bytes left out, and tail, as text that is cut between characters."""
    head, dropped, tail = base64.b64decode(output[0]), output[1], base64.b64decode(output[2])
    if not dropped:
        return (head + tail).decode(errors="replace")
    start = codecs.getincrementaldecoder("utf-8")("replace").decode(head)
    continuation = next((i for i, byte in enumerate(tail[:4]) if byte & 0xC0 != 0x80), 0)
    end = tail[continuation:].decode(errors="replace")
    return f"{start}\n[{dropped} bytes left out]\n{end}"
