"""File tools: view, create and replace in the work folder of the trajectory's sandbox."""

from __future__ import annotations

from agentrl.tool import Tool, ToolOutcome, ToolResult
from tools.python import ANSWER_S
from tools.sandbox.pool import Lease

MAX_BYTES = 1 << 20  # of a file that is viewed or edited
_TIMEOUT_S = 10.0


def file_tools(lease: Lease) -> list[Tool]:
    """The tools `view(path, start_line, end_line)`, `create(path, content)` and
    `replace(path, old, new)`; a path that leads out of the work folder is refused.
    """

    async def view(
        path: str, start_line: int | None = None, end_line: int | None = None
    ) -> str | ToolResult:
        """Show a text file with line numbers, or what is in a folder.

        Args:
            path: Relative to the work folder.
            start_line: The first line to show, from 1 on.
            end_line: The last line to show.
        """
        try:
            data = await lease.sandbox.read_file(path, max_bytes=MAX_BYTES + 1)
        except IsADirectoryError:
            listed = await lease.sandbox.exec(["ls", "-1Ap", "--", path], timeout=_TIMEOUT_S)
            return listed.stdout or listed.stderr or "(an empty folder)"
        text = data[:MAX_BYTES].decode(errors="replace")
        if text.startswith("\ufeff"):
            text = text[1:]
        lines = text.split("\n")
        if lines[-1] == "":
            lines.pop()
        if not lines:
            return "(an empty file)"
        first = 1 if start_line is None else start_line
        last = len(lines) if end_line is None else min(end_line, len(lines))
        if not 1 <= first <= last:
            return _error(f"{path} has lines 1 to {len(lines)}, not {first} to {end_line or last}")
        shown = [f"{number:>6}\t{lines[number - 1]}" for number in range(first, last + 1)]
        if len(data) > MAX_BYTES:
            shown.append(f"[of the file's first {MAX_BYTES} bytes]")
        return "\n".join(shown)

    async def create(path: str, content: str) -> str:
        """Write a file, in place of one that is there.

        Args:
            path: Relative to the work folder; missing folders are made.
            content: All of its text.
        """
        await lease.sandbox.write_file(path, content)
        return f"{path}: {len(content.splitlines())} lines written"

    async def replace(path: str, old: str, new: str) -> str | ToolResult:
        """Replace a piece of a text file.

        Args:
            path: Relative to the work folder.
            old: What is there now, exactly and with its line breaks; it must be there once.
            new: What comes in its place.
        """
        data = await lease.sandbox.read_file(path, max_bytes=MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            return _error(f"{path} has over {MAX_BYTES} bytes")
        piece = old.encode(errors="replace")
        found = data.count(piece) if piece else 0
        if found != 1:
            advice = "give more of the lines around it" if found else "it must match exactly"
            return _error(f"old is {found} times in {path}, not once; {advice}")
        await lease.sandbox.write_file(path, data.replace(piece, new.encode(errors="replace")))
        line = data[: data.index(piece)].count(b"\n") + 1
        return f"{path}: replaced at line {line}"

    return [
        Tool(function, timeout_s=_TIMEOUT_S + ANSWER_S, serial=True)
        for function in (view, create, replace)
    ]


def _error(text: str) -> ToolResult:
    return ToolResult(content=f"Error: {text}", outcome=ToolOutcome.ERROR)
