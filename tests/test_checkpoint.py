"""Checkpoints: exact resume, complete or absent, and nobody else's is deleted."""

from __future__ import annotations

import copy
import errno
import itertools
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import train.checkpoint
from agentrl.attention import register_attention
from agentrl.config_file import make_config
from agentrl.trajectory import Trajectory, TrajectoryGroup
from agentrl.types import Completion, Task
from train.checkpoint import CheckpointError, latest_checkpoint, load_checkpoint, save_checkpoint
from train.learner import Learner

pytestmark = pytest.mark.filterwarnings("ignore:learner and engine differ")


class Tokenizer:
    """Saves one file, as a real one does."""

    def save_pretrained(self, folder):
        (Path(folder) / "tokenizer.json").write_text("{}")


def make_learner(hidden_size=16, limit=2, seed=0):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=31,
            hidden_size=hidden_size,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
            attn_implementation=register_attention(),
        )
    )
    config = make_config(
        {
            "model": {"name_or_path": "tiny"},
            "env": {"id": "none"},
            "loss": {"max_mismatch": 100.0},
            "optim": {
                "learning_rate": 1e-2,
                "lr_scheduler_type": "cosine",
                "weight_decay": 0.1,
                "warmup_steps": 2,
            },
            "checkpoint": {"save_total_limit": limit},
        }
    )
    return Learner(model, config, Accelerator(cpu=True))


def groups(seed):
    rng = np.random.default_rng(seed)
    trajectories = []
    for reward in (0.0, 1.0):
        trajectory = Trajectory()
        trajectory.observe([1, 2, 3])
        trajectory.act(
            Completion(
                token_ids=rng.integers(0, 31, 4).tolist(),
                logprobs=[-3.4] * 4,
                finish_reason="stop",
                versions=[0] * 4,
            )
        )
        trajectory.reward = reward
        trajectories.append(trajectory)
    return [TrajectoryGroup(id="g", task=Task(id="t"), trajectories=trajectories)]


def save(folder, learner, step):
    states = {"cursor": step, "seen": [1, 2]}, {"step": step}
    return save_checkpoint(folder, step, learner, *states, Tokenizer(), "max_steps: 4\n")


def weights(learner):
    return copy.deepcopy(dict(learner.model.state_dict()))


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
    """F086: four updates against two, a resume, and two."""
    whole = make_learner()
    rows = [whole.update(groups(i)) for i in range(4)]
    first = make_learner()
    for i in range(2):
        first.update(groups(i))
    path = save(tmp_path, first, 2)
    draws = random.random(), np.random.random(), torch.rand(1).item()
    second = make_learner(seed=1)
    checkpoint = load_checkpoint(path, second)
    assert (checkpoint.step, checkpoint.rollouts["cursor"], checkpoint.metrics["step"]) == (2, 2, 2)
    assert (random.random(), np.random.random(), torch.rand(1).item()) == draws
    assert second.version == 2
    for i in range(2, 4):
        metrics = second.update(groups(i))
        for name in ("loss", "grad_norm", "learning_rate", "entropy"):
            assert metrics[name] == rows[i][name]
    assert same(weights(whole), weights(second))
    states = whole.optimizer.state_dict()["state"], second.optimizer.state_dict()["state"]
    for index, state in states[0].items():
        assert same(state, states[1][index])


def test_transformers_loads_the_weights_exactly(tmp_path):
    learner = make_learner()
    learner.update(groups(0))
    path = save(tmp_path, learner, 1)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.config._attn_implementation == "sdpa"
    assert model.config.use_cache
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32
    assert same(weights(learner), dict(model.state_dict()))
    assert (path / "config.yaml").read_text() == "max_steps: 4\n"


@pytest.mark.parametrize("crash_at", range(7))
def test_a_crash_at_any_point_leaves_the_previous_or_the_new_state(tmp_path, monkeypatch, crash_at):
    """F082: killed in between two writes, as by kill -9: nothing tidies up."""
    learner = make_learner()
    old = save(tmp_path, learner, 1)

    class Killed(BaseException):
        pass

    calls = itertools.count()

    def dying(function):
        def call(*args, **kwargs):
            if next(calls) == crash_at:
                raise Killed
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(train.checkpoint.torch, "save", dying(torch.save))
    monkeypatch.setattr(train.checkpoint, "_write", dying(train.checkpoint._write))
    monkeypatch.setattr(Path, "rename", dying(Path.rename))
    monkeypatch.setattr(train.checkpoint.os, "replace", dying(os.replace))
    monkeypatch.setattr(train.checkpoint, "_rotate", dying(train.checkpoint._rotate))
    monkeypatch.setattr(train.checkpoint.shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(Killed):
        save(tmp_path, learner, 2)
    monkeypatch.undo()
    path = latest_checkpoint(tmp_path)
    assert path in (old, tmp_path / "checkpoint-000002")
    assert load_checkpoint(path, make_learner()).step in (1, 2)
    save(tmp_path, learner, 3)
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-000003"
    assert not list(tmp_path.glob(".writing*"))


def test_a_full_disk_is_reported_and_loses_nothing(tmp_path, monkeypatch):
    """F082: no space left at the second file."""
    learner = make_learner()
    old = save(tmp_path, learner, 1)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(train.checkpoint.torch, "save", full)
    with pytest.raises(CheckpointError, match=r"No space left.*Earlier checkpoints are intact"):
        save(tmp_path, learner, 2)
    assert latest_checkpoint(tmp_path) == old
    assert load_checkpoint(old, learner).step == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-000001", "latest"]


def test_rotation_keeps_the_newest_and_what_other_runs_left(tmp_path):
    """F083: a stale checkpoint with a higher number is another run's."""
    other = save(tmp_path, make_learner(), 1000)
    learner = make_learner(limit=1)
    for step in (10, 20):
        newest = save(tmp_path, learner, step)
    names = sorted(p.name for p in tmp_path.glob("checkpoint-*"))
    assert names == ["checkpoint-000020", "checkpoint-001000"]
    assert latest_checkpoint(tmp_path) == newest
    assert load_checkpoint(other, make_learner()).step == 1000


def test_rotation_deletes_nothing_below_its_limit(tmp_path):
    """F083."""
    learner = make_learner(limit=4)
    for step in range(1, 7):
        save(tmp_path, learner, step)
        names = sorted(p.name for p in tmp_path.glob("checkpoint-*"))
        assert names == [f"checkpoint-{s:06d}" for s in range(max(1, step - 3), step + 1)]


def test_a_taken_name_is_never_overwritten(tmp_path):
    first, second = save(tmp_path, make_learner(), 5), save(tmp_path, make_learner(), 5)
    assert first != second
    assert latest_checkpoint(tmp_path) == second
    assert load_checkpoint(first, make_learner()).step == 5


def test_without_a_pointer_the_newest_complete_checkpoint_counts(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    learner = make_learner()
    older, newer = save(tmp_path, learner, 1), save(tmp_path, learner, 2)
    (tmp_path / "latest").write_text("checkpoint-999999")
    assert latest_checkpoint(tmp_path) == newer
    (newer / "complete.json").unlink()
    assert latest_checkpoint(tmp_path) == older
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load_checkpoint(newer, learner)


def test_another_models_checkpoint_is_refused(tmp_path):
    path = save(tmp_path, make_learner(), 1)
    with pytest.raises(CheckpointError, match="cannot be resumed from"):
        load_checkpoint(path, make_learner(hidden_size=32))


def test_a_state_that_could_not_be_read_back_is_refused_when_saving(tmp_path):
    learner = make_learner()
    with pytest.raises(CheckpointError, match="could not be written"):
        save_checkpoint(tmp_path, 1, learner, {"task": Task(id="t")}, {}, Tokenizer(), "")
    assert latest_checkpoint(tmp_path) is None
