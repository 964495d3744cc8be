"""Compiled layers: the same gradients, names and rows of every layout, without compiling again."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

from agentrl.config_file import make_config
from tests.runs import save_model
from tests.test_learner import assert_same, gradient, random_groups
from train.learner import Learner
from train.model import load_model

pytestmark = [
    pytest.mark.slow,  # it compiles, with a C++ compiler
    pytest.mark.filterwarnings("ignore:learner and engine differ"),  # the logprobs are invented
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler"),  # the step is intercepted
]


def make_learner(folder, **model):
    values = {
        "model": {"name_or_path": str(folder), "mixed_precision": "no"} | model,
        "env": {"id": "none"},
        "loss": {"max_mismatch": 1e9},
        "optim": {"max_grad_norm": 1e9},
    }
    config = make_config(values)
    return Learner(load_model(config.model)[0], config, Accelerator(cpu=True))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_model_has_the_same_gradients_and_names(tmp_path, checkpointing):
    folder = save_model(tmp_path / "model")
    plain, compiled = (
        make_learner(folder, gradient_checkpointing=checkpointing, torch_compile=compiled)
        for compiled in (False, True)
    )
    assert list(compiled.model.state_dict()) == list(plain.model.state_dict())
    torch._dynamo.reset()
    assert_same(gradient(compiled, random_groups()), gradient(plain, random_groups()))
    num_compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert num_compiled > 0
    others = random_groups(seed=1, num_groups=2, size=3)
    assert_same(gradient(compiled, others), gradient(plain, others))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_compiled
