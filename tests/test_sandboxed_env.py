"""SandboxedEnv: a sandbox for each episode, and what becomes of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl.config_file import make_config
from agentrl.env import EnvNotFound
from agentrl.plan import ConfigError, require_time, tool_limits
from agentrl.types import Action, Message, StopReason, Task, ToolCall
from envs.sandboxed import SandboxedEnv
from tests.sandboxes import LoopThread
from tools.python import python_tool
from tools.sandbox.pool import Lease
from tools.sandbox.protocol import Sandbox, SandboxConfig, SandboxUnavailable


class Notebook(SandboxedEnv):
    def make_tools(self, lease: Lease) -> Any:
        return [python_tool(lease, timeout_s=0.3)]

    def tasks(self, split: str) -> Any:
        return [Task(id="0", prompt=(Message(role="user", content="Go."),), info={"n": "7"})]

    async def setup(self, sandbox: Sandbox) -> None:
        await sandbox.write_file("task.txt", self.task.info["n"])


def cells(*codes: str) -> Action:
    calls = tuple(
        ToolCall(id=f"c{place}", name="python", arguments={"code": code})
        for place, code in enumerate(codes)
    )
    return Action("…", content="", attempts=calls)


@pytest.fixture
def env(sandbox_config: SandboxConfig, sandbox_loop: LoopThread) -> Any:
    made = Notebook(sandbox=sandbox_config.model_dump())
    yield made
    sandbox_loop.run(made.close())


def test_cells_of_a_turn_run_in_order_beside_the_files_of_the_task(
    env: Notebook, sandbox_loop: LoopThread
):
    async def main() -> Any:
        await env.acquire()
        await env.reset(seed=0)
        return await env.step(cells("x = int(open('task.txt').read())", "x + 1"))

    answers, _, _, _, info = sandbox_loop.run(main())
    assert [answer.content for answer in answers] == ["(no output)", "8"]
    assert info["metrics"]["tool/python/ok"] == 2
    assert info["metrics"][f"sandbox/{env.sandbox_config.level}"] == 1.0
    assert info["metrics"]["sandbox/wait_s"] >= 0
    assert info["metrics"]["sandbox/restarts"] == 0


def test_a_reset_gives_another_sandbox_and_close_may_come_twice(
    env: Notebook, sandbox_loop: LoopThread
):
    async def main() -> Any:
        await env.reset(seed=0)
        first = env.lease.sandbox
        await env.step(cells("x = 1; open('left.txt', 'w').close()"))
        await env.reset(seed=0)
        assert env.lease.sandbox is not first
        answers, *_ = await env.step(cells("import os; os.listdir()", "x"))
        await env.close()
        await env.close()
        assert not env.lease.held
        return answers

    files, variable = sandbox_loop.run(main())
    assert files.content == "['task.txt']"
    assert "NameError" in variable.content


def test_what_is_acquired_is_what_reset_takes(env: Notebook, sandbox_loop: LoopThread):
    async def main() -> bool:
        await env.acquire()
        taken = env.lease.sandbox
        await env.reset(seed=0)
        return env.lease.sandbox is taken

    assert sandbox_loop.run(main())


def test_time_outs_in_the_sandbox_end_the_episode_after_some(
    env: Notebook, sandbox_loop: LoopThread
):
    """F106."""

    async def main() -> Any:
        await env.reset(seed=0)
        return await env.step(cells(*["while True: pass"] * 3))

    answers, _, terminated, _, info = sandbox_loop.run(main())
    assert "timed out after 0.3 s" in answers[-1].content
    assert terminated
    assert info["stop_reason"] == StopReason.TOOL_TIMEOUTS
    assert info["metrics"]["tool/python/timeout"] == 3


def test_a_sandbox_that_is_lost_rises_out_of_the_step(env: Notebook, sandbox_loop: LoopThread):
    """F052: a fault of the episode, and no answer to the model."""

    async def main() -> None:
        await env.reset(seed=0)
        await env.lease.sandbox.close()
        with pytest.raises(SandboxUnavailable):
            await env.step(cells("1", "2"))

    sandbox_loop.run(main())


def test_the_level_is_said_before_a_run(env: Notebook):
    (line,) = env.preflight()
    assert env.sandbox_config.level in line


def test_a_level_that_is_not_there_is_bad_input(monkeypatch: pytest.MonkeyPatch):
    """F104."""

    def resolve(config: SandboxConfig) -> None:
        raise SandboxUnavailable("there is no `bwrap`: apt install bubblewrap")

    monkeypatch.setattr("envs.sandboxed.resolve", resolve)
    with pytest.raises(EnvNotFound, match="apt install bubblewrap"):
        Notebook().preflight()


@pytest.mark.parametrize(
    ("sandbox", "said"),
    [
        ({"memory": 64}, r"unknown key sandbox\.memory; there are level, image, memory_mb"),
        ({"memory_mb": "64"}, r"sandbox\.memory_mb: .* integer .*\(got '64'\)"),
        ({"level": "none"}, r"sandbox\.level"),
    ],
)
def test_a_bad_key_is_named(sandbox: Any, said: str):
    with pytest.raises(ValueError, match=said):
        Notebook(sandbox=sandbox)


def test_tools_are_there_before_a_sandbox_and_need_one():
    env = Notebook()
    assert [tool.name for tool in env.tools] == ["python"]
    with pytest.raises(RuntimeError, match="no sandbox is held"):
        _ = env.lease.sandbox
    asyncio.run(env.close())


def test_calls_that_wait_for_each_other_must_fit_into_a_step():
    """F025."""
    env = Notebook(max_calls_per_turn=4)
    one_s = env.tools[0].timeout_s
    limits = tool_limits({"": env})
    assert limits == [("python", one_s), ("python, 4 calls in turn", 4 * one_s)]
    sections = {"model": {"name_or_path": "m"}, "env": {"id": "e"}}
    require_time(make_config(sections), limits)
    short = make_config(sections | {"rollout": {"env_timeout_s": 3 * one_s}})
    with pytest.raises(ConfigError, match="4 calls in turn may take"):
        require_time(short, limits)
