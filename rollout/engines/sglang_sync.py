"""One update of the weights of SGLang servers, each of which is verified or reported as failed.

    nothing in flight -> memory back -> all tensors -> cache flushed -> version set -> verified

A server that fails a step takes no further one. While it goes on, no server may be asked to sample.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from agentrl.protocols import EngineError, Probe, Sent, SyncError, Transport, Weights
from rollout.engines.sglang_pool import Member
from rollout.engines.sglang_server import Lost, SGLangServer

QUIET_S = 30.0  # until aborted requests have ended
READY_SHARE = 0.15  # of an update's time, that a server may take to be ready for weights
POLL_S, LONGEST_POLL_S = 0.02, 1.0

logger = logging.getLogger("agentrl")


@dataclass(slots=True, kw_only=True)
class Update:
    """Weights on their way to `members`, of which those in `failed` did not take them."""

    members: Sequence[Member]
    version: int
    weight_version: str  # what servers call it
    probe: Probe
    rid: str  # of the request that verifies
    adapter: str | None = None  # that holds the weights, where one does
    failed: dict[str, str] = field(default_factory=dict)  # url -> cause
    differences: dict[str, float] = field(default_factory=dict)  # url -> |logprob - learner's|
    lives: list[int] = field(init=False)  # of the members, when this began

    def __post_init__(self) -> None:
        self.lives = [member.server.life for member in self.members]

    async def run(self, transport: Transport, weights: Weights, timeout_s: float) -> Sent:
        """Raises whatever `weights` or the transport as a whole raises."""
        began = asyncio.get_running_loop().time()
        deadline, ready_by = began + timeout_s, began + READY_SHARE * timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                await self._each(lambda member: self._make_ready(member, ready_by))
                sent = await transport.send(weights, [m.server for m in self._left()])
        except TimeoutError as error:
            raise SyncError(
                f"version {self.version} did not reach the servers within "
                f"sglang.sync_timeout_s={timeout_s:g}"
            ) from error
        self.failed |= sent.failed
        self.adapter = transport.adapter
        await self._each(lambda member: self._finish(member, deadline))
        return sent

    def _left(self) -> list[Member]:
        return [m for m in self.members if m.server.url not in self.failed]

    async def _each(self, step: Callable[[Member], Awaitable[None]]) -> None:
        async def take(member: Member) -> None:
            try:
                await step(member)
            except EngineError as error:
                self.failed[member.server.url] = str(error)
            except TimeoutError:
                self.failed[member.server.url] = f"{member.server.url} was not ready in time"

        await asyncio.gather(*(take(member) for member in self._left()))

    async def _make_ready(self, member: Member, deadline: float) -> None:
        async with asyncio.timeout_at(deadline):
            await be_quiet(member.server)
            await take_back(member, "weights")  # the KV cache last: the learner has that memory

    async def _finish(self, member: Member, deadline: float) -> None:
        server, number = member.server, self.members.index(member)
        async with asyncio.timeout_at(deadline):
            await take_back(member, "kv_cache")
            await flush(server, deadline)
            await server.post("/update_weight_version", {"new_version": self.weight_version})
            echo = await server.weight_version()
            if echo != self.weight_version:
                raise SyncError(f"{server.url} says its weights are {echo!r}")
            logprobs = await server.score(
                self.probe.token_ids,
                rid=f"{self.rid}-{number:04}",
                weight_version=self.weight_version,
                adapter=self.adapter,
            )
            difference = self.probe.check(logprobs, self.version, server.url)
        # The probe alone cannot tell: weights of an earlier version may pass it.
        if not member.alive or server.life != self.lives[number]:
            raise SyncError(f"{server.url} died, and lost what it was sent")
        self.differences[server.url], member.version = difference, self.version


async def be_quiet(server: SGLangServer) -> None:
    """End all requests, and return when none is left.

    Raises:
        SyncError: some are.
    """
    pause_s, left = POLL_S, "requests"
    try:
        async with asyncio.timeout(QUIET_S):
            while True:
                await server.abort()  # again: an abort does not reach a request on its way
                with suppress(Lost):  # the scheduler hears nothing while it computes a prompt
                    running, waiting = await server.loads()
                    if not running + waiting:
                        return
                    left = f"{running} running and {waiting} waiting requests"
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_POLL_S)
    except TimeoutError:
        raise SyncError(
            f"{server.url} still has {left} {QUIET_S:g} s after they were aborted"
        ) from None


async def flush(server: SGLangServer, deadline: float) -> None:
    """Return when the server has forgotten all keys and values; `deadline` is in the loop's time.

    Raises:
        SyncError: it has not until then, because it believes that a request still uses them.
    """
    pause_s = POLL_S
    while not await server.flush_cache():
        pause_s = min(2 * pause_s, LONGEST_POLL_S)
        if asyncio.get_running_loop().time() + pause_s > deadline:
            raise SyncError(f"{server.url} did not flush its cache: requests are still in flight")
        await asyncio.sleep(pause_s)


async def take_back(member: Member, tag: str) -> None:
    """Once: SGLang dies of a tag that was not lent."""
    if tag in member.lent:
        await member.server.post("/resume_memory_occupation", {"tags": [tag]})
        member.lent.discard(tag)


async def lend_memory(members: Sequence[Member], timeout_s: float) -> list[str]:
    """Let servers give up weights and KV cache; why some refused. None of them serves any more.

    One that does not answer is left to the watcher: the dead have nothing to lend.
    """
    failed: list[str] = []
    deadline = asyncio.get_running_loop().time() + timeout_s

    async def lend(member: Member) -> None:
        member.version = None
        try:
            await be_quiet(member.server)
            await flush(member.server, deadline)  # SGLang dies of a release before it is idle
            await member.server.post(
                "/release_memory_occupation",
                {"tags": ["kv_cache", "weights"]},
                timeout_s=timeout_s,
            )
            member.lent = {"kv_cache", "weights"}
        except Lost as error:
            logger.warning("%s", error)
            member.suspect.set()
        except EngineError as error:
            failed.append(str(error))

    await asyncio.gather(*(lend(member) for member in members))
    return failed
