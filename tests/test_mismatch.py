"""How far learner and engine may differ: what is measured, warned of, and refused."""

from __future__ import annotations

import warnings

import pytest

from tests.test_learner import make_learner, random_groups
from train.learner import TrainingError


def groups_that_differ_by(nats: float):
    """The engine's logprobs are the learner's, less so many nats."""
    learner, groups = make_learner(rollout__temperature=1.0), random_groups()
    for group in groups:
        for tape in group.trajectories:
            tape.logprobs[1:] = [x - nats for x in learner.logprobs(tape.token_ids)]
    return groups


def update(nats: float, **changes):
    options = {"rollout__temperature": 1.0, "loss__max_mismatch": 1.0} | changes
    return make_learner(**options).update(groups_that_differ_by(nats))


def test_a_small_difference_is_measured_and_passes():
    """F079: the whole panel, exact for a constant difference d of ratio e^d."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        metrics = update(0.011, loss__importance_sampling_mode="token_truncate")
    assert metrics["mismatch/abs_diff"] == pytest.approx(0.011, rel=1e-3)
    assert metrics["mismatch/max"] == pytest.approx(0.011, rel=1e-2)
    assert metrics["mismatch/kl"] == pytest.approx(-0.011, rel=1e-3)
    assert metrics["mismatch/k3"] == pytest.approx(6.07e-5, rel=2e-2)
    assert metrics["mismatch/ess"] == pytest.approx(1.0)
    assert metrics["mismatch/clip_frac"] == 0


def test_a_difference_over_the_lower_limit_is_warned_of():
    """F079."""
    with pytest.warns(UserWarning, match=r"0\.051 nats per token; over 0\.05 \(loss\.warn_mis"):
        update(0.051)


def test_a_difference_over_the_upper_limit_stops_the_run():
    """F079."""
    with pytest.raises(TrainingError, match=r"loss\.max_mismatch=1\)"):
        update(1.001)


def test_both_limits_are_the_configs():
    """F090: an option that does nothing is a bug."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        update(0.2, loss__warn_mismatch=0.3)
    with pytest.raises(TrainingError, match=r"loss\.max_mismatch=0\.1\)"):
        update(0.2, loss__max_mismatch=0.1)


def test_weights_over_the_cap_are_counted_and_warned_of():
    """F063."""
    with pytest.warns(UserWarning, match=r"mode=token_truncate clips or masks 100% of the tokens"):
        metrics = update(
            0.8, loss__importance_sampling_mode="token_truncate", loss__warn_mismatch=1
        )
    assert metrics["mismatch/clip_frac"] == 1, "e^0.8 = 2.23"
