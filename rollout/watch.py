"""What the event loop is waiting for, and how late it wakes."""

from __future__ import annotations

import asyncio
import logging
import time

from agentrl.metrics import MeanMetrics
from rollout.gate import Gate
from rollout.stage import Episode

logger = logging.getLogger("agentrl")

HEARTBEAT_S = 0.05
LAG_ALARM_S = 1.0


class Watch:
    """Knows the pending episodes; says so when nothing moves, or when something blocks the loop."""

    def __init__(self, watchdog_s: float, gate: Gate, metrics: MeanMetrics) -> None:
        self.watchdog_s = watchdog_s
        self._gate, self._metrics = gate, metrics
        self.pending: dict[str, Episode] = {}
        self.lag_s = 0.0  # the worst since it was set to 0

    def table(self) -> str:
        now = time.monotonic()
        rows = [f"{'episode':<16} {'phase':<18} {'age':>8} {'turn':>4}"]
        for episode in sorted(self.pending.values(), key=lambda episode: episode.since):
            age, turn = f"{now - episode.since:.1f} s", len(episode.tape.turns)
            rows.append(f"{episode.id:<16} {episode.phase:<18} {age:>8} {turn:>4}")
        return "\n".join(rows)

    async def progress(self) -> None:
        """Log the table whenever nothing has moved for `watchdog_s` seconds."""
        logged = 0.0
        while True:
            await asyncio.sleep(self.watchdog_s / 4)
            if not self.pending:
                continue
            now, moved = time.monotonic(), max(e.since for e in self.pending.values())
            if now - max(moved, logged) > self.watchdog_s:
                logged = now
                table = self.table()
                logger.warning("no progress for %.0f s; pending:\n%s", now - moved, table)

    async def heartbeat(self) -> None:
        """Measure how late the loop wakes, and how many requests run and wait.

        A blocking call on the loop stalls every episode.
        """
        alarmed = False
        while True:
            due = time.perf_counter() + HEARTBEAT_S
            await asyncio.sleep(HEARTBEAT_S)
            late = time.perf_counter() - due
            self.lag_s = max(self.lag_s, late)
            if self.pending:
                self._metrics.add("rollout/running_requests", self._gate.in_flight)
                self._metrics.add("rollout/queued_requests", self._gate.num_queued)
            if late > LAG_ALARM_S and not alarmed:
                alarmed = True
                logger.warning(
                    "the event loop stood still for %.1f s: something blocks it, or the machine is "
                    "too busy to run it",
                    late,
                )
