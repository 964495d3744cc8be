"""Where two rooms meet: an engine samples tokens, rollouts turn engines and envs into groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from agentrl.trajectory import TrajectoryGroup
from agentrl.types import Completion, Sampling

Weights = Iterable[tuple[str, Any]]
"""Names and tensors of a model, streamed: a reader that needs none of them never makes one."""


class EngineError(RuntimeError):
    """The engine failed at one request; the episode is not the policy's fault."""


class EngineDied(EngineError):
    """The engine failed as a whole: no later request will be answered, so the run stops at once."""


class Engine(Protocol):
    """Samples continuations of token sequences. Called on the manager's event loop."""

    version: int  # of the weights it samples with

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

    async def interrupt(self) -> None:
        """End the requests in flight now; each answers what it sampled so far, as an abort."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """The log probability, at temperature 1, of each token but the first: [n - 1]."""
        ...

    async def release(self, session: str) -> None:
        """The episode is over; what was kept for it may go."""
        ...

    async def update_weights(self, weights: Weights, version: int) -> None:
        """Sample with `weights` from now on, never with KV of older ones; nothing is in flight."""
        ...

    async def close(self) -> None: ...


class Rollouts(Protocol):
    """What the learner sees of rollouts: groups out, weights in, synchronous."""

    def next_groups(self, num_groups: int) -> list[TrajectoryGroup]:
        """Wait for groups that are complete, scored and not staler than allowed."""
        ...

    def evaluate(self) -> list[TrajectoryGroup]:
        """Play the held-out tasks with the present weights; faults stay in the groups, unscored."""
        ...

    def update_weights(self, weights: Weights, version: int) -> None:
        """Hand new weights to the engine, in between requests."""
        ...

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """The engine's logprob of each token but the first, to verify an update: [n - 1]."""
        ...

    def pop_metrics(self) -> dict[str, float]:
        """What was counted and timed since the last call."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...
