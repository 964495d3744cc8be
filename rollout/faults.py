"""How many episodes a batch may lose to the infrastructure before the run stops."""

from __future__ import annotations

from collections import Counter

from agentrl.config import RolloutConfig
from agentrl.metrics import MeanMetrics
from agentrl.trajectory import Trajectory
from agentrl.types import StopReason


class RolloutError(RuntimeError):
    """Rollouts that cannot go on, with the most common cause."""


class FaultBudget:
    """Counts attempts, faults and lost groups of a batch, so that no refill goes on for ever."""

    def __init__(self, config: RolloutConfig, metrics: MeanMetrics) -> None:
        self._config, self._metrics = config, metrics
        self._causes: dict[StopReason, str] = {}
        self.start_batch(config.prompts_per_step)

    def start_batch(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._num_attempts = self._num_dropped = 0
        self._faults: Counter[StopReason] = Counter()

    def count(self, tape: Trajectory) -> None:
        """Take an attempt at an episode that ended.

        Raises:
            RolloutError: after a batch's worth of attempts, too many of them were faults.
        """
        assert tape.stop_reason is not None
        self._num_attempts += 1
        if tape.stop_reason.is_fault:
            self.count_fault(tape)
        else:
            self._check()

    def count_fault(self, tape: Trajectory) -> None:
        """Take the fault of an attempt, which may have been counted when it was still sound.

        Raises:
            RolloutError: as `count` does.
        """
        assert tape.stop_reason is not None
        self._metrics.count(f"rollout/faults/{tape.stop_reason}")
        self._faults[tape.stop_reason] += 1
        self._causes[tape.stop_reason] = tape.error
        self._check()

    def _check(self) -> None:
        limit, num_faults = self._config.max_fault_fraction, self._faults.total()
        batch = self._num_groups * self._config.num_generations
        if self._num_attempts >= batch and num_faults > limit * self._num_attempts:
            raise RolloutError(
                f"{num_faults} of {self._num_attempts} episodes failed, more than "
                f"rollout.max_fault_fraction={limit:g}; {self._most_common()}"
            )

    def drop_group(self) -> None:
        """Take a group that faults left too small.

        Raises:
            RolloutError: so many were lost that refills lead nowhere.
        """
        self._metrics.count("rollout/dropped_groups")
        self._num_dropped += 1
        if self._num_dropped > self._num_groups * self._config.max_attempts:
            raise RolloutError(
                f"{self._num_dropped} groups of one batch had fewer than rollout.min_group_size="
                f"{self._config.min_group_size} episodes without fault; {self._most_common()}"
            )

    def _most_common(self) -> str:
        # Of a group begun before the batch, the faults were counted before it too.
        common = self._faults.most_common(1)
        return "".join(f"most often ({n} times) {r}: {self._causes[r]}" for r, n in common)
