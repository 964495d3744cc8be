"""The weight of the KL to the reference, over the batches of a run."""

from __future__ import annotations

from agentrl.config import LossConfig

_MAX_ERROR = 0.2


class BetaSchedule:
    """`value` is the weight for the present batch; `step` moves on to the next one.

    linear: beta + (beta_end - beta) * batches done / max_steps. adaptive: after each batch
    value * (1 + e / kl_horizon), with e = (KL - kl_target) / kl_target within [-0.2, 0.2]. Source:
    Ziegler et al., "Fine-tuning language models from human preferences", arXiv 1909.08593,
    section 2.2, whose K_beta is 1 / kl_horizon.
    """

    def __init__(self, config: LossConfig, max_steps: int) -> None:
        self._config, self._max_steps = config, max_steps
        self._num_batches = 0
        self.value = config.beta

    def step(self, kl: float | None) -> None:
        """
        Args:
            kl: of the batch, nats per token; None: no step of it was taken.
        """
        self._num_batches += 1
        if self._config.beta_schedule == "adaptive" and kl is not None:
            error = kl / self._config.kl_target - 1
            error = min(max(error, -_MAX_ERROR), _MAX_ERROR)
            self.value *= 1 + error / self._config.kl_horizon
        self._follow_config()

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "num_batches": self._num_batches}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """What follows from the config alone follows from the present one."""
        self._num_batches = int(state["num_batches"])
        if self._config.beta_schedule == "adaptive":
            self.value = state["value"]
        self._follow_config()

    def _follow_config(self) -> None:
        if self._config.beta_schedule == "linear":
            done = min(self._num_batches / self._max_steps, 1.0)
            self.value = self._config.beta + (self._config.beta_end - self._config.beta) * done
