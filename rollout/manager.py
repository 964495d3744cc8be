"""The owner of the event loop on which all episodes run; behind it, rollouts are synchronous.

    learner's thread                    event loop (a daemon thread)

    next_groups(n)  ---- waits for ---> n slots          a slot plays groups until one is fit to train on
                                          |  waits for
                                        G members        a member plays an episode again while faults spoil it
                                          |  waits for
                                        episode          waits, under deadlines, for one of
                                          |- gate --> engine.generate      at most max_concurrent_generations
                                          `- env_calls --> env and rewards at most max_concurrent_env_calls
    update_weights  ---- waits for ---> gate shut, no request in flight, engine.update_weights, gate open

With `max_staleness=0` no slot lives between two calls. Otherwise `(max_staleness + 1) * n` groups are alive at most,
those that the learner holds included, and slots go on while it trains.

With `oversampling > 1` the groups that are complete first make the batch and the others are aborted. This favours
short episodes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import gymnasium

from agentrl.config import EvalConfig, RolloutConfig
from agentrl.metrics import MeanMetrics
from agentrl.protocols import Engine, Weights
from agentrl.renderer import Renderer
from agentrl.rubric import RewardError, Rubric
from agentrl.trajectory import Trajectory, TrajectoryGroup
from agentrl.types import StopReason
from rollout.episode import Episode, PromptMemo, Stage, play, total_reward
from rollout.gate import Gate, Turnstile
from rollout.seeds import derive_seed
from agentrl.summary import summarize
from rollout.tasks import Draw, TaskStream

logger = logging.getLogger("agentrl")

CLOSE_S = 5.0  # what cancelled episodes get to close their envs
HEARTBEAT_S = 0.05
LAG_ALARM_S = 1.0

T = TypeVar("T")
MakeEnv = Callable[[], gymnasium.Env[Any, Any]]


class RolloutError(RuntimeError):
    """Rollouts that cannot go on, with the most common cause."""


@dataclass(slots=True, kw_only=True)
class _Slot:
    """One group wanted; `draw` is the one in play."""

    draw: Draw
    num_refills: int = 0  # after groups without signal


class RolloutManager:
    """Implements `agentrl.protocols.Rollouts`.

    `on_episode` sees each attempt at an episode that ended, on the event loop: it must be quick. An error in it stops
    the run. Sampling seeds follow from `seed` and the numbers of draw, member, attempt and turn.

    Raises:
        ValueError: fewer tasks than a batch takes, or options that exclude each other.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        make_env: MakeEnv,
        renderer: Renderer,
        config: RolloutConfig,
        tasks: TaskStream,
        eval_make_env: MakeEnv | None = None,
        eval_config: EvalConfig | None = None,
        eval_tasks: TaskStream | None = None,
        rubric: Rubric | None = None,
        seed: int = 0,
        on_episode: Callable[[Trajectory], None] | None = None,
    ) -> None:
        if config.oversampling > 1 and config.max_staleness > 0:
            raise ValueError(
                "rollout.oversampling > 1 aborts the slowest groups, rollout.max_staleness > 0 keeps them for the "
                "next batch: set one of them only"
            )
        eval_config = eval_config or EvalConfig()
        tasks.require(config.prompts_per_step, "rollout.prompts_per_step")
        if eval_tasks is not None:
            eval_tasks.require(eval_config.num_tasks, "eval.num_tasks")
        self._config, self._eval_config = config, eval_config
        self._engine, self._seed, self._on_episode = engine, seed, on_episode
        self._tasks, self._eval_tasks = tasks, eval_tasks
        self._stage = Stage(
            engine=engine,
            make_env=make_env,
            renderer=renderer,
            config=config,
            rubric=rubric,
            generation=Gate(config.max_concurrent_generations),
            env_calls=asyncio.Semaphore(config.max_concurrent_env_calls),
            turnstile=Turnstile(),
            prompt=PromptMemo(renderer.prompt),
        )
        self._eval_stage = replace(
            self._stage,
            make_env=eval_make_env or make_env,
            config=config.model_copy(update={"temperature": eval_config.temperature}),
        )
        self._slots: dict[asyncio.Task[TrajectoryGroup | None], _Slot] = {}
        self._replay: list[int] = []  # draws that were in flight when the run stopped
        self._batch_size = config.prompts_per_step
        self._num_attempts, self._num_dropped = 0, 0  # since the last batch
        self._faults: Counter[StopReason] = Counter()
        self._causes: dict[StopReason, str] = {}
        self._pending: dict[str, Episode] = {}
        self._metrics = MeanMetrics()
        self._sampled: list[TrajectoryGroup] = []  # all of them since the last pop
        self._waited_s, self._popped_at = 0.0, time.perf_counter()
        self._lag_s = 0.0

        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="agentrl-rollouts", daemon=True
        )
        self._thread.start()
        self._watchers = [
            asyncio.run_coroutine_threadsafe(watch(), self._loop)
            for watch in (self._watch, self._measure_lag)
        ]

    # The learner's side.

    def next_groups(self, num_groups: int) -> list[TrajectoryGroup]:
        """Wait for `num_groups` groups, in the order of their draws.

        Fewer, possibly none, where groups without signal were not to be had otherwise (dynamic sampling). Episodes
        with a fault stay in their group, with `reward` None.

        Raises:
            RolloutError: too many episodes failed.
            EngineDied: there is no engine any more.
        """
        return self._cross(self._next_groups(num_groups))

    def evaluate(self) -> list[TrajectoryGroup]:
        """Play the held-out tasks, always the same with the same seeds; faults stay in the groups, unscored."""
        return self._cross(self._evaluate())

    def update_weights(self, weights: Weights, version: int) -> None:
        """Let no request begin, wait for those in flight, hand over, and go on.

        Raises:
            RolloutError: a request did not end.
        """
        self._cross(self._update_weights(weights, version))

    def score(self, token_ids: Any) -> list[float]:
        """See `Engine.score`."""
        return self._cross(
            asyncio.wait_for(self._engine.score(token_ids), self._config.generate_timeout_s)
        )

    def pop_metrics(self) -> dict[str, float]:
        """What was counted and timed since the last call, over all episodes sampled, also those not trained on."""
        return self._cross(self._pop_metrics())

    def state_dict(self) -> dict[str, Any]:
        """Which task is next; draws in flight will be played again."""
        return self._cross(self._state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before the first batch only."""
        self._tasks.load_state_dict(state["tasks"])
        self._replay = list(state["in_flight"])

    def close(self) -> None:
        """End all episodes, close their envs and the engine, within seconds."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def __enter__(self) -> RolloutManager:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _cross(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the event loop and wait; Ctrl-C cancels it there and waits until all is cleaned up."""
        if self._closed:
            coroutine.close()
            raise RuntimeError("the rollout manager is closed")
        over = threading.Event()

        async def run() -> T:
            try:
                return await coroutine
            finally:
                over.set()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                over.wait(2 * CLOSE_S)
            raise

    # The loop's side.

    async def _next_groups(self, num_groups: int) -> list[TrajectoryGroup]:
        config = self._config
        self._batch_size = num_groups
        self._num_attempts, self._num_dropped = 0, 0
        self._faults.clear()
        began = time.perf_counter()
        batch: list[tuple[int, TrajectoryGroup]] = []
        try:
            self._start_slots(
                max(self._num_alive_allowed, math.ceil(num_groups * config.oversampling))
            )
            while len(batch) < num_groups and self._slots:
                done, _ = await asyncio.wait(self._slots, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: self._slots[task].draw.number):
                    if len(batch) == num_groups:
                        break
                    group = task.result()
                    slot = self._slots.pop(task)
                    if group is None:
                        continue
                    staleness = self._staleness(group)
                    if staleness > config.max_staleness:
                        self._metrics.count("rollout/stale_groups")
                        self._start_slots(len(self._slots) + 1)
                        continue
                    self._metrics.add("rollout/staleness", staleness)
                    batch.append((slot.draw.number, group))
        except BaseException:
            interrupted = [slot.draw.number for slot in self._slots.values()]
            await self._cancel_slots()
            self._replay = sorted([*self._replay, *interrupted, *(number for number, _ in batch)])
            raise
        finally:
            self._waited_s += time.perf_counter() - began
        if config.max_staleness == 0:
            self._metrics.count("rollout/aborted_groups", len(self._slots))
            await self._cancel_slots()
        else:
            self._start_slots(self._num_alive_allowed - num_groups)
        return [group for _, group in sorted(batch, key=lambda numbered: numbered[0])]

    @property
    def _num_alive_allowed(self) -> int:
        return (self._config.max_staleness + 1) * self._batch_size

    def _start_slots(self, num_alive: int) -> None:
        while len(self._slots) < num_alive:
            slot = _Slot(draw=self._draw())
            self._slots[asyncio.create_task(self._fill(slot))] = slot

    def _draw(self) -> Draw:
        return self._tasks.draw(self._replay.pop(0)) if self._replay else next(self._tasks)

    async def _cancel_slots(self) -> None:
        slots, self._slots = self._slots, {}
        await _cancel(slots)

    async def _fill(self, slot: _Slot) -> TrajectoryGroup | None:
        """Play groups until one is fit to train on; None if the refills for groups without signal are used up."""
        config = self._config
        while True:
            group = await self._play_group(slot.draw, f"g{slot.draw.number}", self._stage)
            self._sampled.append(group)
            num_scored = sum(reward is not None for reward in group.rewards)
            self._metrics.add("rollout/group_size", num_scored)
            if num_scored < config.min_group_size:
                self._drop()
            elif config.dynamic_sampling_rounds == 0 or group.has_signal:
                return group
            else:
                self._metrics.count("rollout/no_signal_groups")
                if slot.num_refills == config.dynamic_sampling_rounds:
                    return None
                slot.num_refills += 1
            slot.draw = self._draw()

    def _drop(self) -> None:
        self._metrics.count("rollout/dropped_groups")
        self._num_dropped += 1
        # Also where single faults spoil every group, refills must end.
        if self._num_dropped > self._batch_size * self._config.max_attempts:
            raise RolloutError(
                f"{self._num_dropped} groups in a row of one batch had fewer than rollout.min_group_size="
                f"{self._config.min_group_size} episodes without fault; {self._common_cause()}"
            )

    async def _play_group(self, draw: Draw, id: str, stage: Stage) -> TrajectoryGroup:
        """All members at once, so that an engine can share their prompt. An error of one ends the others first."""
        training = stage is self._stage
        size = (self._config if training else self._eval_config).num_generations
        members = [
            asyncio.create_task(self._play_member(draw, f"{id}-{member}", member, stage))
            for member in range(size)
        ]
        try:
            episodes = await asyncio.gather(*members)
        except BaseException:
            await _cancel(members)
            raise
        group = TrajectoryGroup(
            id=id, task=draw.task, trajectories=[episode.tape for episode in episodes]
        )
        await self._score_group(group, episodes, stage)
        return group

    async def _play_member(self, draw: Draw, id: str, member: int, stage: Stage) -> Episode:
        training = stage is self._stage
        for attempt in range(self._config.max_attempts):
            episode = Episode(
                id=f"{id}-retry{attempt}" if attempt else id,
                task=draw.task,
                env_seed=draw.env_seed,
                seed=derive_seed(
                    self._seed, "train" if training else "eval", draw.number, member, attempt
                ),
            )
            self._pending[episode.id] = episode
            try:
                tape = await play(episode, stage)
            finally:
                del self._pending[episode.id]
            if self._on_episode is not None:
                self._on_episode(tape)
            assert tape.stop_reason is not None
            if training:
                self._count_attempt(tape.stop_reason, tape.error)
            if not tape.stop_reason.is_fault or tape.stop_reason is StopReason.PROMPT_TOO_LONG:
                break
        return episode

    def _count_attempt(self, reason: StopReason, error: str) -> None:
        self._num_attempts += 1
        if reason.is_fault:
            self._metrics.count(f"rollout/faults/{reason}")
            self._faults[reason] += 1
            self._causes[reason] = error
        limit = self._config.max_fault_fraction
        if (
            self._num_attempts >= self._batch_size * self._config.num_generations
            and self._faults.total() > limit * self._num_attempts
        ):
            raise RolloutError(
                f"{self._faults.total()} of {self._num_attempts} episodes failed, more than "
                f"rollout.max_fault_fraction={limit:g}; {self._common_cause()}"
            )

    def _common_cause(self) -> str:
        common = self._faults.most_common(1)
        return "".join(
            f"most often ({n} times) {reason}: {self._causes[reason]}" for reason, n in common
        )

    async def _score_group(
        self, group: TrajectoryGroup, episodes: list[Episode], stage: Stage
    ) -> None:
        """Run the rewards that compare episodes, on those without fault. Their envs are closed by now."""
        sound = [e for e in episodes if e.tape.stop_reason and not e.tape.stop_reason.is_fault]
        rubrics = sound[0].rubrics(stage) if sound else []
        if not any(rubric.scores_groups for rubric in rubrics):
            return
        scored = TrajectoryGroup(id=group.id, task=group.task, trajectories=[e.tape for e in sound])
        envs = [episode.env and episode.env.unwrapped for episode in sound]
        try:
            for rubric in rubrics:
                async with stage.env_calls, asyncio.timeout(self._config.score_timeout_s):
                    rewards = await rubric.score_group(scored, envs)
                for tape, named in zip(scored.trajectories, rewards, strict=True):
                    tape.rewards |= named
            for tape in scored.trajectories:
                tape.reward = total_reward(tape, rubrics)
        except (RewardError, TimeoutError) as error:
            logger.warning("group %s: scoring failed: %s", group.id, error, exc_info=error)
            for tape in scored.trajectories:
                tape.reward, tape.stop_reason = None, StopReason.REWARD_ERROR
                tape.error = f"{type(error).__name__}: {error}"
                if stage is self._stage:
                    self._count_attempt(tape.stop_reason, tape.error)

    async def _evaluate(self) -> list[TrajectoryGroup]:
        tasks, num_tasks = self._eval_tasks, self._eval_config.num_tasks
        if tasks is None or not num_tasks:
            return []
        groups = [
            asyncio.create_task(
                self._play_group(tasks.draw(number), f"eval{number}", self._eval_stage)
            )
            for number in range(num_tasks)
        ]
        try:
            return await asyncio.gather(*groups)
        except BaseException:
            await _cancel(groups)
            raise

    async def _update_weights(self, weights: Weights, version: int) -> None:
        gate = self._stage.generation
        try:
            # Each request has this deadline itself; one that lives on does not heed its cancellation.
            async with gate.shut(self._config.generate_timeout_s + CLOSE_S):
                await self._engine.update_weights(weights, version)
        except TimeoutError as error:
            raise RolloutError(
                f"{gate.in_flight} requests did not end, so the weights could not be updated\n{self._table()}"
            ) from error
        if self._config.max_staleness > 0 and self._slots:
            self._start_slots(self._num_alive_allowed)

    def _staleness(self, group: TrajectoryGroup) -> int:
        versions = [
            t.oldest_version for t in group.trajectories if t.reward is not None and t.turns
        ]
        return self._engine.version - min(versions, default=self._engine.version)

    async def _pop_metrics(self) -> dict[str, float]:
        now = time.perf_counter()
        groups, self._sampled = self._sampled, []
        metrics = summarize(groups) | self._metrics.pop()
        tapes = [tape for group in groups for tape in group.trajectories]
        spent: Counter[str] = Counter()
        for tape in tapes:
            spent.update(tape.timings)
        # Episodes overlap, so the time waited is split in the ratio of what they spent it on.
        metrics["time/rollout"] = self._waited_s
        for name, seconds in spent.items():
            metrics[f"time/{name}"] = self._waited_s * seconds / max(spent.total(), 1e-9)
        elapsed = self._waited_s if self._config.max_staleness == 0 else now - self._popped_at
        if tapes and elapsed > 0:
            metrics["rollout/tokens_per_second"] = (
                sum(t.num_sampled_tokens for t in tapes) / elapsed
            )
        metrics["rollout/event_loop_lag"] = self._lag_s
        self._waited_s, self._popped_at, self._lag_s = 0.0, now, 0.0
        return metrics

    async def _state_dict(self) -> dict[str, Any]:
        in_flight = sorted([*self._replay, *(slot.draw.number for slot in self._slots.values())])
        return {"tasks": self._tasks.state_dict(), "in_flight": in_flight}

    async def _shut_down(self) -> None:
        # All at once: a call that still waits for slots must not see them vanish first.
        await _cancel(asyncio.all_tasks() - {asyncio.current_task()})
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._engine.close()
        except TimeoutError:
            logger.warning("the engine did not close within %g s", CLOSE_S)

    async def _watch(self) -> None:
        """Print what is pending when nothing has moved for `watchdog_s`."""
        limit, printed = self._config.watchdog_s, 0.0
        while True:
            await asyncio.sleep(limit / 4)
            moved = max((episode.since for episode in self._pending.values()), default=math.inf)
            now = time.monotonic()
            if now - max(moved, printed) > limit:
                printed = now
                logger.warning(
                    "no progress for %.0f s; pending episodes:\n%s", now - moved, self._table()
                )

    def _table(self) -> str:
        now = time.monotonic()
        rows = [f"{'episode':<16} {'phase':<18} {'age':>8} {'turn':>4}"]
        for episode in sorted(self._pending.values(), key=lambda episode: episode.since):
            age, turn = f"{now - episode.since:.1f} s", len(episode.tape.turns)
            rows.append(f"{episode.id:<16} {episode.phase:<18} {age:>8} {turn:>4}")
        return "\n".join(rows)

    async def _measure_lag(self) -> None:
        """How late the loop wakes: a blocking call on it stalls every episode."""
        alarmed = False
        while True:
            due = time.perf_counter() + HEARTBEAT_S
            await asyncio.sleep(HEARTBEAT_S)
            lag = time.perf_counter() - due
            self._lag_s = max(self._lag_s, lag)
            if lag > LAG_ALARM_S and not alarmed:
                alarmed = True
                logger.warning("the event loop stood still for %.1f s: something blocks it", lag)


async def _cancel(tasks: Any) -> None:
    """Cancel and await; what clings to life after `CLOSE_S` is cancelled out of its cleaning up."""
    tasks = list(tasks)
    for grace in (CLOSE_S, 1.0):
        for task in tasks:
            task.cancel()
        if not tasks:
            return
        done, pending = await asyncio.wait(tasks, timeout=grace)
        for task in done:
            if not task.cancelled():
                task.exception()  # retrieved: the first error is the one that is raised
        tasks = list(pending)
    if tasks:
        logger.warning("%d tasks did not end when cancelled", len(tasks))
