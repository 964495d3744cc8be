"""Around what an episode waits for: a slot, a deadline, and a typed fault for what is raised."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agentrl.protocols import EngineDied
from agentrl.threads import FOREIGN_ERRORS
from agentrl.types import StopReason
from rollout.gate import Gate
from rollout.stage import Episode


class Fault(Exception):
    """The infrastructure failed an episode."""

    def __init__(self, reason: StopReason, cause: BaseException | str) -> None:
        super().__init__(cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}")
        self.reason = reason


class faults:
    """Whatever is raised inside becomes a fault: `error`, or `timeout` where a deadline passed.

    Classes, here and below: generators would double what the manager spends on a turn.
    """

    __slots__ = ("error", "timeout")

    def __init__(self, error: StopReason, timeout: StopReason) -> None:
        self.error, self.timeout = error, timeout

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, cause: BaseException | None, trace: Any) -> None:
        if isinstance(cause, FOREIGN_ERRORS) and not isinstance(cause, Fault | EngineDied):
            reason = self.timeout if isinstance(cause, TimeoutError) else self.error
            raise Fault(reason, cause) from cause


class work:
    """Something that waits: for a slot with the episode's clock stopped, then to a deadline."""

    __slots__ = ("began", "deadline", "episode", "phase", "slots", "timeout_s", "timing")

    def __init__(
        self,
        episode: Episode,
        phase: str,
        timing: str,
        slots: Gate | asyncio.Semaphore,
        timeout_s: float,
    ) -> None:
        self.episode, self.phase, self.timing = episode, phase, timing
        self.slots, self.timeout_s = slots, timeout_s

    async def __aenter__(self) -> None:
        queued = time.perf_counter()
        if self.slots.locked():
            self.episode.enter(f"queue for {self.phase}")
            with stopped(self.episode.clock):
                await self.slots.__aenter__()
        else:
            await self.slots.__aenter__()
        self.episode.enter(self.phase)
        self.began = time.perf_counter()
        spend(self.episode, "queue", self.began - queued)
        self.deadline = asyncio.timeout(self.timeout_s)
        await self.deadline.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self.deadline.__aexit__(*error)
        except TimeoutError as late:
            raise TimeoutError(f"{self.phase} did not end within {self.timeout_s:g} s") from late
        finally:
            await self.slots.__aexit__(None, None, None)
            spend(self.episode, self.timing, time.perf_counter() - self.began)


@contextmanager
def stopped(clock: asyncio.Timeout | None) -> Iterator[None]:
    """Time in here does not count towards the clock's deadline."""
    assert clock is not None
    when = clock.when()
    assert when is not None
    loop = asyncio.get_running_loop()
    left = when - loop.time()
    clock.reschedule(None)
    try:
        yield
    finally:
        clock.reschedule(loop.time() + left)


def spend(episode: Episode, timing: str, seconds: float) -> None:
    timings = episode.tape.timings
    timings[timing] = timings.get(timing, 0.0) + seconds
