"""Fleets of servers: a fake launcher stands in for SGLang's, and one test has the real one."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
import pytest
from aiohttp import web

from agentrl.config import SGLangConfig
from agentrl.protocols import EngineDied
from rollout import server as fleets
from rollout.server import ConnectedFleet, SpawnedFleet, make_fleet
from tests.processes import assert_gone, descendants

LAUNCHER = Path(__file__).with_name("fake_launcher.py")
ROOT = LAUNCHER.parents[1]


@pytest.fixture
def python(tmp_path):
    """An interpreter that runs the fake launcher, whatever it is asked to run."""
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} {LAUNCHER} "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


@pytest.fixture
def started():
    """What this test has started and still runs; another's real server may be up beside it."""
    before = set(descendants())
    return lambda: [process for process in descendants() if process not in before]


def spawn(python, folder, *fake, num_servers=1, start_timeout_s=30.0):
    config = SGLangConfig(
        python=python,
        num_servers=num_servers,
        start_timeout_s=start_timeout_s,
        server_args=list(fake),
    )
    return SpawnedFleet(
        config,
        model_path="model",
        dtype="float32",
        context_tokens=128,
        max_requests=4,
        log_folder=folder,
    )


async def info_of(url):
    async with aiohttp.ClientSession() as http, http.get(f"{url}/model_info") as reply:
        return await reply.json()


def running(processes, word):
    """Those with `word` in their command line."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if word in process.cmdline():
                found.append(process)
    return found


def launchers_of(processes):
    return running(processes, str(LAUNCHER))


def test_fleets_side_by_side_share_no_port_and_leave_no_process(python, tmp_path, started, capfd):
    """F034."""

    async def run():
        one = spawn(python, tmp_path / "one", num_servers=2)
        other = spawn(python, tmp_path / "other", num_servers=2)
        await asyncio.gather(one.start(), other.start())
        urls = one.urls + other.urls
        assert len(set(urls)) == 4
        for url in urls:
            arguments = (await info_of(url))["arguments"]
            assert f"--port={url.rpartition(':')[2]}" in arguments
        processes = started()
        assert len(launchers_of(processes)) == 4
        # Ctrl-C in the terminal reaches the trainer's session only.
        assert os.getsid(0) not in {os.getsid(p.pid) for p in processes}
        await asyncio.gather(one.close(), other.close())
        assert_gone(processes)
        assert not started()

    asyncio.run(run())
    told = [line for line in capfd.readouterr().out.splitlines() if line.startswith("sglang http")]
    assert len(told) == 4
    assert (
        "CPU · tensor parallel 1" in told[0] and str(tmp_path / "one" / "sglang-0.log") in told[0]
    )


def test_a_server_that_dies_at_start_is_reported_at_once_and_takes_the_others_along(
    python, tmp_path, started
):
    async def run():
        began = time.monotonic()
        fleet = spawn(python, tmp_path, "--fake=die", num_servers=2)
        with pytest.raises(EngineDied) as error:
            await fleet.start()
        assert time.monotonic() - began < 15
        assert not started()
        return str(error.value)

    said = asyncio.run(run())
    assert "ended with exit status 1" in said
    assert "MemoryError: CUDA out of memory" in said and "lower sglang.mem_fraction" in said


def test_a_server_that_never_answers_is_given_up_and_killed(
    python, tmp_path, started, capfd, monkeypatch
):
    monkeypatch.setattr(fleets, "REPORTS_S", (0.5,))

    async def run():
        fleet = spawn(python, tmp_path, "--fake=hang", start_timeout_s=2.0)
        with pytest.raises(EngineDied, match=r"start_timeout_s.*loading …"):
            await fleet.start()
        assert not started()

    asyncio.run(run())
    assert "does not answer yet, after 0.5 s" in capfd.readouterr().out


def test_a_server_that_was_killed_comes_back_at_the_same_url(python, tmp_path, started):
    """F037."""

    async def run():
        fleet = spawn(python, tmp_path, num_servers=2)
        await fleet.start()
        first, second = fleet.urls
        end = asyncio.create_task(fleet.ended(first))
        others_end = asyncio.create_task(fleet.ended(second))
        port = f"--port={first.rpartition(':')[2]}"
        (launcher,) = (p for p in launchers_of(started()) if port in p.cmdline())
        children = launcher.children()
        launcher.kill()
        assert "SIGKILL" in await asyncio.wait_for(end, 10)
        assert_gone([launcher, *children])
        await fleet.recover(first)
        assert fleet.urls == [first, second]
        assert port in (await info_of(first))["arguments"]
        assert not others_end.done()
        again = asyncio.create_task(fleet.ended(first))
        await asyncio.sleep(0.1)
        assert not again.done()
        await fleet.close()
        assert not started()
        await asyncio.gather(again, others_end)

    asyncio.run(run())


def test_a_server_that_keeps_dying_is_given_up(python, tmp_path, started, monkeypatch):
    monkeypatch.setattr(fleets, "BACKOFF_S", 0.01)

    async def run():
        state = tmp_path / "started"
        fleet = spawn(python, tmp_path, "--fake=die-again", f"--state={state}")
        await fleet.start()
        launchers_of(started())[0].kill()
        await fleet.ended(fleet.urls[0])
        with pytest.raises(EngineDied, match=r"restarted 3 times in a row(.|\n)*out of memory"):
            await fleet.recover(fleet.urls[0])
        await fleet.close()
        assert not started()

    asyncio.run(run())


def test_a_hung_server_is_killed_before_it_is_started_again(python, tmp_path, started):
    async def run():
        fleet = spawn(python, tmp_path)
        await fleet.start()
        before = started()
        launchers_of(before)[0].suspend()
        await fleet.recover(fleet.urls[0])
        assert_gone(before)
        assert await info_of(fleet.urls[0])
        await fleet.close()

    asyncio.run(run())


def test_a_cancelled_start_leaves_no_process(python, tmp_path, started):
    async def run():
        fleet = spawn(python, tmp_path, "--fake=hang", num_servers=2)
        start = asyncio.create_task(fleet.start())
        while len(launchers_of(started())) < 2:
            await asyncio.sleep(0.05)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert not started()

    asyncio.run(run())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_server_outlives_its_trainer(number, python, tmp_path):
    """F037."""
    script = f"""
import asyncio
from pathlib import Path
from agentrl.config import SGLangConfig
from rollout.server import SpawnedFleet

async def run():
    fleet = SpawnedFleet(
        SGLangConfig(python={python!r}, num_servers=2), model_path="m", dtype="float32",
        context_tokens=128, max_requests=4, log_folder=Path({str(tmp_path)!r}),
    )
    await fleet.start()
    print("ready", flush=True)
    await asyncio.sleep(1000)

asyncio.run(run())
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    for _ in range(3):
        line = trainer.stdout.readline()
    assert line == "ready\n"
    processes = descendants(trainer.pid)
    assert len(launchers_of(processes)) == 2 and len(processes) >= 8
    trainer.send_signal(number)
    trainer.wait()
    assert_gone(processes)


class Fake:
    """Some http servers in this process."""

    def __init__(self):
        self._runners = []

    async def serve(self, routes, port=0):
        app = web.Application()
        for path, answer in routes.items():

            async def handler(_, answer=answer):
                return web.json_response(answer)

            app.router.add_get(path, handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self._runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def close(self):
        for runner in self._runners:
            await runner.cleanup()


def connect(*urls, start_timeout_s=10.0):
    return make_fleet(
        SGLangConfig(mode="connect", urls=list(urls), start_timeout_s=start_timeout_s)
    )


@pytest.mark.parametrize("kind", ["new", "old", "none"])
def test_a_router_stands_for_its_workers(kind):
    async def run():
        fake = Fake()
        info = {"/model_info": {"weight_version": "default"}}
        workers = [await fake.serve(info), await fake.serve(info)]
        listed = [{"url": f"{url}/", "worker_type": "regular"} for url in workers]
        routes = {
            "new": {"/workers": {"workers": listed, "total": 2}, **info},
            "old": {"/list_workers": {"urls": workers}, **info},
            "none": info,
        }[kind]
        url = await fake.serve(routes)
        fleet = connect(f"{url}/")
        assert isinstance(fleet, ConnectedFleet)
        await fleet.start()
        assert fleet.urls == (workers if kind != "none" else [url])
        end = asyncio.create_task(fleet.ended(fleet.urls[0]))
        await asyncio.sleep(0.1)
        assert not end.done()
        end.cancel()
        await fleet.close()
        await fake.close()

    asyncio.run(run())


def test_workers_that_cannot_take_weights_are_refused():
    async def run():
        fake = Fake()
        worker = {"url": "http://127.0.0.1:9", "worker_type": "prefill"}
        url = await fake.serve({"/workers": {"workers": [worker]}})
        with pytest.raises(EngineDied, match=rf"{url} has a worker .*:9 \(prefill\)"):
            await connect(url).start()
        await fake.close()

    asyncio.run(run())


def test_connecting_waits_for_a_server_and_names_one_that_does_not_answer():
    async def run():
        fake = Fake()
        url = await fake.serve({"/model_info": {}})
        fleet = connect(url, start_timeout_s=1.0)
        await fake.close()
        with pytest.raises(EngineDied, match=rf"{url}.*running"):
            await fleet.start()
        with pytest.raises(EngineDied, match=url):
            await fleet.recover(url)
        waiting = asyncio.create_task(connect(url).start())
        await asyncio.sleep(0.7)
        assert not waiting.done()
        fake = Fake()
        await fake.serve({"/model_info": {}}, port=int(url.rpartition(":")[2]))
        await waiting
        await fake.close()

    asyncio.run(run())
