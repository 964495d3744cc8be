"""The learner: one batch of groups becomes optimizer steps on float32 weights."""

from __future__ import annotations

import copy
import math
import os
import random
import resource
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import fsdp2_prepare_model

from agentrl.config import TOKEN_ESTIMATORS, RunConfig
from agentrl.trajectory import TrajectoryGroup
from train.advantage import AdvantageInputs, Advantages, advantage_inputs, estimate
from train.beta import BetaSchedule
from train.budget import find_budget
from train.flops import matmul_peak, row_flops
from train.loss import LossInputs, kl_divergence, policy_loss
from train.offload import move_optimizer_state
from train.optimizer import Schedule, clip_grad_norm, make_optimizer, sample
from train.packing import Batch, MicroBatch, counts, pack, single_sequence
from train.policy import Policy, PolicyOutput, layer_classes
from train.ranks import Ranks
from train.weights import adapter_weights, full_weights, merged_weights


class TrainingError(RuntimeError):
    """Training cannot go on: the gradients stay non-finite, or the engine has other weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A micro-batch on its device, with what its updates do not change; every column is [N]."""

    micro_batch: MicroBatch
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    kl: torch.Tensor | None = None  # where it is part of the reward
    old_values: torch.Tensor | None = None
    returns: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Minibatch:
    """This rank's rows of one optimizer step, as many on every rank."""

    rows: list[_Row]
    batch: Batch  # whose counts the step divides by


@dataclass(slots=True, kw_only=True)
class _Totals:
    """What the optimizer steps taken in one update add up to, and how many were skipped."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    max_abs_diff: float = 0.0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    update_ratios: list[float] = field(default_factory=list)
    num_bad_steps: int = 0
    num_empty_steps: int = 0
    num_computed_tokens: int = 0  # on this rank
    num_flops: float = 0.0  # likewise


class Learner:
    """Owns the policy's weights, its optimizer and their version.

    Every rank has one, and calls its methods alike; the groups to train on are rank 0's.

    Example:
        learner = Learner(model, config, Accelerator())
        metrics = learner.update(groups)
        engine.update_weights(learner.weights(), learner.version)
    """

    def __init__(
        self,
        model: Any,
        config: RunConfig,
        accelerator: Accelerator,
        ranks: Ranks | None = None,
    ) -> None:
        """Take a model from `load_model`.

        With `beta` > 0 a frozen copy becomes the reference, or with LoRA the model without adapter.
        """
        if accelerator.gradient_accumulation_steps != 1:
            raise ValueError("the learner accumulates by itself: gradient_accumulation_steps=1")
        self.config = config
        self.accelerator = accelerator
        self.ranks = ranks or Ranks()
        self.version = 0
        self.run_id = self.ranks.lead(lambda: uuid.uuid4().hex)
        self.beta = BetaSchedule(config.loss, config.max_steps)
        self._bad_steps = 0  # in a row
        self._sees_tokens = config.loss.kl_in_reward or config.advantage.estimator == "gae"
        assert not self._sees_tokens or config.advantage.estimator in TOKEN_ESTIMATORS
        # Colocated servers get the memory of the optimizer's state between two updates.
        self._lends_memory = config.sglang.colocate and accelerator.device.type == "cuda"
        self._reference = None
        if config.loss.beta > 0 and config.lora is None:
            reference = copy.deepcopy(model).requires_grad_(False)
            self._reference = self._prepare_frozen(Policy(reference))
        policy = Policy(model, value_head=config.advantage.estimator == "gae")
        policy._no_split_modules = layer_classes(model)  # type: ignore[assignment]
        optimizer = make_optimizer(list(policy.parameters()), config.optim)
        self.policy, self.optimizer = accelerator.prepare(policy, optimizer)
        self.policy.train()
        # Not prepared: Accelerate would step it once per process.
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, Schedule(config.optim, config.max_steps)
        )
        self._micro_batch_tokens = config.optim.micro_batch_tokens
        self._peak: float | None = None  # operations per second, of all ranks

    def _prepare_frozen(self, policy: Policy) -> Any:
        policy._no_split_modules = layer_classes(policy.model)  # type: ignore[assignment]
        if self.accelerator.is_fsdp2:
            return fsdp2_prepare_model(self.accelerator, policy)
        return self.accelerator.prepare_model(policy, evaluation_mode=True)

    @property
    def model(self) -> Any:
        """The transformers model, or peft's around it."""
        return self.accelerator.unwrap_model(self.policy).model

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds but a part of the weights."""
        return self.accelerator.is_fsdp2

    def update(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Train on one batch, rank 0's; `version` is one higher if weights moved.

        Means are over the tokens of the steps taken. A minibatch without any signal, and a step
        with a non-finite gradient on any rank, leave weights and optimizer untouched.

        Returns: metrics of all ranks, among them the seconds `time/logprob`, for what no update
            changes, and `time/update`, for the rest.

        Raises:
            TrainingError: too many bad steps in a row, or `max_mismatch` exceeded.
        """
        if self._micro_batch_tokens == "auto":
            self._micro_batch_tokens = find_budget(self)
        start = time.perf_counter()
        if self.accelerator.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        totals = _Totals()
        with self._cores_of_this_rank():
            minibatches = self._minibatches(groups)
            prepared = time.perf_counter()
            with self._optimizer_at_work():
                for _ in range(self.config.optim.num_iterations):
                    for minibatch in minibatches:
                        self._step(minibatch, totals)
        self.version += bool(totals.grad_norms)
        end = time.perf_counter()
        metrics = self._metrics(totals, minibatches, end - start, end - prepared)
        if "kl" in metrics:
            self.beta.step(metrics["kl"])
        return metrics | {"time/logprob": prepared - start, "time/update": end - prepared}

    @contextmanager
    def _cores_of_this_rank(self) -> Iterator[None]:
        """On a CPU, ranks that work at the same time share its cores."""
        before = torch.get_num_threads()
        num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, before // num_here))
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @contextmanager
    def _optimizer_at_work(self) -> Iterator[None]:
        if not self._lends_memory:
            yield
            return
        move_optimizer_state(self.optimizer, self.accelerator.device)
        try:
            yield
        finally:
            move_optimizer_state(self.optimizer, "cpu")

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and full tensors as transformers names them; a tied tensor comes once.

        With LoRA they are merged, or the adapter's own. Every rank must read all of them: a sharded
        one is gathered when its turn comes.
        """
        if self.config.lora is None:
            return full_weights(self.model)
        merged = self.config.lora.sync == "merged"
        return merged_weights(self.model) if merged else adapter_weights(self.model)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """The log probability, at temperature 1, of each token but the first: [n - 1]."""
        micro_batch = single_sequence(token_ids).to(self.accelerator.device)
        with torch.no_grad():
            return self.policy(micro_batch, 1.0).logprobs.tolist()

    def state_dict(self) -> dict[str, Any]:
        """All that an exact resume needs beside the weights: tensors and plain values only."""
        algorithm, keys, *rest = np.random.get_state()
        return {
            "run_id": self.run_id,
            "version": self.version,
            "bad_steps": self._bad_steps,
            "beta": self.beta.state_dict(),
            "parameters": [n for n, p in self.model.named_parameters() if p.requires_grad],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": {
                "python": random.getstate(),
                "numpy": (algorithm, np.asarray(keys).tolist(), *rest),
                "torch": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; the weights are loaded apart.

        Raises:
            ValueError: the state is that of other trainable parameters.
        """
        names = [n for n, p in self.model.named_parameters() if p.requires_grad]
        if state["parameters"] != names:
            differ = sorted(set(state["parameters"]) ^ set(names))[:5]
            raise ValueError(
                f"the optimizer state is that of other parameters; differing: {differ}"
            )
        self.run_id = state["run_id"]
        self.version = state["version"]
        self._bad_steps = state["bad_steps"]
        self.beta.load_state_dict(state["beta"])
        self._load_optimizer(state["optimizer"], state["scheduler"]["last_epoch"])
        if self._lends_memory:
            move_optimizer_state(self.optimizer, "cpu")
        rng = state["rng"]
        random.setstate(rng["python"])
        np.random.set_state(rng["numpy"])
        torch.set_rng_state(rng["torch"])
        if rng["cuda"]:
            torch.cuda.set_rng_state_all(rng["cuda"])

    def _load_optimizer(self, state: dict[str, Any], num_steps: int) -> None:
        """Moments are those of the checkpoint; rates, schedule and decay are the config's."""
        options = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        self.optimizer.load_state_dict(state)
        self.scheduler.last_epoch = num_steps
        rates = [
            base * factor(num_steps)
            for base, factor in zip(self.scheduler.base_lrs, self.scheduler.lr_lambdas, strict=True)
        ]
        for group, own, rate in zip(self.optimizer.param_groups, options, rates, strict=True):
            group.update(own | {"lr": rate})
        self.scheduler._last_lr = rates

    def _minibatches(self, groups: Sequence[TrajectoryGroup]) -> list[_Minibatch]:
        """This rank's part of the batch, with all that the updates do not change."""
        inputs, parts = None, None
        with self.ranks.together():
            if self.ranks.is_main:
                inputs = advantage_inputs(groups, self.config)
                parts = self._pack(groups, inputs)
        minibatches = [
            _Minibatch(rows=[self._freeze(row) for row in batch.micro_batches], batch=batch)
            for batch in self.ranks.scatter(parts)
        ]
        return self._with_advantages(minibatches, inputs) if self._sees_tokens else minibatches

    def _pack(
        self, groups: Sequence[TrajectoryGroup], inputs: AdvantageInputs
    ) -> list[list[Batch]]:
        """Each rank's batches, one per minibatch: [ranks][minibatches]."""
        config, loss = self.config, self.config.loss
        if self._sees_tokens:  # then they follow from the forward passes
            advantages = np.ones(len(inputs.episodes))
        else:
            advantages = estimate(inputs, config.advantage).advantages
        minibatches = []
        start = 0
        bounds = np.linspace(0, len(groups), config.optim.num_minibatches + 1).astype(int)
        for first, last in pairwise(bounds):
            members = groups[first:last]
            trajectories = [t for group in members for t in group.trajectories if counts(t)]
            stop = start + sum(trajectory.num_sampled_tokens for trajectory in trajectories)
            minibatches.append(
                pack(
                    members,
                    advantages[start:stop],
                    micro_batch_tokens=int(self._micro_batch_tokens),
                    num_ranks=self.ranks.size,
                    first_index=start,
                    keep_zero_advantages=loss.beta > 0 or loss.entropy_coef > 0,
                    mask_truncated_completions=loss.mask_truncated_completions,
                    share_prefixes=config.optim.share_prefixes,
                )
            )
            start = stop
        return [list(parts) for parts in zip(*minibatches, strict=True)]

    @torch.no_grad()
    def _freeze(self, micro_batch: MicroBatch) -> _Row:
        """What the weights say of a row before the first update on it."""
        loss = self.config.loss
        micro_batch = micro_batch.to(self.accelerator.device)
        before = reference = None
        if loss.old_logprobs == "recompute" or self._sees_tokens:
            before = self._forward(micro_batch)
        if self._reference is not None:
            reference = self._reference(micro_batch, self.config.rollout.temperature)
        elif loss.beta > 0:
            reference = self._forward(micro_batch, without_adapter=True)
        row = _Row(micro_batch=micro_batch)
        if before is not None:
            recompute = loss.old_logprobs == "recompute"
            row = replace(
                row,
                old_logprobs=before.logprobs if recompute else None,
                old_values=before.values,
            )
        if reference is not None:
            row = replace(row, ref_logprobs=reference.logprobs)
            if before is not None and loss.kl_in_reward:
                kl = kl_divergence(before.logprobs, reference.logprobs, loss.kl_estimator)
                row = replace(row, kl=kl)
        return row

    def _with_advantages(
        self, minibatches: list[_Minibatch], inputs: AdvantageInputs | None
    ) -> list[_Minibatch]:
        """Estimated by rank 0 from what all ranks computed of their tokens."""
        rows = [row for minibatch in minibatches for row in minibatch.rows]
        columns = {
            name: [getattr(row, attribute).cpu().numpy() for row in rows]
            for name, attribute in (("kl", "kl"), ("values", "old_values"))
            if rows and getattr(rows[0], attribute) is not None
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
            complete = replace(inputs, beta=self.beta.value, **full)
            return estimate(complete, self.config.advantage)

        found = self.ranks.lead(estimate_all)
        return [
            replace(minibatch, rows=[self._complete(row, found) for row in minibatch.rows])
            for minibatch in minibatches
        ]

    def _complete(self, row: _Row, found: Advantages) -> _Row:
        place = row.micro_batch.sampled_index.cpu().numpy()

        def own(column: np.ndarray) -> torch.Tensor:
            return torch.as_tensor(column[place], dtype=torch.float32).to(self.accelerator.device)

        return replace(
            row,
            micro_batch=replace(row.micro_batch, advantages=own(found.advantages)),
            returns=None if found.returns is None else own(found.returns),
        )

    def _forward(self, micro_batch: MicroBatch, **options: Any) -> PolicyOutput:
        return self.policy(micro_batch, self.config.rollout.temperature, **options)

    def _step(self, minibatch: _Minibatch, totals: _Totals) -> None:
        """One optimizer step, or none where there is no signal or no finite gradient."""
        if not minibatch.rows:
            totals.num_empty_steps += 1
            return
        self.optimizer.zero_grad(set_to_none=True)
        loss, sums, max_abs_diff = self._backward(minibatch)
        for row in minibatch.rows:
            totals.num_computed_tokens += len(row.micro_batch.input_ids)
            totals.num_flops += row_flops(self.model, row.micro_batch)
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        grad_norm = clip_grad_norm(parameters, self.config.optim.max_grad_norm)
        if self._anywhere(not math.isfinite(grad_norm)):
            self._skip(totals)
            return
        self._bad_steps = 0
        before = sample(parameters)
        self.optimizer.step()
        self.scheduler.step()
        moved = (sample(parameters) != before).float()
        changed, looked_at = self.ranks.sum(
            torch.stack([moved.sum(), torch.full_like(moved.sum(), len(moved))])
        ).tolist()
        totals.update_ratios.append(changed / looked_at)
        totals.grad_norms.append(grad_norm)
        totals.losses.append(loss)
        totals.max_abs_diff = max(totals.max_abs_diff, max_abs_diff)
        for name, value in sums.items():
            totals.sums[name] += value
        self.optimizer.zero_grad(set_to_none=True)

    def _backward(self, minibatch: _Minibatch) -> tuple[float, dict[str, float], float]:
        """Accumulate the gradient of the whole minibatch.

        Returns: over all ranks the loss, the sums of the metrics, and the largest difference of the
            learner's and the engine's logprobs.
        """
        config = self.config.loss
        loss_sum = torch.zeros((), device=self.accelerator.device)
        sums: dict[str, torch.Tensor] = {}
        max_abs_diff = loss_sum.clone()
        for index, row in enumerate(minibatch.rows, start=1):
            # Shards add up their gradients row by row: the whole gradient would not fit.
            waits = index < len(minibatch.rows) and not self.is_sharded
            with self.accelerator.no_sync(self.policy) if waits else nullcontext():
                forward = self._forward(row.micro_batch, entropy_gradient=config.entropy_coef > 0)
                output = policy_loss(self._loss_inputs(row, forward, minibatch.batch), config)
                # Data parallelism averages over ranks what has to be summed.
                self.accelerator.backward(output.loss * self.ranks.size)
            loss_sum += output.loss.detach()
            max_abs_diff = torch.maximum(max_abs_diff, output.max_abs_diff)
            for name, value in output.sums.items():
                sums[name] = sums[name] + value if name in sums else value
        loss, *values = self.ranks.sum(torch.stack([loss_sum, *sums.values()])).tolist()
        step = dict(zip(sums, values, strict=True))
        self._check_mismatch(step["mismatch/abs_diff"] / max(step["num_tokens"], 1))
        return loss, step, float(self.ranks.max(max_abs_diff))

    def _loss_inputs(self, row: _Row, forward: PolicyOutput, batch: Batch) -> LossInputs:
        micro_batch = row.micro_batch
        return LossInputs(
            logprobs=forward.logprobs,
            entropies=forward.entropies,
            values=forward.values,
            rollout_logprobs=micro_batch.rollout_logprobs,
            advantages=micro_batch.advantages,
            turn_ids=micro_batch.turn_ids,
            sequence_ids=micro_batch.sequence_ids,
            trajectory_tokens=micro_batch.trajectory_tokens,
            group_tokens=micro_batch.group_tokens,
            old_logprobs=row.old_logprobs,
            ref_logprobs=row.ref_logprobs,
            old_values=row.old_values,
            returns=row.returns,
            beta=0.0 if self.config.loss.kl_in_reward else self.beta.value,
            num_loss_tokens=batch.num_loss_tokens,
            num_trajectories=batch.num_trajectories,
            num_groups=batch.num_groups,
            max_episode_tokens=self.config.rollout.max_episode_tokens,
        )

    def _check_mismatch(self, mismatch: float) -> None:
        limit = self.config.loss.max_mismatch
        if mismatch > limit:
            raise self.ranks.alike(
                TrainingError(
                    f"learner and engine differ by {mismatch:.3g} nats per token "
                    f"(loss.max_mismatch={limit:g}): the engine samples with other weights, "
                    "another temperature, or other tokens than the learner reads"
                )
            )
        if mismatch > self.config.loss.warn_mismatch:
            warnings.warn(
                f"learner and engine differ by {mismatch:.3g} nats per token; over "
                f"{self.config.loss.warn_mismatch:g} (loss.warn_mismatch) the samples are "
                "noticeably off-policy",
                stacklevel=2,
            )

    def _skip(self, totals: _Totals) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        totals.num_bad_steps += 1
        self._bad_steps += 1
        if self._bad_steps >= self.config.optim.max_bad_steps:
            raise self.ranks.alike(
                TrainingError(
                    f"{self._bad_steps} steps in a row had non-finite gradients "
                    f"(optim.max_bad_steps={self.config.optim.max_bad_steps}); the weights are "
                    "those of the last good step. Lower optim.learning_rate, or set "
                    "mixed_precision: no"
                )
            )

    def _metrics(
        self,
        totals: _Totals,
        minibatches: list[_Minibatch],
        seconds: float,
        update_seconds: float,
    ) -> dict[str, float]:
        device = self.accelerator.device
        done = torch.tensor(
            [totals.num_computed_tokens, totals.num_flops], dtype=torch.float64, device=device
        )
        num_computed, num_flops = self.ranks.sum(done).tolist()
        memory = torch.tensor(self._peak_memory(), device=device)
        metrics = {
            "learning_rate": self.scheduler.get_last_lr()[0],
            "num_tokens": float(sum(m.batch.num_loss_tokens for m in minibatches)),
            "train/num_trajectories": float(sum(m.batch.num_trajectories for m in minibatches)),
            "train/optimizer_steps": float(len(totals.grad_norms)),
            "train/bad_steps": float(totals.num_bad_steps),
            "train/empty_steps": float(totals.num_empty_steps),
            # Tokens that went through the model: a shared prompt once, no episode without signal.
            "train/computed_tokens": num_computed,
            "train/tokens_per_second": num_computed / seconds,
            "train/mfu": num_flops / update_seconds / self._matmul_peak(),
            "train/seconds": seconds,
            "train/peak_memory_gib": float(self.ranks.max(memory)),  # of the fullest rank
        }
        if self.config.loss.beta > 0:
            metrics["train/beta"] = self.beta.value
        for name, values in (
            ("loss", totals.losses),
            ("grad_norm", totals.grad_norms),
            ("train/update_ratio", totals.update_ratios),
        ):
            if values:
                metrics[name] = sum(values) / len(values)
        sums = dict(totals.sums)
        num_tokens = sums.pop("num_tokens", 0.0)
        if num_tokens:
            weight, squared = sums.pop("importance"), sums.pop("importance_squared")
            metrics["mismatch/ess"] = weight**2 / (num_tokens * squared)
            metrics["mismatch/max"] = totals.max_abs_diff
            metrics |= {name: value / num_tokens for name, value in sums.items()}
        return metrics

    def _matmul_peak(self) -> float:
        """Operations per second of all ranks; measured once, by all at the same time."""
        if self._peak is None:
            device = self.accelerator.device
            bf16 = self.accelerator.mixed_precision == "bf16"
            with self._cores_of_this_rank():
                own = matmul_peak(device, torch.bfloat16 if bf16 else torch.float32)
            peaks = self.ranks.sum(torch.tensor(own, dtype=torch.float64, device=device))
            self._peak = float(peaks)
        return self._peak

    def _peak_memory(self) -> float:
        if self.accelerator.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB

    def _anywhere(self, here: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.ranks.max(torch.tensor(int(here), device=self.accelerator.device)))
