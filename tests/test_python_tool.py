"""The python tool: a notebook that lasts, and says how a cell ended."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.tool import ToolOutcome, ToolResult
from tests.sandboxes import Leased, LoopThread
from tools.python import observation, python_tool
from tools.sandbox.protocol import ExecResult


@pytest.fixture
def cell(sandbox: Leased, sandbox_loop: LoopThread) -> Any:
    """A function that runs a cell in the notebook of this test."""
    python = python_tool(sandbox.lease, timeout_s=0.5)

    def run(code: str) -> ToolResult:
        return sandbox_loop.run(python({"code": code}))

    return run


def test_variables_live_on_and_the_last_value_is_shown(cell: Any):
    assert cell("x = 20").content == "(no output)"
    assert cell("print('so:')\nx + 1") == ToolResult(content="so:\n21")


def test_code_that_raises_is_no_success_and_the_notebook_goes_on(cell: Any):
    """F053: the traceback shows the code's own lines and none of ours."""
    result = cell("x = 1\nprint('a')\n1/0")
    assert result.outcome == ToolOutcome.ERROR
    head, *traceback, last = result.content.split("\n")
    assert (head, last) == ("a", "ZeroDivisionError: division by zero")
    assert traceback[:3] == [
        "Traceback (most recent call last):", '  File "<cell 1>", line 3, in <module>', "    1/0"
    ]  # fmt: skip
    assert "worker" not in result.content
    assert cell("x").content == "1"


def test_a_time_out_shows_what_was_printed_the_limit_and_what_is_left(cell: Any):
    """F106."""
    result = cell("x = 5\nprint('a', flush=True)\nwhile True: pass")
    assert result.outcome == ToolOutcome.TIMEOUT
    assert result.content.startswith("a\n")
    assert result.content.endswith("[timed out after 0.5 s; variables are kept]")
    assert cell("x").content == "5"


def test_an_interpreter_that_is_killed_says_what_is_lost(cell: Any):
    cell("x = 1\nopen('kept.txt', 'w').write('here')")
    result = cell("import os\nos.kill(os.getpid(), 9)")
    assert result.outcome == ToolOutcome.ERROR
    assert "[ended by SIGKILL, as where memory runs out; variables are lost, files are kept]" in (
        result.content
    )
    assert "NameError" in cell("x").content
    assert cell("open('kept.txt').read()").content == "'here'"


def test_bytes_that_are_no_text_are_replaced(cell: Any):
    """F101."""
    assert cell("import os\nos.write(1, b'\\xff\\xfe\\n');").content.startswith("\ufffd\ufffd\n")


def test_a_sandbox_that_had_to_be_started_anew_is_not_said_to_keep_anything():
    result = ExecResult(exit_code=-9, stdout="", stderr="", lost_state=True, lost_files=True)
    said = observation(result, 1.0, kept="variables are lost, files are kept").content
    assert said == "[ended by SIGKILL, as where memory runs out; variables and files are lost]"
