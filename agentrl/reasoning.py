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
    while True:
        if inside:
            close = text.find(CLOSE_THINK, at)
            if close < 0:
                return _MARK.sub("", text).strip("\n"), None
            rest = at = close + len(CLOSE_THINK)
        mark = _MARK.search(text, at)
        if mark is None:
            break
        data_end = _end_of_call_around(mark.start() - rest, text[rest:], parser)
        inside = data_end is None
        at = mark.start() if data_end is None else rest + data_end
    if rest == 0:
        return None, text
    return _MARK.sub("", text[:rest]).strip("\n"), text[rest:].lstrip("\n")


def _end_of_call_around(index: int, text: str, parser: ToolCallParser) -> int | None:
    for attempt in parser.scan(text):
        if isinstance(attempt.call, ToolCall) and attempt.start < index < attempt.end:
            return attempt.end
    return None
