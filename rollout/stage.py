"""What episodes are played on, and one of them: what is to be played, and how far it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from agentrl.config import RolloutConfig
from agentrl.metrics import MeanMetrics
from agentrl.protocols import Engine
from agentrl.renderer import Renderer
from agentrl.rubric import Rubric
from agentrl.trajectory import Trajectory
from agentrl.types import Message, Task
from rollout.gate import Gate, Turnstile


class PromptMemo:
    """The newest prompt with its tokens: the members of a group ask for it one after another."""

    def __init__(self, render: Callable[[list[Message]], list[int]]) -> None:
        self._render = render
        self._messages: list[Message] | None = None
        self._token_ids: list[int] = []

    def __call__(self, messages: list[Message]) -> list[int]:
        if messages != self._messages:
            self._token_ids = self._render(messages)
            self._messages = list(messages)
        return self._token_ids


MakeEnv = Callable[[], gymnasium.Env[Any, Any]]
"""Cheap: what takes long belongs in `acquire` or `reset`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSetup:
    """One of the envs of a run: how it is made, read and scored."""

    make_env: MakeEnv
    renderer: Renderer
    rubric: Rubric | None = None  # rewards beside the env's own
    eval_make_env: MakeEnv | None = None  # for held-out episodes; None: the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What the episodes of one env share; engine, limits and metrics are those of the run."""

    engine: Engine
    make_env: MakeEnv
    renderer: Renderer
    config: RolloutConfig
    rubric: Rubric | None
    generation: Gate
    env_calls: asyncio.Semaphore
    turnstile: Turnstile
    prompt: PromptMemo  # of `renderer`
    metrics: MeanMetrics


@dataclass(slots=True, kw_only=True)
class Episode:
    """One attempt at an episode: what is to be played, and how far it is."""

    id: str
    task: Task
    env_seed: int
    seed: int  # with the number of the turn, the seed of a request
    tape: Trajectory = field(init=False)
    env: gymnasium.Env[Any, Any] | None = None
    phase: str = "start"
    since: float = field(default_factory=time.monotonic)  # when the phase began
    clock: asyncio.Timeout | None = None  # of the whole attempt; stands still in a queue

    def __post_init__(self) -> None:
        self.tape = Trajectory(id=self.id)

    def enter(self, phase: str) -> None:
        self.phase, self.since = phase, time.monotonic()

    @property
    def is_fault(self) -> bool:
        return self.tape.stop_reason is not None and self.tape.stop_reason.is_fault

    def rubrics(self, stage: Stage) -> list[Rubric]:
        rubrics = (getattr(self.env and self.env.unwrapped, "rubric", None), stage.rubric)
        return [rubric for rubric in rubrics if rubric is not None]
