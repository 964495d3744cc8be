"""Checkpoints: exact resume, complete or absent, and nobody else's is deleted."""

from __future__ import annotations

import copy
import errno
import itertools
import os
import random
from pathlib import Path

import accelerate
import numpy as np
import peft
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import train.checkpoint
import train.hf_folder
import train.model
import train.weights
from agentrl.attention import register_attention
from agentrl.config_file import make_config
from agentrl.trajectory import Trajectory, TrajectoryGroup
from agentrl.types import Completion, Task
from tests.fsdp_on_cpu import shard
from tests.rank_processes import run_ranks, values
from train.checkpoint import CheckpointError, latest_checkpoint, load_checkpoint, save_checkpoint
from train.learner import Learner
from train.learner_state import trained_parameters
from train.weights import full_weights

pytestmark = pytest.mark.filterwarnings("ignore:learner and engine differ")


class Tokenizer:
    """Saves one file, as a real one does."""

    def save_pretrained(self, folder):
        (Path(folder) / "tokenizer.json").write_text("{}")


def make_learner(hidden_size=16, limit=2, seed=0, accelerator=None, **changes):
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
            **changes,
        }
    )
    if config.lora:
        model = train.model._with_adapters(model, config.lora, seed)
    return Learner(model, config, accelerator or Accelerator(cpu=True))


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


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": {"r": 2}},
        {"advantage": {"estimator": "gae"}, "loss": {"max_mismatch": 100.0, "vf_coef": 0.5}},
    ],
    ids=["adapter", "value head"],
)
def test_an_adapter_and_a_value_head_go_on_too(tmp_path, changes):
    whole, first = make_learner(**changes), make_learner(**changes)
    for learner in (whole, first):
        learner.update(groups(0))
    second = make_learner(seed=0, **changes)
    load_checkpoint(save(tmp_path, first, 1), second)
    for i in (1, 2):
        assert whole.update(groups(i))["loss"] == second.update(groups(i))["loss"]
    ended = [dict(learner.policy.state_dict()) for learner in (whole, second)]
    assert same(*ended)
    trained = [name for name in ended[0] if "lora_B" in name or "value_head" in name]
    assert trained and all(ended[0][name].any() for name in trained)


def test_peft_loads_an_adapter_that_lies_without_its_base(tmp_path):
    learner = make_learner(lora={"r": 2})
    learner.update(groups(0))
    path = save(tmp_path, learner, 1)
    assert [file.name for file in path.glob("*.safetensors")] == ["adapter_model.safetensors"]
    base = make_learner().model
    loaded = peft.PeftModel.from_pretrained(base, path).state_dict()
    assert same({name: t for name, t in weights(learner).items() if "lora_" in name}, loaded)


def test_a_checkpoint_of_other_parameters_is_refused(tmp_path):
    """F086."""
    path = save(tmp_path, make_learner(), 1)
    with pytest.raises(CheckpointError, match=r"other parameters; differing: .*lora_A"):
        load_checkpoint(path, make_learner(lora={"r": 2}))


def test_weights_that_are_too_many_for_a_file_lie_in_several(tmp_path, monkeypatch):
    """F077: as many bytes as one holds are in memory at a time."""
    monkeypatch.setattr(train.hf_folder, "FILE_BYTES", 2500)
    held = []
    save_file = train.hf_folder.save_file

    def watched(tensors, *args, **kwargs):
        held.append(sum(tensor.nbytes for tensor in tensors.values()))
        save_file(tensors, *args, **kwargs)

    monkeypatch.setattr(train.hf_folder, "save_file", watched)
    learner = make_learner()
    learner.update(groups(0))
    path = save(tmp_path, learner, 1)
    assert len(held) > 2 and max(held) <= 2500
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert files == [
        f"model-{i:05d}-of-{len(held):05d}.safetensors" for i in range(1, len(held) + 1)
    ]
    assert same(weights(learner), dict(AutoModelForCausalLM.from_pretrained(path).state_dict()))
    second = make_learner(seed=1)
    load_checkpoint(path, second)
    assert same(weights(learner), weights(second))


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


# Several ranks.


def learner_of(kind, **options):
    """Of this rank, with data parallelism or with shards of what is trained."""
    AcceleratorState._reset_state(True)
    if kind == "ddp":
        return make_learner(accelerator=Accelerator(cpu=True), **options)
    shard()
    return make_learner(accelerator=accelerate.Accelerator(cpu=True), **options)


def updated(learner, seeds):
    """Losses, and all weights and moments after the last update."""
    own = learner.ranks.is_main
    losses = [learner.update(groups(seed) if own else [])["loss"] for seed in seeds]
    tensors = dict(full_weights(learner.model))
    for name, parameter in trained_parameters(learner.policy).items():
        for slot in ("exp_avg", "exp_avg_sq"):
            tensors[name + slot] = train.weights._full(learner.optimizer.state[parameter][slot])
    return losses, {name: tensor.clone() for name, tensor in tensors.items()}


def saves_sharded(folder):
    """Two updates and two more in either kind, before and after a checkpoint of shards."""
    whole = updated(learner_of("ddp"), range(4))
    first = learner_of("fsdp")
    updated(first, range(2))
    first.logprobs([1, 2, 3])  # which leaves some parameters gathered
    path = save(folder, first, 2)
    resumed = {}
    for kind in ("fsdp", "ddp"):
        learner = learner_of(kind, seed=1)
        assert load_checkpoint(path, learner).step == 2
        resumed[kind] = updated(learner, range(2, 4))
    again = updated(first, range(2, 4))
    return whole, again, resumed


def resumes(path):
    learner = learner_of("fsdp", seed=1)
    checkpoint = load_checkpoint(path, learner)
    return checkpoint.metrics, updated(learner, range(2, 4))


def assert_close(found, expected, tolerance):
    torch.testing.assert_close(found[0], expected[0][-len(found[0]) :], rtol=0, atol=tolerance)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=tolerance)


def test_shards_of_two_ranks_are_resumed_by_two_by_three_and_by_one(tmp_path):
    """F081, F086: sharded or not, with the moments under their names."""
    ended = values(run_ranks(saves_sharded, 2, tmp_path))
    for whole, again, resumed in ended:
        assert_close(again, whole, 1e-6)
        assert_close(resumed["fsdp"], again, 0)
        assert_close(resumed["ddp"], whole, 1e-6)
    path = latest_checkpoint(tmp_path)
    for metrics, resumed in values(run_ranks(resumes, 3, path)):
        assert metrics == {"step": 2}
        assert_close(resumed, ended[0][0], 1e-6)
    alone = make_learner(seed=1)
    load_checkpoint(path, alone)
    assert_close(updated(alone, range(2, 4)), ended[0][0], 1e-6)
    AutoModelForCausalLM.from_pretrained(path)
    sizes = [file.stat().st_size for file in (path / "optimizer").iterdir()]
    assert len(sizes) == 2 and max(sizes) < 1.3 * min(sizes), "each rank wrote its half"


def meets_a_full_disk(folder, places):
    """In each place, on the rank that is said."""
    learner = learner_of("fsdp")
    learner.update(groups(0) if learner.ranks.is_main else [])
    old = save(folder, learner, 1)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    seen = []
    for rank, where in places:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as caught:
            if learner.ranks.rank == rank:
                patch.setattr(where, full)
            save(folder, learner, 2)
        names = learner.ranks.lead(lambda: sorted(path.name for path in folder.iterdir()))
        in_step = learner.ranks.in_step(caught.value)
        seen.append((str(caught.value), in_step, latest_checkpoint(folder) == old, names))
    save(folder, learner, 2)
    return seen


def test_a_full_disk_of_any_rank_is_the_error_of_all(tmp_path):
    """F082: and all stay in step, so that they can save elsewhere or later."""
    places = [
        (0, "train.hf_folder.save_file"),
        (0, "train.checkpoint._write"),
        (1, "train.checkpoint.random_state"),
        (1, "safetensors.torch.save"),
    ]
    for seen in values(run_ranks(meets_a_full_disk, 2, tmp_path, places)):
        for said, in_step, old_stays, names in seen:
            assert "No space left on device" in said and "Earlier checkpoints are intact" in said
            assert in_step and old_stays
            assert names == ["checkpoint-000001", "latest"]
    assert load_checkpoint(latest_checkpoint(tmp_path), make_learner()).step == 2


def test_a_checkpoint_without_its_moments_is_refused(tmp_path):
    learner = make_learner()
    learner.update(groups(0))
    path = save(tmp_path, learner, 1)
    for file in (path / "optimizer").iterdir():
        file.unlink()
    with pytest.raises(CheckpointError, match="folder of moments is empty"):
        load_checkpoint(path, make_learner())


def test_weights_that_are_not_finite_are_no_checkpoint(tmp_path):
    """F068."""
    learner = make_learner()
    save(tmp_path, learner, 1)
    with torch.no_grad():
        learner.model.get_input_embeddings().weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="not finite"):
        save(tmp_path, learner, 2)
    assert latest_checkpoint(tmp_path).name == "checkpoint-000001"


@pytest.mark.parametrize("text", ["[]", "{}", '{"run_id": "a"}', "no json"])
def test_a_folder_whose_marker_is_broken_is_no_checkpoint(tmp_path, text):
    path = save(tmp_path, make_learner(), 1)
    (path / "complete.json").write_text(text)
    assert latest_checkpoint(tmp_path) is None
