"""Memory that the learner lends to servers on its GPU: what moves, when, and that it comes back."""

from __future__ import annotations

import copy

import pytest
import torch

from agentrl.config_file import load_config
from tests.runs import save_model, write_config
from tests.test_learner import make_learner, random_groups
from train.learner import Learner
from train.loop import train
from train.offload import move_optimizer_state

pytestmark = pytest.mark.filterwarnings("ignore:learner and engine differ")


def tensors_of(learner: Learner) -> list[torch.Tensor]:
    return [t for state in learner.optimizer.state.values() for t in state.values()]


def test_every_tensor_of_the_state_moves():
    learner = make_learner()
    learner.update(random_groups())
    assert len(tensors_of(learner)) > 10
    move_optimizer_state(learner.optimizer, "meta")
    assert {tensor.device.type for tensor in tensors_of(learner)} == {"meta"}


def test_a_state_that_was_away_is_bit_by_bit_the_same():
    learner = make_learner()
    learner.update(random_groups())
    before = copy.deepcopy(tensors_of(learner))
    move_optimizer_state(learner.optimizer, "cpu")
    assert all(map(torch.equal, before, tensors_of(learner)))


def test_lending_changes_no_weight_and_keeps_the_state_away_between_updates(monkeypatch):
    """The state is copied at each move, as to another device and back."""
    moves = []

    def move(optimizer, device):
        moves.append(str(device))
        for state in optimizer.state.values():
            state |= {name: tensor.clone() for name, tensor in state.items()}

    monkeypatch.setattr("train.learner.move_optimizer_state", move)
    lending, keeping = make_learner(), make_learner()
    lending._lends_memory = True
    for seed in range(3):
        for learner in (lending, keeping):
            learner.update(random_groups(seed))
    weights = zip(lending.model.parameters(), keeping.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)
    assert moves == ["cpu", "cpu"] * 3, "to the device that trains (here a CPU), and away"


def test_the_state_is_away_again_after_an_update_that_failed(monkeypatch):
    moves = []
    monkeypatch.setattr(
        "train.learner.move_optimizer_state", lambda _, device: moves.append(device)
    )
    learner = make_learner()
    learner._lends_memory = True
    monkeypatch.setattr(learner, "_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        learner.update(random_groups())
    assert moves[-1] == "cpu"


def test_servers_sleep_then_the_optimizer_comes_and_goes_and_then_they_wake(tmp_path, monkeypatch):
    """Release, train, offload, and only then the update, in which the servers wake."""
    calls = []
    config = load_config(
        write_config(
            tmp_path, save_model(tmp_path / "model"), sglang__colocate=True, eval__num_tasks=0,
            max_steps=2,
        )
    )  # fmt: skip
    monkeypatch.setattr(
        "train.learner.move_optimizer_state",
        lambda _, device: calls.append("away" if device == "cpu" else "here"),
    )
    learner = make_learner()
    learner._lends_memory = True
    step = learner._step
    monkeypatch.setattr(learner, "_step", lambda *a: (calls.append("train"), step(*a))[1])

    class Rollouts:
        def next_groups(self, num_groups):
            calls.append("sample")
            return random_groups(len(calls))

        def sleep(self):
            calls.append("sleep")

        def update_weights(self, weights, version, probe):
            calls.append("sync")
            return {}

        def pop_metrics(self):
            return {}

        def state_dict(self):
            return {}

    class Seen:
        evaluations: dict = {0: {}, 2: {}}  # noqa: RUF012
        last_checkpoint_step = 2

        def __getattr__(self, name):
            return lambda *args, **kwargs: None

    train(config, learner, Rollouts(), Seen(), Seen(), None, lambda: None)
    step_calls = ["sample", "sleep", "here", "train", "away", "sync"]
    assert calls == ["sync", *step_calls * 2]
