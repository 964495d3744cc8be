"""docs/estimators.md: every choice has a row, and every recipe is a config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from agentrl.config_file import make_config
from agentrl.config_learner import AdvantageConfig, LossConfig
from tests.test_loss import make_inputs
from train.loss import policy_loss

PAGE = (Path(__file__).parent.parent / "docs/estimators.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"```yaml\n# (.*?)\n(.*?)```", PAGE, flags=re.DOTALL)


def choices(section, key):
    return get_args(section.model_fields[key].annotation)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        (AdvantageConfig, "estimator"),
        (LossConfig, "loss_type"),
        (LossConfig, "aggregation"),
        (LossConfig, "kl_estimator"),
        (LossConfig, "old_logprobs"),
        (LossConfig, "importance_sampling_mode"),
    ],
)
def test_every_choice_has_a_row(section, key):
    rows = set(re.findall(r"^\| `([^`]+)`", PAGE, flags=re.MULTILINE))
    assert choices(section, key) and set(choices(section, key)) <= rows


def test_every_key_of_both_sections_is_spoken_of():
    spoken_of = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", PAGE))))
    keys = AdvantageConfig.model_fields.keys() | LossConfig.model_fields.keys()
    assert keys <= spoken_of


@pytest.mark.parametrize(("name", "text"), RECIPES, ids=[name for name, _ in RECIPES])
def test_a_recipe_is_a_config(name, text):
    base = {"model": {"name_or_path": "tiny"}, "env": {"id": "none"}}
    config = make_config(base | yaml.safe_load(text))
    assert name and config.advantage.estimator in text


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 200] * 3),
        ("seq_mean_token_mean", [1 / 30, 1 / 300, 1 / 270]),
        ("seq_mean_token_sum_norm", [1 / 300] * 3),
        ("prompt_mean", [1 / 220, 1 / 220, 1 / 180]),
    ],
)
def test_the_weights_of_the_aggregations_are_those_of_the_page(aggregation, expected):
    inputs = make_inputs(
        [-1.0] * 3,
        1.0,
        trajectory_tokens=[10, 100, 90],
        group_tokens=[110, 110, 90],
        num_loss_tokens=200,
        num_trajectories=3,
        num_groups=2,
        max_episode_tokens=100,
    )
    policy_loss(inputs, LossConfig(aggregation=aggregation)).loss.backward()
    assert (-inputs.logprobs.grad).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("none", [1, 1]),
        ("token_truncate", [2, 0.5]),
        ("token_mask", [0, 0]),
        ("sequence_truncate", [1.5, 1.5]),
        ("sequence_mask", [1.5, 1.5]),
        ("geometric_mask", [1.5**0.5, 1.5**0.5]),
    ],
)
def test_the_corrections_are_those_of_the_page(mode, expected):
    config = LossConfig(
        importance_sampling_mode=mode,
        importance_sampling_cap=2.0,
        importance_sampling_min=0.6 if mode.endswith("mask") else 0.0,
    )
    inputs = make_inputs([-1.0, -1.0], 1.0, rollout_logprobs=[-1 - 1.0986123, -1 + 0.6931472])
    policy_loss(inputs, config).loss.backward()
    assert (-2 * inputs.logprobs.grad).tolist() == pytest.approx(expected, abs=1e-6)
