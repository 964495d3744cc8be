"""Docker: engines that die, what dead owners left, and where images come from."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import psutil
import pytest

from agentrl.env import EnvNotFound
from agentrl.shutdown import shut_down
from envs.sandboxed import SandboxedEnv
from tests.sandboxes import IMAGE, eventually, missing, require_level
from tools.sandbox.client import WorkerSandbox
from tools.sandbox.docker import Attached, Docker
from tools.sandbox.levels import resolve
from tools.sandbox.pool import Lease
from tools.sandbox.protocol import SandboxConfig, SandboxUnavailable
from tools.sandbox.spawner import owner

ROOT = Path(__file__).parents[1]


def config(**options: Any) -> SandboxConfig:
    limits = {"level": "docker", "image": IMAGE, "memory_mb": 128, "disk_mb": 16, "warm": 0}
    return SandboxConfig.model_validate(limits | options)


def play(main: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        try:
            async with asyncio.timeout(60):
                await main()
        finally:
            await shut_down()

    asyncio.run(run())


@contextlib.asynccontextmanager
async def leased(options: SandboxConfig) -> Any:
    lease = Lease(options)
    await lease.acquire()
    try:
        yield lease.sandbox
    finally:
        await lease.release()


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """Of the machine's own engine, which has the image."""
    require_level(config())
    client = docker.from_env()
    yield client
    client.close()


class Engine:
    """A dockerd of the test's own, which it may kill."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/d.sock"
        self.port = 0
        self.client: Any = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, live_restore: bool = True) -> None:
        with contextlib.suppress(
            FileNotFoundError
        ):  # a pid that is given again would be waited for
            (self.folder / "exec/containerd/containerd.pid").unlink()
        (self.folder / "pid").unlink(missing_ok=True)
        paths = ("--data-root", "data"), ("--exec-root", "exec"), ("--pidfile", "pid")
        options = [text for name, path in paths for text in (name, str(self.folder / path))]
        options += ["--bridge=none", "--iptables=false", "--ip-forward=false"]
        options += ["--host", self.url, f"--live-restore={str(live_restore).lower()}"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["dockerd", *options], stdout=log, stderr=log, start_new_session=True
            )
        assert eventually(self._answers, 20), (self.folder / "log").read_text()[-2000:]

    def _answers(self) -> bool:
        try:
            self.client = docker.DockerClient(self.url)
            return True
        except docker.errors.DockerException:
            return False

    def kill(self) -> None:
        assert self._process is not None
        children = psutil.Process(self._process.pid).children()
        self._process.kill()
        self._process.wait()
        psutil.wait_procs(children, timeout=5)  # its containerd ends with it

    def remove(self) -> None:
        """The engine, which has no containers any more, and its files."""
        self.client.close()
        self.kill()
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for path in mounts:
            if path.startswith(f"{self.folder}/"):
                subprocess.run(["umount", "--lazy", path], check=True)
        shutil.rmtree(self.folder)


@pytest.fixture(scope="module")
def own_engine(client: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        missing("starting an engine of its own takes root and dockerd")
    # A short path: names of sockets may have 108 bytes.
    folder = tmp_path_factory.mktemp("d")
    engine = Engine(folder)
    engine.start()
    try:
        with subprocess.Popen(["docker", "save", IMAGE], stdout=subprocess.PIPE) as save:
            load = ["docker", "--host", engine.url, "load"]
            subprocess.run(load, stdin=save.stdout, check=True, capture_output=True)
        yield engine
    finally:
        engine.remove()


@pytest.fixture
def engine(own_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("DOCKER_HOST", own_engine.url)
    return own_engine


def test_an_engine_that_dies_in_mid_call_is_a_fault_and_idle_sandboxes_go_on(
    engine: Engine,
) -> None:
    """F052 and F104, with --live-restore."""
    options = config(memory_mb=129, warm=1)

    async def main() -> None:
        async with leased(options) as idle, leased(options) as busy:
            await idle.python("x = 41")
            await idle.write_file("file", "kept")
            call = asyncio.create_task(busy.exec("sleep 60", timeout=50))
            await asyncio.sleep(0.3)
            engine.kill()
            died = time.monotonic()
            with pytest.raises(SandboxUnavailable, match="lost"):
                await call
            with pytest.raises(SandboxUnavailable):
                await busy.exec("true")
            assert time.monotonic() - died < 3
            # An episode that begins meanwhile waits for the engine.
            later = Lease(options)
            acquiring = asyncio.create_task(later.acquire())
            await asyncio.sleep(0.3)
            await asyncio.to_thread(engine.start)
            assert (await idle.python("x + 1")).stdout == "42\n"
            assert await idle.read_file("file") == b"kept"
            await acquiring
            assert (await later.sandbox.python("1 + 1")).stdout == "2\n"
            await later.release()

    play(main)
    assert engine.client.containers.list(all=True) == []


def test_sandboxes_that_end_with_their_engine_are_faults_and_are_replaced(engine: Engine) -> None:
    """F052, without --live-restore; spare ones that were lost are not handed out."""
    options = config(memory_mb=130, warm=2)

    async def main() -> None:
        async with leased(options) as idle:
            await idle.python("x = 41")
            await asyncio.sleep(0.5)  # the spare ones start
            engine.kill()
            await asyncio.to_thread(lambda: engine.start(live_restore=False))
            with pytest.raises(SandboxUnavailable, match="lost"):
                await idle.python("x + 1")
            async with leased(options) as other:
                assert (await other.python("1 + 1")).stdout == "2\n"

    play(main)
    assert engine.client.containers.list(all=True) == []


def test_an_engine_may_be_reached_by_tcp(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
    if not Path(path).is_socket():
        pytest.skip("the engine is not at a local socket, to put a port before it")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine_reader, engine_writer = await asyncio.open_unix_connection(path)
        await asyncio.gather(pump(reader, engine_writer), pump(engine_reader, writer))

    async def main() -> None:
        server = await asyncio.start_server(forward, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{port}")
            backend = Docker(config(memory_mb=136))
            await backend.open()
            sandbox = WorkerSandbox(backend.wall(), backend.config)
            await sandbox.start()
            assert (await sandbox.python("'x' * 3")).stdout == "'xxx'\n"
            await sandbox.close()
            await backend.close()

    play(main)


@pytest.mark.parametrize("kind", ["nothing", "a dead socket"])
def test_an_engine_that_is_not_there_is_said_before_a_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F104."""
    path = tmp_path / "docker.sock"
    if kind == "a dead socket":
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")

    class Env(SandboxedEnv):
        def make_tools(self, lease: Lease) -> list[Any]:
            return []

    env = Env(sandbox={"level": "docker", "image": f"{kind.replace(' ', '-')}"})
    start = time.monotonic()
    with pytest.raises(EnvNotFound, match=f"no Docker engine answers at {path}"):
        env.preflight()
    assert time.monotonic() - start < 2


def test_auto_says_why_it_is_not_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_level(SandboxConfig(level="bubblewrap"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    level, line = resolve(SandboxConfig(memory_mb=131))
    assert level == "bubblewrap"
    assert f"not docker: no Docker engine answers at {tmp_path}/docker.sock" in line


def test_auto_is_docker_where_the_engine_has_the_image(client: Any) -> None:
    level, line = resolve(config(level="auto"))
    assert level == "docker"
    assert f"image {IMAGE}" in line
    level, line = "", ""
    with contextlib.suppress(SandboxUnavailable):  # no bubblewrap here
        level, line = resolve(config(level="auto", image="no-such-image:1"))
        assert "not docker: the engine has no image no-such-image:1: docker pull" in line
    assert level != "docker"


OWNER = """
import asyncio, sys
from tools.sandbox.pool import Lease
from tools.sandbox.protocol import SandboxConfig

async def main():
    for _ in range(3):
        lease = Lease(SandboxConfig.model_validate_json(sys.argv[1]))
        await lease.acquire()
        await lease.sandbox.exec("sleep 7171718 &")
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_what_a_killed_owner_left_ends_at_once_and_is_removed_by_the_next(client: Any) -> None:
    """F098: its containers, and no others."""
    command = [sys.executable, "-c", OWNER, config(memory_mb=132).model_dump_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)

    def left() -> list[Any]:
        named = client.containers.list(all=True, filters={"name": f"agentrl-{process.pid}-"})
        return [container.status for container in named]

    assert eventually(lambda: left() == ["exited"] * 3)
    foreign = {
        "another": client.containers.create(IMAGE, "true", name=f"agentrl-{2**22 + 1}-1-test"),
        "elsewhere": client.containers.create(
            IMAGE, "true", name=f"agentrl-{2**22 + 1}-2-test", labels={"agentrl.host": "elsewhere"}
        ),
    }

    async def main() -> None:
        async with leased(config()) as living:
            backend = Docker(config(memory_mb=133))
            await backend.open()
            await backend.close()
            assert (await living.exec("echo alive")).stdout == "alive\n"

    try:
        play(main)
        assert left() == []
        for container in foreign.values():
            container.reload()
    finally:
        for container in foreign.values():
            container.remove()


def test_no_network_is_made_and_no_output_kept(client: Any) -> None:
    """F103."""
    before = {network.id for network in client.networks.list()}

    async def main() -> None:
        async with leased(config()), leased(config()):
            mine = client.containers.list(filters={"name": owner()})
            assert len(mine) == 2
            for container in mine:
                assert container.attrs["HostConfig"]["NetworkMode"] == "none"
                assert container.attrs["HostConfig"]["LogConfig"]["Type"] == "none"
            assert {network.id for network in client.networks.list()} == before

    play(main)
    assert client.containers.list(all=True, filters={"name": owner()}) == []


def test_a_start_that_is_given_up_leaves_no_container(client: Any) -> None:
    async def main() -> None:
        backend = Docker(config())
        await backend.open()
        for delay in (0.0, 0.01, 0.03, 0.1):
            sandbox = WorkerSandbox(backend.wall(), config())
            starting = asyncio.create_task(sandbox.start())
            await asyncio.sleep(delay)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await sandbox.close()
        await backend.close()

    play(main)
    assert client.containers.list(all=True, filters={"name": owner()}) == []


def test_memory_that_ends_the_worker_itself_is_the_policys_fault(client: Any) -> None:
    """F099: files count, and a sandbox without memory for its worker is started anew."""

    async def main() -> None:
        async with leased(config(memory_mb=64, disk_mb=64)) as sandbox:
            for folder in ("/work", "/tmp", "/dev/shm"):
                result = await sandbox.exec(f"head -c 60M /dev/zero > {folder}/big")
                if result.lost_state:
                    break
            assert result.exit_code == -9
            assert "used more than its 64 MB of memory" in result.stderr
            assert (await sandbox.exec("ls /work; echo alive")).stdout == "alive\n"

    play(main)


def test_an_image_is_built_from_a_dockerfile_or_its_folder(client: Any, tmp_path: Path) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(
        f"FROM {IMAGE}\nVOLUME /data\nENTRYPOINT sleep\nENV X=built\nHEALTHCHECK CMD true\n"
    )
    volumes = len(client.volumes.list())

    async def main() -> None:
        for path in (dockerfile, tmp_path):
            async with leased(config(image=str(path))) as sandbox:
                assert (await sandbox.exec("echo $X")).stdout == "built\n"
                assert (await sandbox.exec("echo > /data/x")).exit_code != 0
                assert len(client.volumes.list()) == volumes  # a volume is on the host's disk

    play(main)
    dockerfile.write_text(f"FROM {IMAGE}\nRUN echo swordfish; false\n")
    with pytest.raises(SandboxUnavailable, match=r"(?s)Dockerfile cannot be built.*swordfish"):
        resolve(config(image=str(tmp_path), memory_mb=134))


def test_an_image_is_imported_once_from_a_root_file_system(client: Any, tmp_path: Path) -> None:
    tar = tmp_path / "root.tar"
    container = client.containers.create(IMAGE, "true")
    with tar.open("wb") as file:
        file.writelines(container.export())
    container.remove()

    async def main() -> None:
        async with leased(config(image=str(tar))) as sandbox:
            assert (await sandbox.python("1 + 1")).stdout == "2\n"

    play(main)
    imported = client.images.list("agentrl-sandbox")
    play(main)
    assert client.images.list("agentrl-sandbox") == imported
    newest = max(imported, key=lambda image: image.attrs["Created"])
    client.images.remove(newest.id)


def test_an_image_that_cannot_be_had_is_an_error_that_says_so(client: Any, tmp_path: Path) -> None:
    with pytest.raises(
        SandboxUnavailable, match=r"no-such/image.* is not here and cannot be pulled"
    ):
        resolve(config(image="127.0.0.1:1/no-such/image:1"))
    with pytest.raises(SandboxUnavailable, match=r"there is no file .*none\.tar"):
        resolve(config(image=str(tmp_path / "none.tar")))
    with pytest.raises(SandboxUnavailable, match="is no Dockerfile, nor has one in it"):
        resolve(config(image=str(tmp_path)))
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    with pytest.raises(SandboxUnavailable, match="there is no python3 in the image"):
        resolve(config(image=str(tmp_path), memory_mb=135))


def test_of_what_comes_over_the_connection_only_stdout_is_read() -> None:
    def frame(kind: int, data: bytes) -> bytes:
        return bytes([kind, 0, 0, 0]) + len(data).to_bytes(4, "big") + data

    head = b"HTTP/1.1 101 UPGRADED\r\nUpgrade: tcp\r\n\r\n"
    stream = io.BytesIO(
        head + frame(1, b"one ") + frame(2, b"error") + frame(1, b"") + frame(1, b"two\n")
    ).getvalue()

    async def read(size: int) -> bytes:
        reader = asyncio.StreamReader()
        attached = Attached(reader)
        for start in range(0, len(stream), size):
            attached.data_received(stream[start : start + size])
        attached.connection_lost(None)
        return await reader.read()

    for size in (1, 3, 8, 9, 50, 1000):
        assert asyncio.run(read(size)) == b"one two\n"
