"""One episode outside of a run: played by a check, or by whoever sits at the terminal."""

from __future__ import annotations

from typing import Any, Self

from agentrl.env import call_env, to_messages
from agentrl.rubric import Rubric
from agentrl.trajectory import Trajectory
from agentrl.types import Action, Message, Task


class Game:
    """An env and what was said in it; a sync env is called in threads, as in a run.

    Example:
        async with Game(make_env(name)) as game:
            prompt = await game.begin(task, seed=0)
            answers = await game.act(Action("5"))
            rewards = await game.rewards()
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.tape = Trajectory()
        self.over = False
        self.metrics: dict[str, float] = {}
        self.stop_reason = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await call_env(self.env, "close")

    async def begin(self, task: Task | None, *, seed: int) -> list[Message]:
        """The first observation; with None the env begins by its seed alone."""
        self.task = task or Task(id=f"seed-{seed}")
        if hasattr(self.env.unwrapped, "acquire"):
            await self.env.unwrapped.acquire()
        options = {"task": self.task}
        observation, _ = await call_env(self.env, "reset", seed=seed, options=options)
        self.tape.messages += (said := to_messages(observation))
        return said

    async def act(self, action: Action) -> list[Message]:
        """What the env says to one turn of the policy."""
        self.tape.messages.append(action.to_message())
        observation, reward, terminated, truncated, info = await call_env(self.env, "step", action)
        self.over = terminated or truncated
        self.metrics = info.get("metrics", {})
        self.stop_reason = str(info.get("stop_reason", ""))
        self.tape.rewards["env"] = self.tape.rewards.get("env", 0.0) + float(reward)
        self.tape.messages += (said := to_messages(observation))
        return said

    @property
    def rubric(self) -> Rubric | None:
        return getattr(self.env.unwrapped, "rubric", None)

    async def rewards(self) -> dict[str, float]:
        """Those of the env and of its rubric by name, without those that compare a group."""
        rubric = self.rubric
        if rubric is None:
            return dict(self.tape.rewards)
        scores = await rubric.score(task=self.task, trajectory=self.tape, env=self.env.unwrapped)
        return self.tape.rewards | scores

    def total(self, rewards: dict[str, float]) -> float:
        """The reward of the episode, as a run counts it."""
        rubric = self.rubric
        weights = rubric.weights if rubric else {}
        return rewards.get("env", 0.0) + sum(
            weight * rewards[name] for name, weight in weights.items() if name in rewards
        )
