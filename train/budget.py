"""How many tokens a row of a forward and backward pass may have, by trial."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train.learner import Learner


def find_budget(learner: Learner) -> int:
    """The largest `micro_batch_tokens` that fits on every rank, found without moving a weight."""
    raise NotImplementedError
