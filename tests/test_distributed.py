"""One batch on one, two and three processes, whole and sharded: the same numbers everywhere."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import accelerate
import numpy as np
import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import train.learner
from agentrl.config_file import make_config
from agentrl.trajectory import TrajectoryGroup
from tests import fsdp_on_cpu
from tests.rank_processes import run_ranks, values
from tests.test_learner import make_model, random_groups
from train.learner import Learner, TrainingError
from train.model import _with_adapters as add_adapters
from train.ranks import Ranks
from train.weights import clean_name, full_weights, merged_weights

KINDS = ("ddp", "fsdp")
ONE_ROW_A_SEQUENCE = 60  # tokens
# Time and memory; what is shared less when fewer sequences lie together; entries that are sampled.
OF_THE_LAYOUT = (
    "time/",
    "train/computed_tokens",
    "train/mfu",
    "train/peak_memory_gib",
    "train/seconds",
    "train/tokens_per_second",
    "train/update_ratio",
)

CASES: dict[str, dict[str, Any]] = {
    "five steps": {},
    "a row for each sequence": {"optim": {"micro_batch_tokens": ONE_ROW_A_SEQUENCE}},
    "rows of a few, nothing shared": {
        "optim": {"micro_batch_tokens": 130, "share_prefixes": False}
    },
    "several steps a batch": {
        "optim": {"num_minibatches": 3, "max_grad_norm": 0.01},
        "loss": {"old_logprobs": "recompute", "aggregation": "seq_mean_token_mean"},
    },
    "reference": {"loss": {"beta": 0.1, "kl_estimator": "k3"}},
    "value head": {
        "advantage": {"estimator": "gae"},
        "optim": {"num_minibatches": 3, "micro_batch_tokens": 130},
        "loss": {"old_logprobs": "recompute"},
    },
    "one sequence": {"advantage": {"estimator": "gae", "whiten_advantages": False}},
    "signal in one group": {},
    "checkpointed, untied": {"model": {"gradient_checkpointing": True, "name_or_path": "untied"}},
    "frozen embeddings": {"model": {"freeze_embeddings": True}},
    "adapters": {"lora": {"r": 4}, "loss": {"beta": 0.1}, "optim": {"learning_rate": 1e-2}},
    "entropy bonus": {"loss": {"entropy_coef": 0.1}},
}


def weights_of(learner):
    """On every rank, also where rank 0 alone would hand them over."""
    merges = learner.config.lora is not None
    return merged_weights(learner.model) if merges else full_weights(learner.model)


def batches_of(case: str) -> list[list[TrajectoryGroup]]:
    """What is trained on in a case."""
    if case == "five steps":
        return [random_groups(seed) for seed in range(5)]
    if case == "one sequence":  # all ranks but one have nothing
        return [random_groups(seed, num_groups=1, size=1) for seed in range(2)]
    if case == "signal in one group":  # three sequences, of which ranks have one or none
        groups = random_groups(size=3)
        for group in groups[1:]:
            for trajectory in group.trajectories:
                trajectory.reward = 1.0
        return [groups]
    return [
        random_groups(seed) for seed in range(2 if "beta" in CASES[case].get("loss", {}) else 1)
    ]


class Outcome(NamedTuple):
    """Of one rank."""

    gradients: list[dict[str, np.ndarray]]  # whole, of each optimizer step
    weights: dict[str, np.ndarray]
    metrics: list[dict[str, float]]


def make_learner(ranks: Ranks, sections: dict[str, Any], *, mixed_precision: str = "no") -> Learner:
    values: dict[str, Any] = {
        "model": {"name_or_path": "tied"},
        "env": {"id": "none"},
        "rollout": {"temperature": 0.9, "max_episode_tokens": 40, "prompts_per_step": 3},
        "loss": {"max_mismatch": 1e9, "importance_sampling_mode": "none"},
        # A small epsilon would blow the rounding of gradients near 0 up to whole steps.
        "optim": {"learning_rate": 1e-3, "max_grad_norm": 1e9, "adam_epsilon": 1e-3},
    }
    for section, changes in sections.items():
        values[section] = values.get(section, {}) | changes
    config = make_config(values)
    model = make_model(tied=config.model.name_or_path == "tied")
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.model.freeze_embeddings:
        model.get_input_embeddings().weight.requires_grad_(False)
    if config.model.torch_compile:
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    if config.lora is not None:
        model = add_adapters(model, config.lora, seed=0)
    return Learner(model, config, accelerate.Accelerator(cpu=True), ranks)


def whole(tensor: Any) -> np.ndarray:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().float().numpy().copy()


def watch_gradients(learner: Learner) -> list[dict[str, np.ndarray]]:
    caught: list[dict[str, np.ndarray]] = []
    step = learner.optimizer.step

    def watched_step(*args, **kwargs):
        trained = [(n, p) for n, p in learner.policy.named_parameters() if p.grad is not None]
        caught.append({clean_name(name): whole(p.grad) for name, p in trained})
        return step(*args, **kwargs)

    learner.optimizer.step = watched_step
    return caught


def train_batches(learner: Learner, batches: list[Any]) -> Outcome:
    gradients = watch_gradients(learner)
    metrics = [
        {
            name: value
            for name, value in learner.update(groups if learner.ranks.is_main else []).items()
            if not name.startswith(OF_THE_LAYOUT)
        }
        for groups in batches
    ]
    weights = {name: whole(tensor) for name, tensor in weights_of(learner)}
    return Outcome(gradients, weights, metrics)


def begin(kind: str, mixed_precision: str = "no", **plugin: Any) -> Ranks:
    warnings.simplefilter("ignore")
    if kind == "fsdp":
        fsdp_on_cpu.shard(**plugin)
    accelerate.Accelerator(cpu=True, mixed_precision=mixed_precision)
    return Ranks()


def train_cases(kind: str) -> dict[str, Outcome]:
    ranks = begin(kind)
    return {
        name: train_batches(make_learner(ranks, sections), batches_of(name))
        for name, sections in CASES.items()
    }


def assert_near(found: Outcome, expected: Outcome, tolerance: float = 1e-5) -> None:
    assert len(found.gradients) == len(expected.gradients)
    for own, others in zip(found.gradients, expected.gradients, strict=True):
        assert_near_tensors(own, others, tolerance)
    assert_near_tensors(found.weights, expected.weights, tolerance)
    for own_metrics, other_metrics in zip(found.metrics, expected.metrics, strict=True):
        assert own_metrics == pytest.approx(other_metrics, rel=1e-4, abs=1e-6)


def assert_near_tensors(found: dict, expected: dict, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = np.abs(tensor).max()
        np.testing.assert_allclose(
            found[name], tensor, rtol=0, atol=tolerance * max(scale, 1e-8), err_msg=name
        )


@pytest.fixture(scope="module")
def alone() -> dict[str, Outcome]:
    """The cases in one process."""
    [outcomes] = values(run_ranks(train_cases, 1, "alone"))
    return outcomes


@pytest.mark.parametrize(
    "size",
    [2, pytest.param(3, marks=pytest.mark.slow)],  # more of the same, and 20 s each
)
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_processes_trains_as_one_does(kind, size, alone):
    """F080, F084, F085, F087: gradients, their norm, weights and metrics, of every rank."""
    for outcomes in values(run_ranks(train_cases, size, kind, timeout_s=120)):
        for name, outcome in outcomes.items():
            assert_near(outcome, alone[name])


def refuse(kind: str) -> dict[str, Any]:
    """What becomes of steps whose gradient is not finite on rank 1."""
    ranks = begin(kind)
    learner = make_learner(ranks, {"optim": {"max_bad_steps": 3}})
    before = {name: whole(tensor) for name, tensor in weights_of(learner)}
    loss, clip = train.learner.policy_loss, train.learner.clip_grad_norm

    def poisoned_loss(*args):
        output = loss(*args)
        return replace(output, loss=output.loss * (math.nan if ranks.rank == 1 else 1.0))

    def poisoned_norm(*args):
        norm = clip(*args)
        return math.nan if ranks.rank == 1 else norm

    def update():
        return learner.update(random_groups() if ranks.is_main else [])

    train.learner.clip_grad_norm = poisoned_norm
    skipped = [update()]
    train.learner.clip_grad_norm, train.learner.policy_loss = clip, poisoned_loss
    skipped.append(update())
    try:
        update()
        raised = None
    except TrainingError as error:
        raised = (str(error), ranks.in_step(error))
    after = {name: whole(tensor) for name, tensor in weights_of(learner)}
    return {
        "bad steps": [metrics["train/bad_steps"] for metrics in skipped],
        "norm": [metrics.get("grad_norm") for metrics in skipped],
        "raised": raised,
        "version": learner.version,
        "moved": [name for name in before if not np.array_equal(before[name], after[name])],
        "moments": len(learner.optimizer.state),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_on_one_rank_moves_no_weight_on_any(kind):
    """F068."""
    for found in values(run_ranks(refuse, 2, kind)):
        message, in_step = found.pop("raised")
        assert "3 steps in a row had non-finite gradients" in message and in_step
        nothing = {"norm": [None, None], "version": 0, "moved": [], "moments": 0}
        assert found == {"bad steps": [1.0, 1.0], **nothing}


def train_in_bf16(kind: str) -> tuple[Outcome, list[float], set[torch.dtype]]:
    learner = make_learner(begin(kind, mixed_precision="bf16"), {})
    outcome = train_batches(learner, batches_of("five steps"))
    dtypes = {tensor.dtype for _, tensor in weights_of(learner)}
    return outcome, learner.logprobs(range(40)), dtypes


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_for_products_alone(kind, alone):
    """F066: weights, log probabilities and sums of gradients stay float32."""
    first, second = values(run_ranks(train_in_bf16, 2, kind))
    expected = alone["five steps"]
    for outcome, logprobs, dtypes in (first, second):
        assert dtypes == {torch.float32}
        exact = torch.tensor(logprobs)
        assert (exact.bfloat16().float() != exact).float().mean() > 0.9
        assert outcome.metrics[0]["entropy"] == pytest.approx(
            expected.metrics[0]["entropy"], rel=0.02
        )
        for name, gradient in expected.gradients[0].items():
            own = outcome.gradients[0][name]
            cosine = (own * gradient).sum() / np.linalg.norm(own) / np.linalg.norm(gradient)
            assert cosine > 0.99, name
            assert np.mean(torch.tensor(own).bfloat16().float().numpy() != own) > 0.3, name


def train_with_plugin(**options: Any) -> Outcome:
    learner = make_learner(begin("fsdp", **options), {"optim": {"micro_batch_tokens": 130}})
    return train_batches(learner, batches_of("five steps"))


def train_checkpointed() -> Outcome:
    return train_with_plugin(activation_checkpointing=True)


def train_offloaded() -> Outcome:
    return train_with_plugin(cpu_offload=CPUOffloadPolicy(pin_memory=False))


@pytest.mark.parametrize("train_otherwise", [train_checkpointed, train_offloaded])
def test_what_accelerates_plugin_does_for_memory_changes_no_number(train_otherwise, alone):
    for outcome in values(run_ranks(train_otherwise, 2)):
        for metrics in outcome.metrics:
            assert metrics.keys() == alone["five steps"].metrics[0].keys()
        assert_near(outcome, alone["five steps"])


def train_compiled(kind: str) -> Outcome:
    learner = make_learner(begin(kind), {"model": {"torch_compile": True}})
    return train_batches(learner, batches_of("five steps"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_change_no_number(kind, alone):
    for outcome in values(run_ranks(train_compiled, 2, kind, timeout_s=300)):
        assert_near(outcome, alone["five steps"])
