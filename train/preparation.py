"""A batch before its first update: split over ranks and rows, with all that no update changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from agentrl.config import RunConfig
from agentrl.trajectory import TrajectoryGroup
from train.advantage import AdvantageInputs, Advantages, advantage_inputs, estimate
from train.loss import kl_divergence
from train.packing import Batch, MicroBatch, pack
from train.policy import PolicyOutput
from train.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A micro-batch on its device, with what its updates do not change; every column is [N]."""

    micro_batch: MicroBatch
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    kl: torch.Tensor | None = None  # where it is part of the reward
    old_values: torch.Tensor | None = None
    returns: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """This rank's rows of one optimizer step, as many on every rank."""

    rows: list[Row]
    batch: Batch  # whose counts the step divides by


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What the learner does with a batch before its first update.

    Rank 0 has the groups: it estimates advantages, packs rows and scatters them. Where an estimator
    sees tokens, it does so after all ranks computed theirs.
    """

    config: RunConfig
    ranks: Ranks
    device: torch.device
    policy: Callable[[MicroBatch], PolicyOutput]
    reference: Callable[[MicroBatch], PolicyOutput]  # called where beta > 0

    @property
    def sees_tokens(self) -> bool:
        return self.config.loss.kl_in_reward or self.config.advantage.estimator == "gae"

    def prepare(
        self, groups: Sequence[TrajectoryGroup], micro_batch_tokens: int, beta: float
    ) -> list[Minibatch]:
        """This rank's part of each optimizer step."""
        inputs, parts = None, None
        with self.ranks.together():
            if self.ranks.is_main:
                inputs = advantage_inputs(groups, self.config)
                parts = self._pack(groups, inputs, micro_batch_tokens)
        minibatches = [
            Minibatch(rows=[self._freeze(row) for row in batch.micro_batches], batch=batch)
            for batch in self.ranks.scatter(parts)
        ]
        if self.sees_tokens:
            return self._with_advantages(minibatches, inputs, beta)
        return minibatches

    def _pack(
        self,
        groups: Sequence[TrajectoryGroup],
        inputs: AdvantageInputs,
        micro_batch_tokens: int,
    ) -> list[list[Batch]]:
        """Each rank's batches, one per minibatch: [ranks][minibatches]."""
        config, loss = self.config, self.config.loss
        if self.sees_tokens:  # then they follow from the forward passes
            advantages = np.ones(len(inputs.episodes))
        else:
            advantages = estimate(inputs, config.advantage).advantages
        minibatches = []
        start = 0
        bounds = np.linspace(0, len(groups), config.optim.num_minibatches + 1).astype(int)
        for first, last in pairwise(bounds):
            batches = pack(
                groups[first:last],
                advantages[start:],
                micro_batch_tokens=micro_batch_tokens,
                num_ranks=self.ranks.size,
                first_index=start,
                keep_zero_advantages=loss.beta > 0 or loss.entropy_coef > 0,
                mask_truncated_completions=loss.mask_truncated_completions,
                share_prefixes=config.optim.share_prefixes,
            )
            minibatches.append(batches)
            start += batches[0].num_loss_tokens
        return [list(parts) for parts in zip(*minibatches, strict=True)]

    @torch.no_grad()
    def _freeze(self, micro_batch: MicroBatch) -> Row:
        """What the weights say of a row before the first update on it."""
        loss = self.config.loss
        micro_batch = micro_batch.to(self.device)
        recompute = loss.old_logprobs == "recompute"
        logprobs = values = reference = kl = None
        if recompute or self.sees_tokens:
            logprobs, _, values = self.policy(micro_batch)
        if loss.beta > 0:
            reference = self.reference(micro_batch).logprobs
        if logprobs is not None and reference is not None and loss.kl_in_reward:
            kl = kl_divergence(logprobs, reference, loss.kl_estimator)
        return Row(
            micro_batch=micro_batch,
            old_logprobs=logprobs if recompute else None,
            ref_logprobs=reference,
            kl=kl,
            old_values=values,
        )

    def _with_advantages(
        self, minibatches: list[Minibatch], inputs: AdvantageInputs | None, beta: float
    ) -> list[Minibatch]:
        """Estimated by rank 0 from what all ranks computed of their tokens."""
        rows = [row for minibatch in minibatches for row in minibatch.rows]
        attributes = {"kl": "kl"} if self.config.loss.kl_in_reward else {}
        if self.config.advantage.estimator == "gae":
            attributes["values"] = "old_values"
        columns = {
            name: [getattr(row, attribute).cpu().numpy() for row in rows]
            for name, attribute in attributes.items()
        }
        places = [row.micro_batch.sampled_index.cpu().numpy() for row in rows]
        everyones = self.ranks.gather((places, columns))

        def estimate_all() -> Advantages:
            assert inputs is not None
            full: dict[str, Any] = {}
            for places, columns in everyones:
                for name, parts in columns.items():
                    column = full.setdefault(name, np.zeros(len(inputs.episodes)))
                    for place, part in zip(places, parts, strict=True):
                        column[place] = part
            complete = replace(inputs, beta=beta, **full)
            return estimate(complete, self.config.advantage)

        found = self.ranks.lead(estimate_all)
        return [
            replace(minibatch, rows=[self._complete(row, found) for row in minibatch.rows])
            for minibatch in minibatches
        ]

    def _complete(self, row: Row, found: Advantages) -> Row:
        place = row.micro_batch.sampled_index.cpu().numpy()

        def own(column: np.ndarray) -> torch.Tensor:
            return torch.as_tensor(column[place], dtype=torch.float32).to(self.device)

        return replace(
            row,
            micro_batch=replace(row.micro_batch, advantages=own(found.advantages)),
            returns=None if found.returns is None else own(found.returns),
        )
