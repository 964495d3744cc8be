"""The env under examination, and what an examination of it finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.tool import Tool
from agentrl.types import Action, Message, Task
from envs.cli.game import Game


class CheckFailed(Exception):
    """What is wrong, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The env under examination."""

    make: Callable[[], Any]
    env: Any  # one of them, unwrapped
    tasks: Sequence[Task | None]  # some training tasks, or one None

    def game(self) -> Game:
        return Game(self.make())

    async def first(self, seed: int) -> list[Message]:
        """The first observation of a fresh instance."""
        async with self.game() as game:
            return await game.begin(self.tasks[seed % len(self.tasks)], seed=seed)

    def solution(self, task: Task | None) -> Sequence[Action]:
        """The gold turns of a task, or its answer as a plain reply; none where there are none."""
        if task is None:
            return []
        if hasattr(self.env, "gold"):
            return self.env.gold(task) or []
        plain = isinstance(task.answer, str | int | float)
        return [Action(str(task.answer))] if plain else []

    @property
    def tools(self) -> Sequence[Tool]:
        return getattr(self.env, "tools", ())
