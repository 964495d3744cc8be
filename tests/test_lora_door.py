"""Runs of LoRA through the door: merged weights to an engine inside, adapters alone to servers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.metrics import load_metrics
from agentrl.models import SMOLLM2
from tests.real_server import serving
from tests.runs import ROOT, save_model, write_config
from tests.test_door import as_it_was, run  # noqa: F401 - a fixture

pytestmark = pytest.mark.filterwarnings("ignore:learner and engine differ")

LORA = {"lora__r": 4, "lora__alpha": 8, "loss__beta": 0.01}


def verified(folder: Path, num_steps: int, within: float) -> list[dict[str, float]]:
    """The records of the steps, after each of which the engine had the learner's weights."""
    records = [r for r in load_metrics(folder / "metrics.jsonl") if "loss" in r]
    assert [record["step"] for record in records] == list(range(1, num_steps + 1))
    for record in records:
        assert record["sync/probe_abs_diff"] < within
        assert record["mismatch/abs_diff"] < within, "sampled with the weights that were trained"
    assert any(record["train/update_ratio"] > 0 for record in records)
    return records


def test_a_run_of_adapters_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """The engine inside this process has what they add after each step, resumed or not."""
    path = write_config(
        tmp_path, save_model(tmp_path / "model"), env__id="tests.runs:InTurn",
        rollout__max_concurrent_generations=1, rollout__engine="local", max_steps=2,
        checkpoint__save_steps=1, eval__num_tasks=0, **LORA,
    )  # fmt: skip
    assert run(path, f"output_dir={tmp_path / 'whole'}") == 0
    assert run(path, "max_steps=1") == 0
    assert run(path, "--resume") == 0
    whole, resumed = (verified(tmp_path / name, 2, within=1e-5)[1] for name in ("whole", "run"))
    for name in ("loss", "grad_norm", "kl", "reward", "mismatch/abs_diff"):
        assert whole[name] == resumed[name], name


@pytest.mark.slow
def test_shards_of_adapters_reach_the_engine_whole(tmp_path: Path) -> None:
    path = write_config(tmp_path, save_model(tmp_path / "model"), max_steps=3, **LORA)
    accelerate = Path(sys.executable).with_name("accelerate")
    options = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no"]
    options += ["--dynamo_backend=no", "--main_process_port=0", "-m", "tests.fsdp_on_cpu"]
    done = subprocess.run(
        [str(accelerate), "launch", *options, "train.py", "--config", str(path)],
        cwd=ROOT,
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    verified(tmp_path / "run", 3, within=1e-5)


TARGETS = ["q_proj", "v_proj", "gate_proj", "down_proj"]
UNPINNED = """
try:
    import torch
except ImportError:
    pass
else:
    def unpinned(function):
        return lambda *args, pin_memory=False, **options: function(*args, **options)

    for name in ("tensor", "arange", "zeros", "ones", "empty"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self: self
"""


@pytest.fixture
def lora_server(sglang_python: str, tmp_path: Path) -> Any:
    """A real server that takes adapters; without a GPU it could not pin memory for them."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(UNPINNED)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {sglang_python} "$@"\n')
    python.chmod(0o755)
    arguments = ["--enable-lora", "--max-lora-rank=8", "--lora-backend=torch_native"]
    arguments += ["--lora-target-modules", *TARGETS]
    with serving(str(python), "float32", tmp_path, arguments) as url:
        yield url


@pytest.mark.slow
@pytest.mark.sglang
def test_a_real_server_samples_with_the_adapter_that_it_was_sent(
    lora_server: str, tmp_path: Path
) -> None:
    path = write_config(
        tmp_path, Path(SMOLLM2), sglang__mode="connect", sglang__urls=[lora_server],
        lora__r=8, lora__alpha=16, lora__sync="adapter", optim__learning_rate=1e-3,
        lora__target_modules=TARGETS, rollout__engine="auto",
        rollout__max_context_tokens=512, eval__num_tasks=0,
        env__reward_funcs=["tests.runs:by_chance"],
    )  # fmt: skip
    assert run(path) == 0
    for record in verified(tmp_path / "run", 2, within=1e-3):
        assert record["sync/bytes"] < 10e6, "135 million weights would be 540 MB"
        assert record["sync/tensors"] == 2 * len(TARGETS) * 30
