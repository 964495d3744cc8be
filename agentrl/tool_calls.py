"""Tool-call parsers: how a model writes its calls in text, read by grammar and never repaired."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from agentrl.types import ParseError, ToolCall


class Attempt(NamedTuple):
    """The call attempt at `text[start:end]`."""

    start: int
    end: int
    call: ToolCall | ParseError


class ToolCallParser(Protocol):
    """One format of tool calls. Texts come without reasoning and without control tokens."""

    name: str
    separator: str  # between the calls of one turn

    def scan(self, text: str) -> list[Attempt]:
        """Every call attempt, in the order written, each readable or not; ids count "call_0", …"""
        ...

    def parse(self, text: str) -> tuple[str, tuple[ToolCall | ParseError, ...]]:
        """The text without its calls, and the attempts in order."""
        ...

    def format(self, call: ToolCall) -> str:
        """How the model writes `call`: `parse(format(call))` gives it back.

        Raises:
            ValueError: the format cannot write this call.
        """
        ...

    def describe(self, tools: Sequence[dict[str, Any]]) -> str:
        """What to tell the model about `tools` (OpenAI schemas) where the template does not."""
        ...


def make_parser(name: str, tools: Sequence[dict[str, Any]]) -> ToolCallParser:
    """The parser of the format `name`: "tag", "hermes", "llama3" or "none".

    Raises:
        ValueError: no such format; the message says which one is close.
    """
    if name not in _PARSERS:
        close = difflib.get_close_matches(name, _PARSERS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown tool_format {name!r}; known: {', '.join(_PARSERS)}.{hint}")
    return _PARSERS[name](tools)


class _Parser:
    name: str
    separator = "\n"

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        pass

    def scan(self, text: str) -> list[Attempt]:
        return []

    def parse(self, text: str) -> tuple[str, tuple[ToolCall | ParseError, ...]]:
        attempts = self.scan(text)
        return content_of(text, attempts), tuple(attempt.call for attempt in attempts)

    def format(self, call: ToolCall) -> str:
        raise ValueError(f"tool_format {self.name!r} writes no calls, so not {call.name!r}")

    def describe(self, tools: Sequence[dict[str, Any]]) -> str:
        return ""


def content_of(text: str, attempts: Sequence[Attempt]) -> str:
    """`text` without its call attempts."""
    if not attempts:
        return text
    starts = [*(attempt.start for attempt in attempts), len(text)]
    ends = [0, *(attempt.end for attempt in attempts)]
    pieces = [text[end:start] for end, start in zip(ends, starts, strict=True)]
    # Line breaks next to a call separate it; they are no part of what was said.
    return "".join([pieces[0].rstrip("\n"), *(piece.strip("\n") for piece in pieces[1:])])


class _Tag(_Parser):
    """`<calc>23*47</calc>`: the tag names the tool, which takes one required string."""

    name = "tag"

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        functions = [tool["function"] for tool in tools]
        self._parameter = {function["name"]: _only_parameter(function) for function in functions}
        names = "|".join(re.escape(name) for name in self._parameter)
        self._open = re.compile(f"<({names})>") if names else None

    def scan(self, text: str) -> list[Attempt]:
        attempts: list[Attempt] = []
        at = 0
        while self._open is not None and (tag := self._open.search(text, at)):
            name, id = tag[1], f"call_{len(attempts)}"
            parameter = self._parameter[name]
            close = text.find(f"</{name}>", tag.end())
            if close >= 0 and f"<{name}>" not in text[tag.end() : close]:
                end = at = close + len(name) + 3
                argument = text[tag.end() : close]
            else:
                at = tag.end()
                following = self._open.search(text, at)
                end = following.start() if following else len(text)
                argument = None
            written = text[tag.start() : end]
            call: ToolCall | ParseError
            if argument is None:
                call = ParseError(id=id, text=written, error=f"<{name}> is not closed by </{name}>")
            elif parameter is None:
                error = f"{name} does not take one text, so <{name}>…</{name}> cannot call it"
                call = ParseError(id=id, text=written, error=error)
            else:
                call = ToolCall(id=id, name=name, arguments={parameter: argument})
            attempts.append(Attempt(tag.start(), end, call))
        return attempts

    def format(self, call: ToolCall) -> str:
        parameter = self._parameter.get(call.name)
        value = call.arguments.get(parameter) if parameter else None
        tags = re.compile(f"</?{re.escape(call.name)}>")
        if len(call.arguments) != 1 or not isinstance(value, str) or tags.search(value):
            raise ValueError(f"tool_format 'tag' cannot write {call.name}({call.arguments})")
        return f"<{call.name}>{value}</{call.name}>"

    def describe(self, tools: Sequence[dict[str, Any]]) -> str:
        lines = ["To use a tool, write:"]
        for tool in tools:
            function = tool["function"]
            name, parameter = function["name"], self._parameter[function["name"]]
            if parameter is not None:
                about = function.get("description", "")
                lines.append(f"<{name}>{parameter}</{name}>" + (f" {about}" if about else ""))
        return "\n".join(lines)


def _only_parameter(function: dict[str, Any]) -> str | None:
    schema = function.get("parameters") or {}
    required = schema.get("required") or []
    if len(required) == 1 and schema["properties"][required[0]].get("type") == "string":
        return required[0]
    return None


class _Hermes(_Parser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen write it."""

    name = "hermes"
    _open, _close = "<tool_call>", "</tool_call>"

    def scan(self, text: str) -> list[Attempt]:
        attempts: list[Attempt] = []
        end = 0
        while (start := text.find(self._open, end)) >= 0:
            id = f"call_{len(attempts)}"
            after = start + len(self._open)
            try:
                value, stop = decode_json(text, _skip_space(text, after))
                stop = _skip_space(text, stop)
                if not text.startswith(self._close, stop):
                    raise ValueError(f"expected {self._close} after the JSON object")
                end = stop + len(self._close)
                call: ToolCall | ParseError = _to_call(id, value, ("arguments",))
            except ValueError as error:
                # Where the JSON ends is unknown: skip to the next close, so that nothing inside a
                # broken call is ever taken for a call of its own.
                close = text.find(self._close, after)
                end = close + len(self._close) if close >= 0 else len(text)
                call = ParseError(id=id, text=text[start:end], error=str(error))
            attempts.append(Attempt(start, end, call))
        return attempts

    def format(self, call: ToolCall) -> str:
        body = _dumps({"name": call.name, "arguments": call.arguments})
        return f"{self._open}\n{body}\n{self._close}"

    def describe(self, tools: Sequence[dict[str, Any]]) -> str:
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou "
            "are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
            + "\n".join(_dumps(tool) for tool in tools)
            + "\n</tools>\n\nFor each function call, return a json object with function name and "
            "arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
            '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )


class _Llama3(_Parser):
    """`{"name": …, "parameters": {…}}`, several by `;`, after `<|python_tag|>` or not."""

    name = "llama3"
    separator = "; "
    _tag = "<|python_tag|>"
    _next = re.compile(r"\s*(?:;\s*|(?=\{))(?:<\|python_tag\|>)?(?=\s*\S)")
    _bare = re.compile(r'\s*(?=\{\s*"(?:name|type|parameters)"\s*:)')

    def scan(self, text: str) -> list[Attempt]:
        if bare := self._bare.match(text):
            start = at = bare.end()
        elif self._tag in text:
            start = text.index(self._tag)
            at = start + len(self._tag)
        else:
            return []
        attempts: list[Attempt] = []
        while True:
            id = f"call_{len(attempts)}"
            try:
                value, end = decode_json(text, _skip_space(text, at))
            except ValueError as error:
                # Without a closing mark the rest of the text is this attempt.
                call = ParseError(id=id, text=text[start:], error=str(error))
                return [*attempts, Attempt(start, len(text), call)]
            try:
                call = _to_call(id, value, ("parameters", "arguments"))
            except ValueError as error:
                call = ParseError(id=id, text=text[start:end], error=str(error))
            attempts.append(Attempt(start, end, call))
            following = self._next.match(text, end)
            if following is None:
                return attempts
            start, at = end, following.end()

    def format(self, call: ToolCall) -> str:
        return _dumps({"name": call.name, "parameters": call.arguments})

    def describe(self, tools: Sequence[dict[str, Any]]) -> str:
        return (
            "Given the following functions, please respond with a JSON for a function call with "
            "its proper arguments that best answers the given prompt.\n\nRespond in the format "
            '{"name": function name, "parameters": dictionary of argument name and its value}. '
            "Do not use variables.\n\n" + "\n\n".join(_dumps(tool) for tool in tools)
        )


class _None(_Parser):
    """No tool calls: all text is content."""

    name = "none"


_PARSERS: dict[str, type[_Parser]] = {
    parser.name: parser for parser in (_Tag, _Hermes, _Llama3, _None)
}


def decode_json(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value at `start` and the index after it, by RFC 8259 and nothing laxer.

    Raises:
        ValueError: not JSON, or it holds NaN, an infinity, a duplicate key or a lone surrogate.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON: {error.msg} at character {error.pos - start}") from error
    except RecursionError as error:
        raise ValueError("invalid JSON: nested too deeply") from error
    if "\\u" in text[start:end]:
        try:
            _dumps(value).encode()
        except UnicodeEncodeError as error:
            raise ValueError("invalid JSON: a lone surrogate") from error
    return value, end


def _to_call(id: str, value: Any, argument_keys: tuple[str, ...]) -> ToolCall:
    if not isinstance(value, dict):
        raise ValueError("a call must be a JSON object")
    unknown = set(value) - {"name", "type", "id", *argument_keys}
    if unknown:
        raise ValueError(f"unexpected key {min(unknown)!r} in the call")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError('a call needs a "name" that is a string')
    present = [key for key in argument_keys if key in value]
    if len(present) != 1:
        raise ValueError(f'a call needs "{argument_keys[0]}", once')
    arguments = value[present[0]]
    if isinstance(arguments, str):
        encoded = arguments
        arguments, end = decode_json(encoded, _skip_space(encoded, 0))
        if _skip_space(encoded, end) != len(encoded):
            raise ValueError(f'extra text after the JSON object in "{present[0]}"')
    if not isinstance(arguments, dict):
        raise ValueError(f'"{present[0]}" must be a JSON object')
    return ToolCall(id=id, name=name, arguments=arguments)


def cut_by_length(text: str, attempts: Sequence[Attempt]) -> tuple[ParseError, ...]:
    """The attempts of a turn that the length limit cut: none of them is to be executed."""
    error = "cut by the length limit before the turn ended, so not executed; be shorter"
    return tuple(
        replace(attempt.call, error=error)
        if isinstance(attempt.call, ParseError)
        else ParseError(id=attempt.call.id, text=text[attempt.start : attempt.end], error=error)
        for attempt in attempts
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"invalid JSON: duplicate key {twice!r}")
    return value


def _refuse(literal: str) -> Any:
    raise ValueError(f"invalid JSON: {literal} is no JSON number")


def _finite(literal: str) -> float:
    number = float(literal)
    return number if math.isfinite(number) else _refuse(literal)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
_SPACE = re.compile(r"[ \t\n\r]*")


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
