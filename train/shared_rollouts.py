"""The rollouts of rank 0, for every rank to call alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentrl.protocols import Probe, Rollouts, Weights
from agentrl.trajectory import TrajectoryGroup
from train.interrupt import interruptible
from train.ranks import Ranks


class SharedRollouts:
    """A `Rollouts` whose groups, metrics and state are on rank 0 alone; elsewhere they are empty.

    What fails or is interrupted on rank 0 ends all ranks alike.

    Args:
        rollouts: rank 0's; None elsewhere.
    """

    def __init__(self, ranks: Ranks, rollouts: Rollouts | None) -> None:
        self._ranks, self._own = ranks, rollouts

    def next_groups(self, num_groups: int) -> list[TrajectoryGroup] | None:
        return self._groups(lambda own: own.next_groups(num_groups))

    def evaluate(self) -> list[TrajectoryGroup] | None:
        return self._groups(lambda own: own.evaluate())

    def sleep(self) -> None:
        self._ranks.lead(lambda: self._own and self._own.sleep())

    def update_weights(self, weights: Weights, version: int, probe: Probe) -> dict[str, float]:
        whole = False

        def read() -> Weights:
            nonlocal whole
            # Rank 0 may still wait for turns or servers, longer than a gather of tensors may take.
            self._ranks.gather(None)
            yield from weights
            whole = True

        stream = read()
        metrics: dict[str, float] = {}
        failure: BaseException | None = None
        try:
            if self._own:
                metrics = self._own.update_weights(stream, version, probe)
        except BaseException as error:
            failure = error
        for _ in stream:  # every rank gathers all weights, also those that nobody reads any more
            pass
        if failure and not whole:
            raise failure  # while the others still gather: they are told another way

        def result() -> dict[str, float]:
            if failure:
                raise failure
            return metrics

        return self._ranks.lead(result)

    def pop_metrics(self) -> dict[str, float]:
        return self._own.pop_metrics() if self._own else {}

    def state_dict(self) -> dict[str, Any]:
        return self._own.state_dict() if self._own else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._own:
            self._own.load_state_dict(state)

    def close(self) -> None:
        if self._own:
            self._own.close()

    def _groups(
        self, play: Callable[[Rollouts], list[TrajectoryGroup] | None]
    ) -> list[TrajectoryGroup] | None:
        groups: list[TrajectoryGroup] | None = []

        def lead() -> bool:
            nonlocal groups
            assert self._own is not None
            with interruptible():
                groups = play(self._own)
            return groups is not None

        return groups if self._ranks.lead(lead) else None
