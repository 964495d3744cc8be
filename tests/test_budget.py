"""The budget of `micro_batch_tokens: auto`: it fits, it is agreed on, and it leaves no trace."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

import train.budget
from agentrl.config import ConfigError
from tests import test_distributed
from tests.rank_processes import run_ranks, values
from tests.test_learner import make_learner, make_model, random_groups
from train.budget import find_budget, largest_fit

MIB = 2**20
ROLLOUT = {"rollout__max_context_tokens": 200, "rollout__prompts_per_step": 100}
WHOLE_BATCH = 200 * 100 * 8


@given(
    base=st.integers(0, 10**9),
    per_token=st.integers(1, 10**6),
    limit=st.integers(0, 10**11),
    size=st.integers(2, 5000),
    most=st.integers(1, 10**6),
)
def test_the_line_is_followed_up_to_the_limit(base, per_token, limit, size, most):
    sizes = (size // 2, size)
    found = largest_fit(sizes, [base + per_token * n for n in sizes], limit, most)
    most = min(most, 8 * size)
    assert found <= most
    assert base + per_token * found <= limit
    assert found == most or base + per_token * (found + 1) > limit


def test_what_is_too_small_to_be_seen_is_no_limit():
    assert largest_fit((512, 1024), (10 * MIB, 10 * MIB), 20 * MIB, 7000) == 7000
    assert largest_fit((512, 1024), (10 * MIB, 10 * MIB), 20 * MIB, 10**6) == 8 * 1024


def limited(monkeypatch, num_bytes):
    """So much memory more than now."""
    limit = train.budget._status("VmRSS") + num_bytes
    monkeypatch.setattr(train.budget, "_limit", lambda learner: limit)
    return limit


def wide_model():
    """Of which a token takes so much that the trials' own noise is small beside it."""
    config = make_model().config
    config.update({"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4})
    config.head_dim = 32
    return LlamaForCausalLM(config)


def test_a_row_of_the_budget_fills_the_memory_and_does_not_exceed_it(monkeypatch):
    learner = make_learner(wide_model(), **ROLLOUT)
    find_budget(learner)  # what the first use of a kernel takes for good
    limit = limited(monkeypatch, 200 * MIB)
    budget = find_budget(learner)
    assert 2 * 1024 < budget < WHOLE_BATCH
    peak = train.budget._peak(learner, budget)
    assert limit - 100 * MIB < peak < limit + 40 * MIB
    learner.optimizer.zero_grad()


def test_a_budget_is_at_most_a_whole_batch(capsys):
    learner = make_learner(rollout__max_context_tokens=50, rollout__prompts_per_step=2)
    assert find_budget(learner) == 50 * 2 * 8
    assert capsys.readouterr().out == ("optim.micro_batch_tokens=auto: rows of 800 tokens fit\n")


def test_where_no_episode_fits_the_keys_to_change_are_named(monkeypatch):
    limited(monkeypatch, -(2**40))
    with pytest.raises(ConfigError, match=r"max_context_tokens=200.*gradient_checkpointing=true"):
        find_budget(make_learner(**ROLLOUT))


@pytest.mark.filterwarnings("ignore:learner and engine differ")  # the logprobs are invented
def test_the_moments_of_the_optimizer_have_their_room_before_they_are_there():
    learner = make_learner(loss__entropy_coef=0.1)
    num_bytes = sum(p.nbytes for p in learner.model.parameters())
    assert train.budget._moments_to_come(learner) == 2 * num_bytes
    learner.update(random_groups())
    assert train.budget._moments_to_come(learner) == 0


@pytest.mark.filterwarnings("ignore:learner and engine differ")
def test_an_update_finds_its_budget_once_and_the_trials_leave_no_trace():
    learner = make_learner(optim__micro_batch_tokens="auto", optim__weight_decay=0.1)
    weights = copy.deepcopy(learner.model.state_dict())
    state = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    find_budget(learner)
    assert all(torch.equal(weights[name], w) for name, w in learner.model.state_dict().items())
    assert not learner.optimizer.state
    assert all(p.grad is None for p in learner.model.parameters())
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1:] == (np.random.get_state()[1].tolist(), random.getstate())
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.learner.find_budget", lambda _: calls.append(1) or 4096)
        learner.update(random_groups())
        learner.update(random_groups())
    assert len(calls) == 1


def own_and_agreed_budget():
    """The higher a rank, the less memory it has."""
    ranks = test_distributed.begin("fsdp")
    rollout = {"max_context_tokens": 200, "prompts_per_step": 100}
    learner = test_distributed.make_learner(ranks, {"rollout": rollout})
    limit = train.budget._status("VmRSS") + (60 - 30 * ranks.rank) * MIB
    own = []
    train.budget._limit = lambda learner: limit
    train.budget.largest_fit = lambda *args: own.append(largest_fit(*args)) or own[0]
    agreed = find_budget(learner)
    return own[0], agreed


@pytest.mark.slow
def test_ranks_agree_on_what_fits_them_all():
    (own, agreed), (smaller, agreed_too) = values(run_ranks(own_and_agreed_budget, 2))
    assert agreed == agreed_too == smaller < own
