"""The chat template of a model: messages to text, with what the template itself does not do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import jinja2

from agentrl.control_tokens import ControlTokens
from agentrl.reasoning import OPEN_THINK, split_reasoning
from agentrl.tool_calls import ToolCallParser
from agentrl.types import Message, ToolCall


class RendererError(ValueError):
    """A tokenizer, chat template and tools that cannot work together, and what to do about it."""


# The system message is explicit, so that no default system text gets into a step.
_BASE = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
_HERE = "rendered-here"  # stands where the synthetic turn ends: its text, or its last argument
_MAX_SHAPES = 256


class ChatTemplate:
    """The chat template of a tokenizer, for one tool format.

    What it does with tools and calls is tried once, at construction. What it does not do, or does
    in another format than the parser reads, is written into the system message and the contents.

    The texts it makes come with a mark, at which they are cut for encoding (`ControlTokens.guard`).

    Raises:
        RendererError: there is no template, or it cannot render a dialogue.
    """

    def __init__(
        self,
        tokenizer: Any,
        control: ControlTokens,
        parser: ToolCallParser,
        tools: Sequence[dict[str, Any]],
    ) -> None:
        if not tokenizer.chat_template:
            raise RendererError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; use an instruct "
                "model, or set tokenizer.chat_template to the template of the model's family"
            )
        self._tokenizer = tokenizer
        self._control = control
        self._parser = parser
        self._tools = list(tools)
        self._names = [tool["function"]["name"] for tool in tools]
        self._shapes: dict[tuple[Any, ...], list[str]] = {}

        turn = self._text([*_BASE, {"role": "assistant", "content": _HERE}])
        self._tail = turn.partition(_HERE)[2]
        self.end = control.first_special(self._tail)
        """The control token that ends an assistant's turn; "" if the template writes none."""
        self.close = self._tail[: self._tail.index(self.end) + len(self.end)]
        """From the end of the assistant's text to the end of the turn."""
        self.opens_thinking = self._text(_BASE, header=True).rstrip().endswith(OPEN_THINK)
        """Whether the header of an assistant's turn opens its reasoning."""

        self._arguments_as_text = False
        self._native_calls = bool(tools) and self._find_call_style()
        self._one_call = self._native_calls and not self._takes_two_calls()
        described = self._native_calls and self._describes_tools()
        self._native_tools = self._tools if described else []
        self._description = "" if described else parser.describe(self._tools)
        self._stems = {calls: self._stem(calls) for calls in {False, self._native_calls}}

    # What the template can do

    def _find_call_style(self) -> bool:
        """Whether the template writes calls that the parser reads; sets the type of arguments."""
        for self._arguments_as_text in (False, True):
            call = ToolCall(id="call_0", name=self._names[0], arguments={"x": _HERE})
            try:
                text = self._text([*_BASE, self._turn_with([call])])
            except RendererError:
                continue
            header = self._text(_BASE, header=True)
            pairs = zip(text, header, strict=False)
            start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            turn = text[start:].partition(self.end)[0] if self.end else text[start:]
            _, rest = split_reasoning(turn, self._parser, opened=False)
            if self._parser.parse(rest or "")[1] == (call,):
                return True
        return False

    def _takes_two_calls(self) -> bool:
        ids = ("call_0", "call_1")
        calls = [ToolCall(id=id, name=self._names[0], arguments={"x": _HERE}) for id in ids]
        try:
            return self._text([*_BASE, self._turn_with(calls)]).count(_HERE) == 2
        except RendererError:
            return False

    def _describes_tools(self) -> bool:
        text = self._text(_BASE, tools=self._tools)
        return all(name in text for name in self._names)

    def adaptations(self) -> list[str]:
        """Who writes the tools and the calls, in words."""
        if not self._tools:
            return []
        return [
            "tools by the template" if self._native_tools else "tools in the system message",
            "calls by the template" if self._native_calls else "calls in the content",
            *(["arguments as JSON text"] if self._native_calls and self._arguments_as_text else []),
            *(["several calls in the content"] if self._one_call else []),
        ]

    # A whole dialogue

    def prompt(self, messages: Sequence[Message]) -> tuple[str, str]:
        """`messages` and the header of the assistant's turn, and the mark.

        Raises:
            RendererError: the template refuses the messages, or a tool's name is not in the text.
        """
        dicts, mark = self._control.guard([self._to_dict(m) for m in self._describe_in(messages)])
        text = self._text(dicts, tools=self._native_tools, header=True)
        missing = [name for name in self._names if name not in text]
        if missing:
            raise RendererError(
                f"the prompt does not mention the tools {', '.join(missing)}, which tool_format "
                f"{self._parser.name!r} cannot describe; choose another tool_format, or describe "
                "them in the env's system message"
            )
        return text, mark

    def _describe_in(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not self._description:
            return messages
        if messages and messages[0].role == "system":
            content = f"{messages[0].content}\n\n{self._description}"
            return [replace(messages[0], content=content), *messages[1:]]
        return [Message(role="system", content=self._description), *messages]

    def _to_dict(self, message: Message) -> dict[str, Any]:
        calls = message.tool_calls
        if not calls:
            return message.to_dict()
        if self._native_calls and not (self._one_call and len(calls) > 1):
            return message.to_dict() | self._turn_with(calls, message.content)
        content = message.content
        gap = "\n" if content and not content[-1].isspace() else ""
        written = self._parser.separator.join(self._parser.format(call) for call in calls)
        return replace(message, content=content + gap + written, tool_calls=()).to_dict()

    def _turn_with(self, calls: Sequence[ToolCall], content: str = "") -> dict[str, Any]:
        written = []
        for call in calls:
            arguments: Any = call.arguments
            if self._arguments_as_text:
                arguments = json.dumps(arguments, ensure_ascii=False)
            function = {"name": call.name, "arguments": arguments}
            written.append({"id": call.id, "type": "function", "function": function})
        return {"role": "assistant", "content": content, "tool_calls": written}

    def _text(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        header: bool = False,
    ) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=header
            )
        except (jinja2.TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise RendererError(
                f"the chat template of {self._tokenizer.name_or_path!r} refuses the messages "
                f"[{roles}]: {error}; change the messages or set tokenizer.chat_template"
            ) from error

    # What an env step adds

    def step(self, new: Sequence[Message]) -> tuple[str, str]:
        """What `new` adds after the end of an assistant's turn, glue and next header, and the mark.

        Rendering is slow, so the shape of a step is rendered once and ordinary contents are put in.
        A template may trim a content or look for markup in it: such contents are rendered in full.
        """
        if all(self._is_ordinary(message) for message in new):
            parts = self._shape(new)
            if parts:
                filled = (m.content + part for m, part in zip(new, parts[1:], strict=True))
                return parts[0] + "".join(filled), ""
        dicts, mark = self._control.guard([self._to_dict(message) for message in new])
        return self._suffix(dicts), mark

    def _is_ordinary(self, message: Message) -> bool:
        content = message.content
        return (
            message.role in ("user", "tool")
            and bool(content)
            and "<" not in content
            and not (content[0].isspace() or content[-1].isspace())
            and (message.name is None or message.name in self._names)
            and not self._control.spelled_in(content)
        )

    def _shape(self, new: Sequence[Message]) -> list[str]:
        """The text around the contents of `new`; empty if the template does not copy contents."""
        key = tuple((message.role, message.name, message.tool_call_id) for message in new)
        if key not in self._shapes:
            if len(self._shapes) == _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[key] = self._find_shape(new)
        return self._shapes[key]

    def _find_shape(self, new: Sequence[Message]) -> list[str]:
        # Escaping would show on these characters.
        contents = [f"[{index}\"\\'&é\n中]" for index in range(len(new))]
        pairs = zip(new, contents, strict=True)
        rest = self._suffix([replace(m, content=content).to_dict() for m, content in pairs])
        parts = []
        for content in contents:
            if rest.count(content) != 1:
                return []
            part, _, rest = rest.partition(content)
            parts.append(part)
        return [*parts, rest]

    def _suffix(self, new: Sequence[dict[str, Any]]) -> str:
        """What `new` adds after a synthetic turn, which made the calls that `new` answers."""
        turn = self._synthetic_turn([message for message in new if message["role"] == "tool"])
        text = self._text([*_BASE, turn, *new], tools=self._native_tools[:1], header=True)
        stem = self._stems["tool_calls" in turn]
        at = text.index(_HERE) + len(_HERE)
        if not text.startswith(stem, at):
            raise RendererError(
                f"the chat template of {self._tokenizer.name_or_path!r} rewrites the assistant's "
                "turn when messages follow it, so nothing can be appended; use history: template"
            )
        return text[at + len(stem) :]

    def _synthetic_turn(self, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if not (results and self._native_calls):
            return {"role": "assistant", "content": _HERE}
        calls = [
            ToolCall(
                id=result.get("tool_call_id", ""),
                name=result.get("name", self._names[0]),
                arguments={"x": _HERE} if result is results[-1] else {},
            )
            for result in results
        ]
        return self._turn_with(calls[-1:] if self._one_call else calls)

    def _stem(self, calls: bool) -> str:
        """What the template writes from `_HERE` to the end of the synthetic turn."""
        turn = self._synthetic_turn([{"tool_call_id": "call_0"}] if calls else [])
        after = self._text([*_BASE, turn], tools=self._native_tools[:1]).partition(_HERE)[2]
        if self.end:
            return after[: after.index(self.end) + len(self.end)]
        return after.removesuffix(self._tail)
