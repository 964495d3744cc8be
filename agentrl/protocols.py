"""Where two rooms meet: an engine samples tokens, rollouts turn engines and envs into groups."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.trajectory import TrajectoryGroup
from agentrl.types import Completion, Sampling

Weights = Iterable[tuple[str, Any]]
"""Names and tensors of a model, streamed: a reader that needs none of them never makes one."""


class EngineError(RuntimeError):
    """The engine failed at one request; the episode is not the policy's fault."""


class EngineDied(EngineError):
    """The engine failed as a whole: no later request will be answered, so the run stops at once."""


class SyncError(EngineError):
    """New weights did not arrive everywhere: nothing may be trained on what is sampled now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What the learner says of some tokens, for an engine to agree with after an update.

    Example:
        Probe(token_ids=[5, 7, 2], logprobs=[-3.2, -0.4], tolerance=1e-3)
    """

    token_ids: list[int]  # [n]
    logprobs: list[float]  # [n - 1], of each token but the first, at temperature 1
    tolerance: float  # mean |difference| in nats per token that passes

    def check(self, logprobs: Sequence[float], version: int, where: str) -> float:
        """The mean |difference| to `logprobs`.

        Raises:
            SyncError: it is over the tolerance, or no number.
        """
        pairs = zip(self.logprobs, logprobs, strict=True)
        difference = sum(abs(ours - theirs) for ours, theirs in pairs) / len(self.logprobs)
        if not difference <= self.tolerance:
            raise SyncError(
                f"after the update to version {version} the logprobs of {where} differ from the "
                f"learner's by {difference:.3g} nats per token, more than {self.tolerance:g}"
            )
        return difference


class Engine(Protocol):
    """Samples continuations of token sequences. Called on the manager's event loop."""

    version: int  # of the weights it samples with
    wants_weights: asyncio.Event
    """Set while a part of it came back without weights: `update_weights` with the present ones."""

    @property
    def serving(self) -> bool:
        """Whether anything has weights; else a request waits, however long that takes."""
        ...

    async def start(self) -> None:
        """Get ready for the first `update_weights`, which comes before the first request.

        Raises:
            EngineDied: there is nothing that could sample.
        """
        ...

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, session: str
    ) -> Completion:
        """Sample one turn after `token_ids`.

        `session` names the episode: an engine may keep its KV cache between the turns. Cancelling
        the call aborts the request.

        Raises:
            EngineError: the request could not be answered.
        """
        ...

    async def interrupt(self, *, running: bool = True) -> None:
        """End the requests in flight now; each answers what it sampled so far, as an abort.

        With `running` false, only those that wait for weights, of which nothing is sampled yet.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """The log probability, at temperature 1, of each token but the first: [n - 1]."""
        ...

    async def release(self, session: str) -> None:
        """The episode is over; what was kept for it may go."""
        ...

    async def sleep(self) -> None:
        """Lend its memory to the learner until the next `update_weights`; nothing is in flight."""
        ...

    async def update_weights(
        self, weights: Weights, version: int, probe: Probe
    ) -> dict[str, float]:
        """Sample with `weights` from now on, never with KV of older ones; nothing is in flight.

        Returns: metrics named `sync/…`, the mean |difference| of the probe among them.

        Raises:
            SyncError: the engine does not sample with these weights.
        """
        ...

    def pop_metrics(self) -> dict[str, float]:
        """What it counted and timed since the last call, named `engine/…`."""
        ...

    async def close(self) -> None: ...


class Server(Protocol):
    """One server of an engine, as whoever brings it weights sees it."""

    url: str
    life: int  # counts its starts: what an earlier life was told is forgotten
    num_ranks: int  # over which it splits each tensor
    dtype: str  # of its weights: "bfloat16", "float32", …
    routes: frozenset[str]  # the paths that it serves

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float | None = None) -> Any:
        """The JSON it answers.

        Raises:
            EngineError: it does not answer, or not with status 200.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a transport did."""

    num_tensors: int
    num_bytes: int
    seconds: dict[str, float]  # `gather`, `serialize`, `send`, …: the parts of the time it took
    failed: dict[str, str]  # url -> why; the other servers took all tensors


class Transport(Protocol):
    """Brings weights from the learner to servers."""

    adapter: str | None
    """The LoRA adapter that holds them, which requests name; None: the servers' own weights do."""

    async def send(self, weights: Weights, servers: Sequence[Server]) -> Sent:
        """Let each server load all tensors; `weights` is read once, in a thread of its own."""
        ...

    async def close(self) -> None: ...


class Rollouts(Protocol):
    """What the learner sees of rollouts: groups out, weights in, synchronous."""

    def next_groups(self, num_groups: int) -> list[TrajectoryGroup] | None:
        """Wait for groups that are complete, scored and not staler than allowed.

        None: the engine wants the present weights again; give them, then ask again.
        """
        ...

    def evaluate(self) -> list[TrajectoryGroup] | None:
        """Play the held-out tasks with the present weights; faults stay in the groups, unscored.

        None as in `next_groups`.
        """
        ...

    def sleep(self) -> None:
        """Lend the engine's memory to the learner until the next `update_weights`."""
        ...

    def update_weights(self, weights: Weights, version: int, probe: Probe) -> dict[str, float]:
        """Hand weights to the engine, in between requests; they are verified with `probe`."""
        ...

    def pop_metrics(self) -> dict[str, float]:
        """What was counted and timed since the last call."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...
