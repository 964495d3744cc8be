"""Runs that are killed at any moment, and go on with `--resume` as if nothing had been."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file

import train.checkpoint
import train.hf_folder
import train.learner
import train.record
from agentrl.metrics import load_metrics
from tests import fsdp_on_cpu
from tests.rank_processes import run_ranks, values
from tests.runs import ROOT, Tiny, episodes, save_model, without_times, write_config
from train.checkpoint import latest_checkpoint
from train.learner import Learner

CALLS_OF_EVAL, CALLS_A_STEP = 2 * 2, 2 * 4 * 2  # of the env: prompts, episodes of each, turns
# By the moment: what is called in it, the call that is killed, and the checkpoint that stays.
MOMENTS: dict[str, tuple[Any, str, int, str]] = {
    # In the second step, whose first is saved.
    "rollout": (Tiny, "step", CALLS_OF_EVAL + CALLS_A_STEP + 5, "000001"),
    "update": (train.learner, "clip_grad_norm", 1, "000001"),
    "sync": (Learner, "weights", 2, "000001"),
    "metrics": (train.record, "write_groups", 1, "000001"),
    "weights": (train.hf_folder, "save_file", 1, "000001"),
    "random": (train.checkpoint, "random_state", 1, "000001"),
    "moments": (safetensors.torch, "save", 1, "000001"),
    "state": (train.checkpoint, "_sync_tree", 1, "000001"),
    "marker": (Path, "rename", 2, "000001"),  # the first is of a file of weights
    # The rest happens with the second step saved, or about to be.
    "pointer": (train.checkpoint.os, "replace", 1, "000001"),
    "rotation": (train.checkpoint.shutil, "rmtree", 3, "000002-2"),
}


def go(kind: str, path: Path, arguments: list[str], moment: str = "", rank: int = 0) -> int:
    """Run the door in this rank; it is killed at the moment, before what is called in it."""
    if kind == "fsdp":
        fsdp_on_cpu.shard()
    if moment and int(os.environ["RANK"]) == rank:
        owner, name, call, _ = MOMENTS[moment]
        setattr(owner, name, killed_at(call, getattr(owner, name)))
    spec = importlib.util.spec_from_file_location("door", ROOT / "train.py")
    assert spec and spec.loader
    door = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(door)
    return door.main(["--config", str(path), *arguments])


def killed_at(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return counted


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def config_of(folder: Path, model: Path) -> Path:
    """Three steps, each saved, with a learning rate that falls and a KL term that is scheduled."""
    folder.mkdir()
    return write_config(
        folder, model, env__id="tests.runs:InTurn", rollout__max_concurrent_generations=1,
        max_steps=3, checkpoint__save_steps=1, optim__lr_scheduler_type="linear",
        loss__beta=0.1, loss__beta_schedule="linear", checkpoint__save_total_limit=1,
    )  # fmt: skip


def assert_the_same(found: Path, expected: Path, tolerance: float) -> None:
    """Tasks, tokens, metrics and weights of two runs."""
    a, b = (load_metrics(run / "metrics.jsonl") for run in (found, expected))
    assert [record["step"] for record in a] == [0, 1, 2, 3]
    for one, two in zip(a, b, strict=True):
        assert without_times(one) == pytest.approx(without_times(two), rel=0, abs=tolerance)
    for step in (1, 2, 3):
        for one, two in zip(episodes(found, step), episodes(expected, step), strict=True):
            assert (one[0], one[1], one[3]) == (two[0], two[1], two[3])
            assert one[2] == pytest.approx(two[2], rel=0, abs=tolerance)
    paths = [latest_checkpoint(run / "checkpoints") for run in (found, expected)]
    assert all(path is not None for path in paths)
    weights = [load_file(path / "model.safetensors") for path in paths if path]
    torch.testing.assert_close(*weights, rtol=0, atol=tolerance)


def kill_and_resume(
    kind: str, ranks: int, model: Path, folder: Path, moments: dict[str, int], tolerance: float
) -> None:
    """A run that is killed at each moment in turn, on the rank that is said, against a whole one.

    The others end with it.
    """
    whole, parts = (config_of(folder / name, model) for name in ("whole", "parts"))
    assert values(run_ranks(go, ranks, kind, whole, [])) == [0] * ranks
    resume: list[str] = []
    for moment, rank in moments.items():
        ended = run_ranks(go, ranks, kind, parts, resume, moment, rank)
        assert ended[rank].exit_code == -signal.SIGKILL, (moment, ended)
        assert all(end.exit_code == 0 and end.value != 0 for end in ended if end != ended[rank])
        path = latest_checkpoint(folder / "parts/run/checkpoints")
        assert path is not None and path.name == f"checkpoint-{MOMENTS[moment][3]}", moment
        resume = ["--resume"]
    assert values(run_ranks(go, ranks, kind, parts, resume)) == [0] * ranks
    assert_the_same(folder / "parts/run", folder / "whole/run", tolerance)
    left = sorted(path.name for path in (folder / "parts/run/checkpoints").iterdir())
    assert left == ["checkpoint-000003", "latest"]


def test_a_run_that_was_killed_equals_one_that_was_not(tmp_path, model):
    """F081, F082, F086, F088: to the last bit, on one process."""
    moments = ("rollout", "update", "sync", "state", "pointer")
    kill_and_resume("", 1, model, tmp_path, dict.fromkeys(moments, 0), 0.0)


@pytest.mark.slow
def test_a_run_killed_at_every_moment_equals_one_that_was_not(tmp_path, model):
    kill_and_resume("", 1, model, tmp_path, dict.fromkeys(MOMENTS, 0), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_several_ranks_of_which_one_is_killed_go_on_together(tmp_path, model, kind):
    """Whichever it is, and wherever: the others end with it."""
    moments = {"rollout": 0, "update": 1, "sync": 0, "random": 1, "moments": 1, "pointer": 0}
    kill_and_resume(kind, 2, model, tmp_path, moments, 1e-6)
