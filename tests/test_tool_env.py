"""ToolEnv: every attempt answered, in order, whatever the policy writes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.tool import ToolResult, Unavailable, tool
from agentrl.types import Action, Message, ParseError, StopReason, Task, ToolCall
from envs.tool_env import ToolEnv, clip, demonstration
from tools.calculator import calc


def call(id: str, name: str = "calc", **arguments: Any) -> ToolCall:
    return ToolCall(id=id, name=name, arguments=arguments)


def acting(*attempts: ToolCall | ParseError) -> Action:
    return Action("…", content="", attempts=attempts)


class Env(ToolEnv):
    system_prompt = "Use calc."
    demonstrations = (
        demonstration("2*3?", [("calc", {"expression": "2*3"}, "6")], "It is 6."),
        demonstration("2*4?", [("calc", {"expression": "2*4"}, "8")], "It is 8."),
    )
    tools = (calc,)

    def tasks(self, split: str) -> Sequence[Task]:
        return [
            Task(id=f"{index}", prompt=(Message(role="user", content=f"{index}+1?"),))
            for index in range(50)
        ]


def play(env: ToolEnv, *actions: str) -> list[Any]:
    async def main() -> list[Any]:
        await env.reset(seed=0)
        return [await env.step(action) for action in actions]

    return asyncio.run(main())


def test_a_call_is_answered_and_an_answer_ends_the_episode():
    first, last = play(Env(), acting(call("c0", expression="2+3")), Action("It is 5."))
    assert first[0] == [Message(role="tool", content="5", tool_call_id="c0", name="calc")]
    assert first[1:4] == (0.0, False, False)
    assert first[4]["metrics"]["tool/calls"] == 1
    assert last[:4] == ([], 0.0, True, False)
    assert "stop_reason" not in last[4]


def test_a_plain_string_is_a_final_answer():
    ((_, _, terminated, _, _),) = play(Env(), "It is 5.")
    assert terminated


@pytest.mark.parametrize("text", ["", " \n"])
def test_saying_nothing_ends_the_episode_as_no_action(text: str):
    """F036."""
    ((_, _, terminated, _, info),) = play(Env(), Action(text))
    assert terminated
    assert info["stop_reason"] == StopReason.NO_ACTION


def test_a_turn_of_reasoning_alone_is_no_action():
    """F036, F039."""
    ((_, _, _, _, info),) = play(Env(), Action("<think>hm</think>", content="", reasoning="hm"))
    assert info["stop_reason"] == StopReason.NO_ACTION


def test_what_cannot_run_is_answered_in_words_and_counted():
    """F040, F041: nothing is repaired and run."""
    broken = ParseError(id="c0", text='{"a": [1, 2', error="the JSON is not closed")
    ((answers, _, terminated, _, info),) = play(
        Env(),
        acting(
            broken, call("c1", "solve", x=1), call("c2", formula="2"), call("c3", expression="1/0")
        ),
    )
    assert [answer.content for answer in answers] == [
        "Error: the JSON is not closed",
        "Error: no tool 'solve'; tools: calc",
        "Error: bad arguments: expression is missing; formula is no argument. "
        "calc takes: expression (string)",
        "Error: ZeroDivisionError: division by zero",
    ]
    assert [answer.tool_call_id for answer in answers] == ["c0", "c1", "c2", "c3"]
    assert not terminated
    assert info["metrics"] == {
        "tool/calls": 1,
        "tool/errors": 1,
        "tool/parse_errors": 1,
        "tool/unknown": 1,
        "tool/bad_arguments": 1,
        "tool/timeouts": 0,
        "tool/over_limit": 0,
        "tool/calc/ok": 0,
        "tool/calc/error": 1,
        "tool/calc/bad_arguments": 1,
        "tool/calc/timeout": 0,
    }


def test_calls_run_side_by_side_answer_in_order_and_end_at_the_limit():
    """F042."""
    finished = []
    second_done = asyncio.Event()

    @tool
    async def first() -> str:
        """Finish after the second."""
        await second_done.wait()
        finished.append("r1")
        return "r1"

    @tool
    async def second() -> str:
        """Finish first."""
        finished.append("r2")
        second_done.set()
        return "r2"

    class Two(Env):
        tools = (first, second)

    ((answers, _, _, _, info),) = play(
        Two(max_calls_per_turn=2),
        acting(call("a", "first"), call("b", "second"), call("c", "first")),
    )
    assert [answer.content for answer in answers] == [
        "r1",
        "r2",
        "Error: not executed: limit of 2 calls per turn",
    ]
    assert [answer.tool_call_id for answer in answers] == ["a", "b", "c"]
    assert finished == ["r2", "r1"]
    assert info["metrics"]["tool/over_limit"] == 1


@pytest.mark.parametrize("serial", [True, False])
def test_calls_of_serial_tools_run_one_after_another_in_the_order_written(serial: bool):
    """What a notebook's second cell uses was made by its first."""
    running, together = [], []

    @tool(serial=serial)
    async def cell(seconds: float) -> int:
        """Run a cell."""
        running.append(seconds)
        together.append(len(running))
        await asyncio.sleep(seconds)
        running.remove(seconds)
        return len(together)

    class Notebook(Env):
        tools = (cell,)

    attempts = [call(f"c{seconds}", "cell", seconds=seconds) for seconds in (0.02, 0.01, 0.0)]
    ((answers, *_),) = play(Notebook(), acting(*attempts))
    assert max(together) == (1 if serial else 3)
    if serial:
        assert [answer.content for answer in answers] == ["1", "2", "3"]


def test_a_tool_that_is_out_of_order_cancels_the_other_calls_and_rises():
    """F052: the episode is a fault, and nothing of its turn runs on."""
    ended = []

    @tool
    async def waits() -> None:
        """Wait."""
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.append("waits")

    @tool
    async def broken() -> None:
        """Break."""
        await asyncio.sleep(0.01)
        raise Unavailable("no sandbox")

    class Broken(Env):
        tools = (waits, broken)

    with pytest.raises(Unavailable, match="no sandbox"):
        play(Broken(), acting(call("a", "waits"), call("b", "broken")))
    assert ended == ["waits"]


def test_time_outs_are_answered_with_the_limit_and_end_the_episode_after_some():
    """F106."""
    release = threading.Event()

    @tool(timeout_s=0.02)
    def hangs() -> None:
        """Hang."""
        release.wait()

    class Hung(Env):
        tools = (hangs,)

    turns = play(Hung(max_tool_timeouts=3), *[acting(call("c", "hangs"))] * 3)
    release.set()
    assert "timed out after 0.02 s" in turns[0][0][0].content
    assert [turn[2] for turn in turns] == [False, False, True]
    assert turns[2][4]["stop_reason"] == StopReason.TOOL_TIMEOUTS
    assert turns[2][4]["metrics"]["tool/timeouts"] == 3


def test_errors_are_bounded_in_an_episode():
    """F040."""
    turns = play(Env(max_errors_per_episode=3), *[acting(call("c", "solve"))] * 3)
    assert [turn[2] for turn in turns] == [False, False, True]


def test_a_long_result_keeps_head_and_tail():
    """F100."""

    @tool
    def floods() -> ToolResult:
        """Flood."""
        return ToolResult(content="a" * 5000 + "z" * 5000)

    class Flood(Env):
        tools = (floods,)

    ((answers, *_),) = play(Flood(max_output_chars=100), acting(call("c", "floods")))
    content = answers[0].content
    assert len(content) <= 100
    assert content.startswith("aaa")
    assert content.endswith("zzz")
    assert "[9940 characters left out]" in content


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=300), st.integers(40, 200))
def test_clipping_never_exceeds_its_cap_and_leaves_short_text_alone(text: str, cap: int):
    clipped = clip(text, cap)
    assert len(clipped) <= cap
    if len(text) <= cap:
        assert clipped == text


def test_the_prompt_is_system_demonstrations_and_task():
    task = Task(id="t", prompt=(Message(role="user", content="9+9?"),))
    observation, _ = asyncio.run(Env(num_demonstrations=1).reset(seed=0, options={"task": task}))
    assert [message.role for message in observation] == [
        "system", "user", "assistant", "tool", "assistant", "user",
    ]  # fmt: skip
    assert observation[2].tool_calls[0].arguments == {"expression": "2*3"}
    assert observation[-1].content == "9+9?"
    assert len(asyncio.run(Env().reset(seed=0))[0]) == 10
    assert len(asyncio.run(Env(num_demonstrations=0).reset(seed=0))[0]) == 2
    with pytest.raises(ValueError, match="num_demonstrations is 3, but there are 2"):
        Env(num_demonstrations=3)


def test_the_seed_chooses_the_task():
    def question(seed: int) -> str:
        return asyncio.run(Env().reset(seed=seed))[0][-1].content

    assert question(1) == question(1)
    assert len({question(seed) for seed in range(20)}) > 10


def test_counts_begin_anew_with_each_episode():
    env = Env()
    play(env, acting(call("c", expression="1+1")))
    ((_, _, _, _, info),) = play(env, "done")
    assert info["metrics"]["tool/calls"] == 0


def test_tools_of_one_episode_may_keep_state_in_the_env():
    class Bank(ToolEnv):
        async def reset(self, *, seed=None, options=None):
            self.balance = 0
            self.tools = (tool(self.deposit),)
            return await super().reset(seed=seed, options=options)

        def deposit(self, amount: int) -> int:
            """Put money in."""
            self.balance += amount
            return self.balance

    turns = play(Bank(), *[acting(call("c", "deposit", amount=2))] * 2)
    assert turns[1][0][0].content == "4"
