"""Losses, aggregations and corrections: against hand-computed cases and a numpy oracle."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import LossConfig
from tests.oracles_loss import loss_and_gradients
from train.loss import LossInputs, kl_divergence, policy_loss

LOSSES = [
    *itertools.product(("ppo", "cispo", "sapo"), ("token", "turn", "sequence")),
    ("reinforce", "token"),
]
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "prompt_mean")
CORRECTIONS = (
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_mask",
)
KL_ESTIMATORS = (None, "k1", "k2", "k3", "k3+")
GRADIENTS = ("logprobs", "entropies", "values")


def make_inputs(logprobs, advantages, **changes):
    """One turn of one trajectory of one group, unless `changes` say otherwise."""
    logprobs = torch.as_tensor(logprobs, dtype=torch.float64).requires_grad_()
    n = len(logprobs)
    values = {
        "entropies": 0.0,
        "rollout_logprobs": logprobs.detach(),
        "advantages": advantages,
        "turn_ids": 0,
        "sequence_ids": 0,
        "trajectory_tokens": float(n),
        "group_tokens": float(n),
        "num_loss_tokens": n,
        "num_trajectories": 1,
        "num_groups": 1,
        "max_episode_tokens": 100,
    } | changes
    columns = {}
    for name, value in values.items():
        if not name.startswith(("num", "max", "beta")):
            dtype = torch.int64 if name.endswith("ids") else torch.float64
            value = torch.as_tensor(value, dtype=dtype).expand(n).clone()
        columns[name] = value
    return LossInputs(logprobs=logprobs, **columns)


def gradient(inputs, config):
    policy_loss(inputs, config).loss.backward()
    return inputs.logprobs.grad.tolist()


def mean(output, name):
    return float(output.sums[name] / output.sums["num_tokens"])


def shares(output, *names):
    return [mean(output, f"clip_ratio/{name}_mean") for name in names]


def spans(lengths):
    """Which of the spans of these lengths each token is in."""
    return np.repeat(np.arange(len(lengths)), np.array(lengths, dtype=int))


def random_case(rng, turns=((2, 1), (3,), (1, 1, 2), (1,)), *, ref=True, values=True):
    """Fields of LossInputs: a micro-batch of sequences, each with turns of so many tokens.

    The first two are segments of one trajectory, and the step has more of everything.
    """
    lengths = [sum(sequence) for sequence in turns]
    n = sum(lengths)
    trajectory = [sum(lengths[:2])] * 2 + lengths[2:]
    columns = {
        "logprobs": -rng.random(n) * 3,
        "rollout_logprobs": -rng.random(n) * 3,
        "old_logprobs": -rng.random(n) * 3,
        "entropies": rng.random(n),
        "advantages": rng.normal(size=n),
        "turn_ids": 40 + spans([*itertools.chain(*turns)]),
        "sequence_ids": 7 + spans(lengths),
        "trajectory_tokens": np.array(trajectory, dtype=float)[spans(lengths)],
        "group_tokens": np.full(n, n + 2.0),
        "beta": 0.3 * ref,
        "num_loss_tokens": n + 5,
        "num_trajectories": 6,
        "num_groups": 3,
        "max_episode_tokens": 17,
    }
    if ref:
        columns["ref_logprobs"] = -rng.random(n) * 3
    if values:
        columns |= {name: rng.normal(size=n) for name in ("values", "old_values", "returns")}
    return columns


def compute(case, config, dtype=torch.float64):
    """The output, and the gradients by what can carry one."""
    tensors = dict(case)
    for name, column in case.items():
        if isinstance(column, np.ndarray):
            tensors[name] = torch.tensor(column, dtype=None if name.endswith("ids") else dtype)
    leaves = {name: tensors[name].requires_grad_() for name in GRADIENTS if name in tensors}
    output = policy_loss(LossInputs(**tensors), config)
    output.loss.backward()
    gradients = {
        name: np.zeros(len(leaf)) if leaf.grad is None else leaf.grad.numpy()
        for name, leaf in leaves.items()
    }
    return output, gradients


def configs(loss_type, level):
    """Every aggregation, correction and KL, with the rest of the options taking turns."""
    olds = itertools.cycle(("recompute", "skip", "rollout"))
    deltas = itertools.cycle((None, 1.5))
    for aggregation, mode, kl in itertools.product(AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS):
        old = next(olds)
        if old == "rollout" and (loss_type == "reinforce" or CORRECTIONS.index(mode) > 1):
            old = "recompute"
        yield LossConfig(
            loss_type=loss_type,
            importance_sampling_level=level,
            aggregation=aggregation,
            importance_sampling_mode=mode,
            importance_sampling_cap=1.6,
            importance_sampling_min=0.5 if mode.endswith("mask") else 0.0,
            beta=0.3 if kl else 0.0,
            kl_estimator=kl or "k3+",
            old_logprobs=old,
            epsilon_high=0.28,
            delta=next(deltas) if loss_type == "ppo" else None,
            entropy_coef=0.05,
        )


@pytest.mark.parametrize(("loss_type", "level"), LOSSES)
def test_every_loss_and_its_gradient_agree_with_the_oracle(loss_type, level):
    rng = np.random.default_rng(0)
    for number, config in enumerate(configs(loss_type, level)):
        case = random_case(rng, ref=config.beta > 0, values=number % 2 == 0)
        output, gradients = compute(case, config)
        expected, expected_gradients = loss_and_gradients(case, config)
        assert output.loss.item() == pytest.approx(expected, rel=1e-6), config
        for name, found in gradients.items():
            np.testing.assert_allclose(found, expected_gradients[name], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("loss_type", "level"), LOSSES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_no_split_or_order_of_a_batch_changes_its_loss(loss_type, level, data):
    """F057: sequences may land in any micro-batch, in any order."""
    turns = data.draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1))
    config = data.draw(st.sampled_from([*configs(loss_type, level)]))
    case = random_case(np.random.default_rng(0), turns, ref=config.beta > 0)
    whole, gradients = compute(case, config)
    order = data.draw(st.permutations(range(len(turns))))
    home = [data.draw(st.integers(0, 2)) for _ in order]
    loss, num_tokens = 0.0, 0.0
    clip_frac = np.zeros(())
    for part in range(3):
        mine = [np.flatnonzero(case["sequence_ids"] == 7 + s) for s in order if home[s] == part]
        place = np.concatenate([np.zeros(0, dtype=int), *mine])
        share = {k: v[place] if isinstance(v, np.ndarray) else v for k, v in case.items()}
        output, own = compute(share, config)
        loss += output.loss.item()
        num_tokens += output.sums["num_tokens"].item()
        clip_frac += output.sums.get("mismatch/clip_frac", torch.zeros(())).numpy()
        for name, found in own.items():
            np.testing.assert_allclose(found, gradients[name][place], rtol=1e-9, atol=1e-15)
    assert loss == pytest.approx(whole.loss.item(), rel=1e-9)
    assert num_tokens == whole.sums["num_tokens"]
    assert clip_frac == whole.sums.get("mismatch/clip_frac", 0)


@pytest.mark.parametrize(("loss_type", "level"), LOSSES)
def test_extreme_logprobs_leave_loss_gradient_and_metrics_finite(loss_type, level):
    """F060, F068: in every combination, alone and beside others in a sequence."""
    rng = np.random.default_rng(0)
    extremes = (-1e4, -200.0, -1.0, 0.0)
    grid = np.array([*itertools.product(extremes, extremes, extremes, (-3.0, 0.0, 3.0))])
    names = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")
    columns = dict(zip(names, rng.permutation(grid).T, strict=True))
    for config in configs(loss_type, level):
        case = random_case(rng, [(1,)] * 96 + [(3, 5)] * 12, ref=config.beta > 0) | columns
        if config.beta:
            case["ref_logprobs"] = rng.permutation(columns["logprobs"])
        output, gradients = compute(case, config, torch.float32)
        assert output.loss.isfinite(), config
        assert all(np.isfinite(found).all() for found in gradients.values()), config
        assert all(value.isfinite() for value in output.sums.values()), config


@pytest.mark.parametrize(("loss_type", "level"), LOSSES)
def test_no_trained_token_gives_loss_zero_with_a_gradient(loss_type, level):
    """F054."""
    for config in configs(loss_type, level):
        case = random_case(np.random.default_rng(0), [], ref=config.beta > 0)
        counts = {"num_loss_tokens": 0, "num_trajectories": 0, "num_groups": 0}
        output, gradients = compute(case | counts, config)
        assert output.loss.item() == 0.0
        assert output.max_abs_diff.item() == 0.0
        assert not any(value.any() for value in output.sums.values())
        assert all(len(found) == 0 for found in gradients.values())


def test_the_ratio_is_clipped_per_token_and_pessimistically():
    """F065: ratios 1.1, 0.9, 1.5 with clip 0.2."""
    ratios = np.log([1.1, 0.9, 1.5])
    config = LossConfig(old_logprobs="recompute", importance_sampling_mode="none")
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
    config = LossConfig(epsilon=0.2, epsilon_high=0.28, old_logprobs="recompute")
    inputs = make_inputs(
        np.log([1.25, 1.35, 0.75]), [1.0, 1.0, -1.0], old_logprobs=0.0, rollout_logprobs=0.0
    )
    output = policy_loss(inputs, config)
    output.loss.backward()
    assert inputs.logprobs.grad.tolist() == pytest.approx([-1.25 / 3, 0, 0], abs=1e-6)
    assert shares(output, "low", "high", "region") == pytest.approx([1 / 3, 1 / 3, 2 / 3])


def test_dual_clip_bounds_only_bad_episodes():
    """Ratio 5 with delta 3: A = -1 costs 3 and pushes no more, A = 1 is clipped at 1.2 anyway."""
    config = LossConfig(delta=3.0, old_logprobs="recompute", importance_sampling_mode="none")
    inputs = make_inputs(np.log([5.0, 2.0, 5.0]), [-1.0, -1.0, 1.0], old_logprobs=0.0)
    output = policy_loss(inputs, config)
    output.loss.backward()
    assert output.loss.item() == pytest.approx((3 + 2 - 1.2) / 3)
    assert inputs.logprobs.grad.tolist() == pytest.approx([0, 2 / 3, 0])


def test_a_sequence_has_the_geometric_mean_of_its_ratios():
    """GSPO: ratios 2 and 0.5 of one sequence make 1; clipped at once where they make 4."""
    config = LossConfig(
        importance_sampling_level="sequence",
        aggregation="seq_mean_token_mean",
        old_logprobs="recompute",
        importance_sampling_mode="none",
    )
    options = {"sequence_ids": [0, 0, 1, 1], "trajectory_tokens": 2.0, "num_trajectories": 2}
    inputs = make_inputs(np.log([2, 0.5, 2, 8]), 1.0, old_logprobs=0.0, **options)
    output = policy_loss(inputs, config)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-(1 + 1.2) / 2)
    assert inputs.logprobs.grad.tolist() == pytest.approx([-0.25, -0.25, 0, 0])
    assert mean(output, "ratio") == pytest.approx((1 + 4) / 2)
    assert shares(output, "high") == [0.5]


def test_the_sequence_level_has_the_gradient_of_the_geometric_mean_itself():
    """GSPO's objective, written down plainly: the mean over sequences of A * exp(mean log r)."""
    rng = np.random.default_rng(0)
    logprobs, advantages = rng.normal(size=5) / 50, [0.7, 0.7, -1.2, -1.2, -1.2]
    config = LossConfig(
        importance_sampling_level="sequence",
        aggregation="seq_mean_token_mean",
        old_logprobs="recompute",
        importance_sampling_mode="none",
    )
    inputs = make_inputs(
        logprobs,
        advantages,
        old_logprobs=0.0,
        sequence_ids=[0, 0, 1, 1, 1],
        trajectory_tokens=[2, 2, 3, 3, 3],
        num_trajectories=2,
    )
    plain = torch.tensor(logprobs, requires_grad=True)
    ratios = (plain[:2].mean().exp(), plain[2:].mean().exp())
    (-(0.7 * ratios[0] - 1.2 * ratios[1]) / 2).backward()
    assert gradient(inputs, config) == pytest.approx(plain.grad.tolist(), rel=1e-9)


def test_a_turn_has_a_ratio_of_its_own():
    config = LossConfig(
        importance_sampling_level="turn",
        old_logprobs="recompute",
        importance_sampling_mode="none",
        epsilon=9.0,
    )
    inputs = make_inputs(np.log([2, 8, 3]), 1.0, old_logprobs=0.0, turn_ids=[4, 4, 5])
    assert gradient(inputs, config) == pytest.approx([-4 / 3, -4 / 3, -1])


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    """Ratios 0.1, 1.1 and 5 weigh 0.1, 1.1 and 1.2."""
    config = LossConfig(
        loss_type="cispo", old_logprobs="recompute", importance_sampling_mode="none"
    )
    inputs = make_inputs(np.log([0.1, 1.1, 5]), [1.0, -1.0, 1.0], old_logprobs=0.0)
    assert gradient(inputs, config) == pytest.approx([-0.1 / 3, 1.1 / 3, -1.2 / 3])
    assert shares(policy_loss(inputs, config), "high") == pytest.approx([1 / 3])


def test_the_gate_of_sapo_closes_with_the_distance_from_one():
    """Ratio 3, t = 1: sigmoid(2) = 0.880797; loss -4 * 0.880797, slope -4 * 0.104994 * 3."""
    config = LossConfig(loss_type="sapo", old_logprobs="recompute", importance_sampling_mode="none")
    inputs = make_inputs([math.log(3)], 1.0, old_logprobs=0.0)
    assert policy_loss(inputs, config).loss.item() == pytest.approx(-3.523188, abs=1e-6)
    assert gradient(inputs, config) == pytest.approx([-1.259923], abs=1e-5)
    on_policy = make_inputs([-1.0, -1.0], [2.0, -2.0], old_logprobs=-1.0)
    assert gradient(on_policy, config) == pytest.approx([-1, 1])
    bad = make_inputs([math.log(3)], -1.0, old_logprobs=0.0)
    assert gradient(bad, config)[0] < 1.259, "bad episodes have the steeper gate"


def test_reinforce_has_no_ratio():
    config = LossConfig(loss_type="reinforce", old_logprobs="recompute")
    inputs = make_inputs([-1.0, -2.0], [1.0, -0.5], old_logprobs=-7.0, rollout_logprobs=-7.0)
    output = policy_loss(inputs, config)
    assert output.loss.item() == pytest.approx((1 - 1) / 2)
    assert "ratio" not in output.sums
    assert gradient(inputs, config) == pytest.approx([-0.5, 0.25])


@pytest.mark.parametrize(
    ("aggregation", "short", "long"),
    [
        ("seq_mean_token_mean", 0.1 / 2, 0.01 / 2),
        ("token_mean", 1 / 110, 1 / 110),
        ("seq_mean_token_sum_norm", 1 / 400, 1 / 400),
        ("prompt_mean", 0.1 / 2, 0.01 / 2),
    ],
)
def test_each_aggregation_weighs_tokens_by_its_formula(aggregation, short, long):
    """F059: A = -1, lengths 10 and 100, each the only one of its group."""
    lengths = [10.0] * 10 + [100.0] * 100
    inputs = make_inputs(
        [-1.0] * 110,
        -1.0,
        trajectory_tokens=lengths,
        group_tokens=lengths,
        num_trajectories=2,
        num_groups=2,
        max_episode_tokens=200,
    )
    found = gradient(inputs, LossConfig(aggregation=aggregation))
    assert found == pytest.approx([short] * 10 + [long] * 100)


def test_micro_batches_add_up_to_the_mean_over_all_tokens():
    """F057: one token of loss 1 and three of loss 0 make 0.25, not 0.5."""
    parts = [
        make_inputs([-1.0], -1.0, num_loss_tokens=4),
        make_inputs([-1.0] * 3, 0.0, num_loss_tokens=4),
    ]
    loss = sum(policy_loss(part, LossConfig()).loss.item() for part in parts)
    assert loss == pytest.approx(0.25)


def test_tokens_of_a_tool_are_not_in_the_denominator():
    """F058: three trained tokens of loss 1 make 1.0, however many the tools wrote."""
    assert policy_loss(make_inputs([-1.0] * 3, -1.0), LossConfig()).loss.item() == pytest.approx(1)


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
    assert kl[6].item() == 99
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


def test_a_kl_in_the_reward_is_measured_and_not_in_the_loss():
    config = LossConfig(beta=0.1, kl_in_reward=True, kl_estimator="k1")
    inputs = make_inputs([-1.0, -1.0], 0.0, ref_logprobs=-1.5, beta=0.0)
    output = policy_loss(inputs, config)
    output.loss.backward()
    assert mean(output, "kl") == pytest.approx(0.5)
    assert inputs.logprobs.grad.tolist() == [0, 0]


def test_importance_weights_are_capped_and_carry_no_gradient():
    inputs = make_inputs([-1.0, -1.0], 1.0, rollout_logprobs=[-3.0, -0.5])
    output = policy_loss(inputs, LossConfig(importance_sampling_cap=2.0))
    output.loss.backward()
    assert inputs.logprobs.grad.tolist() == pytest.approx([-1.0, -math.exp(-0.5) / 2])
    assert mean(output, "mismatch/clip_frac") == 0.5
    assert mean(output, "mismatch/abs_diff") == pytest.approx(1.25)
    assert output.max_abs_diff.item() == 2.0


def test_icepop_masks_on_both_sides_and_keeps_the_denominator():
    """LESSONS 16: ratios 0.4, 1.5 and 6 in [0.5, 5]: only 1.5 remains, and still 1/3 of it."""
    config = LossConfig(
        importance_sampling_mode="token_mask",
        importance_sampling_min=0.5,
        importance_sampling_cap=5.0,
    )
    inputs = make_inputs([-1.0] * 3, 1.0, rollout_logprobs=-1 - np.log([0.4, 1.5, 6]))
    assert gradient(inputs, config) == pytest.approx([0, -0.5, 0])
    assert mean(policy_loss(inputs, config), "mismatch/clip_frac") == pytest.approx(2 / 3)


def test_a_product_over_a_sequence_leaves_the_bounds_that_its_mean_keeps():
    """F063: 0.012 nats over 100 tokens are 3.3201 as a product, 1.0121 as a mean."""
    inputs = make_inputs([-1.0] * 100, 1.0, rollout_logprobs=-1.012)
    gradients, clipped = {}, {}
    for mode in ("sequence_mask", "sequence_truncate", "geometric_mask", "token_mask"):
        config = LossConfig(importance_sampling_mode=mode, importance_sampling_cap=3.0)
        inputs.logprobs.grad = None
        output = policy_loss(inputs, config)
        output.loss.backward()
        gradients[mode] = inputs.logprobs.grad[0].item() * -100
        clipped[mode] = mean(output, "mismatch/clip_frac")
    assert clipped == {
        "sequence_mask": 1.0,
        "sequence_truncate": 1.0,
        "geometric_mask": 0.0,
        "token_mask": 0.0,
    }
    assert gradients["sequence_mask"] == 0
    assert gradients["sequence_truncate"] == pytest.approx(3)
    assert gradients["geometric_mask"] == gradients["token_mask"] == pytest.approx(1.012072)
    wide = LossConfig(importance_sampling_mode="sequence_mask", importance_sampling_cap=4.0)
    inputs.logprobs.grad = None
    assert gradient(inputs, wide)[0] * -100 == pytest.approx(3.320117)


def test_a_token_that_the_engine_held_impossible_leaves_the_loss_finite():
    inputs = make_inputs([-1.0, -1.0], 1.0, rollout_logprobs=[-math.inf, -1.0])
    assert gradient(inputs, LossConfig()) == pytest.approx([-1.0, -0.5])


def test_values_may_not_gain_by_leaving_the_old_ones_further_than_the_clip():
    """Old 0, clip 0.2, return 1: v = 0.5 costs what 0.2 does; v = -0.5 and 0.1 what they do."""
    config = LossConfig(vf_coef=0.5)
    inputs = make_inputs(
        [-1.0] * 3, 0.0, values=torch.zeros(3), old_values=0.0, returns=[1.0, 1.0, 1.0]
    )
    inputs.values.copy_(torch.tensor([0.5, -0.5, 0.1]))
    inputs.values.requires_grad_()
    output = policy_loss(inputs, config)
    output.loss.backward()
    assert mean(output, "value_loss") == pytest.approx((0.64 + 2.25 + 0.81) / 6)
    assert mean(output, "value_clip_ratio") == pytest.approx(1 / 3)
    assert output.loss.item() == pytest.approx(0.5 * (0.64 + 2.25 + 0.81) / 6)
    assert inputs.values.grad.tolist() == pytest.approx([0, -1.5 / 6, -0.9 / 6])


def test_the_entropy_bonus_pulls_at_every_token_alike():
    inputs = make_inputs([-1.0, -2.0], 0.0, entropies=[0.5, 1.5])
    inputs.entropies.requires_grad_()
    output = policy_loss(inputs, LossConfig(entropy_coef=0.1))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-0.1)
    assert inputs.entropies.grad.tolist() == pytest.approx([-0.05, -0.05])


def test_entropy_is_the_mean_over_trained_tokens():
    """F069: entropies ln 2 and 0 make 0.346574."""
    inputs = make_inputs([-1.0, -1.0], 1.0, entropies=[math.log(2), 0.0])
    assert mean(policy_loss(inputs, LossConfig()), "entropy") == pytest.approx(0.346574, abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "reinforce", "importance_sampling_level": "turn"},
        {"loss_type": "reinforce", "old_logprobs": "rollout"},
        {"loss_type": "cispo", "delta": 3.0},
        {"old_logprobs": "rollout", "importance_sampling_mode": "sequence_mask"},
    ],
)
def test_options_that_a_loss_does_not_read_are_refused(options):
    """F090."""
    with pytest.raises(ValueError, match=list(options)[-1]):
        LossConfig(**options)
