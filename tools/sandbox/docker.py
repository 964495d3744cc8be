"""The level of a Docker engine: a container per sandbox, its worker spoken to over the socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import docker
from docker.errors import APIError, DockerException
from docker.utils import parse_host
from requests.exceptions import RequestException

from agentrl.threads import run_in_thread
from tools.sandbox.client import BOOT, MAX_LINE, Setup, limits_of_processes
from tools.sandbox.images import find_image
from tools.sandbox.protocol import Level, SandboxConfig, SandboxUnavailable
from tools.sandbox.spawner import is_abandoned, owner

HOME = "/work"
UID = 65534
ENV = {
    "HOME": HOME,
    "LANG": "C.UTF-8",
    "USER": "agent",
    "LOGNAME": "agent",
    # Libraries that see all cores of the machine would start more threads than are allowed.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
CALL_S = 60.0  # for the engine to answer; building or pulling an image has no such limit
NUM_CALLS = 8  # at once; more make an engine slower
RESUME_S = 10.0  # for an engine that is being restarted to come back
END_S = 3.0  # for an engine to notice that a container has ended


class Docker:
    """No network, a read-only system, files in memory, its own processes, no privileges."""

    level: Level = "docker"

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self._client: Any = None
        self._url = ""
        self._calls = asyncio.Semaphore(NUM_CALLS)
        self._options: dict[str, Any] = {}
        self._left: set[str] = set()  # containers to remove once the engine answers again

    async def open(self) -> str:
        # Without a deadline: an image may have to be pulled or built.
        return await run_in_thread(self._open)

    def wall(self) -> DockerWall:
        return DockerWall(self)

    async def close(self) -> None:
        if self._client is not None:
            with contextlib.suppress(SandboxUnavailable):  # the next run removes what is left
                await self.ask(self._remove_left)
            self._client.close()

    async def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)`, which asks the engine, in a thread.

        Raises:
            SandboxUnavailable: it fails, or the engine does not answer.
        """
        async with self._calls:
            try:
                with unavailable():
                    return await run_in_thread(function, *args, timeout_s=CALL_S)
            except TimeoutError as error:
                raise SandboxUnavailable(f"the Docker engine does not answer: {error}") from error

    def create(self, name: str) -> None:
        self._remove_left()
        self._client.api.create_container_from_config(self._options, name)

    def start(self, name: str) -> None:
        try:
            self._client.api.start(name)
        except APIError as error:
            if "python3" in str(error.explanation):
                raise SandboxUnavailable(
                    f"there is no python3 in the image {self.config.image} ({error.explanation})"
                ) from error
            raise

    def state(self, name: str) -> dict[str, Any]:
        """What the engine says of a container: whether it is Running, was OOMKilled, …"""
        return self._client.api.inspect_container(name)["State"]

    def remove(self, name: str) -> None:
        """End a container; one that cannot be ended now is ended later."""
        self._left.add(name)
        try:
            self._client.api.remove_container(name, v=True, force=True)
        except APIError as error:
            if error.status_code not in (404, 409):  # gone, or already on its way
                raise
        self._left.discard(name)

    async def attach(self, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The streams of a container's main process; raises OSError or EOFError."""
        api, loop = self._client.api, asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MAX_LINE)
        head = (
            f"POST /v{api.api_version}/containers/{name}/attach?stream=1&stdin=1&stdout=1&stderr=1 "
            "HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
        )
        make = partial(Attached, reader)
        url = urlsplit(self._url)
        if url.scheme == "http+unix":
            transport, protocol = await loop.create_unix_connection(make, url.path)
        else:
            tls = tls_of(api) if url.scheme == "https" else None
            transport, protocol = await loop.create_connection(
                make, str(url.hostname), int(url.port or 0), ssl=tls
            )
        try:
            transport.write(head.encode())
            await protocol.upgraded
        except BaseException:
            transport.close()
            raise
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    def _open(self) -> str:
        """In a thread."""
        self._url = url = engine_url()
        with unavailable(f"no Docker engine answers at {address(url)} (DOCKER_HOST says where): "):
            self._client = docker.from_env(timeout=int(CALL_S))
            info, version = self._client.info(), self._client.version()["Version"]
        missing = [key for key in ("MemoryLimit", "PidsLimit", "CpuCfsQuota") if not info.get(key)]
        if missing:
            raise SandboxUnavailable(
                f"the Docker engine at {address(url)} cannot limit what a container uses: it "
                f"lacks {', '.join(missing)}, as rootless ones do without cgroups of version 2"
            )
        with unavailable():
            images = docker.from_env(timeout=3600)
            image = find_image(images, self.config.image, pull=self.config.level == "docker")
            images.close()
            self._options = self._container(image, info["NCPU"])
            self._sweep()
        return (
            f"docker (engine {version}, image {self.config.image} {image.short_id}): no network, "
            "read-only system, memory, processes and CPU limited by the engine"
        )

    def _container(self, image: Any, num_cpus: int) -> dict[str, Any]:
        config, api = self.config, self._client.api
        size = f"size={config.disk_mb << 20}"
        volumes = image.attrs["Config"].get("Volumes") or {}  # would be on the host's disk
        host = api.create_host_config(
            network_mode="none",
            read_only=True,
            tmpfs=dict.fromkeys(volumes, "ro,size=4k")
            | {
                HOME: f"{size},mode=0700,uid={UID},gid={UID},exec",
                "/tmp": f"{size},mode=1777,exec",
            },
            shm_size=config.disk_mb << 20,
            mem_limit=config.memory_mb << 20,
            memswap_limit=config.memory_mb << 20,
            pids_limit=config.max_processes + 1,  # the worker
            nano_cpus=int(min(config.cpus, num_cpus) * 1e9),
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            log_config={"type": "none"},
        )
        return api.create_container_config(
            image.id,
            command=[],
            entrypoint=["python3", "-I", "-c", BOOT],
            hostname="sandbox",
            network_disabled=True,  # "none" is a network too, set up by a process per start
            user=f"{UID}:{UID}",
            stdin_open=True,  # to the one who attaches: with a dead owner the worker ends
            environment=ENV,
            working_dir=HOME,
            stop_signal="SIGKILL",  # an engine that stops would wait for what heeds no other
            healthcheck={"test": ["NONE"]},
            labels={"agentrl.host": this_host(), "agentrl.config": config.model_dump_json()},
            host_config=host,
        )

    def _sweep(self) -> None:
        """Remove the containers that dead owners of this host have left."""
        ours = {"label": f"agentrl.host={this_host()}"}
        for container in self._client.api.containers(all=True, filters=ours):
            for name in container["Names"]:
                if is_abandoned(name.removeprefix("/")):
                    self.remove(container["Id"])

    def _remove_left(self) -> None:
        for name in list(self._left):
            self.remove(name)


class DockerWall:
    """The `Wall` of a sandbox that is a container."""

    level: Level = "docker"

    def __init__(self, docker: Docker) -> None:
        self._docker = docker
        self._name = ""
        self._created: asyncio.Future[Any] | None = None

    async def start(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Setup]:
        docker = self._docker
        self._name = f"{owner()}-{uuid.uuid4().hex[:12]}"
        # Where the start is given up, `kill` still has to know what came of it.
        self._created = asyncio.ensure_future(docker.ask(docker.create, self._name))
        await asyncio.shield(self._created)
        reader, writer = await docker.attach(self._name)
        try:
            await docker.ask(docker.start, self._name)
        except BaseException:
            writer.close()
            raise
        return reader, writer, Setup(home=HOME, limits=limits_of_processes(docker.config))

    async def resume(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """An engine with --live-restore comes back with its containers."""
        deadline = asyncio.get_running_loop().time() + RESUME_S
        while True:
            try:
                state = await self._docker.ask(self._docker.state, self._name)
                return await self._docker.attach(self._name) if state["Running"] else None
            except (SandboxUnavailable, OSError, EOFError) as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise SandboxUnavailable(f"a docker sandbox was lost: {error}") from error
                await asyncio.sleep(0.2)

    async def kill(self) -> None:
        created, self._created = self._created, None
        if created is None:
            return
        with contextlib.suppress(SandboxUnavailable):  # it is removed once the engine is back
            await asyncio.wait((created,))
            await self._docker.ask(self._docker.remove, self._name)

    async def verdict(self) -> str | None:
        deadline = asyncio.get_running_loop().time() + END_S
        while asyncio.get_running_loop().time() < deadline:
            try:
                state = await self._docker.ask(self._docker.state, self._name)
            except SandboxUnavailable:
                return None
            if not state["Running"]:
                used = f"it used more than its {self._docker.config.memory_mb} MB of memory"
                return used if state["OOMKilled"] else None
            await asyncio.sleep(0.1)
        return None


class Attached(asyncio.StreamReaderProtocol):
    """The attach connection: feeds its reader with stdout alone, out of the frames of both."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self.upgraded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._buffer = bytearray()
        self._left, self._is_stdout = 0, False  # of the frame that is being read

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self.upgraded.done():
            head, end, rest = self._buffer.partition(b"\r\n\r\n")
            if not end:
                return
            if b" 101 " not in head.partition(b"\r\n")[0]:
                self.upgraded.set_exception(OSError(f"cannot attach: {bytes(self._buffer)!r}"))
                return
            self._buffer = rest
            self.upgraded.set_result(None)
        while len(self._buffer) >= (1 if self._left else 8):
            if self._left == 0:  # one byte of kind, three of nothing, four of length
                self._is_stdout = self._buffer[0] == 1
                self._left = int.from_bytes(self._buffer[4:8], "big")
                del self._buffer[:8]
            piece = bytes(self._buffer[: self._left])
            del self._buffer[: self._left]
            self._left -= len(piece)
            if self._is_stdout and piece:
                super().data_received(piece)

    def eof_received(self) -> bool:
        super().eof_received()
        return False  # close: an engine that ended one way has ended

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.upgraded.done():
            self.upgraded.set_exception(EOFError("the engine closed the connection"))
        super().connection_lost(None)


@contextlib.contextmanager
def unavailable(prefix: str = "Docker: ") -> Iterator[None]:
    """Errors of the engine, and of the way to it, as SandboxUnavailable."""
    try:
        yield
    except (DockerException, RequestException) as error:
        reason = error.explanation if isinstance(error, APIError) else error
        raise SandboxUnavailable(f"{prefix}{reason}") from error


def engine_url() -> str:
    """Of the scheme http+unix, http or https; raises SandboxUnavailable."""
    with unavailable("DOCKER_HOST: "):
        tls = os.environ.get("DOCKER_TLS_VERIFY") or os.environ.get("DOCKER_CERT_PATH")
        url = str(parse_host(os.environ.get("DOCKER_HOST"), tls=bool(tls)))
    if not url.startswith("http"):
        raise SandboxUnavailable(f"DOCKER_HOST: {url} is neither unix:// nor tcp://")
    return url


def address(url: str) -> str:
    return url.removeprefix("http+unix://")


def tls_of(api: Any) -> ssl.SSLContext:
    """What the SDK's client was told in the environment."""
    context = ssl.create_default_context(cafile=api.verify if isinstance(api.verify, str) else None)
    if not api.verify:  # certificates, but no DOCKER_TLS_VERIFY
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if api.cert:
        context.load_cert_chain(*api.cert)
    return context


def this_host() -> str:
    """Where this process's pid means something: the host, and on it the pid namespace."""
    return f"{socket.gethostname()}/{os.stat('/proc/self/ns/pid').st_ino}"
