"""The file tools: view, create and replace, in the work folder alone."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.tool import ToolOutcome, ToolResult
from tests.sandboxes import Leased, LoopThread
from tools.files import file_tools


@pytest.fixture
def call(sandbox: Leased, sandbox_loop: LoopThread) -> Any:
    """A function that calls a file tool by its name."""
    tools = {tool.name: tool for tool in file_tools(sandbox.lease)}

    def run(name: str, **arguments: Any) -> ToolResult:
        return sandbox_loop.run(tools[name](arguments))

    return run


def test_a_file_is_created_edited_and_viewed(call: Any):
    assert call("create", path="a/b.txt", content="one\ntwo\nthree\n").content == (
        "a/b.txt: 3 lines written"
    )
    assert call("replace", path="a/b.txt", old="two\nth", new="2\nTh").content == (
        "a/b.txt: replaced at line 2"
    )
    assert call("view", path="a/b.txt").content == "     1\tone\n     2\t2\n     3\tThree"
    assert call("view", path="a/b.txt", start_line=2, end_line=2).content == "     2\t2"
    assert call("view", path="a").content == "b.txt\n"


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ("two", "old is 2 times in f, not once; give more of the lines around it"),
        ("Two", "old is 0 times in f, not once; it must match exactly"),
        ("", "old is 0 times in f"),
    ],
)
def test_what_is_replaced_must_be_there_once(call: Any, old: str, said: str):
    call("create", path="f", content="two and two")
    result = call("replace", path="f", old=old, new="x")
    assert result.outcome == ToolOutcome.ERROR
    assert said in result.content
    assert call("view", path="f").content == "     1\ttwo and two"


@pytest.mark.parametrize(("first", "last"), [(3, None), (0, 1), (2, 1)])
def test_lines_that_are_not_there_are_named(call: Any, first: int, last: int | None):
    call("create", path="f", content="a\nb")
    result = call("view", path="f", start_line=first, end_line=last)
    assert result.outcome == ToolOutcome.ERROR
    assert "f has lines 1 to 2" in result.content


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "link/x"])
def test_no_path_leads_out_of_the_work_folder(call: Any, sandbox: Leased, path: str):
    sandbox.exec("ln -s /tmp link; touch /tmp/x")
    for name, arguments in [
        ("view", {}),
        ("create", {"content": "x"}),
        ("replace", {"old": "x", "new": "y"}),
    ]:
        result = call(name, path=path, **arguments)
        assert result.outcome == ToolOutcome.ERROR
        assert "outside of the work folder" in result.content


def test_bytes_that_are_no_text_survive_an_edit(call: Any, sandbox: Leased):
    """F101."""
    sandbox.write_file("f", b"\xff old \xfe")
    call("replace", path="f", old="old", new="n\u00e9w")
    assert sandbox.read_file("f") == b"\xff n\xc3\xa9w \xfe"
    assert call("view", path="f").content == "     1\t\ufffd n\u00e9w \ufffd"
