"""Reasoning (`<think>…</think>`) and what follows it, told apart."""

from __future__ import annotations

import re

from agentrl.tool_calls import ToolCallParser
from agentrl.types import ToolCall

OPEN_THINK, CLOSE_THINK = "<think>", "</think>"
_MARK = re.compile(f"{OPEN_THINK}|{CLOSE_THINK}")


def split_reasoning(
    text: str, parser: ToolCallParser, *, opened: bool
) -> tuple[str | None, str | None]:
    """Cut an assistant's text after its last `</think>` that is no argument of a call.

    Args:
        opened: whether the prompt ended in `<think>`.

    Returns: the reasoning, None if there is none; and the rest, None if the reasoning never ended.
    """
    rest = at = 0
    inside = opened or text.lstrip().startswith(OPEN_THINK)
    calls: list[tuple[int, int]] | None = None  # in what follows `rest`
    while True:
        if inside:
            close = text.find(CLOSE_THINK, at)
            if close < 0:
                return _MARK.sub("", text).strip("\n"), None
            rest = at = close + len(CLOSE_THINK)
            calls = None
        mark = _MARK.search(text, at)
        if mark is None:
            break
        if calls is None:
            calls = _calls(text, rest, parser)
        end = next((end for start, end in calls if start < mark.start() < end), None)
        inside = end is None
        at = mark.start() if end is None else end
    if rest == 0:
        return None, text
    return _MARK.sub("", text[:rest]).strip("\n"), text[rest:].lstrip("\n")


def _calls(text: str, start: int, parser: ToolCallParser) -> list[tuple[int, int]]:
    return [
        (start + attempt.start, start + attempt.end)
        for attempt in parser.scan(text[start:])
        if isinstance(attempt.call, ToolCall)
    ]
