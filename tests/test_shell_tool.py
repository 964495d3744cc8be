"""The shell tool: a folder and variables that last, and how a command ended."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.tool import ToolOutcome, ToolResult
from tests.sandboxes import Leased, LoopThread
from tools.shell import shell_tool


@pytest.fixture
def shell(sandbox: Leased, sandbox_loop: LoopThread) -> Any:
    """A function that runs a command in the sandbox of this test."""
    tool = shell_tool(sandbox.lease, timeout_s=0.5)

    def run(command: str) -> ToolResult:
        return sandbox_loop.run(tool({"command": command}))

    return run


def test_folder_and_exported_variables_last(shell: Any):
    home = shell("pwd").content
    assert shell("mkdir d && cd d && export A='x  y\n\"$z' && B=not").content == "(no output)"
    assert shell('echo "$A"; echo "${B-none}"; pwd').content == f'x  y\n"$z\nnone\n{home}/d'
    assert shell("cd - >/dev/null; pwd").content == home


def test_a_time_out_leaves_folder_and_variables_as_they_were(shell: Any):
    """F106."""
    shell("mkdir d && cd d && export A=1")
    result = shell("export A=2; cd ..; echo so far; sleep 60")
    assert result.outcome == ToolOutcome.TIMEOUT
    assert result.content == (
        "so far\n[timed out after 0.5 s; folder and variables are as before it]"
    )
    assert shell("echo $A; basename $PWD").content == "1\nd"


@pytest.mark.parametrize(
    ("command", "content"),
    [
        ("exit 3", "[exit code 3]"),
        ("echo out; echo err >&2; false", "out\nerr\n[exit code 1]"),
    ],
)
def test_an_exit_code_that_is_not_0_is_shown_and_is_no_success(
    shell: Any, command: str, content: str
):
    """F053."""
    assert shell(command) == ToolResult(content=content, outcome=ToolOutcome.ERROR)


def test_state_is_kept_by_a_command_that_exits_and_by_one_that_is_no_shell(shell: Any):
    shell("export A=1; exit 1")
    assert shell("(").outcome == ToolOutcome.ERROR
    assert shell("echo $A").content == "1"


def test_a_folder_that_is_gone_is_said_once(shell: Any):
    home = shell("pwd").content
    shell("mkdir d; cd d; rmdir ../d")
    assert "No such file or directory" in shell("pwd").content
    assert shell("pwd").content == home


def test_errors_on_stderr_are_shown_where_all_went_well(shell: Any):
    assert shell("echo warning >&2") == ToolResult(content="warning")
