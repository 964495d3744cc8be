"""One group: its members side by side, each played again while faults spoil it, then compared."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.rubric import RewardError
from agentrl.trajectory import Trajectory, TrajectoryGroup
from agentrl.types import StopReason
from rollout.episode import add_rewards, play, total_reward
from rollout.seeds import derive_seed
from rollout.stage import Episode, Stage
from rollout.tasks import Draw

logger = logging.getLogger("agentrl")

CLOSE_S = 5.0  # what cancelled episodes get to close their envs


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlayer:
    """Plays groups of one kind; sampling seeds follow from `seed` and draw, member and attempt."""

    stages: Mapping[str, Stage]  # by the name of the tasks' env
    kind: Literal["train", "eval"]
    num_generations: int
    seed: int
    pending: dict[str, Episode]
    on_episode: Callable[[Trajectory], None]  # each attempt that ended
    on_fault: Callable[[Trajectory], None]  # each one that was sound until the group was scored

    async def play(self, draw: Draw) -> TrajectoryGroup:
        """All members at once, so that an engine can share their prompt.

        An error that is no episode's own ends the other members first, then rises.
        """
        stage = self.stages[draw.task.env]
        id = f"{'g' if self.kind == 'train' else 'eval'}{draw.number}"
        attempts: list[Trajectory] = []
        members = [
            asyncio.create_task(self._play_member(stage, draw, f"{id}-{member}", member, attempts))
            for member in range(self.num_generations)
        ]
        try:
            episodes = await asyncio.gather(*members)
            await self._compare(stage, id, draw, episodes)
        except BaseException:
            await cancel(members)
            _waste(attempts, stage)
            raise
        _waste([tape for tape in attempts if tape.reward is None], stage)
        return TrajectoryGroup(id=id, task=draw.task, trajectories=[e.tape for e in episodes])

    async def _play_member(
        self, stage: Stage, draw: Draw, id: str, member: int, attempts: list[Trajectory]
    ) -> Episode:
        for attempt in range(stage.config.max_attempts):
            episode = Episode(
                id=f"{id}-retry{attempt}" if attempt else id,
                task=draw.task,
                env_seed=draw.env_seed,
                seed=derive_seed(self.seed, self.kind, draw.number, member, attempt),
            )
            attempts.append(episode.tape)
            self.pending[episode.id] = episode
            try:
                tape = await play(episode, stage)
            finally:
                del self.pending[episode.id]
            self.on_episode(tape)
            if not episode.is_fault or tape.stop_reason is StopReason.PROMPT_TOO_LONG:
                break
        return episode

    async def _compare(self, stage: Stage, id: str, draw: Draw, episodes: list[Episode]) -> None:
        """Run the rewards that score a group, on members without fault; their envs are closed."""
        sound = [episode for episode in episodes if not episode.is_fault]
        rubrics = sound[0].rubrics(stage) if sound else []
        if not any(rubric.scores_groups for rubric in rubrics):
            return
        tapes = [episode.tape for episode in sound]
        group = TrajectoryGroup(id=id, task=draw.task, trajectories=tapes)
        envs = [episode.env and episode.env.unwrapped for episode in sound]
        try:
            for rubric in rubrics:
                deadline = asyncio.timeout(stage.config.score_timeout_s)
                async with stage.env_calls, deadline:
                    rewards = await rubric.score_group(group, envs)
                for tape, named in zip(tapes, rewards, strict=True):
                    add_rewards(tape, named)
            for tape in tapes:
                tape.reward = total_reward(tape, rubrics)
        except (RewardError, TimeoutError) as error:
            logger.warning("group %s: scoring failed: %s", id, error, exc_info=error)
            for tape in tapes:
                tape.reward, tape.stop_reason = None, StopReason.REWARD_ERROR
                tape.error = f"{type(error).__name__}: {error}"
                self.on_fault(tape)


def _waste(tapes: list[Trajectory], stage: Stage) -> None:
    num_tokens = sum(tape.num_sampled_tokens for tape in tapes)
    stage.metrics.count("rollout/wasted_tokens", num_tokens)


async def first_done(tasks: Iterable[asyncio.Task[Any]], event: asyncio.Event) -> bool:
    """Wait for one of `tasks`; False where `event` is set first. All of them go on."""
    is_set = asyncio.create_task(event.wait())
    try:
        done, _ = await asyncio.wait([*tasks, is_set], return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_set.cancel()
    return bool(done - {is_set})


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel and await; after `CLOSE_S` even the cleaning up is cancelled."""
    left = list(tasks)
    for grace in (CLOSE_S, 1.0):
        for task in left:
            task.cancel()
        if not left:
            return
        done, pending = await asyncio.wait(left, timeout=grace)
        for task in done:
            if not task.cancelled():
                task.exception()  # retrieved: the first error is the one that is raised
        left = list(pending)
    if left:
        logger.warning("%d tasks did not end when cancelled", len(left))
