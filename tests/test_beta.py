"""The weight of the KL over the batches of a run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config import LossConfig
from train.beta import BetaSchedule


def values(schedule, kls):
    found = []
    for kl in kls:
        schedule.step(kl)
        found.append(schedule.value)
    return found


def test_a_constant_beta_stays():
    assert values(BetaSchedule(LossConfig(beta=0.1), 4), [0.0, 9.0]) == [0.1, 0.1]


def test_a_linear_beta_arrives_at_its_end_with_the_last_batch():
    """Batches without a step are counted too."""
    schedule = BetaSchedule(LossConfig(beta=0.4, beta_schedule="linear", beta_end=0.2), 4)
    assert schedule.value == 0.4
    assert values(schedule, [9.0, None, 0.0, 1.0]) == pytest.approx([0.35, 0.3, 0.25, 0.2])


def test_an_adaptive_beta_grows_by_at_most_a_fifth_of_a_horizon_per_batch():
    """Target 0.1: a KL of 0.11 is 10 % over it, 0.05 and 7 are out of bounds."""
    config = LossConfig(beta=1.0, beta_schedule="adaptive", kl_target=0.1, kl_horizon=10)
    found = values(BetaSchedule(config, 100), [0.11, 0.1, 7.0, 0.05, None])
    assert found == pytest.approx([1.01, 1.01, 1.01 * 1.02, 1.01 * 1.02 * 0.98, 1.009596])


def test_an_adaptive_beta_finds_the_weight_that_keeps_the_target():
    """A policy whose KL falls with beta: KL = 0.02 / beta, so that 0.1 wants 0.2."""
    config = LossConfig(beta=1.0, beta_schedule="adaptive", kl_target=0.1, kl_horizon=5)
    schedule = BetaSchedule(config, 200)
    for _ in range(200):
        schedule.step(0.02 / schedule.value)
    assert schedule.value == pytest.approx(0.2, rel=1e-3)


@pytest.mark.parametrize("schedule", ["constant", "linear", "adaptive"])
@given(kls=st.lists(st.floats(0, 3), max_size=8), more=st.lists(st.floats(0, 3), max_size=8))
def test_a_resumed_schedule_goes_on_as_if_nothing_had_happened(schedule, kls, more):
    config = LossConfig(beta=0.3, beta_schedule=schedule)
    first, second = BetaSchedule(config, 10), BetaSchedule(config, 10)
    values(first, kls)
    second.load_state_dict(first.state_dict())
    assert second.value == first.value
    assert values(second, more) == values(first, more)


def test_a_resumed_schedule_follows_a_config_that_changed():
    first = BetaSchedule(LossConfig(beta=0.3), 10)
    first.step(0.0)
    second = BetaSchedule(LossConfig(beta=0.2, beta_schedule="linear"), 10)
    second.load_state_dict(first.state_dict())
    assert second.value == pytest.approx(0.18)
