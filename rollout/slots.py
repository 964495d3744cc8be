"""The groups in play and those that are complete, and which of them make the next batch.

At most `(max_staleness + 1) * n` groups are alive, those that the learner holds included, and each
batch of n takes those with the oldest tokens first. It waits for a group in play only if that
could not be trained within `max_staleness` any more otherwise: no episode is lost for being long.

With `max_staleness=0` no group outlives its batch. With `oversampling > 1` the groups that are
complete first make the batch and the others are aborted, which favours short episodes.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from agentrl.config import RolloutConfig
from agentrl.metrics import MeanMetrics
from agentrl.protocols import Engine
from agentrl.trajectory import TrajectoryGroup
from rollout.faults import FaultBudget
from rollout.group import GroupPlayer, cancel, first_done
from rollout.tasks import Draw, Tasks


@dataclass(slots=True, kw_only=True, eq=False)
class _Slot:
    """One group wanted; `draw` is the one in play."""

    draw: Draw
    oldest_version: int  # of its tokens; while it is in play, of the weights when it began
    num_refills: int = 0  # after groups without signal
    group: TrajectoryGroup | None = None  # complete, and fit to train on
    versions: Counter[int] = field(default_factory=Counter)  # how many tokens each sampled


@dataclass(slots=True, kw_only=True)
class Slots:
    """Runs on the event loop; `on_group` sees each group that ends, fit to train on or not."""

    player: GroupPlayer
    tasks: Tasks
    config: RolloutConfig
    engine: Engine
    faults: FaultBudget
    metrics: MeanMetrics
    on_group: Callable[[TrajectoryGroup], None]
    batch_size: int = field(init=False)
    _slots: dict[asyncio.Task[None], _Slot] = field(init=False, default_factory=dict)
    _replay: list[Draw] = field(init=False, default_factory=list)  # to play again, first
    # Groups since the last batch, with the numbers of their draws.
    _ended: list[tuple[int, TrajectoryGroup]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.batch_size = self.config.prompts_per_step

    async def next_batch(self, num_groups: int) -> list[TrajectoryGroup] | None:
        """Wait for `num_groups` groups, in the order of their draws.

        Fewer, possibly none, where dynamic sampling found no more groups with signal. None while
        the engine wants weights; what is in play or complete stays for the next call.
        """
        self.batch_size = num_groups
        try:
            self._start(max(self._num_allowed, math.ceil(num_groups * self.config.oversampling)))
            while (batch := self._ripe()) is None:
                in_play = [task for task in self._slots if not task.done()]
                if not await first_done(in_play, self.engine.wants_weights):
                    return None
        except BaseException:
            self._replay = self._draws()
            self._ended.clear()
            await self.cancel()
            raise
        self.faults.start_batch(num_groups)
        self.tasks.learn([group for _, group in sorted(self._ended, key=itemgetter(0))])
        self._ended.clear()
        for slot in batch.values():
            self._count_staleness(slot)
        self._slots = {task: slot for task, slot in self._slots.items() if task not in batch}
        if self.config.max_staleness == 0:
            self.metrics.count("rollout/aborted_groups", len(self._slots))
            await self.cancel()
        else:
            self._start(self._num_allowed - num_groups)
        slots = sorted(batch.values(), key=lambda slot: slot.draw.number)
        return [slot.group for slot in slots if slot.group is not None]

    @property
    def tasks_in_play(self) -> list[asyncio.Task[None]]:
        return list(self._slots)

    def start_more(self) -> None:
        """After an update of the weights: the groups that the learner held are trained."""
        if self.config.max_staleness > 0 and self._slots:
            self._start(self._num_allowed)

    async def cancel(self) -> None:
        slots, self._slots = self._slots, {}
        self._waste(*slots.values())  # of those in play, their players count it
        await cancel(slots)

    def state_dict(self) -> dict[str, Any]:
        """Which task is next; draws in play or complete will be played again."""
        tickets = [draw.ticket for draw in self._draws()]
        return {"tasks": self.tasks.state_dict(), "in_flight": tickets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tasks.load_state_dict(state["tasks"])
        self._replay = [self.tasks.draw(ticket) for ticket in state["in_flight"]]

    def _ripe(self) -> dict[asyncio.Task[None], _Slot] | None:
        """The next batch, or None: there is something to wait for."""
        self._settle()
        done = sorted(
            (task for task in self._slots if task.done()),
            key=lambda task: (self._slots[task].oldest_version, self._slots[task].draw.number),
        )
        num_groups, max_staleness = self.batch_size, self.config.max_staleness
        batch = {task: self._slots[task] for task in done[:num_groups]}
        if len(done) == len(self._slots):
            return batch
        if len(batch) < num_groups:
            return None
        left = [slot.oldest_version for task, slot in self._slots.items() if task not in batch]
        for num_later in range(max_staleness):
            # So many batches can still take groups that are as old as this.
            limit = self.engine.version - max_staleness + num_later
            if sum(version <= limit for version in left) > num_later * num_groups:
                return None
        return batch

    def _settle(self) -> None:
        """Give up the slots without a group that could be trained; errors in them rise here."""
        for task, slot in list(self._slots.items()):
            if not task.done():
                continue
            task.result()
            if slot.group is None:
                del self._slots[task]
            elif self.engine.version - slot.oldest_version > self.config.max_staleness:
                del self._slots[task]
                self.metrics.count("rollout/stale_groups")
                self._waste(slot)
                self._start(len(self._slots) + 1)

    @property
    def _num_allowed(self) -> int:
        return (self.config.max_staleness + 1) * self.batch_size

    def _start(self, num_alive: int) -> None:
        while len(self._slots) < num_alive:
            slot = _Slot(draw=self._draw(), oldest_version=self.engine.version)
            self._slots[asyncio.create_task(self._fill(slot))] = slot

    def _draw(self) -> Draw:
        return self._replay.pop(0) if self._replay else next(self.tasks)

    def _draws(self) -> list[Draw]:
        """Those in play or complete, and those to be played again."""
        draws = [*self._replay, *(slot.draw for slot in self._slots.values())]
        return sorted(draws, key=lambda draw: draw.number)

    async def _fill(self, slot: _Slot) -> None:
        """Play groups until one is fit to train on, or the refills for signal are used up."""
        config = self.config
        while True:
            slot.oldest_version = self.engine.version
            group = await self.player.play(slot.draw)
            self.on_group(group)
            self._ended.append((slot.draw.number, group))
            scored = [tape for tape in group.trajectories if tape.reward is not None]
            slot.versions = Counter()
            for tape in scored:
                slot.versions.update(tape.versions)
            del slot.versions[-1]  # not sampled
            slot.oldest_version = min(slot.versions, default=slot.oldest_version)
            self.metrics.add("rollout/group_size", len(scored))
            if len(scored) < config.min_group_size:
                self.faults.drop_group()
            elif config.dynamic_sampling_rounds == 0 or group.has_signal:
                slot.group = group
                return
            else:
                self.metrics.count("rollout/no_signal_groups")
                slot.num_refills += 1
            self._waste(slot)
            slot.versions = Counter()
            if slot.num_refills > config.dynamic_sampling_rounds:
                return
            slot.draw = self._draw()

    def _waste(self, *slots: _Slot) -> None:
        self.metrics.count("rollout/wasted_tokens", sum(s.versions.total() for s in slots))

    def _count_staleness(self, slot: _Slot) -> None:
        now = self.engine.version
        self.metrics.add("rollout/staleness", now - slot.oldest_version)
        for version, num_tokens in slot.versions.items():
            for staleness in range(self.config.max_staleness + 1):
                is_it = float(now - version == staleness)
                self.metrics.add(f"rollout/staleness_{staleness}", is_it, weight=num_tokens)
