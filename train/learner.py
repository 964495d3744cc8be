"""The learner: one batch of groups becomes optimizer steps on float32 weights."""

from __future__ import annotations

import copy
import itertools
import math
import random
import resource
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from agentrl.config import OptimConfig, RunConfig
from agentrl.trajectory import Trajectory, TrajectoryGroup
from train.advantage import group_advantages
from train.logprobs import Policy
from train.loss import LossInputs, policy_loss
from train.offload import move_optimizer_state
from train.packing import Batch, MicroBatch, pack, single_sequence
from train.weights import full_weights


class TrainingError(RuntimeError):
    """Training cannot go on: the gradients stay non-finite, or the engine has other weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A minibatch on its device, with the logprobs that its updates do not change."""

    batch: Batch  # the counts are global, the micro-batches as many on every rank
    old_logprobs: list[torch.Tensor | None]
    ref_logprobs: list[torch.Tensor | None]


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
    num_computed_tokens: int = 0


class Learner:
    """Owns the policy's weights, its optimizer and their version.

    Example:
        learner = Learner(model, config, Accelerator())
        metrics = learner.update(groups)
        engine.update_weights(learner.weights(), learner.version)
    """

    def __init__(self, model: Any, config: RunConfig, accelerator: Accelerator) -> None:
        """Take a model from `load_model`; with `beta` > 0 a frozen copy becomes the reference."""
        if accelerator.gradient_accumulation_steps != 1:
            raise ValueError("the learner accumulates by itself: gradient_accumulation_steps=1")
        self.config = config
        self.accelerator = accelerator
        self.version = 0
        self.run_id = uuid.uuid4().hex
        self._bad_steps = 0  # in a row
        # Colocated servers get the memory of the optimizer's state between two updates.
        self._lends_memory = config.sglang.colocate and accelerator.device.type == "cuda"
        self._reference = None
        if config.loss.beta > 0:
            reference = copy.deepcopy(model).requires_grad_(False)
            self._reference = accelerator.prepare_model(Policy(reference), evaluation_mode=True)
        optimizer = _make_optimizer(model, config.optim)
        self.policy, self.optimizer = accelerator.prepare(Policy(model), optimizer)
        self.policy.train()
        # Not prepared: Accelerate would step it once per process.
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, _Schedule(config.optim, config.max_steps)
        )

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.accelerator.unwrap_model(self.policy).model

    def update(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Train on this rank's share of one batch; `version` is one higher if weights moved.

        Means are over the tokens of the steps taken. A minibatch without any signal, and a step
        with a non-finite gradient on any rank, leave weights and optimizer untouched.

        Returns: metrics, among them the seconds `time/logprob`, for what no update changes, and
            `time/update`, for the rest.

        Raises:
            TrainingError: too many bad steps in a row, or `max_mismatch` exceeded.
        """
        start = time.perf_counter()
        if self.accelerator.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        totals = _Totals()
        minibatches = self._minibatches(groups)
        prepared = time.perf_counter()
        with self._optimizer_at_work():
            for _ in range(self.config.optim.num_iterations):
                for minibatch in minibatches:
                    self._step(minibatch, totals)
        self.version += bool(totals.grad_norms)
        metrics = self._metrics(totals, minibatches, time.perf_counter() - start)
        return metrics | {
            "time/logprob": prepared - start,
            "time/update": time.perf_counter() - prepared,
        }

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

        Every rank must read all of them: a sharded one is gathered when its turn comes.
        """
        return full_weights(self.model)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """The log probability, at temperature 1, of each token but the first: [n - 1]."""
        micro_batch = single_sequence(token_ids).to(self.accelerator.device)
        with torch.no_grad():
            return self.policy(micro_batch, 1.0)[0].tolist()

    def state_dict(self) -> dict[str, Any]:
        """All that an exact resume needs beside the weights: tensors and plain values only."""
        algorithm, keys, *rest = np.random.get_state()
        return {
            "run_id": self.run_id,
            "version": self.version,
            "bad_steps": self._bad_steps,
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

    def _minibatches(self, groups: Sequence[TrajectoryGroup]) -> list[_Prepared]:
        bounds = np.linspace(0, len(groups), self.config.optim.num_minibatches + 1).astype(int)
        return [self._prepare(groups[start:stop]) for start, stop in itertools.pairwise(bounds)]

    def _prepare(self, groups: Sequence[TrajectoryGroup]) -> _Prepared:
        loss = self.config.loss
        advantages = [
            group_advantages([self._reward(t) for t in group.trajectories], loss.scale_rewards)
            for group in groups
        ]
        batch = pack(
            groups,
            advantages,
            micro_batch_tokens=self.config.optim.micro_batch_tokens,
            keep_zero_advantages=loss.beta > 0,
            mask_truncated_completions=loss.mask_truncated_completions,
        )
        device = self.accelerator.device
        counts = torch.tensor([batch.num_loss_tokens, batch.num_trajectories], device=device)
        num_loss_tokens, num_trajectories = self._reduce(counts).tolist()
        # Ranks must call the same collectives: the shorter ones run rows without trained tokens.
        longest = torch.tensor([len(batch.micro_batches)], device=device)
        missing = int(self._gather(longest).max()) - len(batch.micro_batches)
        rows = [*batch.micro_batches, *[single_sequence([0])] * missing]
        micro_batches = [row.to(device) for row in rows]
        recompute = loss.old_logprobs == "recompute"
        return _Prepared(
            batch=Batch(
                micro_batches=micro_batches,
                num_loss_tokens=int(num_loss_tokens),
                num_trajectories=int(num_trajectories),
            ),
            old_logprobs=[
                self._frozen(self.policy if recompute else None, m) for m in micro_batches
            ],
            ref_logprobs=[self._frozen(self._reference, m) for m in micro_batches],
        )

    def _reward(self, trajectory: Trajectory) -> float | None:
        """A masked episode is no baseline for its siblings either."""
        stop = trajectory.stop_reason
        masked = self.config.loss.mask_truncated_completions and stop is not None and stop.is_cut
        return None if masked else trajectory.reward

    @torch.no_grad()
    def _frozen(self, policy: Any, micro_batch: MicroBatch) -> torch.Tensor | None:
        if policy is None:
            return None
        return policy(micro_batch, self.config.rollout.temperature)[0]

    def _step(self, minibatch: _Prepared, totals: _Totals) -> None:
        """One optimizer step, or none where there is no signal or no finite gradient."""
        micro_batches = minibatch.batch.micro_batches
        if not micro_batches:
            totals.num_empty_steps += 1
            return
        self.optimizer.zero_grad(set_to_none=True)
        loss, sums, max_abs_diff = self._backward(minibatch)
        totals.num_computed_tokens += sum(len(m.input_ids) for m in micro_batches)
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        grad_norm = self.accelerator.clip_grad_norm_(parameters, self.config.optim.max_grad_norm)
        grad_norm = float(grad_norm)  # type: ignore[arg-type]
        bad = torch.tensor([not math.isfinite(grad_norm)], device=self.accelerator.device)
        if bool(self._gather(bad).any()):
            self._skip(totals)
            return
        self._bad_steps = 0
        before = _sample(parameters)
        self.optimizer.step()
        self.scheduler.step()
        totals.update_ratios.append(float((_sample(parameters) != before).float().mean()))
        totals.grad_norms.append(grad_norm)
        totals.losses.append(loss)
        totals.max_abs_diff = max(totals.max_abs_diff, max_abs_diff)
        for name, value in sums.items():
            totals.sums[name] += value
        self.optimizer.zero_grad(set_to_none=True)

    def _backward(self, minibatch: _Prepared) -> tuple[float, dict[str, float], float]:
        """Accumulate the gradient of the whole minibatch.

        Returns: over all ranks the loss, the sums of the metrics, and the largest difference of the
            learner's and the engine's logprobs.
        """
        batch = minibatch.batch
        columns = zip(
            batch.micro_batches, minibatch.old_logprobs, minibatch.ref_logprobs, strict=True
        )
        loss_sum = torch.zeros((), device=self.accelerator.device)
        sums: dict[str, torch.Tensor] = {}
        max_abs_diff = loss_sum.clone()
        for index, (micro_batch, old, ref) in enumerate(columns, start=1):
            last = index == len(batch.micro_batches)
            with nullcontext() if last else self.accelerator.no_sync(self.policy):
                logprobs, entropies = self.policy(micro_batch, self.config.rollout.temperature)
                output = policy_loss(
                    LossInputs(
                        logprobs=logprobs,
                        entropies=entropies,
                        rollout_logprobs=micro_batch.rollout_logprobs,
                        advantages=micro_batch.advantages,
                        trajectory_tokens=micro_batch.trajectory_tokens,
                        old_logprobs=old,
                        ref_logprobs=ref,
                        num_loss_tokens=batch.num_loss_tokens,
                        num_trajectories=batch.num_trajectories,
                        max_episode_tokens=self.config.rollout.max_episode_tokens,
                    ),
                    self.config.loss,
                )
                # Data parallelism averages over ranks what has to be summed.
                self.accelerator.backward(output.loss * self.accelerator.num_processes)
            loss_sum += output.loss.detach()
            max_abs_diff = torch.maximum(max_abs_diff, output.max_abs_diff)
            for name, value in output.sums.items():
                sums[name] = sums[name] + value if name in sums else value
        loss, *values = self._reduce(torch.stack([loss_sum, *sums.values()])).tolist()
        step = dict(zip(sums, values, strict=True))
        self._check_mismatch(step["mismatch/abs_diff"] / max(step["num_tokens"], 1))
        return loss, step, float(self._gather(max_abs_diff[None]).max())

    def _check_mismatch(self, mismatch: float) -> None:
        limit = self.config.loss.max_mismatch
        if mismatch > limit:
            raise TrainingError(
                f"learner and engine differ by {mismatch:.3g} nats per token "
                f"(loss.max_mismatch={limit:g}): the engine samples with other weights, another "
                "temperature, or other tokens than the learner reads"
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
            raise TrainingError(
                f"{self._bad_steps} steps in a row had non-finite gradients "
                f"(optim.max_bad_steps={self.config.optim.max_bad_steps}); the weights are those "
                "of the last good step. Lower optim.learning_rate, or set mixed_precision: no"
            )

    def _metrics(
        self, totals: _Totals, minibatches: list[_Prepared], seconds: float
    ) -> dict[str, float]:
        computed = torch.tensor([totals.num_computed_tokens], device=self.accelerator.device)
        num_computed = int(self._reduce(computed))
        metrics = {
            "learning_rate": self.scheduler.get_last_lr()[0],
            "num_tokens": float(sum(m.batch.num_loss_tokens for m in minibatches)),
            "train/num_trajectories": float(sum(m.batch.num_trajectories for m in minibatches)),
            "train/optimizer_steps": float(len(totals.grad_norms)),
            "train/bad_steps": float(totals.num_bad_steps),
            "train/empty_steps": float(totals.num_empty_steps),
            # Tokens that went through the model: a shared prompt once, no episode without signal.
            "train/computed_tokens": float(num_computed),
            "train/tokens_per_second": num_computed / seconds,
            "train/seconds": seconds,
            "train/peak_memory_gib": self._peak_memory(),
        }
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

    def _peak_memory(self) -> float:
        if self.accelerator.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB

    def _reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(tensor, reduction="sum")  # type: ignore[return-value]

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.gather(tensor)  # type: ignore[return-value]


class _Schedule:
    """The factor of the learning rate by optimizer step: linear warm-up, then the named decay."""

    def __init__(self, config: OptimConfig, max_steps: int) -> None:
        self._kind = config.lr_scheduler_type
        self._warmup = config.warmup_steps
        self._total = max_steps * config.num_iterations * config.num_minibatches

    def __call__(self, step: int) -> float:
        if step < self._warmup:
            return (step + 1) / (self._warmup + 1)  # a first step with rate 0 would be wasted
        if self._kind == "constant":
            return 1.0
        done = min(1.0, (step - self._warmup) / max(1, self._total - self._warmup))
        return 1 - done if self._kind == "linear" else (1 + math.cos(math.pi * done)) / 2


def _make_optimizer(model: Any, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, of which only matrices decay."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def _sample(parameters: list[torch.Tensor]) -> torch.Tensor:
    """A few hundred entries of every parameter."""
    return torch.cat([p.detach().flatten()[:: max(1, p.numel() // 256)] for p in parameters])
