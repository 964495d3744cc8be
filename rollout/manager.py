"""The owner of the event loop on which all episodes run; behind it, rollouts are synchronous.

    learner's thread                  event loop (a daemon thread)

    next_groups(n) --- waits for ---> slots       each plays groups until one is fit to train on
                                        |  waits for
                                      G members   each plays an episode, again while faults spoil it
                                        |  waits for
                                      episode     waits, under deadlines, for one of
                                        |- gate       max_concurrent_generations --> engine
                                        `- env_calls  max_concurrent_env_calls --> env, rewards
    update_weights --- waits for ---> gate shut, nothing in flight, engine.update_weights, gate open

Turns that are in flight at an update are interrupted and go on after it (`rollout.on_update`).

`slots.py` says which groups are alive: with `max_staleness=0` none while the learner trains.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from agentrl.config import EvalConfig, RolloutConfig
from agentrl.metrics import MeanMetrics
from agentrl.protocols import Engine, Probe, Weights
from agentrl.shutdown import shut_down
from agentrl.summary import summarize
from agentrl.threads import num_abandoned_threads
from agentrl.trajectory import Trajectory, TrajectoryGroup
from rollout.faults import FaultBudget, RolloutError
from rollout.gate import Gate, Turnstile
from rollout.group import CLOSE_S, GroupPlayer, cancel, first_done
from rollout.slots import Slots
from rollout.stage import EnvSetup, PromptMemo, Stage
from rollout.tasks import Draw, Tasks
from rollout.watch import Watch

logger = logging.getLogger("agentrl")

T = TypeVar("T")
SHUT_DOWN_S = 10.0  # what envs share gets to end


class RolloutManager:
    """Implements `agentrl.protocols.Rollouts`.

    `envs` are the envs by the name that their tasks give, which is "" for an only one.
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
        envs: Mapping[str, EnvSetup],
        config: RolloutConfig,
        tasks: Tasks,
        eval_config: EvalConfig | None = None,
        eval_draws: Sequence[Draw] = (),
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
        self._config, self._engine = config, engine
        self._tasks, self._eval_draws = tasks, eval_draws
        self._metrics = MeanMetrics()
        self._faults = FaultBudget(config, self._metrics)
        self._gate = Gate(config.max_concurrent_generations)
        self._watch = Watch(config.watchdog_s, self._gate, self._metrics)
        env_calls, turnstile = asyncio.Semaphore(config.max_concurrent_env_calls), Turnstile()
        stages = {
            name: Stage(
                engine=engine,
                make_env=env.make_env,
                renderer=env.renderer,
                config=config,
                rubric=env.rubric,
                generation=self._gate,
                env_calls=env_calls,
                turnstile=turnstile,
                prompt=PromptMemo(env.renderer.prompt),
                metrics=self._metrics,
            )
            for name, env in envs.items()
        }
        eval_metrics = MeanMetrics()  # those of training are of training alone
        eval_rollout = config.model_copy(update={"temperature": eval_config.temperature})
        eval_stages = {
            name: replace(
                stages[name],
                metrics=eval_metrics,
                make_env=env.eval_make_env or env.make_env,
                config=eval_rollout,
            )
            for name, env in envs.items()
        }

        def on_train_episode(tape: Trajectory) -> None:
            on_episode(tape)
            self._faults.count(tape)

        player = GroupPlayer(
            stages=stages,
            kind="train",
            num_generations=config.num_generations,
            seed=seed,
            pending=self._watch.pending,
            on_episode=on_train_episode,
            on_fault=self._faults.count_fault,
        )
        self._eval_player = replace(
            player,
            stages=eval_stages,
            kind="eval",
            num_generations=eval_config.num_generations,
            on_episode=on_episode,
            on_fault=lambda tape: None,
        )
        self._evaluation: asyncio.Task[list[TrajectoryGroup]] | None = None
        self._sampled: list[TrajectoryGroup] = []  # all of them since the last pop
        self._slots = Slots(
            player=player,
            tasks=tasks,
            config=config,
            engine=engine,
            faults=self._faults,
            metrics=self._metrics,
            on_group=lambda group: self._sampled.append(group),
        )
        self._waited_s, self._popped_at = 0.0, time.perf_counter()

        self._closed = False
        self._calls: set[asyncio.Task[Any]] = set()  # of the learner's side
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="agentrl-rollouts", daemon=True
        )
        self._thread.start()
        for watch in (self._watch.progress, self._watch.heartbeat):
            asyncio.run_coroutine_threadsafe(watch(), self._loop)
        try:
            self._cross(engine.start())
        except BaseException:
            self.close()
            raise

    # The learner's side.

    def next_groups(self, num_groups: int) -> list[TrajectoryGroup] | None:
        """Wait for `num_groups` groups, in the order of their draws.

        Fewer, possibly none, where dynamic sampling found no more groups with signal. Episodes with
        a fault stay in their group, with `reward` None. None: the engine wants the present weights
        again; after `update_weights` the next call goes on where this one stopped.

        Raises:
            RolloutError: too many episodes failed.
            EngineDied: there is no engine any more.
        """
        return self._cross(self._next_groups(num_groups))

    def evaluate(self) -> list[TrajectoryGroup] | None:
        """Play the held-out tasks, always the same with the same seeds.

        Episodes with a fault stay in their group, with `reward` None. None as in `next_groups`.
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

        `time/<part>` are seconds and split `time/rollout` as the episodes spent theirs. Over the
        groups handed over, `rollout/staleness` is the mean of the versions that passed since the
        oldest token of each, and `rollout/staleness_<k>` the fraction of tokens that are k versions
        old. `rollout/wasted_tokens` were sampled in turns begun anew, failed or aborted episodes,
        and groups not handed over. `rollout/running_requests` and `rollout/queued_requests` are
        means over time.
        """
        return self._cross(self._pop_metrics())

    def state_dict(self) -> dict[str, Any]:
        """Which task is next; draws in flight will be played again."""
        return self._cross(self._state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before the first batch only."""
        self._slots.load_state_dict(state)

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
            call = asyncio.current_task()
            assert call is not None
            self._calls.add(call)
            try:
                return await coroutine
            finally:
                self._calls.discard(call)
                over.set()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                over.wait(2 * CLOSE_S)
            raise

    # The loop's side.

    async def _next_groups(self, num_groups: int) -> list[TrajectoryGroup] | None:
        began = time.perf_counter()
        try:
            return await self._slots.next_batch(num_groups)
        finally:
            self._waited_s += time.perf_counter() - began

    async def _evaluate(self) -> list[TrajectoryGroup] | None:
        if self._evaluation is None:
            self._evaluation = asyncio.create_task(self._play_evaluation())
        try:
            if not await first_done([self._evaluation], self._engine.wants_weights):
                return None
            groups = self._evaluation.result()
        except BaseException:
            await cancel([self._evaluation])
            self._evaluation = None
            raise
        self._evaluation = None
        return groups

    async def _play_evaluation(self) -> list[TrajectoryGroup]:
        groups = [asyncio.create_task(self._eval_player.play(draw)) for draw in self._eval_draws]
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
        # Those that wait for these very weights cannot finish.
        running = self._config.on_update != "finish"
        interrupt = partial(self._engine.interrupt, running=running)
        try:
            # Each request has this deadline itself; one that lives on is deaf to its cancellation.
            async with self._gate.shut(self._config.generate_timeout_s + CLOSE_S, interrupt):
                metrics = await self._engine.update_weights(weights, version, probe)
        except TimeoutError as error:
            raise RolloutError(
                f"{self._gate.in_flight} requests did not end, so the weights could not be "
                f"updated\n{self._watch.table()}"
            ) from error
        self._slots.start_more()
        return metrics

    async def _pop_metrics(self) -> dict[str, float]:
        now = time.perf_counter()
        groups, self._sampled = self._sampled, []
        metrics = summarize(groups) | self._metrics.pop() | self._engine.pop_metrics()
        metrics |= self._tasks.metrics()
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
        return self._slots.state_dict()

    async def _shut_down(self) -> None:
        # All at once: a call that still waits for slots must not see them vanish first.
        evaluation = [self._evaluation] if self._evaluation else []
        await cancel([*self._calls, *self._slots.tasks_in_play, *evaluation])
        try:
            async with asyncio.timeout(SHUT_DOWN_S):
                await shut_down()
        except Exception:
            logger.exception("what the envs share did not end well")
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._engine.close()
        except TimeoutError:
            logger.warning("the engine did not close within %g s", CLOSE_S)
        # Not before: envs and engine have tasks that they end themselves, in order.
        await cancel(asyncio.all_tasks() - {asyncio.current_task()})
