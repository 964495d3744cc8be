"""The weight of the KL to the reference, over the batches of a run."""

from __future__ import annotations

from agentrl.config import LossConfig


class BetaSchedule:
    """`value` is the weight for the present batch; `step` moves on to the next one."""

    def __init__(self, config: LossConfig, max_steps: int) -> None:
        self._config, self._max_steps = config, max_steps
        self.value = config.beta

    def step(self, kl: float) -> None:
        """
        Args:
            kl: of the batch that was trained on, nats per token.
        """

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]
