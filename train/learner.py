"""The learner: one batch of groups becomes optimizer steps on float32 weights."""

from __future__ import annotations

import copy
import math
import resource
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import fsdp2_prepare_model
from torch.distributed.fsdp import MixedPrecisionPolicy

from agentrl.config import RunConfig
from agentrl.trajectory import TrajectoryGroup
from train.beta import BetaSchedule
from train.budget import find_budget
from train.flops import matmul_peak, row_flops
from train.loss import LossInputs, policy_loss
from train.offload import move_optimizer_state
from train.optimizer import Schedule, clip_grad_norm, make_optimizer, resume_schedule, sample
from train.packing import Batch, MicroBatch, single_sequence
from train.policy import Policy, PolicyOutput
from train.preparation import Minibatch, Preparation, Row
from train.ranks import Ranks, cores_of_a_rank
from train.totals import Totals
from train.weights import adapter_weights, full_weights, merged_weights

_MOST = 0.5  # of the tokens; corrections are for the few


class TrainingError(RuntimeError):
    """Training cannot go on: the gradients stay non-finite, or the engine has other weights."""


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
        if accelerator.is_fsdp2 and accelerator.mixed_precision == "bf16":
            # Accelerate's own policy would round log probabilities and sums of gradients, too.
            plugin: Any = accelerator.state.fsdp_plugin
            plugin.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        self._reference = None
        if config.loss.beta > 0 and config.lora is None:
            reference = copy.deepcopy(model).requires_grad_(False)
            self._reference = self._prepare_frozen(Policy(reference))
        policy = Policy(model, value_head=config.advantage.estimator == "gae")
        optimizer = make_optimizer(list(policy.parameters()), config.optim)
        self.policy, self.optimizer = accelerator.prepare(policy, optimizer)
        self.policy.train()
        # Colocated servers get the memory of the optimizer's state between two updates.
        place = next(self.policy.parameters()).device.type
        self._lends_memory = config.sglang.colocate and place == "cuda"
        # Not prepared: Accelerate would step it once per process.
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, Schedule(config.optim, config.max_steps)
        )
        tokens = config.optim.micro_batch_tokens
        self._micro_batch_tokens = None if tokens == "auto" else tokens
        self._found_budget: list[Any] | None = None  # with what it was found for
        self._preparation = Preparation(
            config=config,
            ranks=self.ranks,
            device=accelerator.device,
            policy=self._forward,
            reference=self._forward_reference,
        )
        self._peak: float | None = None  # operations per second, of all ranks

    def _prepare_frozen(self, policy: Policy) -> Any:
        if self.accelerator.is_fsdp2:
            return fsdp2_prepare_model(self.accelerator, policy)
        return self.accelerator.prepare_model(policy, evaluation_mode=True)

    @property
    def model(self) -> Any:
        """The transformers model, or peft's around it."""
        return self.accelerator.unwrap_model(self.policy).model

    @property
    def num_optimizer_steps(self) -> int:
        return self.scheduler.last_epoch

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
        if self._micro_batch_tokens is None:
            self._micro_batch_tokens = find_budget(self)
            self._found_budget = [self._micro_batch_tokens, *self._budget_conditions()]
        start = time.perf_counter()
        if self.accelerator.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        totals = Totals()
        with cores_of_a_rank():
            minibatches = self._preparation.prepare(
                groups, self._micro_batch_tokens, self.beta.value
            )
            prepared = time.perf_counter()
            with self._optimizer_at_work():
                for _ in range(self.config.optim.num_iterations):
                    for minibatch in minibatches:
                        self._step(minibatch, totals)
        self.version += bool(totals.grad_norms)
        end = time.perf_counter()
        metrics = self._metrics(totals, minibatches, end - start, end - prepared)
        self.beta.step(metrics.get("kl"))
        return metrics | {"time/logprob": prepared - start, "time/update": end - prepared}

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
        one is gathered when its turn comes. Where none is sharded, rank 0 alone has any.
        """
        if not (self.is_sharded or self.ranks.is_main):
            return iter(())
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
        """Plain values, alike on all ranks; tensors and random generators are saved apart."""
        return {
            "run_id": self.run_id,
            "version": self.version,
            "bad_steps": self._bad_steps,
            "beta": self.beta.state_dict(),
            "found_budget": self._found_budget,
            "optimizer_steps": self.num_optimizer_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`, after the tensors were loaded; rates are those of the config."""
        self.run_id = state["run_id"]
        self.version = state["version"]
        self._bad_steps = state["bad_steps"]
        self.beta.load_state_dict(state["beta"])
        found = state["found_budget"]
        if self._micro_batch_tokens is None and found and found[1:] == self._budget_conditions():
            # Rows of another length would round differently.
            self._micro_batch_tokens, self._found_budget = found[0], found
        if self._lends_memory:
            move_optimizer_state(self.optimizer, "cpu")
        resume_schedule(self.scheduler, state["optimizer_steps"])

    def _budget_conditions(self) -> list[Any]:
        """What a budget that was found depends on."""
        device = self.accelerator.device
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return [self.ranks.size, self.is_sharded, kind, self.config.rollout.max_context_tokens]

    def _forward(self, micro_batch: MicroBatch, **options: Any) -> PolicyOutput:
        return self.policy(micro_batch, self.config.rollout.temperature, **options)

    def _forward_reference(self, micro_batch: MicroBatch) -> PolicyOutput:
        if self._reference is None:
            return self._forward(micro_batch, without_adapter=True)
        return self._reference(micro_batch, self.config.rollout.temperature)

    def _step(self, minibatch: Minibatch, totals: Totals) -> None:
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
        totals.add_step(loss=loss, grad_norm=grad_norm, update_ratio=changed / looked_at)
        totals.add_sums(sums, max_abs_diff)
        self.optimizer.zero_grad(set_to_none=True)

    def _backward(self, minibatch: Minibatch) -> tuple[float, dict[str, float], float]:
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
        num_tokens = max(step["num_tokens"], 1)
        self._check_mismatch(step["mismatch/abs_diff"] / num_tokens)
        self._check_correction(step.get("mismatch/clip_frac", 0.0) / num_tokens)
        return loss, step, float(self.ranks.max(max_abs_diff))

    def _loss_inputs(self, row: Row, forward: PolicyOutput, batch: Batch) -> LossInputs:
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
            self._warn(
                f"learner and engine differ by {mismatch:.3g} nats per token; over "
                f"{self.config.loss.warn_mismatch:g} (loss.warn_mismatch) the samples are "
                "noticeably off-policy"
            )

    def _check_correction(self, clipped: float) -> None:
        if clipped > _MOST:
            mode = self.config.loss.importance_sampling_mode
            self._warn(
                f"loss.importance_sampling_mode={mode} clips or masks {clipped:.0%} of the tokens: "
                "widen its bounds, or take a token_ mode, for differences add up over a sequence"
            )

    def _warn(self, text: str) -> None:
        if self.ranks.is_main:  # for all of them
            warnings.warn(text, stacklevel=3)

    def _skip(self, totals: Totals) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        totals.num_bad_steps += 1
        self._bad_steps += 1
        if self._bad_steps >= self.config.optim.max_bad_steps:
            num_bad, self._bad_steps = self._bad_steps, 0  # a resumed run has as many tries again
            raise self.ranks.alike(
                TrainingError(
                    f"{num_bad} steps in a row had non-finite gradients "
                    f"(optim.max_bad_steps={self.config.optim.max_bad_steps}); the weights are "
                    "those of the last good step. Lower optim.learning_rate, or set "
                    "mixed_precision: no"
                )
            )

    def _metrics(
        self,
        totals: Totals,
        minibatches: list[Minibatch],
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
            # Tokens that went through the model: a shared prompt once, no episode without signal.
            "train/computed_tokens": num_computed,
            "train/tokens_per_second": num_computed / seconds,
            "train/mfu": num_flops / update_seconds / self._matmul_peak(),
            "train/seconds": seconds,
            "train/peak_memory_gib": float(self.ranks.max(memory)),  # of the fullest rank
        }
        if self.config.loss.beta > 0:
            metrics["train/beta"] = self.beta.value
        return metrics | totals.metrics()

    def _matmul_peak(self) -> float:
        """Operations per second of all ranks; measured once, by all at the same time."""
        if self._peak is None:
            device = self.accelerator.device
            bf16 = self.accelerator.mixed_precision == "bf16"
            with cores_of_a_rank():
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
