"""`python -m envs play` and `list`: a person or a server's model acts, and all is shown."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from envs.__main__ import main

ENV = '''
from agentrl import Message, Rubric, Task, tool
from envs.tool_env import ToolEnv


@tool(inline=True)
def double(n: int) -> int:
    """Twice a number."""
    return 2 * n


def correct(completion: str, answer: str) -> float:
    return float(completion == answer)


class Doubles(ToolEnv):
    tools = (double,)
    rubric = Rubric([correct])

    def tasks(self, split):
        return [Task(id="4", prompt=(Message(role="user", content="Twice 4?"),), answer="8")]

    def preflight(self):
        return ["all is there"]
'''


@pytest.fixture
def doubles(tmp_path: Path) -> str:
    (tmp_path / "doubles.py").write_text(ENV)
    return f"{tmp_path}/doubles.py:Doubles"


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_a_person_calls_tools_and_answers_line_by_line(
    doubles: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    typed(monkeypatch, 'double {"n": 4}', "double 4", "8")
    assert main(["play", doubles]) == 0
    output = capsys.readouterr().out
    assert output.startswith("all is there\ntool double")
    assert "-- user\nTwice 4?" in output
    assert "-- tool double\n8" in output
    assert "Error: arguments are a JSON object" in output
    assert output.endswith("== over\n   env: 0\n   correct: 1\n   reward: 1\n")


def test_the_end_of_the_input_leaves_the_episode(
    doubles: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    typed(monkeypatch)
    assert main(["play", doubles]) == 0
    assert "== left before the end" in capsys.readouterr().out


def test_a_row_that_is_not_there_is_bad_input(doubles: str, capsys: pytest.CaptureFixture[str]):
    assert main(["play", doubles, "--task", "1"]) == 2
    assert "has 1 training tasks; there is no 1" in capsys.readouterr().err


@pytest.fixture
def model() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that speaks OpenAI's protocol, and what it was asked."""
    asked: list[dict[str, Any]] = []

    async def complete(request: web.Request) -> web.Response:
        asked.append(await request.json())
        arguments = json.dumps({"n": 4})
        function = {"name": "double", "arguments": arguments}
        said: dict[str, Any] = (
            {"content": None, "reasoning_content": "I use it.", "tool_calls": [
                {"id": "a", "type": "function", "function": function}
            ]}
            if len(asked) == 1
            else {"content": "8"}
        )  # fmt: skip
        return web.json_response({"choices": [{"message": {"role": "assistant", **said}}]})

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[web.AppRunner, int]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, runner.addresses[0][1]

    runner, port = asyncio.run_coroutine_threadsafe(start(), loop).result()
    yield f"http://127.0.0.1:{port}/v1", asked
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_model_behind_a_server_plays_and_its_reasoning_is_shown(
    doubles: str,
    model: tuple[str, list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
):
    url, asked = model
    assert main(["play", doubles, "--url", url]) == 0
    output = capsys.readouterr().out
    assert '(thinks: I use it.)\n-> double {"n": 4}' in output
    assert output.endswith("reward: 1\n")
    assert asked[0]["tools"][0]["function"]["name"] == "double"
    assert [message["role"] for message in asked[1]["messages"]] == ["user", "assistant", "tool"]
    assert asked[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"n": 4}'


def test_a_server_that_is_away_is_said_in_a_line(doubles: str, capsys: pytest.CaptureFixture[str]):
    assert main(["play", doubles, "--url", "http://127.0.0.1:9/v1"]) == 1
    assert "no answer from http://127.0.0.1:9/v1" in capsys.readouterr().err


def test_the_list_has_a_line_for_each_env_and_scheme(capsys: pytest.CaptureFixture[str]):
    assert main(["list"]) == 0
    output = capsys.readouterr().out
    for name in (
        "agentrl/GSM8K-v0",
        "agentrl/FrozenLake-v0",
        "rg:gsm_symbolic",
        "mcp:",
        "openenv:",
    ):
        (line,) = [line for line in output.splitlines() if line.strip().startswith(name)]
        assert len(line.split()) > 2 or line.endswith("installed")
