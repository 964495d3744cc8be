"""Scripted episodes of an env, scored as in a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.trajectory import Trajectory
from agentrl.types import Action, Task


async def play(
    env: Any, task: Task, actions: Sequence[Action]
) -> tuple[dict[str, float], Trajectory]:
    """The rewards by name and the tape of an episode in which the policy acts so."""
    tape = Trajectory(id="e")
    try:
        await env.acquire()
        observation, _ = await env.reset(seed=0, options={"task": task})
        tape.messages.extend(observation)
        for action in actions:
            tape.messages.append(action.to_message())
            answers, *_ = await env.step(action)
            tape.messages.extend(answers)
        return await env.rubric.score(task=task, trajectory=tape, env=env), tape
    finally:
        await maybe_close(env)


async def maybe_close(env: Any) -> None:
    closing = env.close()
    if closing is not None:
        await closing


def last_result(tape: Trajectory) -> str:
    """What the last tool said."""
    return next(m.content for m in reversed(tape.messages) if m.role == "tool")
