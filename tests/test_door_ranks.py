"""The command line with several processes: one run, whoever fails or is interrupted in it."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM

from agentrl.config import ConfigError
from agentrl.config_file import make_config
from agentrl.metrics import load_metrics
from tests import fsdp_on_cpu
from tests.processes import descendants
from tests.rank_processes import run_ranks, values
from tests.runs import ROOT, save_model, write_config
from train.checkpoint import latest_checkpoint
from train.learner import Learner
from train.setup import make_accelerator

KINDS = ("ddp", "fsdp")
IN_TURN = {"env__id": "tests.runs:InTurn", "rollout__max_concurrent_generations": 1}
OF_THE_LAYOUT = ("time", "train/", "step_time", "engine/", "sync/", "rollout/", "mismatch/max")


def open_door(kind: str, path: Path, *arguments: str) -> int:
    """What `accelerate launch train.py --config path …` does in each process."""
    if kind == "fsdp":
        fsdp_on_cpu.shard()
    spec = importlib.util.spec_from_file_location("door", ROOT / "train.py")
    assert spec is not None and spec.loader is not None
    door = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(door)
    return door.main(["--config", str(path), *arguments])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory) -> Path:
    """The folder of a run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    path = write_config(folder, model, **IN_TURN)
    assert values(run_ranks(open_door, 1, "alone", path)) == [0]
    return folder / "run"


def learnt(run: Path) -> list[dict[str, float]]:
    """The metrics of its steps and evaluations that do not depend on who computes what."""
    return [
        {name: value for name, value in line.items() if not name.startswith(OF_THE_LAYOUT)}
        for line in load_metrics(run / "metrics.jsonl")
    ]


def assert_same_run(run: Path, expected: Path) -> None:
    lines, others = learnt(run), learnt(expected)
    assert len(lines) == len(others) == 3  # before, and after each step
    for line, other in zip(lines, others, strict=True):
        assert line == pytest.approx(other, rel=1e-4, abs=1e-5)
    assert "grad_norm" in lines[1] and "eval/reward" in lines[0]
    weights, others = (
        AutoModelForCausalLM.from_pretrained(latest_checkpoint(folder / "checkpoints"))
        for folder in (run, expected)
    )
    for name, tensor in weights.state_dict().items():
        torch.testing.assert_close(tensor, others.state_dict()[name], atol=1e-4, rtol=0, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_two_ranks_is_that_of_one(kind, model, alone, tmp_path):
    path = write_config(tmp_path, model, **IN_TURN)
    first, second = run_ranks(open_door, 2, kind, path)
    assert values([first, second]) == [0, 0]
    assert second.output == ""  # rank 0 speaks for all
    assert "held-out, before -> after" in first.output
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"optim__learning_rate": -1}, 2, "optim.learning_rate"),
        ({"env__id": "tests.runs:Absent"}, 2, "Absent"),
        ({"env__kwargs": {"num_tasks": -1}}, 2, "num_tasks must not be negative"),
        ({"env__reward_funcs": ["tests.runs:fails"]}, 1, "no reward today"),
    ],
)
def test_what_is_wrong_is_said_once_and_ends_all(change, code, words, model, tmp_path):
    path = write_config(tmp_path, model, **change)
    first, second = run_ranks(open_door, 2, "ddp", path)
    assert values([first, second]) == [code, code]
    assert words in first.output and second.output == ""


def untie() -> str:
    fsdp_on_cpu.shard(cpu_ram_efficient_loading=True)
    config = make_config({"model": {"name_or_path": "tiny"}, "env": {"id": "none"}})
    with pytest.raises(ConfigError) as raised:
        make_accelerator(config)
    return str(raised.value)


def test_a_plugin_that_would_untie_embeddings_is_refused():
    for message in values(run_ranks(untie, 2)):
        assert "fsdp_cpu_ram_efficient_loading: true" in message and "set it to false" in message


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_2nodes", "ddp"])
def test_the_configs_of_accelerate_mean_what_they_say(name, monkeypatch):
    """Read by Accelerate's own launcher, and by the plugin that a process makes of it."""
    path = ROOT / f"configs/accelerate/{name}.yaml"
    nodes = 2 if name == "fsdp2_2nodes" else 1
    arguments = ["--config_file", str(path), "--main_process_ip", "node0", "train.py"]
    options, config, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    assert (options.num_machines, options.num_processes) == (nodes, 8 * nodes)
    assert set(config.fsdp_config) <= {name for name in vars(options) if name.startswith("fsdp_")}
    environment = prepare_multi_gpu_env(options)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    if name == "ddp":
        assert options.multi_gpu and not options.use_fsdp
        return
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, True)
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy
    assert not plugin.cpu_ram_efficient_loading and not plugin.activation_checkpointing
    assert not isinstance(plugin.cpu_offload, CPUOffloadPolicy)


def fail_in_update(kind: str, path: Path, how: str) -> int:
    """Rank 1 does, in the second update, while rank 0 computes gradients with it."""
    update = Learner.update

    def fails(learner: Learner, groups: Any) -> dict[str, float]:
        if learner.version == 1 and learner.ranks.rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise MemoryError("no room for the logits")
        return update(learner, groups)

    Learner.update = fails
    return open_door(kind, path)


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_rank_0_names_the_rank_that_failed_and_its_error(kind, model, tmp_path):
    """F021."""
    path = write_config(tmp_path, model, **IN_TURN)
    first, second = run_ranks(fail_in_update, 2, kind, path, "raises", timeout_s=40)
    assert first.value == 1 and second.exit_code == 1
    assert "error: rank 1 failed: MemoryError: no room for the logits" in first.output
    assert "MemoryError: no room for the logits" in second.output


def test_a_rank_that_the_system_kills_ends_the_run(model, tmp_path):
    path = write_config(tmp_path, model, **IN_TURN)
    first, second = run_ranks(fail_in_update, 2, "ddp", path, "killed", timeout_s=40)
    assert first.value == 1 and second.exit_code == -signal.SIGKILL
    assert "error: another rank ended without a word" in first.output


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_an_interrupted_run_is_saved_by_all_ranks_and_goes_on(kind, model, tmp_path):
    changes = {"env__id": "tests.runs:Kills", "eval__num_tasks": 0, "max_steps": 3}
    env = {"number": int(signal.SIGINT), "after": 20}  # in the second batch
    path = write_config(tmp_path, model, env__kwargs=env, **changes)
    first, second = run_ranks(open_door, 2, kind, path)
    assert [first.value, second.value] == [130, 130]
    assert "interrupted" in first.output and "goes on after step 1" in first.output
    assert second.output == ""
    env["after"] = 10**6
    path = write_config(tmp_path, model, env__kwargs=env, **changes)
    assert values(run_ranks(open_door, 2, kind, path, "--resume")) == [0, 0]
    steps = [line["step"] for line in load_metrics(tmp_path / "run/metrics.jsonl")]
    assert steps == [1, 2, 3]


@contextmanager
def launched(kind: str, path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`accelerate launch` of two ranks, in a process group of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    command += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    command += ["--dynamo_backend", "no", "--main_process_port", str(port)]
    command += ["-m", "tests.fsdp_on_cpu"] if kind == "fsdp" else []
    command += ["train.py", "--config", str(path), *arguments]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        left = descendants(process.pid) if process.poll() is None else []
        for each in [*left, process]:
            each.kill()
        process.wait()


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The two processes of a launcher, once they are there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ranks = []
        for each in descendants(process.pid):
            with suppress(psutil.NoSuchProcess):
                if each.environ().get("RANK"):
                    ranks.append(each)
        if len(ranks) == 2:
            break
        time.sleep(0.1)
    return ranks


def output_of(process: subprocess.Popen[str], ranks: list[psutil.Process]) -> str:
    """All of it, after the processes ended by themselves."""
    output, _ = process.communicate(timeout=120)
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert alive == []
    assert "terminate called" not in output and "Fatal Python error" not in output
    return output


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_accelerate_launches_a_run_of_two_ranks(kind, model, alone, tmp_path):
    path = write_config(tmp_path, model, **IN_TURN)
    with launched(kind, path) as process:
        output = output_of(process, ranks_of(process))
    assert process.returncode == 0, output
    assert output.count("held-out, before -> after") == 1
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_at_the_launcher_saves_and_ends_all(kind, model, tmp_path):
    path = write_config(tmp_path, model, max_steps=10_000, eval__num_tasks=0)
    with launched(kind, path) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run/metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1.0)
        ranks = ranks_of(process)
        os.killpg(process.pid, signal.SIGINT)
        output = output_of(process, ranks)
    assert process.returncode != 0
    assert latest_checkpoint(tmp_path / "run/checkpoints") is not None, output
    assert "interrupted" in output


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_launcher(model, tmp_path):
    path = write_config(tmp_path, model, max_steps=10_000, eval__num_tasks=0)
    with launched("ddp", path) as process:
        while not (tmp_path / "run/metrics.jsonl").exists() and process.poll() is None:
            time.sleep(0.1)
        ranks = ranks_of(process)
        [victim] = [p for p in ranks if p.environ()["RANK"] == "1"]
        victim.kill()
        output = output_of(process, ranks)
    assert process.returncode != 0
    assert "(SIGKILL)" in output  # the launcher is faster than rank 0 to say who
