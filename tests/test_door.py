"""The command line: what a run leaves, how it goes on and stops, what it says of mistakes."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import accelerate
import pytest
import torch
import yaml
from accelerate.state import AcceleratorState, PartialState
from transformers import AutoModelForCausalLM, Qwen2Config

import train.checkpoint
from agentrl.config_file import load_config
from agentrl.metrics import load_metrics
from tests.runs import ROOT, Breaks, Kills, episodes, save_model, without_times, write_config
from train.checkpoint import latest_checkpoint
from train.learner import Learner

pytestmark = pytest.mark.filterwarnings("ignore:learner and engine differ")

spec = importlib.util.spec_from_file_location("door", ROOT / "train.py")
door = importlib.util.module_from_spec(spec)
spec.loader.exec_module(door)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    """A run changes its process: signal handlers, Accelerate's state, the counters of the envs."""
    monkeypatch.setattr(door, "use_all_cores", lambda: None)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    AcceleratorState._reset_state(True)
    for env in (Breaks, Kills):
        env.calls = type(env.calls)(1)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    AcceleratorState._reset_state(True)
    PartialState._reset_state()


def run(path: Path, *arguments: str) -> int:
    AcceleratorState._reset_state(True)
    return door.main(["--config", str(path), *arguments])


def running_threads() -> set[str]:
    return {t.name for t in threading.enumerate()} & {"local-engine", "agentrl-rollouts"}


def refused(capsys, path: Path, *arguments: str, code: int = 2) -> str:
    """The one clear message of a run that must end with `code`."""
    assert run(path, *arguments) == code
    message = capsys.readouterr().err
    assert "Traceback" not in "".join(
        line for line in message.splitlines() if not line.startswith("WARNING")
    )
    assert message.count("error: ") >= 1
    assert not running_threads()
    return message[message.index("error: ") :]


# What a run leaves.


def test_a_run_leaves_config_metrics_episodes_a_curve_and_a_model_that_loads(
    tmp_path, model, capsys
):
    assert run(write_config(tmp_path, model)) == 0
    folder = tmp_path / "run"
    assert yaml.safe_load((folder / "config.yaml").read_text())["max_steps"] == 2
    records = load_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2]
    assert "eval/reward" in records[0] and "eval/reward" in records[2]
    assert records[1]["sync/probe_abs_diff"] < 1e-4
    episodes = sorted(path.name for path in (folder / "trajectories").iterdir())
    assert episodes == [
        "eval-000000.jsonl", "eval-000002.jsonl", "step-000001.jsonl", "step-000002.jsonl"
    ]  # fmt: skip
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    trained = AutoModelForCausalLM.from_pretrained(latest_checkpoint(folder / "checkpoints"))
    start = AutoModelForCausalLM.from_pretrained(model)
    assert any(
        not torch.equal(a, b) for a, b in zip(trained.parameters(), start.parameters(), strict=True)
    )
    out = capsys.readouterr().out
    assert "held-out, before -> after: reward" in out
    assert str(folder) in out and "checkpoint-000002" in out
    assert "2 prompts x 4 episodes = 8 episodes, 1 optimizer step" in out, "F089"
    assert not running_threads()


def test_a_second_run_gets_a_folder_of_its_own_and_says_so(tmp_path, model, capsys):
    path = write_config(tmp_path, model, max_steps=1, eval__num_tasks=0)
    assert run(path) == 0
    first = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert run(path) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/run holds a run already; this one lies in {tmp_path}/run-2" in out
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == first
    resolved = yaml.safe_load((tmp_path / "run-2" / "config.yaml").read_text())
    assert resolved["output_dir"] == f"{tmp_path}/run-2", "so that it can be resumed from"


def test_train_py_runs_as_a_command(tmp_path, model):
    path = write_config(tmp_path, model, eval__num_tasks=0)
    result = subprocess.run(
        [sys.executable, "train.py", "--config", str(path), "max_steps=1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert latest_checkpoint(tmp_path / "run" / "checkpoints") is not None
    assert f"the run: {tmp_path}/run" in result.stdout


def test_trackers_get_the_metrics(tmp_path, model, monkeypatch):
    """F090: an option that does nothing is a bug."""
    seen = []

    class Tracker(accelerate.tracking.GeneralTracker):
        name, requires_logging_directory = "trackio", False
        tracker = None

        def __init__(self, run_name, **kwargs):
            super().__init__()

        def store_init_configuration(self, values): ...

        def log(self, values, step, **kwargs):
            seen.append((step, values))

    monkeypatch.setitem(accelerate.accelerator.LOGGER_TYPE_TO_CLASS, "trackio", Tracker)
    monkeypatch.setattr(
        accelerate.tracking,
        "get_available_trackers",
        lambda: [accelerate.tracking.LoggerType.TRACKIO],
    )
    monkeypatch.setattr(door, "require_trackers", lambda config: None)
    path = write_config(tmp_path, model, max_steps=1, eval__num_tasks=0, report_to=["trackio"])
    assert run(path) == 0
    [(step, values)] = seen
    assert step == 1 and "reward" in values


def test_a_run_of_several_envs_measures_each_and_goes_on_as_one(tmp_path, model, capsys):
    """What the envs say of themselves is printed; a checkpoint of one env does not fit."""
    mix = {
        "a": {"id": "tests.runs:Needy"},
        "b": {"id": "tests.runs:InTurn", "weight": 3.0, "reward_funcs": ["tests.runs:length"]},
    }
    path = write_config(
        tmp_path, model, env=None, mix=mix, curriculum={}, max_steps=1, eval__num_tasks=4,
        rollout__prompts_per_step=4,
    )  # fmt: skip
    assert run(path) == 0
    said = capsys.readouterr().out
    assert "a: needs nothing, at level none" in said
    assert "tests.runs:Needy + tests.runs:InTurn" in said
    assert "before -> after: a/reward" in said and "b/reward" in said
    assert run(path, "--resume", "max_steps=2") == 0
    before, _, after = load_metrics(tmp_path / "run/metrics.jsonl")
    assert after["step"] == 2 and after["mix/b/share"] > after["mix/a/share"] > 0
    assert "eval/a/reward" in before and "eval/b/length" in after and "b/length" in after
    assert "a/length" not in after, "a reward of one env alone"
    message = refused(
        capsys, path, "--resume", "mix={}", "curriculum=null", "env.id=tests.runs:Tiny"
    )
    assert "made with a mix of envs" in message


# Going on.


def test_two_steps_and_two_more_are_four_steps(tmp_path, model, capsys):
    """F081, F086, F088: same tasks, same parameters, same metrics; the log has a segment 1."""
    folders = [tmp_path / "straight", tmp_path / "parts"]
    for folder in folders:
        folder.mkdir()
    straight, parts = (
        write_config(
            folder, model, env__id="tests.runs:InTurn", rollout__max_concurrent_generations=1,
            max_steps=4, optim__lr_scheduler_type="linear",
        )
        for folder in folders
    )  # fmt: skip
    assert run(straight) == 0
    stop_after(2, parts)
    assert run(parts, "--resume") == 0
    assert "resumed after step 2" in capsys.readouterr().out
    a, b = (folder / "run" for folder in folders)
    for step in (3, 4):
        for one, two in zip(episodes(a, step), episodes(b, step), strict=True):
            assert one == two
    models = [
        AutoModelForCausalLM.from_pretrained(latest_checkpoint(f / "checkpoints")) for f in (a, b)
    ]
    for one, two in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(one, two)
    records_a, records_b = (load_metrics(f / "metrics.jsonl") for f in (a, b))
    assert [r["segment"] for r in records_b] == [0, 0, 0, 1, 1]
    assert all(r["train/optimizer_steps"] == 1 for r in records_a[1:])
    for one, two in zip(records_a, records_b, strict=True):
        assert without_times(one) == without_times(two)


def stop_after(steps: int, path: Path) -> None:
    """Interrupt a run of `path` in the rollouts of the step after `steps`."""
    update, done = Learner.update, []

    def counted(learner, groups):
        done.append(1)
        if len(done) == steps:
            os.kill(os.getpid(), signal.SIGINT)
        return update(learner, groups)

    Learner.update = counted
    try:
        assert run(path) == 130
    finally:
        Learner.update = update


def test_a_resume_may_raise_max_steps_and_follows_the_new_schedule_and_rate(tmp_path, model):
    path = write_config(tmp_path, model, optim__lr_scheduler_type="linear", eval__num_tasks=0)
    assert run(path) == 0
    assert run(path, "--resume", "max_steps=4", "optim.learning_rate=4e-3") == 0
    records = load_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records[2]["learning_rate"] == pytest.approx(1e-3), "what the fourth step has"
    assert records[2]["train/update_ratio"] > 0
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["max_steps"] == 4


def test_a_resume_with_nothing_left_to_do_ends_well(tmp_path, model, capsys):
    path = write_config(tmp_path, model, max_steps=1)
    assert run(path) == 0
    assert run(path, "--resume") == 0
    assert capsys.readouterr().out.count("held-out, before -> after") == 2
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_resume_with_other_tasks_is_refused(tmp_path, model, capsys):
    path = write_config(tmp_path, model, max_steps=1, eval__num_tasks=0)
    assert run(path) == 0
    config = (tmp_path / "run" / "config.yaml").read_bytes()
    message = refused(capsys, path, "--resume", "env.kwargs.num_tasks=5")
    assert "8 tasks, the env now has 5" in message
    assert (tmp_path / "run" / "config.yaml").read_bytes() == config


# Ctrl-C.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_first_rollouts_leaves_nothing_to_resume(tmp_path, model, capsys, number):
    path = write_config(
        tmp_path, model, env__id="tests.runs:Kills", env__kwargs={"number": int(number)},
        eval__num_tasks=0,
    )  # fmt: skip
    assert run(path) == 130
    assert "interrupted\nno step was finished, so there is nothing to resume" in (
        capsys.readouterr().err
    )
    assert latest_checkpoint(tmp_path / "run" / "checkpoints") is None
    assert not running_threads()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_an_update_waits_for_its_end(tmp_path, model, capsys, number, monkeypatch):
    update = Learner.update

    def killed(learner, groups):
        os.kill(os.getpid(), number)
        return update(learner, groups)

    monkeypatch.setattr(Learner, "update", killed)
    assert run(write_config(tmp_path, model, eval__num_tasks=0)) == 130
    message = capsys.readouterr().err
    assert f"--resume output_dir={tmp_path}/run goes on after step 1" in message
    checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None and checkpoint.name == "checkpoint-000001"
    assert [r["step"] for r in load_metrics(tmp_path / "run" / "metrics.jsonl")] == [1]
    assert not running_threads()


@pytest.mark.parametrize(
    ("number", "phase", "saved"), [(signal.SIGINT, "rollout", 1), (signal.SIGTERM, "update", 2)]
)
def test_a_process_that_is_told_to_stop_saves_and_ends_with_130(
    tmp_path, model, number, phase, saved
):
    marker = tmp_path / "now"
    path = write_config(
        tmp_path, model, env__id="tests.runs:Announces", eval__num_tasks=0, max_steps=50,
        env__kwargs={"path": str(marker), "phase": phase},
    )  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "train.py", "--config", str(path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 90
        while not marker.exists() and time.monotonic() < until and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert f"goes on after step {saved}" in errors and "Traceback" not in errors
    checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None and checkpoint.name == f"checkpoint-{saved:06d}"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


# Which engine.


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "expected"),
    [
        ([], 0, "local"),
        ([], 1, "sglang"),
        (["sglang.mode=connect", "sglang.urls=[http://a:1]"], 0, "sglang"),
        (["rollout.engine=local"], 1, "local"),
        (["rollout.engine=sglang"], 0, "sglang"),
    ],
)
def test_auto_is_sglang_where_there_is_a_gpu_or_a_url(
    tmp_path, model, overrides, num_gpus, expected
):
    config = load_config(write_config(tmp_path, model), overrides)
    assert door.choose_engine(config, num_gpus) == expected


def test_the_engine_that_was_chosen_is_printed(tmp_path, model, capsys):
    path = write_config(tmp_path, model, max_steps=1, eval__num_tasks=0)
    assert run(path) == 0
    assert "engine: local (rollout.engine=auto)" in capsys.readouterr().out


def test_sglang_that_is_not_installed_is_refused_before_anything_is_loaded(tmp_path, model, capsys):
    """F095: one message that says what to install, and no run is begun."""
    path = write_config(tmp_path, model)
    message = refused(capsys, path, "rollout.engine=sglang", "sglang.python=/no/python")
    assert "sglang.python=/no/python" in message
    assert not (tmp_path / "run").exists()


def test_processes_whose_gradients_would_never_meet_are_refused(
    tmp_path, model, capsys, monkeypatch
):
    """Without a GPU and without being told of the CPU, Accelerate takes each for one alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "ACCELERATE_USE_CPU=true" in refused(capsys, write_config(tmp_path, model))


def test_an_adapter_is_no_model_to_begin_with(tmp_path, model, capsys):
    folder = shutil.copytree(model, tmp_path / "adapter")
    (folder / "adapter_config.json").write_text("{}")
    assert "python -m train.export" in refused(capsys, write_config(tmp_path, folder))


# The plan.


def dry_run(capsys, path: Path, *arguments: str, code: int = 0) -> str:
    assert run(path, "--dry-run", *arguments) == code
    out, err = capsys.readouterr()
    return out + err


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    """A config without weights, of the shape of Qwen2.5-0.5B."""
    folder = tmp_path_factory.mktemp("qwen")
    Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((ROOT / "configs").glob("*.yaml")) if "mix" not in path.stem],
    ids=lambda path: path.stem,
)
def test_every_shipped_config_has_a_plan_on_the_gpus_it_names(path, qwen, capsys):
    """F096: the command in the file's own comment, without a GPU or a hub."""
    command = re.search(r"--dry-run (.*)--config (\S+)", path.read_text())
    arguments = command[1].split() if command else []
    assert command is None or command[2] == f"configs/{path.name}"
    text = dry_run(capsys, path, *arguments, f"model.name_or_path={qwen}")
    assert "who runs where" in text and "time limits" in text
    assert "DOES NOT FIT" not in text and "0.494 billion parameters" in text


@pytest.mark.parametrize(
    "command",
    re.findall(r"^python train.py (--dry-run .*)$", (ROOT / "README.md").read_text(), re.M),
)
def test_the_dry_run_of_the_readme_works(command, qwen, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert door.main([*command.split(), f"model.name_or_path={qwen}"]) == 0
    assert "fits" in capsys.readouterr().out


def test_a_dry_run_starts_and_writes_nothing(tmp_path, model, capsys):
    text = dry_run(capsys, write_config(tmp_path, model))
    assert "2 prompts x 4 generations = 8 episodes" in text
    assert "engine    local" in text
    assert not (tmp_path / "run").exists() and not running_threads()


def test_a_dry_run_of_a_model_that_is_not_here_prints_the_rest(tmp_path, model, capsys):
    text = dry_run(capsys, write_config(tmp_path, model), "model.name_or_path=nobody/nothing")
    assert "the shape of nobody/nothing is not known on this machine" in text
    assert "time limits" in text


def test_a_dry_run_says_what_an_env_lacks_and_no_more_than_that(tmp_path, model, capsys):
    """A plan may be for another machine."""
    path = write_config(tmp_path, model, env__id="tests.runs:Needy")
    assert "needs nothing, at level none" in dry_run(capsys, path)
    text = dry_run(capsys, path, "env.kwargs.lacks=engine")
    assert "not to be had here: there is no engine; install it" in text and "time limits" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--assume-gpus", "1x139", "rollout.engine=sglang"], "the learner keeps 1"),
        (["--assume-gpus", "2x0.001", "rollout.engine=sglang"], "this cannot run"),
        (["model.name_or_path=/no/such/folder"], "/no/such/folder"),
        (["optim.micro_batch_tokens=100"], "rollout.max_context_tokens=128"),
    ],
)
def test_a_config_that_cannot_run_is_refused_by_a_dry_run(tmp_path, model, capsys, arguments, said):
    assert said in dry_run(capsys, write_config(tmp_path, model), *arguments, code=2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dry-run", "--assume-gpus", "8"], "'8' is no number of GPUs and GiB of each, as 8x139"),
        (["--assume-gpus", "8x139"], "--assume-gpus only goes with --dry-run"),
    ],
)
def test_gpus_that_cannot_be_assumed_are_refused(tmp_path, model, capsys, arguments, said):
    with pytest.raises(SystemExit):
        run(write_config(tmp_path, model), *arguments)
    assert said in capsys.readouterr().err


def test_servers_to_connect_to_are_told_how_to_start(tmp_path, model, capsys):
    text = dry_run(
        capsys, write_config(tmp_path, model), "--assume-gpus", "1x139", "sglang.mode=connect",
        "sglang.urls=[http://a:30000, http://a:30001, http://b:30000]",
    )  # fmt: skip
    commands = [line for line in text.splitlines() if "sglang.launch_server" in line]
    assert [re.search(r"--port=(\d+).*gpu-id=(\d)", c).groups() for c in commands] == [
        ("30000", "0"), ("30001", "1"), ("30000", "0")
    ]  # fmt: skip
    assert all("--host=0.0.0.0" in c and "--context-length=136" in c for c in commands)
    assert "by distributed" in text


# The doctor.


def doctor(capsys, path: Path, *arguments: str, code: int) -> dict[str, str]:
    """What each check came to, by its name."""
    assert run(path, "--doctor", *arguments) == code
    lines = capsys.readouterr().out.splitlines()
    assert not running_threads()
    return {line[8:24].strip(): line[:8].strip() + " " + line[24:] for line in lines if line[8:]}


def test_a_doctor_tries_everything_and_leaves_nothing(tmp_path, model, capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    checks = doctor(capsys, write_config(tmp_path, model), code=0)
    for name in ("versions", "GPUs", "env", "model", "template", "disk", "engine", "start"):
        assert checks[name].startswith("ok "), checks[name]
    assert "torch" in checks["versions"]
    assert "sync/probe_abs_diff" in checks["weights"]
    assert "tokens in" in checks["one turn"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml"]


@pytest.mark.parametrize(
    ("arguments", "failed", "said"),
    [
        (["env.id=tests.runs:Breaks", "env.kwargs.where=reset"], ["env"], "the database is gone"),
        (["env.id=tests.runs:Sleeps", "rollout.env_timeout_s=0.1"], ["env"], "0.1"),
        (["model.name_or_path=/no/such/folder"], ["model"], "/no/such/folder"),
        (
            ["rollout.engine=sglang", "sglang.python=/no/python"],
            ["SGLang", "engine"],
            "sglang.python=/no/python",
        ),
        (["rollout.engine=sglang", f"sglang.python={sys.executable}"], ["SGLang"], "no SGLang"),
    ],
    ids=["env raises", "env hangs", "model", "no interpreter", "no SGLang in it"],
)
def test_a_check_that_fails_says_why_and_the_others_go_on(
    tmp_path, model, capsys, arguments, failed, said
):
    checks = doctor(capsys, write_config(tmp_path, model), *arguments, code=1)
    assert all(said in checks[name] and checks[name].startswith("FAILED") for name in failed)
    assert checks["versions"].startswith("ok") and ("disk" in checks)


def test_a_doctor_looks_at_each_env_of_a_mix(tmp_path, model, capsys):
    mix = {"here": {"id": "tests.runs:Needy"}, "lost": {"id": "tests.runs:Needy?lacks=engine"}}
    checks = doctor(capsys, write_config(tmp_path, model, env=None, mix=mix), code=1)
    assert checks["env here"].startswith("ok") and "at level none" in checks["env here"]
    assert checks["env lost"].startswith("FAILED") and "install it" in checks["env lost"]
    assert checks["one turn"].startswith("ok")


def test_a_full_disk_is_found_before_the_run(tmp_path, model, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    checks = doctor(capsys, write_config(tmp_path, model), code=1)
    assert "lower checkpoint.save_total_limit" in checks["disk"]
    assert checks["one turn"].startswith("ok")


# Bad input.


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.learning_rat=1e-6", "did you mean optim.learning_rate?"),
        ("learning_rate=1e-6", "did you mean optim.learning_rate?"),
        ("optim.learning_rate=fast", "key 'optim.learning_rate': Input should be a valid number"),
        ("rollout.num_generations=[", "override 'rollout.num_generations', line 1"),
        ("env.id=tests.runs:Tyni", "has no 'Tyni'"),
        ("env.id=no_such_package:Env", "no module 'no_such_package'"),
        ("env.id=agentrl/Aritmetic-v0", "Did you mean agentrl/Arithmetic-v0"),
        ("env.id=nowhere/env.py:Env", "there is no file nowhere/env.py"),
        ("env.kwargs.colour=red", "env.kwargs={'colour': 'red'}: TypeError"),
        ("env.kwargs.num_tasks=-1", "ValueError: num_tasks must not be negative"),
        ("env.id=tests.runs:Needy?lacks=engine", "there is no engine; install it"),
        ("env.id=tests.runs:Needy?lacks=code", "preflight of env Needy failed: ZeroDivisionError"),
        ("env.kwargs.num_tasks=1", "1 tasks, fewer than eval.num_tasks=2"),
        ("env.kwargs.num_tasks=0", "the env has no tasks in this split"),
        ("optim.micro_batch_tokens=100", "rollout.max_context_tokens=128"),
        ("eval.num_tasks=9", "8 tasks, fewer than eval.num_tasks=9"),
        ("env.reward_funcs=[tests.runs:lenght]", "has no function 'lenght'"),
        ("env.reward_funcs=[no_such_package:f]", "no module 'no_such_package'"),
        ("model.name_or_path=/no/such/folder", "model.name_or_path='/no/such/folder'"),
        ("report_to=[wandb]", "pip install -e '.[wandb]'"),
        ("output_dir=/dev/null/run", "/dev/null/run cannot be written"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(tmp_path, model, capsys, monkeypatch, override, said):
    """F090, F093. Exit code 2, one message, and no run is begun."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "wandb" else find_spec(n, *a)
    )
    assert said in refused(capsys, write_config(tmp_path, model), override)
    assert not list((tmp_path / "run").glob("*"))


def test_held_out_envs_are_looked_at_before_the_run_too(tmp_path, model, capsys):
    config = write_config(tmp_path, model)
    lacking = ["env.id=tests.runs:Needy", "eval.env_kwargs.lacks=engine"]
    assert "there is no engine; install it" in refused(capsys, config, *lacking)


def test_a_tool_that_may_outlast_its_env_call_is_refused(tmp_path, model, capsys):
    """F025: all time limits are in one line, and the inner one must be the shorter."""
    (tmp_path / "slow.py").write_text(
        "import agentrl\nfrom envs.tool_env import ToolEnv\n"
        "@agentrl.tool(timeout_s=50)\ndef look(place: str) -> str:\n"
        '    """Look.\n\n    Args:\n        place: where.\n    """\n    return place\n'
        "class Slow(ToolEnv):\n    tools = [look]\n"
    )
    path = write_config(tmp_path, model)
    said = refused(capsys, path, f"env.id={tmp_path}/slow.py:Slow", "rollout.env_timeout_s=40")
    assert "tool look may take 50 s" in said and "rollout.env_timeout_s=40" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {name_or_path: a\nenv: {id: b}\n", "config.yaml, line 2"),
        ("seed: 1\nseed: 2\n", "config.yaml, line 2: the key 'seed' is written twice"),
        ("? [a]\n: 1\n", "config.yaml, line 1"),
        ("seed: 2020-13-45\n", "config.yaml: month must be in 1..12"),
        ("seed: \x01\n", "config.yaml: unacceptable character"),
        ("1: 2\n", "'1'"),
        ("- seed\n", "holds no mapping"),
        ("", "holds no mapping"),
    ],
)
def test_a_file_that_is_no_config_is_refused_with_its_line(tmp_path, capsys, text, said):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert said in refused(capsys, path)


def test_a_config_that_is_missing_or_no_text_is_refused_by_name(tmp_path, capsys):
    assert "nowhere.yaml: No such file" in refused(capsys, tmp_path / "nowhere.yaml")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    assert "no UTF-8 text" in refused(capsys, tmp_path / "picture.png")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class Env(:\n", "SyntaxError: invalid syntax (env.py, line 1)"),
        ("x = 1\ny = x / 0\n", "ZeroDivisionError: division by zero"),
        ("import no_such_package\n", "No module named 'no_such_package'"),
    ],
)
def test_an_env_file_that_fails_is_named_with_its_line(tmp_path, model, capsys, source, said):
    file = tmp_path / "env.py"
    file.write_text(source)
    path = write_config(tmp_path, model, env__id=f"{file}:Env")
    for _ in range(2):  # a failed import leaves nothing behind that looks like a module
        message = refused(capsys, path)
        assert said in message and "env.py" in message


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path, capsys):
    path = write_config(tmp_path, save_model(tmp_path / "model", template=False))
    assert "no chat template" in refused(capsys, path)


def test_a_resume_without_a_checkpoint_is_refused(tmp_path, model, capsys):
    path = write_config(tmp_path, model)
    assert "no complete checkpoint to resume from" in refused(capsys, path, "--resume")
    assert not (tmp_path / "run").exists()


# What fails on the way.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"env__kwargs": {"prompt": "go" * 100}}, "max_context_tokens=128"),
        (
            {"env__id": "tests.runs:Breaks", "env__kwargs": {"where": "reset"}},
            "LookupError: the database is gone",
        ),
        (
            {"env__id": "tests.runs:Breaks", "env__kwargs": {"where": "step"}},
            "LookupError: the database is gone",
        ),
        ({"env__id": "tests.runs:Hangs", "rollout__env_timeout_s": 0.1}, "step did not"),
        ({"env__reward_funcs": ["tests.runs:fails"]}, "no reward today"),
        ({"env__reward_funcs": ["tests.runs:not_a_number"]}, "returned nan"),
    ],
    ids=["prompt", "reset", "step", "hang", "reward raises", "reward is nan"],
)
def test_a_run_whose_every_episode_fails_ends_with_the_cause(
    tmp_path, model, capsys, changes, said
):
    path = write_config(tmp_path, model, eval__num_tasks=0, **changes)
    message = refused(capsys, path, code=1)
    assert "episodes failed, more than rollout.max_fault_fraction" in message and said in message


def test_a_fifth_of_failing_episodes_does_not_stop_a_run(tmp_path, model):
    path = write_config(
        tmp_path, model, env__id="tests.runs:Breaks", env__kwargs={"where": "reset", "every": 5},
        rollout__max_attempts=2, eval__num_tasks=0,
    )  # fmt: skip
    assert run(path) == 0
    records = load_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(records) == 2
    assert sum(record.get("rollout/faults/env_error", 0) for record in records) >= 1


def test_a_full_disk_at_a_checkpoint_leaves_everything_else_intact(
    tmp_path, model, capsys, monkeypatch
):
    path = write_config(tmp_path, model, checkpoint__save_steps=1, eval__num_tasks=0)
    sync, synced = train.checkpoint._sync, []

    def full(file):
        synced.append(file)
        if latest_checkpoint(tmp_path / "run" / "checkpoints") is not None and (
            ".writing" in str(file)
        ):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr(train.checkpoint, "_sync", full)
    message = refused(capsys, path, code=1)
    assert "No space left on device" in message and "Earlier checkpoints are intact" in message
    assert "--resume" in message and "after step 1" in message
    checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None and checkpoint.name == "checkpoint-000001"
    AutoModelForCausalLM.from_pretrained(checkpoint)
    assert len(load_metrics(tmp_path / "run" / "metrics.jsonl")) == 2
    assert (tmp_path / "run" / "trajectories" / "step-000002.jsonl").stat().st_size


def test_a_full_disk_at_the_metrics_is_said_plainly_and_the_step_is_saved(
    tmp_path, model, capsys, monkeypatch
):
    def full(self, step, metrics):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("agentrl.metrics.MetricLog.write", full)
    path = write_config(tmp_path, model, eval__num_tasks=0)
    message = refused(capsys, path, code=1)
    assert "No space left on device" in message and "after step 1" in message
    checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert torch.load(checkpoint / "state.pt", weights_only=True)["learner"]["version"] == 1
