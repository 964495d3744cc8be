"""The SGLang servers of a run: a fleet started here and watched, or one that is connected to."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Any, Protocol

import aiohttp

from agentrl.config import SGLangConfig
from agentrl.protocols import EngineDied
from rollout.launch import (
    HOST,
    Launch,
    assign_gpus,
    begin_log,
    explain_end,
    find_interpreter,
    hold_port,
    last_line,
    launch_command,
    launch_environment,
)

logger = logging.getLogger("agentrl")

KEEPER = Path(__file__).with_name("keeper.py")
POLL_S, REQUEST_S = 0.5, 5.0
REPORTS_S = (15.0, 60.0, 180.0, 300.0)  # waits after which is said what is awaited
STOP_S = 15.0  # a keeper needs less, unless a process cannot be killed
MAX_RESTARTS, BACKOFF_S = 3, 1.0  # in a row; the pause before each is twice the one before
HEALTHY_S = 60.0  # a server that answered for so long is restarted as if it were the first time


class Fleet(Protocol):
    """Servers; `urls` is theirs from `start` on."""

    urls: list[str]

    async def start(self) -> None:
        """Wait until all answer.

        Raises:
            EngineDied: one does not, with the cause and what to do.
        """
        ...

    async def ended(self, url: str) -> str:
        """The cause, once the process of that server has ended."""
        ...

    async def recover(self, url: str) -> None:
        """Bring that server back, at the same url and with no weights of the run.

        Raises:
            EngineDied: it does not come back.
        """
        ...

    async def close(self) -> None:
        """Leave no process behind that `start` made."""
        ...


def make_fleet(config: SGLangConfig, **launch: Any) -> Fleet:
    """The fleet that `config.mode` says; `launch` are the fields of `Launch`."""
    return ConnectedFleet(config) if config.mode == "connect" else SpawnedFleet(config, **launch)


class SpawnedFleet:
    """Servers on this machine that end with this process, however it ends.

    Args:
        launch: the fields of `Launch`.

    Raises:
        ConfigError: SGLang is not installed, or the GPUs do not suffice.
    """

    def __init__(self, config: SGLangConfig, **launch: Any) -> None:
        self._config = config
        self._servers: dict[str, _Spawned] = {}
        run = Launch(**launch)
        run.log_folder.mkdir(parents=True, exist_ok=True)
        python = find_interpreter(config.python)
        for gpus in assign_gpus(config, run.gpus, num_learner_gpus=run.num_learner_gpus):
            ports = (hold_port(), hold_port())
            port, nccl_port = (holder.getsockname()[1] for holder in ports)
            url = f"http://{HOST}:{port}"
            self._servers[url] = _Spawned(
                url=url,
                gpus=gpus,
                ports=ports,
                command=launch_command(config, run, python=python, port=port, nccl_port=nccl_port),
                environment=launch_environment(
                    os.environ,
                    gpus=gpus,
                    learner_gpus=run.gpus[: run.num_learner_gpus],
                    model_path=run.model_path,
                ),
                log=run.log_folder / f"sglang-{len(self._servers)}.log",
            )
        self.urls = list(self._servers)

    async def start(self) -> None:
        for server in self._servers.values():
            print(server.describe(self._config), flush=True)
        deadline = time.monotonic() + self._config.start_timeout_s
        starting = [
            asyncio.create_task(server.start(deadline)) for server in self._servers.values()
        ]
        reports = asyncio.create_task(self._say_what_is_awaited())
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self.close()
            raise
        finally:
            reports.cancel()

    async def _say_what_is_awaited(self) -> None:
        began = time.monotonic()
        for after_s in REPORTS_S:
            await asyncio.sleep(began + after_s - time.monotonic())
            for server in self._servers.values():
                if server.answers_since is None:
                    print(
                        f"{server.url} does not answer yet, after {after_s:g} s; the end of "
                        f"{server.log}: {last_line(server.log)[:120]}",
                        flush=True,
                    )

    async def ended(self, url: str) -> str:
        return await self._servers[url].ended()

    async def recover(self, url: str) -> None:
        server = self._servers[url]
        deadline = time.monotonic() + self._config.start_timeout_s
        if server.answers_since and time.monotonic() - server.answers_since > HEALTHY_S:
            server.num_restarts = 0
        await server.stop()
        cause = server.explain()
        while server.num_restarts < MAX_RESTARTS:
            await asyncio.sleep(BACKOFF_S * 2**server.num_restarts)
            server.num_restarts += 1
            try:
                return await server.start(deadline)
            except EngineDied as error:
                cause = str(error)
                if time.monotonic() > deadline:
                    break
        raise EngineDied(f"restarted {server.num_restarts} times in a row and given up: {cause}")

    async def close(self) -> None:
        for server in self._servers.values():
            server.let_go()  # also when the wait is cancelled, the keepers see to the rest
        await asyncio.gather(*(server.stop() for server in self._servers.values()))
        for server in self._servers.values():
            for holder in server.ports:
                holder.close()


@dataclass(slots=True, kw_only=True, eq=False)
class _Spawned:
    """One server, the child of its keeper, which is the child of this process."""

    url: str
    gpus: list[int]
    ports: tuple[socket, socket]  # held, of HTTP and NCCL
    command: list[str]
    environment: dict[str, str]
    log: Path
    keeper: asyncio.subprocess.Process | None = None
    pipe: int | None = None  # the writing end of the keeper's stdin: it ends, all end
    answers_since: float | None = None
    num_restarts: int = 0  # in a row

    def describe(self, config: SGLangConfig) -> str:
        where = f"GPUs {', '.join(map(str, self.gpus))}" if self.gpus else "CPU"
        memory = "SGLang's choice" if config.mem_fraction is None else f"{config.mem_fraction:g}"
        return (
            f"sglang {self.url} · {where} · tensor parallel {config.tensor_parallel_size} · "
            f"memory fraction {memory} · log {self.log}"
        )

    async def start(self, deadline: float) -> None:
        """Return when it answers. Raises EngineDied, and leaves no process, when it does not."""
        self.answers_since = None
        try:
            await self._spawn()
            await self._until_it_answers(deadline)
        except BaseException:
            await self.stop()
            raise
        self.answers_since = time.monotonic()

    async def _spawn(self) -> None:
        reading_end, self.pipe = os.pipe()
        try:
            with self.log.open("ab") as log:
                begin_log(log, self.command)
                # A session of its own: the terminal's Ctrl-C is for whoever decides, not for it.
                self.keeper = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", str(KEEPER), *self.command),
                    stdin=reading_end,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self.environment,
                    start_new_session=True,
                )
        finally:
            os.close(reading_end)

    async def _until_it_answers(self, deadline: float) -> None:
        assert self.keeper is not None
        async with _http() as http:
            while not await _answers(http, self.url):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.keeper.wait(), POLL_S)
                    raise EngineDied(self.explain())
                if time.monotonic() > deadline:
                    raise EngineDied(
                        f"{self.url} did not answer within sglang.start_timeout_s; raise it if the "
                        f"server still makes progress. The end of {self.log}: {last_line(self.log)}"
                    )

    async def ended(self) -> str:
        assert self.keeper is not None
        await self.keeper.wait()
        return self.explain()

    def explain(self) -> str:
        assert self.keeper is not None and self.keeper.returncode is not None
        return f"{self.url} {explain_end(self.keeper.returncode, self.log)}"

    def let_go(self) -> None:
        """Tell the keeper to end it, and all that it started."""
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None

    async def stop(self) -> None:
        """Return when its processes are gone."""
        self.let_go()
        if self.keeper is None:
            return
        try:
            await asyncio.wait_for(self.keeper.wait(), STOP_S)
        except TimeoutError:
            logger.error("%s cannot be killed; its log: %s", self.url, self.log)
            self.keeper.kill()
            await self.keeper.wait()


class ConnectedFleet:
    """Servers that somebody else started, and ends; those behind a router are its workers."""

    def __init__(self, config: SGLangConfig) -> None:
        self.urls = [url.rstrip("/") for url in config.urls]
        self._config = config

    async def start(self) -> None:
        deadline = time.monotonic() + self._config.start_timeout_s
        async with _http() as http:
            found = [await self._find_servers(http, url, deadline) for url in self.urls]
            self.urls = list(dict.fromkeys(url for urls in found for url in urls))
            await asyncio.gather(
                *(self._until_it_answers(http, url, deadline) for url in self.urls)
            )

    async def _find_servers(
        self, http: aiohttp.ClientSession, url: str, deadline: float
    ) -> list[str]:
        """The url itself, or of the workers that a router there has; it is waited for the first."""
        while time.monotonic() < deadline:
            with suppress(aiohttp.ClientConnectionError, TimeoutError):
                workers = await _workers(http, url)
                if workers is None:
                    return [url]
                if workers:
                    return workers
            await asyncio.sleep(POLL_S)
        raise EngineDied(
            f"nothing answers at sglang.urls {url} after {self._config.start_timeout_s:g} s, or it "
            "is a router without workers; is it running, and can it be reached from this machine?"
        )

    async def _until_it_answers(
        self, http: aiohttp.ClientSession, url: str, deadline: float
    ) -> None:
        while not await _answers(http, url):
            if time.monotonic() > deadline:
                raise EngineDied(
                    f"the server at {url} does not answer /model_info after "
                    f"{self._config.start_timeout_s:g} s (sglang.start_timeout_s)"
                )
            await asyncio.sleep(POLL_S)

    async def ended(self, url: str) -> str:
        return await asyncio.get_running_loop().create_future()  # its process is not ours to see

    async def recover(self, url: str) -> None:
        deadline = time.monotonic() + self._config.start_timeout_s
        async with _http() as http:
            await self._until_it_answers(http, url, deadline)

    async def close(self) -> None:
        pass


def _http() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_S))


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    """Whether a server does; the route generates nothing, so a busy one answers too."""
    try:
        async with http.get(f"{url}/model_info") as reply:
            return reply.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _workers(http: aiohttp.ClientSession, url: str) -> list[str] | None:
    """The urls of a router's workers; None: it is no router.

    Raises:
        EngineDied: its workers cannot be used one by one.
    """
    for route in ("/workers", "/list_workers"):  # of newer routers, and of older ones
        async with http.get(url + route) as reply:
            if reply.status != 200:
                continue
            answer: dict[str, Any] = await reply.json()
        workers = answer.get("workers") or [{"url": worker} for worker in answer.get("urls", [])]
        for worker in workers:
            kind = worker.get("worker_type", "regular")
            if kind != "regular" or not worker["url"].startswith("http"):
                raise EngineDied(
                    f"the router at {url} has a worker {worker['url']} ({kind}); only regular ones "
                    "over HTTP can be given new weights"
                )
        return [worker["url"].rstrip("/") for worker in workers]
    return None
