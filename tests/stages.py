"""Where the scripted engines of `tests/engines.py` play: an episode, groups in slots, a manager."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from agentrl.metrics import MeanMetrics
from agentrl.types import Task
from rollout.faults import FaultBudget
from rollout.gate import Gate, Turnstile
from rollout.group import GroupPlayer
from rollout.manager import RolloutManager
from rollout.slots import Slots
from rollout.stage import EnvSetup, Episode, PromptMemo, Stage
from rollout.tasks import TaskStream
from tests.engines import ANY_PROBE, CountEnv, ScriptedEngine, config, make_tasks

TASK = Task(id="t")
MakeEnv = Callable[[], Any]


def stage_of(
    engine: ScriptedEngine,
    make_env: MakeEnv = CountEnv,
    *,
    rubric: Any = None,
    generations: int = 8,
    env_calls: int = 8,
    **values: Any,
) -> Stage:
    return Stage(
        engine=engine,
        make_env=make_env,
        renderer=engine.renderer,
        config=config(**values),
        rubric=rubric,
        generation=Gate(generations),
        env_calls=asyncio.Semaphore(env_calls),
        turnstile=Turnstile(),
        prompt=PromptMemo(engine.renderer.prompt),
        metrics=MeanMetrics(),
    )


def episode_of(id: str = "e0", seed: int = 1) -> Episode:
    return Episode(id=id, task=TASK, env_seed=7, seed=seed)


def slots_of(engine: ScriptedEngine, make_env: MakeEnv = CountEnv, **values: Any) -> Slots:
    stage = stage_of(engine, make_env, generations=999, env_calls=999, **values)
    faults = FaultBudget(stage.config, stage.metrics)
    player = GroupPlayer(
        stages={"": stage},
        kind="train",
        num_generations=stage.config.num_generations,
        seed=0,
        pending={},
        on_episode=faults.count,
        on_fault=faults.count_fault,
    )
    return Slots(
        player=player,
        tasks=TaskStream(make_tasks(40), 0),
        config=stage.config,
        engine=engine,
        faults=faults,
        metrics=stage.metrics,
        on_group=lambda group: None,
    )


async def update_weights(slots: Slots, version: int) -> None:
    engine = slots.engine
    interrupt = None if slots.config.on_update == "finish" else engine.interrupt
    async with slots.player.stages[""].generation.shut(1000, interrupt):
        await engine.update_weights([], version, ANY_PROBE)
    slots.start_more()


def manager_of(
    engine: ScriptedEngine,
    make_env: Callable[[], Any] = CountEnv,
    *,
    num_tasks: int = 40,
    seed: int = 0,
    rollout: dict[str, Any] | None = None,
    rubric: Any = None,
    **more: Any,
) -> RolloutManager:
    return RolloutManager(
        engine=engine,
        envs={"": EnvSetup(make_env=make_env, renderer=engine.renderer, rubric=rubric)},
        config=config(**(rollout or {})),
        tasks=TaskStream(make_tasks(num_tasks), seed),
        seed=seed,
        **more,
    )
