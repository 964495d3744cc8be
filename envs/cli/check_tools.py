"""Whether every tool of an env answers whatever it is called with, in time, and holds up nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

from agentrl.tool import Tool, ToolResult
from agentrl.types import Action, Message, ParseError, ToolCall
from envs.cli.subject import CheckFailed, Subject

DEADLINE_S = 2.0
"""Of one call, where the tool's own is longer."""
GRACE_S = 2.0
MAX_STALL_S = 0.5
"""So long may the event loop stand still: other episodes stand still with it."""

HOSTILE = {
    "string": ["", "../../etc/passwd", "'\"; \x00\n{}é漢", "x" * 20_000],
    "integer": [0, -1, 10**18],
    "number": [0.0, -1.5, 1e300],
    "boolean": [True, False],
    "array": [[]],
    "object": [{}],
}
NUM_ROUNDS = max(map(len, HOSTILE.values()))


async def check_tools(subject: Subject) -> str:
    """What was tried.

    Raises:
        CheckFailed: a tool raises, ignores its deadline, stops the event loop or is not answered.
    """
    num_calls = 0
    async with subject.game() as game:
        await game.begin(subject.tasks[0], seed=0)
        for tool in game.env.unwrapped.tools:
            tool.timeout_s = min(tool.timeout_s, DEADLINE_S)
            for arguments in _arguments(tool):
                await _call(tool, arguments)
                num_calls += 1
    async with subject.game() as game:
        await game.begin(subject.tasks[0], seed=0)
        name = game.env.unwrapped.tools[0].name
        wrong = (
            ToolCall(id="a", name=name, arguments={"no such argument": 1}),
            ToolCall(id="b", name="no_such_tool", arguments={}),
            ParseError(id="c", text="{", error="no JSON"),
        )
        answers = await game.act(Action("", attempts=wrong))
        _require_answers(answers, [attempt.id for attempt in wrong])
    return f"{num_calls} calls of {len(game.env.unwrapped.tools)} tools"


def example_turn(tool: Tool) -> Action:
    """A turn that calls `tool` as its schema allows."""
    *_, last = _arguments(tool)
    arguments = {name: v[:20] if isinstance(v, str) else v for name, v in last.items()}
    return Action("", attempts=(ToolCall(id="call_0", name=tool.name, arguments=arguments),))


def _arguments(tool: Tool) -> Iterator[dict[str, Any]]:
    """Bad ones, then such as the schema allows and nobody expects."""
    parameters = tool.schema["function"]["parameters"]
    required = {name: parameters["properties"][name] for name in parameters.get("required", ())}
    yield {"no such argument": 1}
    yield dict.fromkeys(required, object)
    for index in range(NUM_ROUNDS):
        yield {name: _hostile(schema, index) for name, schema in required.items()}


def _hostile(schema: dict[str, Any], index: int) -> Any:
    if "enum" in schema:
        return schema["enum"][index % len(schema["enum"])]
    values = HOSTILE.get(schema.get("type", "string"), [None])
    return values[index % len(values)]


async def _call(tool: Tool, arguments: dict[str, Any]) -> None:
    shown = f"{tool.name}({str(arguments)[:80]})"
    stalls: list[float] = []
    watch = asyncio.create_task(_watch(stalls))
    await asyncio.sleep(0)  # so that it watches already
    work = asyncio.ensure_future(tool(arguments))
    limit_s = tool.timeout_s + GRACE_S
    await asyncio.wait({work}, timeout=limit_s)
    await asyncio.sleep(0.02)  # so that it has seen the end
    watch.cancel()
    if not work.done():
        work.cancel()
        raise CheckFailed(
            f"{shown} took more than {limit_s:g} s, its deadline is {tool.timeout_s:g} s: let "
            "CancelledError rise"
        )
    if error := work.exception():
        raise CheckFailed(
            f"{shown} raised {type(error).__name__}: {error}; a tool answers in words, what it "
            "raises says that it is out of order"
        ) from error
    result = work.result()
    if not isinstance(result, ToolResult):
        raise CheckFailed(f"{shown} gave {type(result).__name__}, not a ToolResult")
    if max(stalls) > MAX_STALL_S:
        raise CheckFailed(
            f"{shown} held up the event loop for {max(stalls):.1f} s, and with it all episodes: "
            "make it a plain function, which runs in a thread"
        )


async def _watch(stalls: list[float]) -> None:
    while True:
        before = time.monotonic()
        await asyncio.sleep(0.01)
        stalls.append(time.monotonic() - before)


def _require_answers(answers: list[Message], ids: list[str]) -> None:
    answered = [message.tool_call_id for message in answers if message.role == "tool"]
    if answered != ids:
        raise CheckFailed(
            f"calls {ids} were answered as {answered}: every call needs its answer, in order"
        )
