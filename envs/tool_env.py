"""ToolEnv: reads the calls of a turn, runs the tools, and answers every attempt in its place."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from agentrl.env import TextEnv
from agentrl.tool import Tool, ToolOutcome
from agentrl.types import Action, Message, ParseError, StopReason, Task, ToolCall

Demonstration = tuple[Message, ...]
"""A solved example, shown before the task: from the user's message to the last assistant's."""

_FAILURES = (
    "tool/errors",  # the tool raised, or said that it failed
    "tool/parse_errors",
    "tool/unknown",
    "tool/bad_arguments",
    "tool/timeouts",
    "tool/over_limit",  # beyond `max_calls_per_turn`, not run
)
_TOTAL = {
    ToolOutcome.ERROR: "tool/errors",
    ToolOutcome.BAD_ARGUMENTS: "tool/bad_arguments",
    ToolOutcome.TIMEOUT: "tool/timeouts",
}


class ToolEnv(TextEnv):
    """An environment whose turns either call tools or end the episode with an answer.

    A subclass gives `tools`, `rubric` and `tasks(split)`, and, where it wants them,
    `system_prompt` and `demonstrations`, or its own `prompt(task)`. The env itself rewards
    nothing: its rubric does.

    Every attempt to call a tool is answered by one message of role "tool", in the order written:
    with the result, or with what was wrong (malformed, unknown tool, bad arguments, time-out, too
    many calls). `info["metrics"]` counts them over the episode so far: `tool/calls` that ran, the
    failures, and `tool/<name>/<outcome>` for each tool and `ToolOutcome`. Calls of a turn run side
    by side, but for those of `serial` tools.

    Example:
        class Arithmetic(ToolEnv):
            tools = (calc,)
            rubric = Rubric([correct])

            def tasks(self, split):
                question = Message(role="user", content="What is 2+3?")
                return [Task(id="0", prompt=(question,), answer="5")]
    """

    system_prompt: str = ""
    demonstrations: Sequence[Demonstration] = ()

    def __init__(
        self,
        *,
        num_demonstrations: int | None = None,
        max_calls_per_turn: int = 4,
        max_errors_per_episode: int = 8,
        max_tool_timeouts: int = 3,
        max_output_chars: int = 8000,
    ) -> None:
        """
        Args:
            num_demonstrations: The first so many are shown; None: all.
            max_calls_per_turn: Further calls of a turn are answered, not run.
            max_errors_per_episode: The episode ends with the turn that has so many failed attempts
                behind it.
            max_tool_timeouts: The episode ends with the turn that has so many time-outs behind it.
            max_output_chars: Of one tool result, at least 40; the middle of a longer one is left
                out.
        """
        if num_demonstrations is not None and not 0 <= num_demonstrations <= len(
            self.demonstrations
        ):
            raise ValueError(
                f"num_demonstrations is {num_demonstrations}, but there are "
                f"{len(self.demonstrations)}"
            )
        self.num_demonstrations = num_demonstrations
        self.max_calls_per_turn = max_calls_per_turn
        self.max_errors_per_episode = max_errors_per_episode
        self.max_tool_timeouts = max_tool_timeouts
        self.max_output_chars = max_output_chars
        self.metrics: dict[str, float] = {}
        self._tools: dict[str, Tool] = {}
        self._serial = asyncio.Lock()
        self._running = False

    def prompt(self, task: Task) -> list[Message]:
        """The first observation: system prompt, demonstrations, task."""
        system = [Message(role="system", content=self.system_prompt)] if self.system_prompt else []
        shown = self.demonstrations[: self.num_demonstrations]
        return [*system, *(message for shot in shown for message in shot), *task.prompt]

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Begin with `options["task"]`, or with a training task that the seed chooses."""
        super().reset(seed=seed)
        task = (options or {}).get("task")
        if task is None:
            rows = self.tasks("train")
            task = (
                rows[int(self.np_random.integers(len(rows)))] if rows else Task(id=f"seed-{seed}")
            )
        self.task: Task = task
        self._tools = {tool.name: tool for tool in self.tools}
        outcomes = [f"tool/{name}/{outcome}" for name in self._tools for outcome in ToolOutcome]
        self.metrics = dict.fromkeys(["tool/calls", *_FAILURES, *outcomes], 0)
        self._running = True
        return self.prompt(task), {"metrics": dict(self.metrics)}

    async def step(self, action: str) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        """Answer the calls of a turn; a turn without one is the final answer.

        Raises:
            RuntimeError: the episode is over, or has not begun.
            Unavailable: as a tool did; the other calls of the turn are cancelled.
        """
        if not self._running:
            raise RuntimeError("the episode is over; call reset before step")
        action = action if isinstance(action, Action) else Action(action)
        if not action.attempts:
            return self._end([], None if action.content.strip() else StopReason.NO_ACTION)
        answers = await _together(
            self._answer(attempt, place) for place, attempt in enumerate(action.attempts)
        )
        if self.metrics["tool/timeouts"] >= self.max_tool_timeouts:
            return self._end(answers, StopReason.TOOL_TIMEOUTS)
        failed = sum(self.metrics[name] for name in _FAILURES)
        if failed >= self.max_errors_per_episode:
            return self._end(answers, None)
        return answers, 0.0, False, False, {"metrics": dict(self.metrics)}

    def _end(
        self, answers: list[Message], reason: StopReason | None
    ) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        self._running = False
        info: dict[str, Any] = {"metrics": dict(self.metrics)}
        if reason is not None:
            info["stop_reason"] = reason
        return answers, 0.0, True, False, info

    async def _answer(self, attempt: ToolCall | ParseError, place: int) -> Message:
        name = attempt.name if isinstance(attempt, ToolCall) else None
        content = clip(await self._observe(attempt, place), self.max_output_chars)
        return Message(role="tool", content=content, tool_call_id=attempt.id, name=name)

    async def _observe(self, attempt: ToolCall | ParseError, place: int) -> str:
        if place >= self.max_calls_per_turn:
            self.metrics["tool/over_limit"] += 1
            return f"Error: not executed: limit of {self.max_calls_per_turn} calls per turn"
        if isinstance(attempt, ParseError):
            self.metrics["tool/parse_errors"] += 1
            return f"Error: {attempt.error}"
        tool = self._tools.get(attempt.name)
        if tool is None:
            self.metrics["tool/unknown"] += 1
            return f"Error: no tool {attempt.name!r}; tools: {', '.join(self._tools) or 'none'}"
        async with self._serial if tool.serial else contextlib.nullcontext():
            result = await tool(attempt.arguments)
        self.metrics[f"tool/{tool.name}/{result.outcome}"] += 1
        if result.outcome in _TOTAL:
            self.metrics[_TOTAL[result.outcome]] += 1
        if result.outcome != ToolOutcome.BAD_ARGUMENTS:
            self.metrics["tool/calls"] += 1
        return result.content


async def _together(answers: Iterable[Coroutine[Any, Any, Message]]) -> list[Message]:
    """All of them, in order; where one raises, the others are cancelled and have ended."""
    tasks = [asyncio.create_task(answer) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def clip(text: str, max_chars: int) -> str:
    """Head and tail of a text, at most `max_chars`, and between them how much was left out."""
    if len(text) <= max_chars:
        return text
    kept = max(max_chars - 40, 0)  # the marker is shorter than 40
    tail = kept // 2
    marker = f"\n[{len(text) - kept} characters left out]\n"
    return text[: kept - tail] + marker + text[len(text) - tail :]


def demonstration(
    question: str, calls: Sequence[tuple[str, dict[str, Any], str]], answer: str
) -> Demonstration:
    """A solved example; each call (tool name, arguments, result) is a turn of its own."""
    messages = [Message(role="user", content=question)]
    for index, (name, arguments, result) in enumerate(calls):
        call = ToolCall(id=f"shown_{index}", name=name, arguments=arguments)
        messages.append(Message(role="assistant", content="", tool_calls=(call,)))
        messages.append(Message(role="tool", content=result, tool_call_id=call.id, name=name))
    return (*messages, Message(role="assistant", content=answer))
