"""The owner of the event loop on which all episodes run; behind it, rollouts are synchronous.

    learner's thread                  event loop (a daemon thread)

    next_groups(n) --- waits for ---> n slots     each plays groups until one is fit to train on
                                        |  waits for
                                      G members   each plays an episode, again while faults spoil it
                                        |  waits for
                                      episode     waits, under deadlines, for one of
                                        |- gate       max_concurrent_generations --> engine
                                        `- env_calls  max_concurrent_env_calls --> env, rewards
    update_weights --- waits for ---> gate shut, nothing in flight, engine.update_weights, gate open

Turns that are in flight at an update are interrupted and go on after it (`rollout.on_update`).

With `max_staleness=0` no slot lives between two calls. Otherwise `(max_staleness + 1) * n` groups
are alive at most, those that the learner holds included, and slots go on while it trains.

With `oversampling > 1` the groups that are complete first make the batch and the others are
aborted. This favours short episodes.
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
from agentrl.protocols import Engine, Probe, Weights
from agentrl.renderer import Renderer
from agentrl.rubric import Rubric
from agentrl.summary import summarize
from agentrl.threads import num_abandoned_threads
from agentrl.trajectory import Trajectory, TrajectoryGroup
from rollout.episode import PromptMemo, Stage
from rollout.faults import FaultBudget, RolloutError
from rollout.gate import Gate, Turnstile
from rollout.group import CLOSE_S, GroupPlayer, cancel
from rollout.tasks import Draw, TaskStream
from rollout.watch import Watch

logger = logging.getLogger("agentrl")

T = TypeVar("T")
MakeEnv = Callable[[], gymnasium.Env[Any, Any]]


@dataclass(slots=True, kw_only=True)
class _Slot:
    """One group wanted; `draw` is the one in play."""

    draw: Draw
    num_refills: int = 0  # after groups without signal


class RolloutManager:
    """Implements `agentrl.protocols.Rollouts`.

    `on_episode` sees each attempt at an episode that ended, on the event loop: it must be quick. An
    error in it stops the run. Sampling seeds follow from `seed` and the numbers of draw, member,
    attempt and turn.

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
        on_episode: Callable[[Trajectory], None] = lambda tape: None,
    ) -> None:
        if config.oversampling > 1 and config.max_staleness > 0:
            raise ValueError(
                "rollout.oversampling > 1 aborts the slowest groups, rollout.max_staleness > 0 "
                "keeps them for the next batch: set one of them only"
            )
        eval_config = eval_config or EvalConfig()
        tasks.require(config.prompts_per_step, "rollout.prompts_per_step")
        if eval_tasks is not None:
            eval_tasks.require(eval_config.num_tasks, "eval.num_tasks")
        self._config, self._engine = config, engine
        self._tasks = tasks
        self._eval_tasks, self._num_eval_tasks = eval_tasks, eval_config.num_tasks
        self._metrics = MeanMetrics()
        self._faults = FaultBudget(config, self._metrics)
        self._watch = Watch(config.watchdog_s)
        self._gate = Gate(config.max_concurrent_generations)
        stage = Stage(
            engine=engine,
            make_env=make_env,
            renderer=renderer,
            config=config,
            rubric=rubric,
            generation=self._gate,
            env_calls=asyncio.Semaphore(config.max_concurrent_env_calls),
            turnstile=Turnstile(),
            prompt=PromptMemo(renderer.prompt),
        )

        def on_train_episode(tape: Trajectory) -> None:
            on_episode(tape)
            self._faults.count(tape)

        self._player = GroupPlayer(
            stage=stage,
            kind="train",
            num_generations=config.num_generations,
            seed=seed,
            pending=self._watch.pending,
            on_episode=on_train_episode,
            on_fault=self._faults.count_fault,
        )
        self._eval_player = replace(
            self._player,
            stage=replace(
                stage,
                make_env=eval_make_env or make_env,
                config=config.model_copy(update={"temperature": eval_config.temperature}),
            ),
            kind="eval",
            num_generations=eval_config.num_generations,
            on_episode=on_episode,
            on_fault=lambda tape: None,
        )
        self._slots: dict[asyncio.Task[TrajectoryGroup | None], _Slot] = {}
        self._replay: list[int] = []  # draws that were in flight when the run stopped
        self._batch_size = config.prompts_per_step
        self._sampled: list[TrajectoryGroup] = []  # all of them since the last pop
        self._waited_s, self._popped_at = 0.0, time.perf_counter()

        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="agentrl-rollouts", daemon=True
        )
        self._thread.start()
        for watch in (self._watch.progress, self._watch.lag):
            asyncio.run_coroutine_threadsafe(watch(), self._loop)
        try:
            self._cross(engine.start())
        except BaseException:
            self.close()
            raise

    # The learner's side.

    def next_groups(self, num_groups: int) -> list[TrajectoryGroup]:
        """Wait for `num_groups` groups, in the order of their draws.

        Fewer, possibly none, where dynamic sampling found no more groups with signal. Episodes with
        a fault stay in their group, with `reward` None.

        Raises:
            RolloutError: too many episodes failed.
            EngineDied: there is no engine any more.
        """
        return self._cross(self._next_groups(num_groups))

    def evaluate(self) -> list[TrajectoryGroup]:
        """Play the held-out tasks, always the same with the same seeds.

        Episodes with a fault stay in their group, with `reward` None.
        """
        return self._cross(self._evaluate())

    def sleep(self) -> None:
        """See `Engine.sleep`."""
        self._cross(self._sleep())

    def update_weights(self, weights: Weights, version: int, probe: Probe) -> dict[str, float]:
        """Let no request begin, end those in flight, hand over, and go on.

        Raises:
            RolloutError: a request did not end.
            SyncError: see `Engine.update_weights`.
        """
        return self._cross(self._update_weights(weights, version, probe))

    def pop_metrics(self) -> dict[str, float]:
        """Counts, means and times since the last call, over all groups sampled, trained on or not.

        `time/<part>` are seconds and split `time/rollout` as the episodes spent theirs.
        """
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
        """Run on the event loop and wait; Ctrl-C cancels it there and waits for the clean-up."""
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
        self._faults.start_batch(num_groups)
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
        await cancel(slots)

    async def _fill(self, slot: _Slot) -> TrajectoryGroup | None:
        """Play groups until one is fit to train on; None if the refills for signal are used up."""
        config = self._config
        while True:
            group = await self._player.play(slot.draw)
            self._sampled.append(group)
            num_scored = sum(reward is not None for reward in group.rewards)
            self._metrics.add("rollout/group_size", num_scored)
            if num_scored < config.min_group_size:
                self._faults.drop_group()
            elif config.dynamic_sampling_rounds == 0 or group.has_signal:
                return group
            else:
                self._metrics.count("rollout/no_signal_groups")
                if slot.num_refills == config.dynamic_sampling_rounds:
                    return None
                slot.num_refills += 1
            slot.draw = self._draw()

    async def _evaluate(self) -> list[TrajectoryGroup]:
        tasks, num_tasks = self._eval_tasks, self._num_eval_tasks
        if tasks is None or not num_tasks:
            return []
        groups = [
            asyncio.create_task(self._eval_player.play(tasks.draw(number)))
            for number in range(num_tasks)
        ]
        try:
            return await asyncio.gather(*groups)
        except BaseException:
            await cancel(groups)
            raise

    async def _sleep(self) -> None:
        async with self._gate.shut(self._config.generate_timeout_s + CLOSE_S):
            await self._engine.sleep()

    async def _update_weights(
        self, weights: Weights, version: int, probe: Probe
    ) -> dict[str, float]:
        interrupt = None if self._config.on_update == "finish" else self._engine.interrupt
        try:
            # Each request has this deadline itself; one that lives on is deaf to its cancellation.
            async with self._gate.shut(self._config.generate_timeout_s + CLOSE_S, interrupt):
                metrics = await self._engine.update_weights(weights, version, probe)
        except TimeoutError as error:
            raise RolloutError(
                f"{self._gate.in_flight} requests did not end, so the weights could not be "
                f"updated\n{self._watch.table()}"
            ) from error
        if self._config.max_staleness > 0 and self._slots:
            self._start_slots(self._num_alive_allowed)
        return metrics

    def _staleness(self, group: TrajectoryGroup) -> int:
        versions = [
            t.oldest_version for t in group.trajectories if t.reward is not None and t.turns
        ]
        return self._engine.version - min(versions, default=self._engine.version)

    async def _pop_metrics(self) -> dict[str, float]:
        now = time.perf_counter()
        groups, self._sampled = self._sampled, []
        metrics = summarize(groups) | self._metrics.pop() | self._engine.pop_metrics()
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
        metrics["rollout/event_loop_lag"] = self._watch.lag_s
        metrics["rollout/abandoned_threads"] = num_abandoned_threads()
        self._waited_s, self._popped_at, self._watch.lag_s = 0.0, now, 0.0
        return metrics

    async def _state_dict(self) -> dict[str, Any]:
        in_flight = sorted([*self._replay, *(slot.draw.number for slot in self._slots.values())])
        return {"tasks": self._tasks.state_dict(), "in_flight": in_flight}

    async def _shut_down(self) -> None:
        # All at once: a call that still waits for slots must not see them vanish first.
        await cancel(asyncio.all_tasks() - {asyncio.current_task()})
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._engine.close()
        except TimeoutError:
            logger.warning("the engine did not close within %g s", CLOSE_S)
