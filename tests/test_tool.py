"""Tools: schema, argument checks, outcomes, deadlines."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.threads import DeadlineExceeded, num_abandoned_threads, run_in_thread
from agentrl.tool import Tool, ToolOutcome, ToolResult, to_text, tool


@tool
def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> str:
    """The weather of the
    next days.

    Args:
        city: Where, 北京 for
            example.
        days: How many.

    Returns:
        a text
    """
    return f"{city} {days} {unit}"


def run(made: Tool, arguments: Any) -> ToolResult:
    return asyncio.run(made(arguments))


def test_signature_and_docstring_become_the_schema():
    assert weather.schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of the next days.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where, 北京 for example."},
                    "days": {"type": "integer", "description": "How many."},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                },
                "required": ["city"],
            },
        },
    }


def test_defaults_of_the_function_hold():
    assert run(weather, {"city": "Rome"}) == ToolResult(content="Rome 1 C")


def test_tool_without_parameters_is_called_without_arguments():
    """F038."""

    @tool
    def now() -> int:
        """The time."""
        return 12

    assert now.schema["function"]["parameters"] == {"type": "object", "properties": {}}
    assert run(now, {}) == ToolResult(content="12")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"n": "five"}, "n: Input should be a valid integer"),
        ([1], "arguments: Input should be a valid dictionary"),
        ({"n": float("nan")}, "n: Input should be a finite number"),
        ({}, "n is missing"),
        ({"n": 1, "m": 2}, "m is no argument"),
        ({"n": 1, "x": float("inf")}, "x: Input should be a finite number"),
    ],
)
def test_bad_arguments_are_named_and_the_tool_does_not_run(arguments: Any, said: str):
    """F040, F043."""
    ran = []

    @tool
    def count(n: int, x: float = 0.0) -> None:
        """Count."""
        ran.append(n)

    result = run(count, arguments)
    assert result.outcome == ToolOutcome.BAD_ARGUMENTS
    assert said in result.content
    assert "count takes: n (integer)" in result.content
    assert not ran


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("as it is", "as it is"),
        ("cut \ud800", "cut ?"),
        (None, ""),
        ({"a": 1}, '{"a": 1}'),
        (3.0, "3.0"),
        (True, "true"),
        (b"\xff", "\ufffd"),
        (["北京"], '["北京"]'),
        (Path("x"), '"x"'),
        ({(1, 2): 3}, '{"1,2": 3}'),
    ],
)
def test_any_result_becomes_text(result: Any, text: str):
    """F044."""
    assert to_text(result) == text


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ).filter(lambda value: isinstance(value, list | dict))
)
def test_json_results_can_be_read_back(value: Any):
    assert json.loads(to_text(value)) == value


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("division by zero"), SystemExit(3), TimeoutError("host")]
)
def test_an_exception_is_an_observation_and_no_success(error: BaseException):
    """F044, F053: a TimeoutError of the tool's own is no time-out of ours."""

    @tool
    def fails() -> None:
        """Fail."""
        raise error

    assert run(fails, {}) == ToolResult(
        content=f"Error: {type(error).__name__}: {error}", outcome=ToolOutcome.ERROR
    )


def test_a_tool_can_say_itself_that_it_failed():
    """F053."""

    @tool
    async def shell() -> ToolResult:
        """Run."""
        return ToolResult(content="exit 1", outcome=ToolOutcome.ERROR)

    assert run(shell, {}).outcome == ToolOutcome.ERROR


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_tool_that_hangs_is_answered_at_its_deadline(asynchronous: bool):
    """F024."""
    release = threading.Event()

    def blocks() -> None:
        """Hang."""
        release.wait()

    async def waits() -> None:
        """Hang."""
        await asyncio.sleep(60)

    hung = Tool(waits if asynchronous else blocks, timeout_s=0.05)
    before = num_abandoned_threads()
    result = run(hung, {})
    assert result.outcome == ToolOutcome.TIMEOUT
    assert "0.05 s" in result.content
    assert num_abandoned_threads() == before + (not asynchronous)
    release.set()
    deadline = time.monotonic() + 5
    while num_abandoned_threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_abandoned_threads() == before


def test_hung_threads_take_no_capacity_and_do_not_hold_up_the_exit():
    code = """
import asyncio, threading
from agentrl.tool import tool
@tool(timeout_s=0.01)
def hangs():
    "Hang."
    threading.Event().wait()
@tool
def works():
    "Work."
    return "ok"
async def main():
    await asyncio.gather(*(hangs({}) for _ in range(100)))
    print((await works({})).content)
asyncio.run(main())
"""
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_cancelling_the_caller_leaves_the_thread_behind_and_counts_it():
    """F026."""
    release = threading.Event()
    before = num_abandoned_threads()

    async def main() -> None:
        waiting = asyncio.create_task(run_in_thread(release.wait, timeout_s=60))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert num_abandoned_threads() == before + 1
        release.set()

    asyncio.run(main())


def test_run_in_thread_returns_raises_and_keeps_its_deadline():
    async def main() -> None:
        assert await run_in_thread(divmod, 7, 2, timeout_s=5) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await run_in_thread(divmod, 7, 0, timeout_s=5)
        with pytest.raises(DeadlineExceeded, match=r"sleep did not return within 0\.01 s"):
            await run_in_thread(time.sleep, 0.2, timeout_s=0.01)

    asyncio.run(main())


def test_a_blocking_tool_does_not_stall_the_loop_and_an_inline_one_needs_no_thread():
    """F023."""

    @tool
    def blocks() -> int:
        """Block."""
        time.sleep(0.4)
        return threading.get_ident()

    @tool(inline=True)
    def quick() -> int:
        """Be quick."""
        return threading.get_ident()

    async def main() -> None:
        started = time.perf_counter()
        results = await asyncio.gather(*(blocks({}) for _ in range(8)))
        assert time.perf_counter() - started < 2.4  # one after another: 3.2 s
        assert str(threading.get_ident()) not in {result.content for result in results}
        assert (await quick({})).content == str(threading.get_ident())

    asyncio.run(main())


def test_bound_methods_keep_their_object():
    class Counter:
        count = 0

        def add(self, n: int) -> int:
            """Add."""
            self.count += n
            return self.count

    counter = Counter()
    add = tool(counter.add)
    run(add, {"n": 2})
    assert run(add, {"n": 3}).content == "5"
    with pytest.raises(TypeError, match=r"tool\(self\.method\)"):
        tool(Counter.add)


def test_a_function_that_says_too_little_is_no_tool():
    def silent(x: int) -> None: ...

    def untyped(x) -> None:
        """Doc."""

    def spread(*xs: int) -> None:
        """Doc."""

    with pytest.raises(TypeError, match="silent needs a docstring"):
        tool(silent)
    with pytest.raises(TypeError, match="'x' needs a type"):
        tool(untyped)
    with pytest.raises(TypeError, match="cannot be given by name"):
        tool(spread)


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "deep": {"$ref": "#/$defs/deep"}},
    "required": ["n"],
    "additionalProperties": False,
    "$defs": {"deep": {"type": "object", "properties": {"x": {"type": "number"}}}},
}


def described(parameters: dict[str, Any]) -> Tool:
    async def count(**arguments: Any) -> Any:
        return arguments

    return Tool.from_schema(count, name="count", description="Count.", parameters=parameters)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"n": "5"}, "n: '5' is not of type 'integer'"),
        ([1], "they must be an object"),
        ({"n": 5, "deep": {"x": float("nan")}}, "NaN"),
        ({}, "'n' is a required property"),
        ({"n": 1, "m": 2}, "'m' was unexpected"),
        ({"n": 1, "deep": {"x": "y"}}, "deep.x: 'y' is not of type 'number'"),
    ],
)
def test_a_foreign_schema_checks_arguments_as_it_says(arguments: Any, said: str):
    """F043."""
    result = run(described(SCHEMA), arguments)
    assert result.outcome == ToolOutcome.BAD_ARGUMENTS
    assert said in result.content
    assert "count takes: n (integer), deep" in result.content


def test_a_foreign_schema_is_what_the_model_reads():
    made = described(SCHEMA)
    assert made.schema["function"] == {
        "name": "count", "description": "Count.", "parameters": SCHEMA
    }  # fmt: skip
    assert run(made, {"n": 1, "deep": {"x": 1}}).content == '{"n": 1, "deep": {"x": 1}}'
    with pytest.raises(ValueError, match="tool count: its parameters are no JSON schema"):
        described({"type": "nonsense"})
