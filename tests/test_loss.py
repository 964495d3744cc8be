"""The loss against a numpy oracle and hand-computed cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import LossConfig
from train.loss import LossInputs, kl_divergence, policy_loss

LOSS_TYPES = ("grpo", "dr_grpo", "dapo")


def make_inputs(logprobs, advantages, *, tokens=None, rollout=None, **changes):
    """One trajectory per call unless `tokens` says how long each token's trajectory is."""
    logprobs = torch.tensor(logprobs, dtype=torch.float32, requires_grad=True)
    n = len(logprobs)

    def column(values):
        return torch.as_tensor(values, dtype=torch.float32).expand(n).clone()

    values = {
        "logprobs": logprobs,
        "entropies": torch.zeros(n),
        "rollout_logprobs": logprobs.detach() if rollout is None else column(rollout),
        "advantages": column(advantages),
        "trajectory_tokens": column(float(n) if tokens is None else tokens),
        "num_loss_tokens": n,
        "num_trajectories": 1,
        "max_episode_tokens": 100,
    }
    values |= {k: column(v) if k.endswith("logprobs") else v for k, v in changes.items()}
    return LossInputs(**values)


def mean(output, name):
    return float(output.sums[name] / output.sums["num_tokens"])


def test_the_ratio_is_clipped_per_token_and_pessimistically():
    """F065: ratios 1.1, 0.9, 1.5 with clip 0.2."""
    ratios = np.log([1.1, 0.9, 1.5])
    config = LossConfig(old_logprobs="recompute", importance_sampling_cap=None)
    for advantage, expected in ((1.0, -1.066667), (-1.0, 1.166667)):
        output = policy_loss(make_inputs(ratios, advantage, old_logprobs=0.0), config)
        assert output.loss.item() == pytest.approx(expected, abs=1e-5)


def test_before_any_update_the_ratio_is_one_and_the_gradient_is_not_zero():
    """F064."""
    inputs = make_inputs([-0.5, -1.0, -2.0], [1.0, -1.0, 0.5])
    output = policy_loss(inputs, LossConfig())
    output.loss.backward()
    assert mean(output, "ratio") == 1.0
    assert mean(output, "clip_ratio/region_mean") == 0.0
    assert output.loss.item() == pytest.approx(-0.5 / 3)
    assert inputs.logprobs.grad.tolist() == pytest.approx([-1 / 3, 1 / 3, -0.5 / 3])


def test_clip_higher_lets_the_ratio_rise_further_than_it_may_fall():
    ratios = np.log([1.25, 1.35, 0.75])
    config = LossConfig(epsilon=0.2, epsilon_high=0.28, old_logprobs="recompute")
    inputs = make_inputs(ratios, [1.0, 1.0, -1.0], old_logprobs=0.0, rollout=0.0)
    output = policy_loss(inputs, config)
    output.loss.backward()
    assert inputs.logprobs.grad.tolist() == pytest.approx([-1.25 / 3, 0, 0], abs=1e-6)
    assert mean(output, "clip_ratio/high_mean") == pytest.approx(1 / 3)
    assert mean(output, "clip_ratio/low_mean") == pytest.approx(1 / 3)
    assert mean(output, "clip_ratio/region_mean") == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("loss_type", "short", "long"),
    [("grpo", 0.1 / 2, 0.01 / 2), ("dapo", 1 / 110, 1 / 110), ("dr_grpo", 1 / 400, 1 / 400)],
)
def test_each_aggregation_weighs_tokens_by_its_formula(loss_type, short, long):
    """F059: A = -1, lengths 10 and 100."""
    inputs = make_inputs(
        [-1.0] * 110,
        -1.0,
        tokens=[10.0] * 10 + [100.0] * 100,
        num_trajectories=2,
        max_episode_tokens=200,
    )
    policy_loss(inputs, LossConfig(loss_type=loss_type)).loss.backward()
    gradient = inputs.logprobs.grad
    torch.testing.assert_close(gradient, torch.tensor([short] * 10 + [long] * 100))


def test_micro_batches_add_up_to_the_mean_over_all_tokens():
    """F057: one token of loss 1 and three of loss 0 make 0.25, not 0.5."""
    config = LossConfig()
    parts = [
        make_inputs([-1.0], -1.0, num_loss_tokens=4),
        make_inputs([-1.0] * 3, 0.0, num_loss_tokens=4),
    ]
    assert sum(policy_loss(part, config).loss.item() for part in parts) == pytest.approx(0.25)


def test_tokens_of_a_tool_are_not_in_the_denominator():
    """F058: three trained tokens of loss 1 make 1.0, however many the tools wrote."""
    assert policy_loss(make_inputs([-1.0] * 3, -1.0), LossConfig()).loss.item() == 1.0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_no_trained_token_gives_loss_zero_with_a_gradient(loss_type):
    """F054."""
    inputs = make_inputs([], 0.0, tokens=0.0, num_loss_tokens=0, num_trajectories=0)
    output = policy_loss(inputs, LossConfig(loss_type=loss_type))
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert output.max_abs_diff.item() == 0.0


@pytest.mark.parametrize("estimator", ["k3", "k3+"])
def test_k3_has_its_known_values_and_never_overflows(estimator):
    """F060."""
    d = torch.tensor([0.0, 0.5, -0.5, 10.0, -10.0, 100.0, -100.0])
    logprobs = torch.zeros(7, requires_grad=True)
    kl = kl_divergence(logprobs, d, estimator)
    kl.sum().backward()
    assert kl[:3].tolist() == pytest.approx([0, 0.148721, 0.106531], abs=1e-6)
    assert kl[3].item() == pytest.approx(math.exp(10) - 11, rel=1e-6)
    assert kl[4].item() == pytest.approx(math.exp(-10) + 9, rel=1e-6)
    assert kl.isfinite().all()
    assert logprobs.grad.isfinite().all()


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2():
    ref = torch.tensor([-1.0, -3.0])
    gradients = {}
    for estimator in ("k1", "k2", "k3", "k3+"):
        logprobs = torch.tensor([-2.0, -2.5], requires_grad=True)
        kl_divergence(logprobs, ref, estimator).sum().backward()
        gradients[estimator] = logprobs.grad.tolist()
    assert gradients["k1"] == [1.0, 1.0]
    assert gradients["k2"] == gradients["k3+"] == [-1.0, 0.5]
    assert gradients["k3"] == pytest.approx([1 - math.e, 1 - math.exp(-0.5)])


def test_importance_weights_are_capped_and_carry_no_gradient():
    inputs = make_inputs([-1.0, -1.0], 1.0, rollout=[-3.0, -0.5])
    output = policy_loss(inputs, LossConfig(importance_sampling_cap=2.0))
    output.loss.backward()
    assert inputs.logprobs.grad.tolist() == pytest.approx([-1.0, -math.exp(-0.5) / 2])
    assert mean(output, "mismatch/clip_frac") == 0.5
    assert mean(output, "mismatch/abs_diff") == pytest.approx(1.25)
    assert output.max_abs_diff.item() == 2.0


def test_entropy_is_the_mean_over_trained_tokens():
    """F069: entropies ln 2 and 0 make 0.346574."""
    inputs = make_inputs([-1.0, -1.0], 1.0, entropies=torch.tensor([math.log(2), 0.0]))
    assert mean(policy_loss(inputs, LossConfig()), "entropy") == pytest.approx(0.346574, abs=1e-6)


def test_a_wild_log_ratio_stays_finite():
    config = LossConfig(old_logprobs="rollout")
    inputs = make_inputs([-1.0, -200.0], [-1.0, 1.0], rollout=[-200.0, -1.0])
    output = policy_loss(inputs, config)
    output.loss.backward()
    assert output.loss.isfinite()
    assert inputs.logprobs.grad.isfinite().all()
    assert all(value.isfinite() for value in output.sums.values())


numbers = st.floats(-4, 0, width=32)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(numbers, numbers, numbers, numbers, st.floats(-3, 3, width=32)),
        min_size=1,
        max_size=12,
    ),
    loss_type=st.sampled_from(LOSS_TYPES),
    old_logprobs=st.sampled_from(["skip", "recompute", "rollout"]),
    cap=st.sampled_from([None, 2.0]),
    beta=st.sampled_from([0.0, 0.1]),
    estimator=st.sampled_from(["k1", "k2", "k3", "k3+"]),
)
def test_the_loss_agrees_with_numpy(rows, loss_type, old_logprobs, cap, beta, estimator):
    lp, old, rollout, ref, advantages = (np.array(c, dtype=np.float64) for c in zip(*rows))  # noqa: B905
    config = LossConfig(
        loss_type=loss_type,
        old_logprobs=old_logprobs,
        importance_sampling_cap=cap,
        beta=beta,
        kl_estimator=estimator,
        epsilon_high=0.28,
    )
    inputs = make_inputs(
        lp.tolist(),
        advantages,
        rollout=rollout,
        old_logprobs=old,
        tokens=7.0,
        num_loss_tokens=31,
        num_trajectories=5,
        **({"ref_logprobs": ref} if beta else {}),
    )
    learner = {"skip": lp, "rollout": lp, "recompute": old}[old_logprobs]
    centre = rollout if old_logprobs == "rollout" else learner
    ratio = np.exp(lp - centre)
    losses = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 0.8, 1.28))
    if cap is not None and old_logprobs != "rollout":
        losses = losses * np.minimum(np.exp(learner - rollout), cap)
    if beta:
        d = ref - lp
        k3 = np.exp(d) - d - 1
        losses = losses + beta * {"k1": -d, "k2": d**2 / 2, "k3": k3, "k3+": k3}[estimator]
    weight = {"grpo": 1 / 35, "dapo": 1 / 31, "dr_grpo": 1 / 500}[loss_type]
    loss = policy_loss(inputs, config).loss.item()
    assert loss == pytest.approx(float(weight * losses.sum()), rel=1e-4, abs=1e-5)
