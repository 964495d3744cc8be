"""The renderer: messages to tokens, each once, and sampled tokens to actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.chat_template import ChatTemplate, RendererError
from agentrl.control_tokens import ControlTokens
from agentrl.reasoning import split_reasoning
from agentrl.tool_calls import content_of, cut_by_length, make_parser
from agentrl.types import Action, FinishReason, Message, ToolCall

__all__ = ["Delta", "Renderer", "RendererError"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What an env step adds to the tape.

    Example:
        Delta(token_ids=[198, 151644, …])  # the glue, "<|im_start|>user", …, the next header
    """

    token_ids: list[int]
    new_segment: bool = False  # True: `token_ids` is the whole next prompt, not an extension


class Renderer:
    """Messages to tokens and back, for one tokenizer, chat template and set of tools.

    The prompt is rendered by the chat template; each env step as the text that its messages add
    after a synthetic assistant turn. What was sampled is never encoded again. With
    `history="template"` the template has its way with older turns (many drop old reasoning): a step
    is then the full render, and starts a new segment where that does not extend the tape.

    What users and tools say cannot forge control tokens. System and assistant messages are trusted.

    Args:
        tokenizer: a fast Hugging Face tokenizer with a chat template.
        tool_format: how the model writes calls: "tag", "hermes", "llama3" or "none".
        tools: OpenAI tool schemas.

    Raises:
        RendererError: no chat template, or one that cannot render a dialogue.
        ValueError: no such `tool_format`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tool_format: str,
        tools: Sequence[dict[str, Any]] = (),
        history: Literal["append", "template"] = "append",
    ) -> None:
        self.history = history
        self.parser = make_parser(tool_format, tools)
        self._tools = list(tools)
        self._backend = tokenizer.backend_tokenizer
        control = ControlTokens(tokenizer)
        self._template = ChatTemplate(tokenizer, control, self.parser, tools)
        stops = [tokenizer.eos_token_id, control.special.get(self._template.end)]
        if self._template.end == "<|eot_id|>":  # Llama 3.1 ends a turn that calls a tool with it
            stops.append(control.special.get("<|eom_id|>"))
        self.stop_token_ids: tuple[int, ...] = tuple(
            dict.fromkeys(id for id in stops if id is not None)
        )
        """The tokens that end the sampling of a turn."""

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of `messages` and of the header that starts the assistant's turn.

        Raises:
            RendererError: the template refuses the messages, or a tool's name is not in them.
        """
        return self._encode(*self._template.prompt(messages))

    def observation(
        self, history: Sequence[Message], new: Sequence[Message], *, context: Sequence[int]
    ) -> Delta:
        """The tokens that `new` adds after the assistant turn that was just sampled.

        Args:
            history: all messages before `new`; the last is the assistant's.
            new: what the env said.
            context: the tape's current tokens, the sampled turn included.
        """
        if self.history == "append":
            return Delta(token_ids=self._step(new, cut=context[-1] not in self.stop_token_ids))
        ids = self.prompt([*history, *new])
        if ids[: len(context)] == list(context):
            return Delta(token_ids=ids[len(context) :])
        return Delta(token_ids=ids, new_segment=True)

    def _step(self, new: Sequence[Message], *, cut: bool = False) -> list[int]:
        text, mark = self._template.step(new)
        if cut:  # the turn has no end of its own
            return self._encode(self._template.close + text, mark)
        # The end token leads, so that the glue is encoded as what follows a control token.
        ids = self._encode(self._template.end + text, mark)
        return ids[1:] if self._template.end else ids

    def parse(self, token_ids: Sequence[int], finish_reason: FinishReason) -> Action:
        """What the model did: its reasoning, its calls, and the text that remains.

        A turn that did not end by itself has no `ToolCall`, only `ParseError`s.
        """
        stopped = len(token_ids) > 0 and token_ids[-1] in self.stop_token_ids
        text = self.decode(token_ids[:-1] if stopped else token_ids)
        reasoning, rest = split_reasoning(text, self.parser, opened=self._template.opens_thinking)
        if rest is None:
            return Action(text, content="", reasoning=reasoning, finish_reason=finish_reason)
        attempts = self.parser.scan(rest)
        return Action(
            text,
            content=content_of(rest, attempts),
            reasoning=reasoning,
            attempts=tuple(attempt.call for attempt in attempts)
            if finish_reason == "stop"
            else cut_by_length(rest, attempts),
            finish_reason=finish_reason,
        )

    def clip(self, text: str, max_tokens: int) -> str:
        """`text`, or where it has more tokens, its head and tail around how many were left out.

        It is cut between characters. A text that is short enough is given back as it is.
        """
        if len(text) <= max_tokens and len(text.encode("utf-8", "replace")) <= max_tokens:
            return text  # no token is less than a byte
        self._backend.no_truncation()
        places = self._backend.encode(
            text.encode("utf-8", "replace").decode(), add_special_tokens=False
        ).offsets
        if len(places) <= max_tokens:
            return text
        marker = f"\n[{len(places)} tokens left out]\n"
        kept = max(max_tokens - len(self._encode(marker)), 0)
        tail = kept // 2
        left_out = places[kept - tail : len(places) - tail]
        # All tokens of one character have its place: where they are cut apart, it is left out.
        head, rest = text[: left_out[0][0]], text[left_out[-1][1] :]
        return f"{head}\n[{len(left_out)} tokens left out]\n{rest}"

    def write(self, action: Action) -> list[int]:
        """The tokens that a model would sample to act so, its end token included; for checks."""
        calls = "\n".join(self.parser.format(call) for call in action.tool_calls)
        text = "\n".join(part for part in (action.content, calls) if part)
        thought = "</think>" if self._template.opens_thinking else ""
        return self._encode(thought + text + self._template.close)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, control tokens included; for parsing and display only."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def _encode(self, text: str, mark: str = "") -> list[int]:
        # Other users of the tokenizer may have left these on.
        self._backend.no_truncation()
        self._backend.no_padding()
        text = text.encode("utf-8", "replace").decode()  # a lone surrogate has no encoding
        pieces = text.split(mark) if mark else [text]
        return [
            id
            for piece in pieces
            for id in self._backend.encode(piece, add_special_tokens=False).ids
        ]

    def probe(self) -> str:
        """Render a short dialogue as an episode does, and compare it with the one-shot render.

        Returns: one line that says how tokenizer, template and tool format work together.

        Raises:
            RendererError: they do not.
        """
        messages = [Message(role="user", content="What is 23*47?")]
        tape = self.prompt(messages)
        if self._tools and self.parser.name != "none":
            call = self._example_call()
            tape += self._encode(self.parser.format(call) + self._template.close)
            messages.append(Message(role="assistant", content="", tool_calls=(call,)))
            result = Message(role="tool", content="1081", tool_call_id=call.id, name=call.name)
            tape += self._checked_step(result)
            messages.append(result)
        tape += self._encode("It is 1081." + self._template.close)
        thanks = Message(role="user", content="Thank you.")
        tape += self._checked_step(thanks)
        messages += [Message(role="assistant", content="It is 1081."), thanks]
        end = self._template.end
        return "; ".join(
            [
                f"tool format {self.parser.name}, history {self.history}",
                *self._template.adaptations(),
                f"steps appended by token after {end}"
                if end
                else "no end-of-turn token in the template, steps appended by string",
                _compare(tape, self.prompt(messages)),
            ]
        )

    def _example_call(self) -> ToolCall:
        function = self._tools[0]["function"]
        required = (function.get("parameters") or {}).get("required") or ["x"]
        call = ToolCall(id="call_0", name=function["name"], arguments={required[0]: "23*47"})
        if self.parse(self.write(Action("", attempts=(call,))), "stop").tool_calls != (call,):
            raise RendererError(
                f"a call in tool_format {self.parser.name!r} does not survive the tokenizer; "
                "choose another tool_format"
            )
        return call

    def _checked_step(self, message: Message) -> list[int]:
        ids = self._step([message])
        if message.content not in self.decode(ids):
            raise RendererError(
                f"the chat template writes nothing for role {message.role!r}; use a template that "
                "knows it, or let the env answer as the user"
            )
        return ids


def _compare(tape: list[int], reference: list[int]) -> str:
    if tape == reference:
        return "an episode equals the one-shot render"
    pairs = enumerate(zip(tape, reference, strict=False))
    shorter = min(len(tape), len(reference))
    at = next((index for index, (left, right) in pairs if left != right), shorter)
    return f"an episode differs from the one-shot render at token {at}: history is kept as sampled"
