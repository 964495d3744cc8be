"""The nouns that travel between the rooms: messages, tasks, actions, completions, stop reasons."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Self

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that the model wrote and that could be read.

    Example:
        ToolCall(id="call_0", name="calculator", arguments={"expression": "2+3"})
    """

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseError:
    """One call attempt that could not be read; it is answered, never repaired and executed."""

    id: str
    text: str  # what the model wrote
    error: str  # what was wrong with it, in words for the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message in OpenAI's shape.

    Example:
        Message(role="tool", content="5", tool_call_id="call_0", name="calculator")
    """

    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The dictionary that chat templates and JSON files take; empty fields are left out."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message

    @classmethod
    def from_dict(cls, message: dict[str, Any]) -> Self:
        """The inverse of `to_dict`; takes `arguments` as an object or as a JSON string."""
        calls = []
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            calls.append(
                ToolCall(
                    id=call["id"],
                    name=call["function"]["name"],
                    arguments=json.loads(arguments) if isinstance(arguments, str) else arguments,
                )
            )
        return cls(
            role=message["role"],
            content=message.get("content") or "",
            reasoning=message.get("reasoning_content"),
            tool_calls=tuple(calls),
            tool_call_id=message.get("tool_call_id"),
            name=message.get("name"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row of a data set: what an episode is about.

    `prompt` may be empty: then the env writes its first observation from its seed alone.

    Example:
        Task(id="train-7", prompt=(Message(role="user", content="What is 2+3?"),), answer="5")
    """

    id: str
    prompt: tuple[Message, ...] = ()
    answer: Any = None
    info: dict[str, Any] = field(default_factory=dict)
    env: str = ""  # which of a run's envs plays it, where there are several


class Action(str):
    """What `env.step` receives: the assistant's text, with what was read out of it.

    A plain gymnasium env sees a string. `ToolEnv` reads `attempts`: every call the model tried to
    make, in the order written, readable (`ToolCall`) or not (`ParseError`).
    """

    content: str  # the text without reasoning and without calls
    reasoning: str | None
    attempts: tuple[ToolCall | ParseError, ...]
    finish_reason: FinishReason

    def __new__(
        cls,
        text: str,
        *,
        content: str | None = None,
        reasoning: str | None = None,
        attempts: tuple[ToolCall | ParseError, ...] = (),
        finish_reason: FinishReason = "stop",
    ) -> Self:
        action = super().__new__(cls, text)
        action.content = text if content is None else content
        action.reasoning = reasoning
        action.attempts = attempts
        action.finish_reason = finish_reason
        return action

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(a for a in self.attempts if isinstance(a, ToolCall))

    @property
    def parse_errors(self) -> tuple[ParseError, ...]:
        return tuple(a for a in self.attempts if isinstance(a, ParseError))

    def to_message(self) -> Message:
        """The assistant message this action is in the transcript."""
        return Message(
            role="assistant",
            content=self.content,
            reasoning=self.reasoning,
            tool_calls=self.tool_calls,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one request is sampled. Lengths count tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all of the vocabulary
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled in one request.

    The token that stopped the turn is part of it. `logprobs[i]` is the log probability of
    `token_ids[i]` under the distribution it was drawn from (temperature included).

    Example:
        Completion(
            token_ids=[7, 8], logprobs=[-0.1, -2.3], finish_reason="stop", versions=[4, 4]
        )
    """

    token_ids: list[int]  # [n]
    logprobs: list[float]  # [n]
    finish_reason: FinishReason
    versions: list[int]  # [n] of the weights that sampled each token


class StopReason(StrEnum):
    """Every way an episode can end."""

    DONE = "done"  # the env said terminated
    TRUNCATED = "truncated"  # the env said truncated
    MAX_TURNS = "max_turns"
    TURN_LENGTH = "turn_length"  # a turn was cut at `max_new_tokens`
    EPISODE_LENGTH = "episode_length"  # all turns together reached `max_episode_tokens`
    CONTEXT_LENGTH = "context_length"  # prompt, turns and observations fill `max_context_tokens`
    NO_ACTION = "no_action"  # the model said nothing
    TOOL_TIMEOUTS = "tool_timeouts"  # the model's calls ran into their deadline too often
    # Faults of the infrastructure: never trained, counted, and the group is refilled.
    PROMPT_TOO_LONG = "prompt_too_long"
    ENV_ERROR = "env_error"
    ENV_TIMEOUT = "env_timeout"
    REWARD_ERROR = "reward_error"
    ENGINE_ERROR = "engine_error"
    ENGINE_TIMEOUT = "engine_timeout"
    EPISODE_TIMEOUT = "episode_timeout"
    ABORTED = "aborted"

    @property
    def is_fault(self) -> bool:
        """Whether the episode says nothing about the policy, so that it must not be trained on."""
        return self in _FAULTS

    @property
    def is_cut(self) -> bool:
        """Whether a limit on length or turns ended an episode that would have gone on."""
        return self in _CUT


_FAULTS = frozenset(
    {
        StopReason.PROMPT_TOO_LONG,
        StopReason.ENV_ERROR,
        StopReason.ENV_TIMEOUT,
        StopReason.REWARD_ERROR,
        StopReason.ENGINE_ERROR,
        StopReason.ENGINE_TIMEOUT,
        StopReason.EPISODE_TIMEOUT,
        StopReason.ABORTED,
    }
)
_CUT = frozenset(
    {
        StopReason.TRUNCATED,
        StopReason.MAX_TURNS,
        StopReason.TURN_LENGTH,
        StopReason.EPISODE_LENGTH,
        StopReason.CONTEXT_LENGTH,
    }
)
