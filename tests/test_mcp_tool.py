"""Tools of a real MCP server, over stdio and over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agentrl.env import EnvNotFound
from agentrl.tool import Tool, ToolOutcome, ToolResult, Unavailable
from tests.sandboxes import eventually
from tools import mcp as client
from tools.mcp import MCPServer

pytest.importorskip("mcp.client.client", reason="needs mcp 2")

SERVER = """
import asyncio, os, subprocess, sys, time
from mcp.server.mcpserver import Image, MCPServer
server, count = MCPServer("test"), 0

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

@server.tool()
def next_number() -> int:
    "Count."
    global count
    count += 1
    return count

@server.tool()
def fails() -> str:
    "Fail."
    raise ValueError("no luck")

@server.tool()
async def waits(seconds: float) -> str:
    "Wait."
    await asyncio.sleep(seconds)
    return "done"

@server.tool()
async def hangs() -> None:
    "Hang, and everything with it."
    time.sleep(60)

@server.tool()
def dies() -> None:
    "End the server."
    os._exit(3)

@server.tool()
def leaves() -> int:
    "Leave a process behind, in a session of its own."
    return subprocess.Popen(["sleep", "60"], start_new_session=True).pid

@server.tool()
def picture():
    "Show a picture."
    return [Image(data=b"abc", format="png"), "a cat"]

if sys.argv[1:]:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("mcp") / "server.py"
    file.write_text(SERVER)
    return [sys.executable, str(file)]


@pytest.fixture(scope="module", params=["stdio", "http"])
def where(request: pytest.FixtureRequest, command: list[str]) -> Iterator[str | list[str]]:
    """A command, or the url of a server that is there."""
    if request.param == "stdio":
        yield command
        return
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([*command, str(port)], stderr=subprocess.DEVNULL)

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    assert eventually(listens, 20)
    yield f"http://127.0.0.1:{port}/mcp"
    server.kill()
    server.wait()


def named(server: MCPServer) -> dict[str, Tool]:
    return {tool.name: tool for tool in server.tools()}


def keepers() -> list[psutil.Process]:
    """Of the servers that this process has started."""
    children = psutil.Process().children()
    return [child for child in children if "mcp_keeper.py" in " ".join(child.cmdline())]


def test_a_session_lists_calls_and_closes(where: str | list[str]):
    """F043, F044, F053: schemas are the server's, results are text, errors are no success."""
    server = MCPServer(where, timeout_s=0.4)
    tools = named(server)
    assert tools["add"].description == "Add two numbers."
    assert tools["add"].schema["function"]["parameters"]["required"] == ["a", "b"]

    async def main() -> dict[str, ToolResult]:
        await server.connect()
        calls = {
            "sum": tools["add"]({"a": 1, "b": 2}),
            "wrong": tools["add"]({"a": "x"}),
            "failed": tools["fails"]({}),
            "late": tools["waits"]({"seconds": 60}),
            "in time": tools["waits"]({"seconds": 0}),
            "picture": tools["picture"]({}),
        }
        results = dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
        results["after"] = await tools["add"]({"a": 2, "b": 2})
        await server.close()
        await server.close()
        return results

    results = asyncio.run(main())
    assert results["sum"] == ToolResult(content="3")
    assert results["wrong"].outcome == ToolOutcome.BAD_ARGUMENTS
    assert "a: 'x' is not of type 'integer'" in results["wrong"].content
    assert results["failed"].outcome == ToolOutcome.ERROR
    assert "no luck" in results["failed"].content
    assert results["late"] == ToolResult(
        content="Error: waits timed out after 0.4 s", outcome=ToolOutcome.TIMEOUT
    )
    assert results["in time"].content == "done"
    assert results["picture"].content == "[image: image/png]\na cat"
    assert results["after"].content == "4"


def test_a_command_is_a_server_of_the_sessions_own_that_ends_with_all_it_started(
    command: list[str],
):
    servers = [MCPServer(command) for _ in range(2)]

    async def main() -> tuple[list[str], int]:
        await asyncio.gather(*(server.connect() for server in servers))
        tools = [named(server) for server in servers]
        counted = [(await one["next_number"]({})).content for one in (*tools, *tools)]
        pid = int((await tools[0]["leaves"]({})).content)
        assert psutil.pid_exists(pid)
        await asyncio.gather(*(server.close() for server in servers))
        return counted, pid

    counted, pid = asyncio.run(main())
    assert counted == ["1", "1", "2", "2"]
    assert eventually(lambda: not psutil.pid_exists(pid))
    assert not keepers()


@pytest.mark.parametrize("tool", ["dies", "hangs"])
def test_a_server_that_dies_or_hangs_is_unavailable(
    command: list[str], tool: str, monkeypatch: pytest.MonkeyPatch
):
    """F052: the episode is a fault and is tried again, with a server of its own."""
    monkeypatch.setattr(client, "_PROBE_S", 0.3)
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.2)
    server = MCPServer(command, timeout_s=0.3)
    tools = named(server)

    async def main() -> None:
        await server.connect()
        with pytest.raises(Unavailable, match="does not answer"):
            await tools[tool]({})
        await server.close()
        with pytest.raises(Unavailable, match="no session"):
            await tools["add"]({"a": 1, "b": 1})

    asyncio.run(main())
    assert not keepers()


def test_a_server_ends_with_the_run_that_is_killed(command: list[str]):
    """F098."""
    code = f"""
import asyncio
from tools.mcp import MCPServer
async def main():
    server = MCPServer({command!r})
    await server.connect()
    print((await server._call("leaves")).content, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    root = Path(__file__).parents[1]
    run = subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    pid = int(run.stdout.readline())
    started = psutil.Process(run.pid).children(recursive=True)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert started
    assert eventually(lambda: not any(p.is_running() for p in (*started,)))
    assert eventually(lambda: not psutil.pid_exists(pid))


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("no-such-command", "No such file or directory"),
        ([sys.executable, "-c", "raise SystemExit('key missing')"], "key missing"),
        ("http://127.0.0.1:9/mcp", "connection attempts failed"),
    ],
)
def test_a_server_that_cannot_be_had_says_why(where: str | list[str], said: str):
    with pytest.raises(EnvNotFound, match=said):
        MCPServer(where).tools()
    with pytest.raises(Unavailable, match=said):
        asyncio.run(MCPServer(where).connect())


def test_a_connection_that_is_given_up_leaves_nothing(
    command: list[str], monkeypatch: pytest.MonkeyPatch
):
    """F026."""
    monkeypatch.setattr(client, "CONNECT_S", 0.3)
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.2)
    threads = threading.active_count()
    silent = MCPServer([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(Unavailable, match=r"no answer from .* within 0\.3 s"):
        asyncio.run(silent.connect())
    assert not keepers()
    assert threading.active_count() <= threads
