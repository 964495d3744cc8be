"""Finds out that a server is dead, has it brought back, and says that it wants weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from agentrl.protocols import EngineError
from rollout.engines.sglang_pool import Member, Pool
from rollout.server import Fleet

logger = logging.getLogger("agentrl")

PROBE_EVERY_S = 5.0
PROBE_S = 5.0  # what a probe may take
PROBE_AGAIN_S = 0.2  # after one that was not answered
MISSES = 3  # in a row, and the server is dead


class Watcher:
    """A task per server.

    Args:
        admit: lets a server take weights that came back; raises EngineError where it cannot.
        wants_weights: set when one did.
        longest_lease_s: during which no probe tells death; a process that ends is seen always.
    """

    def __init__(
        self,
        fleet: Fleet,
        admit: Callable[[Member], Awaitable[None]],
        wants_weights: asyncio.Event,
        longest_lease_s: float,
    ) -> None:
        self.num_restarts = 0
        self.may_start = asyncio.Event()
        """Cleared while there is no memory for a server that starts."""
        self.may_start.set()
        self._fleet, self._admit, self._wants_weights = fleet, admit, wants_weights
        self._longest_lease_s, self._lease_until = longest_lease_s, 0.0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, pool: Pool) -> None:
        self._tasks = [asyncio.create_task(self._watch(m, pool)) for m in pool.members]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Servers may be silent in here: they load weights."""
        self._lease_until = asyncio.get_running_loop().time() + self._longest_lease_s
        try:
            yield
        finally:
            self._lease_until = 0.0

    async def _watch(self, member: Member, pool: Pool) -> None:
        url = member.server.url
        try:
            while True:
                cause = await self._until_dead(member, pool)
                logger.warning("%s: its requests go elsewhere, and it is brought back", cause)
                pool.lose(member)
                await self.may_start.wait()
                member.starting = True
                try:
                    await self._fleet.recover(url)
                    await self._admit(member)
                except EngineError as error:
                    logger.error("%s is given up: %s", url, error)
                    pool.give_up(member, str(error))
                    return
                finally:
                    member.starting = False
                logger.warning("%s is back, and waits for weights", url)
                self.num_restarts += 1
                pool.answered(member)
                member.suspect.clear()
                pool.notify()
                self._wants_weights.set()
        except Exception as error:
            pool.fail(f"the watch over {url} broke: {error!r}")
            raise

    async def _until_dead(self, member: Member, pool: Pool) -> str:
        """The cause. A suspicion lasts until a probe says that it was none."""
        ended = asyncio.create_task(self._fleet.ended(member.server.url))
        misses, pause_s = 0, PROBE_EVERY_S
        try:
            while True:
                suspected = asyncio.create_task(member.suspect.wait())
                await asyncio.wait(
                    {ended, suspected} if not misses else {ended},
                    timeout=pause_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                suspected.cancel()
                if ended.done():
                    return ended.result()
                if asyncio.get_running_loop().time() < self._lease_until:
                    member.suspect.clear()
                    continue
                try:
                    await self._probe(member)
                    misses, pause_s = 0, PROBE_EVERY_S
                    member.suspect.clear()
                    pool.notify()
                except EngineError as error:
                    misses, pause_s = misses + 1, PROBE_AGAIN_S
                    if misses == MISSES:
                        return f"{member.server.url} does not answer: {error}"
        finally:
            ended.cancel()

    async def _probe(self, member: Member) -> None:
        # Not /health, which samples: a server that is busy would look dead.
        await member.server.get("/model_info", timeout_s=PROBE_S)
        try:
            member.num_running, member.num_waiting = await member.server.loads(timeout_s=PROBE_S)
        except EngineError as error:  # its scheduler may be busy for long
            logger.info("%s does not tell its load: %s", member.server.url, error)
