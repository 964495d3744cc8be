"""Advantages against hand-computed cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.advantage import group_advantages


def test_two_right_and_two_wrong_are_0_866_apart_from_zero():
    expected = [0.8660, -0.8660, 0.8660, -0.8660]
    assert group_advantages([1, 0, 1, 0]) == pytest.approx(expected, abs=1e-4)


def test_scale_none_only_subtracts_the_mean():
    assert group_advantages([1, 0, 1, 0], "none").tolist() == [0.5, -0.5, 0.5, -0.5]


@pytest.mark.parametrize("reward", [1 / 3, 0.9, 0.1, 0.0, -2.7])
def test_equal_rewards_give_exactly_zero_despite_rounding(reward):
    """LESSONS 14: the rounded mean of equal numbers must not become an advantage."""
    for size in (2, 7, 10):
        assert not group_advantages([reward] * size).any()


def test_an_unscored_member_is_no_member():
    """F051: the mean of [1, None, 0, 0] is 1/3, over three."""
    for missing in (None, math.nan, math.inf):
        advantages = group_advantages([1, missing, 0, 0], "none")
        assert advantages == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3])
        assert advantages[1] == 0


def test_booleans_are_rewards():
    """F051."""
    assert group_advantages([True, False], "none").tolist() == [0.5, -0.5]


def test_a_group_of_one_has_no_advantage():
    """F055, F056."""
    assert group_advantages([0.7]).tolist() == [0.0]
    assert group_advantages([None, 0.7, None]).tolist() == [0.0, 0.0, 0.0]
    assert group_advantages([]).tolist() == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-10, 10) | st.none(), min_size=2, max_size=16))
def test_advantages_agree_with_numpy_and_sum_to_zero(rewards):
    advantages = group_advantages(rewards)
    scored = np.array([r for r in rewards if r is not None])
    assert advantages.sum() == pytest.approx(0, abs=1e-6)
    if len(scored) > 1 and np.ptp(scored) > 1e-9:
        expected = (scored - scored.mean()) / (scored.std(ddof=1) + 1e-6)
        actual = advantages[[r is not None for r in rewards]]
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)
    else:
        assert not advantages.any()
