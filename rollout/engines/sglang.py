"""SGLang servers as one engine: routing, retries, and weights that are verified.

An episode stays with one server, whose prefix cache holds its turns; a new one goes to the server
with the least to do. Retries happen here and nowhere else: a request that a server did not answer
goes to another, with the same tokens. A server serves while it is known to hold the weights of
`version`; one that died comes back with none, and waits for the next `update_weights`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

from agentrl.config import SGLangConfig
from agentrl.metrics import MeanMetrics
from agentrl.protocols import EngineDied, EngineError, Probe, SyncError, Transport, Weights
from agentrl.types import Completion, Sampling
from rollout.engines.sglang_pool import Member, Pool
from rollout.engines.sglang_reply import BadReply, ForeignWeights, Reply
from rollout.engines.sglang_server import (
    ContextOverflow,
    Lost,
    SGLangServer,
    Unavailable,
    open_http,
)
from rollout.engines.sglang_sync import Update, lend_memory
from rollout.engines.sglang_watch import Watcher
from rollout.gate import Turnstile
from rollout.server import Fleet

logger = logging.getLogger("agentrl")

T = TypeVar("T")
Ask = Callable[[Member, int, str], Awaitable[T]]  # member, version, request id -> its answer

BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0
ABORT_S = 5.0  # what an abort that nobody waits for may take
DISOWN_S = 2.0
NOBODYS = "default"  # what SGLang calls the weights that it started with
CLOSE_S = 2.0  # what such aborts get at the end


class SGLangEngine:
    """Implements `agentrl.protocols.Engine`.

    With one seed it samples the same only where the servers run SGLang's deterministic inference.

    Args:
        fleet: where the servers are, and what brings back one that ended.
        transport: how weights get from the learner to a server.
        run_id: servers that hold weights of another run are refused.
        max_concurrent: requests in flight at once; more wait here for a socket.
        architecture: of the learner's model, such as LlamaForCausalLM; servers of others are
            refused.
    """

    def __init__(
        self,
        fleet: Fleet,
        transport: Transport,
        config: SGLangConfig,
        *,
        run_id: str,
        max_context_tokens: int,
        max_concurrent: int,
        architecture: str | None = None,
    ) -> None:
        self.version = 0
        self.wants_weights = asyncio.Event()
        self._fleet, self._transport, self._config = fleet, transport, config
        self._run_id, self._max_concurrent = run_id, max_concurrent
        self._max_context_tokens, self._architecture = max_context_tokens, architecture
        self._pool = Pool([], config.start_timeout_s)
        self._asleep = False
        self._rid, self._numbers = secrets.token_hex(4), itertools.count()
        self._slots = asyncio.Semaphore(max_concurrent)
        self._background: set[asyncio.Task[None]] = set()
        self._watcher = Watcher(fleet, self._admit, self.wants_weights, config.sync_timeout_s)
        self._metrics = MeanMetrics()
        self._cleanup = AsyncExitStack()

    async def start(self) -> None:
        self._cleanup.push_async_callback(self._fleet.close)
        try:
            await self._fleet.start()
            http, num_requests = open_http(self._max_concurrent)
            await self._cleanup.enter_async_context(http)
            self._slots = asyncio.Semaphore(num_requests)
            turnstile = Turnstile()
            members = [Member(SGLangServer(url, http, turnstile)) for url in self._fleet.urls]
            self._pool = Pool(members, self._config.start_timeout_s)
            self._cleanup.push_async_callback(self._transport.close)
            self._cleanup.push_async_callback(self._finish_background)
            if self._config.mode == "connect":
                self._cleanup.push_async_callback(self._disown)
            await self._admit_all()
            self._watcher.start(self._pool)
            self._cleanup.push_async_callback(self._watcher.close)
        except BaseException:
            await self.close()
            raise

    async def _admit_all(self) -> None:
        admitted = (self._admit(member) for member in self._pool.members)
        errors = [e for e in await asyncio.gather(*admitted, return_exceptions=True) if e]
        for error in errors:
            if not isinstance(error, EngineDied):
                raise error
        if errors:
            raise EngineDied("; ".join(map(str, errors)))

    async def _admit(self, member: Member) -> None:
        """Let a server take weights. Raises EngineDied where it cannot serve this run."""
        try:
            info = await member.server.describe()
        except EngineError as error:
            raise EngineDied(str(error)) from error
        objection = info.objection(
            run_id=self._run_id,
            max_context_tokens=self._max_context_tokens,
            architecture=self._architecture,
            take_over=self._config.take_over,
        )
        if objection:
            raise EngineDied(f"{member.server.url} cannot serve this run: {objection}")
        member.alive = True

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, session: str
    ) -> Completion:
        """See `Engine.generate`.

        Where the tokens do not fit a server's context, an empty turn ends by length. Where
        `interrupt` came while no server served, an empty turn ends by abort.
        """
        if sampling.max_new_tokens < 1:
            raise EngineError("a request for no tokens")  # SGLang would invent one's logprob

        async def ask(member: Member, version: int, rid: str) -> tuple[Reply, int]:
            reply = await member.server.generate(
                token_ids,
                sampling,
                rid=rid,
                weight_version=self._name(version),
                adapter=self._transport.adapter,
            )
            return reply, version

        try:
            answer = await self._request(session, ask)
        except ContextOverflow:
            self._metrics.count("engine/context_overflows")
            return Completion(token_ids=[], logprobs=[], finish_reason="length", versions=[])
        if answer is None:
            return Completion(token_ids=[], logprobs=[], finish_reason="abort", versions=[])
        reply, version = answer
        self._count(reply, session)
        return reply.completion(version)

    async def interrupt(self, *, running: bool = True) -> None:
        self._pool.interrupt()
        if not running:
            return
        await asyncio.gather(*(self._abort(m, None) for m in self._pool.members if m.requests))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        async def ask(member: Member, version: int, rid: str) -> list[float]:
            return await member.server.score(
                token_ids,
                rid=rid,
                weight_version=self._name(version),
                adapter=self._transport.adapter,
            )

        session = self._next_rid()
        try:
            logprobs = await self._request(session, ask)
        finally:
            self._pool.release(session)
        if logprobs is None:
            raise EngineError("new weights came before a server scored the tokens")
        return logprobs

    async def release(self, session: str) -> None:
        self._pool.release(session)

    async def sleep(self) -> None:
        """See `Engine.sleep`. Raises EngineError where all servers refuse."""
        self._asleep = True
        self._watcher.may_start.clear()
        await self._pool.wait_until_started()
        members = self._pool.alive
        failed = await lend_memory(members, self._config.sync_timeout_s)
        for cause in failed:
            logger.warning("a server keeps its memory: %s", cause)
        if failed and len(failed) == len(members):
            raise EngineError("no server lent its memory: " + "; ".join(failed))

    async def update_weights(
        self, weights: Weights, version: int, probe: Probe
    ) -> dict[str, float]:
        """See `Engine.update_weights`.

        With the version it has already, only servers that lack it get weights. A server that does
        not take them serves no more until a later update; `sync/failed_servers` counts it.
        """
        began = time.perf_counter()
        self._watcher.may_start.set()
        await self._pool.wait_until_alive()
        self.wants_weights.clear()
        up_to_date = version if version == self.version else None
        members = [m for m in self._pool.alive if m.version is None or m.version != up_to_date]
        for member in members:
            member.version = None
        update = Update(
            members=members,
            version=version,
            weight_version=self._name(version),
            probe=probe,
            rid=self._next_rid(),
        )
        try:
            with self._watcher.lease():
                sent = await update.run(self._transport, weights, self._config.sync_timeout_s)
        except BaseException:
            for member in self._pool.members:
                member.version = None
            raise
        for url, cause in update.failed.items():
            logger.warning("%s is out until the next update of the weights: %s", url, cause)
        for member in members:
            if member.server.url in update.failed:
                member.suspect.set()
        if not self._pool.serving:
            raise SyncError(
                f"no server took version {version}: " + "; ".join(update.failed.values())
            )
        self.version, self._asleep = version, False
        for session in self._pool.sessions.values():
            session.num_tokens = 0  # of which nothing is cached any more
        self._pool.notify()
        metrics = {
            "sync/seconds": time.perf_counter() - began,
            "sync/bytes": float(sent.num_bytes),
            "sync/tensors": float(sent.num_tensors),
            "sync/num_servers": float(len(update.differences)),
            "sync/failed_servers": float(len(update.failed)),
        }
        if update.differences:
            metrics["sync/probe_abs_diff"] = max(update.differences.values())
        return metrics | {f"sync/{part}_s": seconds for part, seconds in sent.seconds.items()}

    def pop_metrics(self) -> dict[str, float]:
        """Means per request, and counts, since the last call. Times count seconds.

        `engine/ttft_s`, `engine/tpot_s` and `engine/queue_s` are there where servers tell them, see
        `Reply`. `engine/running` and `engine/waiting` are requests in the servers, seconds
        ago at most; `engine/servers` those that serve.
        """
        pool, metrics = self._pool, self._metrics
        metrics.count("engine/moved_sessions", pool.num_moved)
        metrics.count("engine/restarts", self._watcher.num_restarts)
        pool.num_moved = self._watcher.num_restarts = 0
        return metrics.pop() | {
            "engine/servers": float(len(pool.serving)),
            "engine/running": float(sum(m.num_running for m in pool.alive)),
            "engine/waiting": float(sum(m.num_waiting for m in pool.alive)),
        }

    async def close(self) -> None:
        self._pool.fail("the engine is closed")
        await self._cleanup.aclose()

    async def _disown(self) -> None:
        """Let the next run have servers that are not this one's to end."""

        async def disown(server: SGLangServer) -> None:
            try:
                async with asyncio.timeout(DISOWN_S):
                    if (await server.weight_version()).startswith(f"{self._run_id}/"):
                        await server.post("/update_weight_version", {"new_version": NOBODYS})
            except (EngineError, TimeoutError) as error:
                logger.warning(
                    "%s still counts as this run's (%s): the next one needs sglang.take_over=true",
                    server.url,
                    error,
                )

        await asyncio.gather(*(disown(member.server) for member in self._pool.alive))

    @property
    def serving(self) -> bool:
        return bool(self._pool.serving)

    def _name(self, version: int) -> str:
        """What servers call the weights: whose they are, and which."""
        return f"{self._run_id}/{version}"

    def _next_rid(self) -> str:
        return f"{self._rid}-{next(self._numbers):012}"  # one length: none begins with another

    async def _request(self, session: str, ask: Ask[T]) -> T | None:
        """Ask one server after another; None: `interrupt` came while none served.

        Raises:
            EngineError: none answered in `config.max_tries` tries.
        """
        if self._asleep:
            raise EngineError("its memory is lent to the learner until the next update_weights")
        tried: list[Member] = []
        while True:
            member = await self._pool.take(session, tried)
            if member is None:
                return None
            try:
                answer = await self._ask(member, ask)
            except (Unavailable, BadReply) as error:
                tried.append(member)
                retry_after_s = self._note_failure(member, error)
                if len(tried) >= self._config.max_tries:
                    raise
                self._metrics.count("engine/retries")
                if self._pool.has_other(tried):
                    continue
                backoff_s = min(BACKOFF_S * 2 ** (len(tried) - 1), LONGEST_BACKOFF_S)
                pause_s = max(backoff_s * random.uniform(0.5, 1.0), retry_after_s)
                if not await self._pool.pause(pause_s):
                    return None
            else:
                self._pool.answered(member)
                return answer

    async def _ask(self, member: Member, ask: Ask[T]) -> T:
        rid = self._next_rid()
        clock = asyncio.timeout(None)  # which rings when the server is found dead
        try:
            async with self._slots, clock:
                member.requests.add(clock)
                if member.version is None:
                    raise Unavailable(f"{member.server.url} lost its weights")
                return await ask(member, member.version, rid)
        except TimeoutError as error:
            raise Lost(f"{member.server.url} died") from error
        except (asyncio.CancelledError, Lost):
            self._metrics.count("engine/aborts")
            task = asyncio.create_task(self._abort(member, rid))
            self._background.add(task)
            task.add_done_callback(self._background.discard)
            raise
        finally:
            member.requests.discard(clock)

    def _note_failure(self, member: Member, error: Unavailable | BadReply) -> float:
        """Returns the seconds that the server wants to be left alone."""
        retry_after_s = 0.0
        if isinstance(error, Unavailable):
            retry_after_s = min(error.retry_after_s, LONGEST_BACKOFF_S)
            if isinstance(error, Lost):
                member.suspect.set()
        else:
            self._metrics.count("engine/bad_replies")
            logger.warning("a reply is thrown away: %s", error)
        if isinstance(error, ForeignWeights):
            member.version = None
            self.wants_weights.set()
        self._pool.failed(member, retry_after_s)
        return retry_after_s

    async def _abort(self, member: Member, rid: str | None) -> None:
        """End one request at a server, or all, unless it is dead: then the watcher acts."""
        try:
            async with asyncio.timeout(ABORT_S):
                await member.server.abort(rid)
        except (EngineError, TimeoutError) as error:
            member.suspect.set()
            logger.info("%s did not take an abort: %s", member.server.url, error)

    async def _finish_background(self) -> None:
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSE_S)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def _count(self, reply: Reply, name: str) -> None:
        add, count = self._metrics.add, self._metrics.count
        if reply.finish_reason == "abort":
            count("engine/aborts")
        for metric, seconds in (
            ("engine/request_s", reply.latency_s),
            ("engine/queue_s", reply.queue_s),
            ("engine/ttft_s", reply.ttft_s),
            ("engine/tpot_s", reply.tpot_s),
        ):
            if seconds is not None:
                add(metric, seconds)
        num_sampled, num_prompt = len(reply.token_ids), reply.num_prompt_tokens
        count("engine/sampled_tokens", num_sampled)
        if num_prompt is None:
            return
        num_cached = reply.num_cached_tokens
        count("engine/cached_tokens", num_cached)
        count("engine/prefilled_tokens", num_prompt - num_cached)
        add("engine/cache_hit_fraction", num_cached / num_prompt, num_prompt)
        session = self._pool.sessions.get(name)
        if session is None:
            return
        if before := min(session.num_tokens, num_prompt):
            add("engine/prefix_hit_fraction_later_turns", min(num_cached / before, 1.0), before)
        session.num_tokens = num_prompt + num_sampled
