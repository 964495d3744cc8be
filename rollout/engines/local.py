"""The embedded engine: continuous batching of a transformers model on a thread of this process.

Each step feeds one flat row of tokens through the model: the last sampled token of every decoding
request, and the tokens of prompts and observations that are not cached yet, up to a budget. Keys
and values live in slots, one per episode, allocated once. A slot outlives the turn, so an episode's
next request feeds only what the env added; and it is matched by its tokens, so a group's prompt, or
the demonstrations that all prompts begin with, are computed once and copied. Weights of the
learner's own dtype are the learner's own; on a CPU the linear layers are packed beside them.

What it does not do: beam search, penalties, several devices.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from agentrl.protocols import EngineDied, EngineError, Probe, SyncError, Weights
from agentrl.types import Completion, FinishReason, Sampling
from rollout.engines.local_kv import KVSlots, SlotAttention, causal
from rollout.engines.local_linear import PackedLinear, pack_linears
from rollout.engines.local_sampling import sample

log = logging.getLogger("agentrl")

PREFILL_TOKENS_PER_STEP = 2048


@dataclass(slots=True, eq=False)
class _Request:
    token_ids: list[int]  # the context, and behind it what was sampled
    sampling: Sampling
    session: str
    future: asyncio.Future[Completion]
    num_prompt: int = 0
    logprobs: list[float] = field(default_factory=list)
    slot: int = -1
    cancelled: bool = False


class LocalEngine:
    """Implements `agentrl.protocols.Engine` over one model.

    Args:
        model: a causal LM loaded with `attn_implementation=register_attention()`.
        num_slots: episodes whose keys and values are kept at once; as many requests run at once.
        max_context_tokens: per slot, sampled tokens included.
        dtype: of the weights and the cache. Other than the model's, or with `share_weights=False`,
            the engine keeps a copy of its own, which `update_weights` writes. Shared weights too
            count from the next `update_weights` on.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_slots: int,
        max_context_tokens: int,
        dtype: torch.dtype | None = None,
        share_weights: bool = True,
    ) -> None:
        reference: torch.Tensor = next(model.parameters())
        dtype = reference.dtype if dtype is None else dtype
        self.shares_weights = share_weights and dtype == reference.dtype
        if not self.shares_weights:
            model = copy.deepcopy(model).requires_grad_(False).to(dtype)
        self.version = 0
        self.wants_weights = asyncio.Event()  # never: it does not lose them
        self.serving = True
        self._model = pack_linears(model)
        self._kv = KVSlots(model.config, num_slots, max_context_tokens, dtype, reference.device)
        self._busy: dict[int, _Request] = {}  # slot -> the request that runs in it
        self._sessions: dict[str, int] = {}  # session -> its slot, the longest unused first
        self._waiting: deque[_Request] = deque()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._failure: BaseException | None = None
        self._counts = dict.fromkeys(_COUNTS, 0.0)
        self._thread = threading.Thread(target=self._run, name="local-engine", daemon=True)
        self._thread.start()

    # The side of the event loop.

    async def start(self) -> None:
        self._refuse_if_down()

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, session: str
    ) -> Completion:
        room = self._kv.max_length - len(token_ids)
        if sampling.max_new_tokens < 1 or sampling.max_new_tokens > room:
            raise EngineError(
                f"{len(token_ids)} tokens of context and {sampling.max_new_tokens} new ones do not "
                f"fit the engine's {self._kv.max_length}"
            )
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = _Request(list(token_ids), sampling, session, future, num_prompt=len(token_ids))
        with self._wake:
            self._refuse_if_down()
            self._waiting.append(request)
            self._wake.notify()
        try:
            return await future
        except asyncio.CancelledError:
            request.cancelled = True
            raise

    async def interrupt(self, *, running: bool = True) -> None:
        if running:  # none waits for weights: they cannot be lost
            await self._on_thread(self._interrupt)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await self._on_thread(lambda: self._score(token_ids))

    async def release(self, session: str) -> None:
        # The slot's content stays, to be matched, until somebody needs the slot.
        self._post(lambda: self._sessions.pop(session, None))

    async def sleep(self) -> None:
        """Its cache is small, and its weights are the learner's own or a copy it cannot lose."""

    async def update_weights(
        self, weights: Weights, version: int, probe: Probe
    ) -> dict[str, float]:
        return await self._on_thread(lambda: self._update_weights(weights, version, probe))

    async def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def pop_metrics(self) -> dict[str, float]:
        """Counts of tokens and evictions, and busy seconds, since the last call.

        `engine/cache_hit_fraction` is that of the prompts' tokens.
        """
        counts, self._counts = self._counts, dict.fromkeys(_COUNTS, 0.0)
        cached, prefilled = counts["engine/cached_tokens"], counts["engine/prefilled_tokens"]
        if cached + prefilled:
            counts["engine/cache_hit_fraction"] = cached / (cached + prefilled)
        return counts

    async def _on_thread(self, command: Callable[[], Any]) -> Any:
        self._refuse_if_down()
        return await asyncio.wrap_future(self._post(command))

    def _post(self, command: Callable[[], Any]) -> Future[Any]:
        """Run `command` on the engine's thread, between two steps."""
        done: Future[Any] = Future()
        with self._wake:
            self._commands.append((command, done))
            self._wake.notify()
        return done

    def _refuse_if_down(self) -> None:
        if self._failure is not None:
            raise EngineDied(f"the engine died of {self._failure!r}") from self._failure
        if self._closed:
            raise EngineDied("the engine is closed")

    # The engine's thread.

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._await_work():
                    started = time.perf_counter()
                    self._step()
                    self._counts["engine/busy_s"] += time.perf_counter() - started
        except BaseException as failure:
            log.exception("the local engine died")
            with self._wake:
                self._failure = failure
        self._fail_everything()

    def _await_work(self) -> bool:
        while True:
            with self._wake:
                while not (self._commands or self._waiting or self._busy or self._closed):
                    self._wake.wait()
                commands = list(self._commands)
                self._commands.clear()
            for command, done in commands:
                if not done.set_running_or_notify_cancel():
                    continue
                try:
                    done.set_result(command())
                except Exception as error:  # it belongs to whoever asked
                    done.set_exception(error)
            if self._closed:
                return False
            if self._waiting or self._busy:
                return True

    def _step(self) -> None:
        """Admit what fits, run the model once, sample, and answer what is finished."""
        self._drop_cancelled()
        self._admit()
        budget = PREFILL_TOKENS_PER_STEP
        chunks: list[tuple[int, int, int]] = []  # (slot, first position, number of tokens)
        ids: list[int] = []
        ready: list[_Request] = []  # with all their tokens in this step: the next can be drawn
        rows: list[int] = []  # where in the flat row their last tokens stand
        for slot in sorted(self._busy):
            request = self._busy[slot]
            start = int(self._kv.lengths[slot])
            pending = self._num_pending(request)
            count = 1 if pending == 1 else min(pending, budget)
            if count == 0:
                continue
            if count > 1:
                budget -= count
            chunks.append((slot, start, count))
            ids += request.token_ids[start : start + count]
            if count == pending:
                ready.append(request)
                rows.append(len(ids) - 1)
        if not chunks:
            return
        hidden = self._forward(ids, chunks)
        for slot, start, count in chunks:
            self._kv.append(slot, self._busy[slot].token_ids[start : start + count])
        if not ready:
            return
        logits = self._model.get_output_embeddings()(hidden[rows]).float()
        tokens, logprobs = sample(
            logits,
            [request.sampling for request in ready],
            [len(request.logprobs) for request in ready],
        )
        answers: list[tuple[_Request, Completion]] = []
        for request, token, logprob in zip(ready, tokens, logprobs, strict=True):
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            reason: FinishReason | None = None
            if token in request.sampling.stop_token_ids:
                reason = "stop"
            elif len(request.logprobs) == request.sampling.max_new_tokens:
                reason = "length"
            if reason:
                self._vacate(request)
                answers.append((request, self._completion(request, reason)))
        self._counts["engine/sampled_tokens"] += len(ready)
        self._answer(answers)

    def _drop_cancelled(self) -> None:
        with self._wake:
            self._waiting = deque(request for request in self._waiting if not request.cancelled)
        for request in [r for r in self._busy.values() if r.cancelled]:
            self._vacate(request)

    def _admit(self) -> None:
        """Give slots to waiting requests, as long as one step's prefill budget lasts."""
        budget = PREFILL_TOKENS_PER_STEP
        # A request whose prompt another one is computing waits until it can copy it.
        computing = [r.token_ids for r in self._busy.values() if self._num_pending(r) > 1]
        postponed: list[_Request] = []
        while budget > 0:
            with self._wake:
                if not self._waiting:
                    break
                request = self._waiting.popleft()
            own = self._sessions.get(request.session)
            if own is not None and own in self._busy:
                error = EngineError(f"session {request.session!r} has a request running already")
                self._fail([request], error)
                continue
            length, source = self._kv.match(request.token_ids, prefer=own)
            being_computed = max(
                (_common_prefix(request.token_ids, ids) for ids in computing), default=0
            )
            if being_computed > length + 1:
                postponed.append(request)
                continue
            slot = self._free_slot() if own is None else own
            if slot is None:
                postponed.append(request)
                break
            self._kv.copy_prefix(source, slot, length)
            request.slot = slot
            self._busy[slot] = request
            self._sessions.pop(request.session, None)  # to stand last: the longest unused first
            self._sessions[request.session] = slot
            pending = self._num_pending(request)
            if pending > 1:
                computing.append(request.token_ids)
            budget -= pending
            self._counts["engine/cached_tokens"] += length
            self._counts["engine/prefilled_tokens"] += pending
        with self._wake:
            self._waiting.extendleft(reversed(postponed))

    def _free_slot(self) -> int | None:
        """A slot that no session holds, best an empty one; else that of the longest idle."""
        held = self._busy.keys() | set(self._sessions.values())
        free = [slot for slot in range(self._kv.num_slots) if slot not in held]
        if free:
            # The lowest: decoding rows then stand close together.
            return min(free, key=lambda slot: (self._kv.lengths[slot] > 0, slot))
        for session, slot in self._sessions.items():
            if slot not in self._busy:
                del self._sessions[session]
                self._counts["engine/evicted_sessions"] += 1
                return slot
        return None

    def _interrupt(self) -> None:
        with self._wake:
            requests = [*self._busy.values(), *self._waiting]
            self._waiting.clear()
        self._busy.clear()
        self._answer([(r, self._completion(r, "abort")) for r in requests if not r.cancelled])

    def _num_pending(self, request: _Request) -> int:
        """Tokens whose keys and values are not computed yet; the last of them draws the next."""
        return len(request.token_ids) - int(self._kv.lengths[request.slot])

    def _vacate(self, request: _Request) -> None:
        del self._busy[request.slot]

    def _completion(self, request: _Request, reason: FinishReason) -> Completion:
        return Completion(
            token_ids=request.token_ids[request.num_prompt :],
            logprobs=request.logprobs,
            finish_reason=reason,
            versions=[self.version] * len(request.logprobs),
        )

    def _answer(self, answers: list[tuple[_Request, Completion]]) -> None:
        if not answers:
            return

        def deliver() -> None:
            for request, completion in answers:
                if not request.future.done():
                    request.future.set_result(completion)

        answers[0][0].future.get_loop().call_soon_threadsafe(deliver)

    def _fail(self, requests: list[_Request], error: Exception) -> None:
        def deliver(request: _Request) -> None:
            if not request.future.done():
                request.future.set_exception(error)

        for request in requests:
            request.future.get_loop().call_soon_threadsafe(deliver, request)

    def _fail_everything(self) -> None:
        with self._wake:
            requests = [*self._waiting, *self._busy.values()]
            commands = list(self._commands)
            self._waiting.clear()
            self._commands.clear()
        cause = (
            f"the engine died of {self._failure!r}" if self._failure else "the engine was closed"
        )
        self._fail([r for r in requests if not r.cancelled], EngineDied(cause))
        for _, done in commands:
            if done.set_running_or_notify_cancel():
                done.set_exception(EngineDied(cause))

    def _forward(self, ids: list[int], chunks: list[tuple[int, int, int]]) -> torch.Tensor:
        """Hidden states [T, hidden] of the flat row of `chunks`, which join their slots."""
        attend = SlotAttention(self._kv, chunks)
        output = self._model.get_decoder()(
            input_ids=torch.tensor([ids], device=self._kv.device),
            position_ids=attend.positions[None],
            use_cache=False,
            attend=attend,
        )
        return output.last_hidden_state[0]

    def _score(self, token_ids: Sequence[int]) -> list[float]:
        ids = torch.tensor([list(token_ids)], device=self._kv.device)
        hidden = self._model.get_decoder()(
            input_ids=ids,
            position_ids=torch.arange(len(token_ids), device=self._kv.device)[None],
            use_cache=False,
            attend=causal,
        ).last_hidden_state[0, :-1]
        logprobs = torch.log_softmax(self._model.get_output_embeddings()(hidden).float(), dim=-1)
        return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()

    def _update_weights(self, weights: Weights, version: int, probe: Probe) -> dict[str, float]:
        self._drop_cancelled()
        if self._busy or self._waiting:
            raise SyncError("weights cannot change under a running request")
        if not self.shares_weights:
            own = dict(self._model.named_parameters())
            # Weights that are sharded cannot be gathered in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                for name, tensor in weights:
                    if name not in own:
                        raise SyncError(f"the engine has no weight {name!r}")
                    own.pop(name).copy_(tensor)
            if own:
                raise SyncError(f"no new values came for {', '.join(sorted(own))}")
        for module in self._model.modules():
            if isinstance(module, PackedLinear):
                module.pack()
        self._sessions.clear()
        self._kv.clear()
        difference = probe.check(self._score(probe.token_ids), version, "the local engine")
        self.version = version
        return {"sync/probe_abs_diff": difference}


_COUNTS: tuple[str, ...] = (
    "engine/prefilled_tokens",
    "engine/cached_tokens",
    "engine/sampled_tokens",
    "engine/evicted_sessions",
    "engine/busy_s",
)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(different[0]) if len(different) else n
