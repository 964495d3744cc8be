"""Recorded episodes are trained on again, with the metrics of the run that recorded them."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys

import pytest
from accelerate.state import AcceleratorState

import train.replay
from agentrl.metrics import load_metrics
from agentrl.trajectory import read_groups
from rollout import collect
from tests.runs import ROOT, save_model, write_config

pytestmark = [
    pytest.mark.filterwarnings("ignore:learner and engine differ"),
    pytest.mark.usefixtures("fresh_accelerate"),
]

spec = importlib.util.spec_from_file_location("door", ROOT / "train.py")
door = importlib.util.module_from_spec(spec)
spec.loader.exec_module(door)

TIMED = ("time", "seconds", "per_second", "mfu", "memory")
OF_THE_LEARNER = {"loss", "grad_norm", "kl", "entropy", "mismatch/abs_diff", "num_tokens"}


@pytest.fixture(scope="module", autouse=True)
def few_threads():
    with pytest.MonkeyPatch.context() as patch:
        for module in (door, train.replay):
            patch.setattr(module, "use_all_cores", lambda: None)
        patch.setattr("rollout.engines.local_load.use_all_cores", lambda: None)
        yield


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of three batches of two minibatches each, with a reference: its folder."""
    folder = tmp_path_factory.mktemp("recorded")
    path = write_config(
        folder,
        save_model(folder / "model"),
        env__id="tests.runs:InTurn",
        rollout__max_concurrent_generations=1,
        loss__beta=0.05,
        loss__old_logprobs="recompute",
        optim__num_minibatches=2,
        optim__lr_scheduler_type="linear",
        eval__num_tasks=0,
        max_steps=3,
    )
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    AcceleratorState._reset_state(True)
    assert door.main(["--config", str(path)]) == 0
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return folder / "run"


def files_of(run):
    return sorted((run / "trajectories").iterdir())


def replay(run, folder, *arguments):
    AcceleratorState._reset_state(True)
    given = arguments or files_of(run)
    config = ["--config", str(run / "config.yaml"), "--output", str(folder)]
    return train.replay.main([*map(str, given), *config])


def untimed(record):
    return {k: v for k, v in record.items() if not any(word in k for word in TIMED)}


def test_a_replay_gives_the_metrics_of_the_run_bit_by_bit_every_time(recorded, tmp_path, capsys):
    assert replay(recorded, tmp_path / "a") == 0
    out = capsys.readouterr().out
    assert "step-000001.jsonl: reward" in out and f"metrics: {tmp_path}/a/metrics.jsonl" in out
    assert replay(recorded, tmp_path / "a") == 0
    first, second = (load_metrics(tmp_path / name / "metrics.jsonl") for name in ("a", "a-2"))
    assert [untimed(record) for record in first] == [untimed(record) for record in second]
    original = load_metrics(recorded / "metrics.jsonl")
    assert len(original) == len(first) == 3
    for ran, replayed in zip(map(untimed, original), map(untimed, first), strict=True):
        assert replayed.keys() >= OF_THE_LEARNER
        assert replayed == {name: ran[name] for name in replayed}


def test_a_batch_alone_is_replayed_from_other_weights(recorded, tmp_path):
    """The last checkpoint's: what was learnt since moves its mismatch to the episodes."""
    last = files_of(recorded)[-1]
    checkpoint = recorded / "checkpoints" / "checkpoint-000003"
    assert replay(recorded, tmp_path / "a", last, f"model.name_or_path={checkpoint}") == 0
    (record,) = load_metrics(tmp_path / "a" / "metrics.jsonl")
    before = load_metrics(recorded / "metrics.jsonl")[-1]
    assert record["mismatch/abs_diff"] > 10 * before["mismatch/abs_diff"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["none.jsonl"], 2, "there is no file none.jsonl"),
        (["{broken}"], 2, "broken.jsonl, line 2: no group, JSONDecodeError"),
        (["{file}", "optim.learning_rat=1"], 2, "did you mean optim.learning_rate?"),
        (["{file}", "optim.micro_batch_tokens=8"], 2, "does not fit optim.micro_batch_tokens=8"),
        (["{file}", "model.name_or_path=/no/such/folder"], 2, "/no/such/folder"),
        (["{foreign}"], 2, "holds the token 49000, the vocabulary of model.name_or_path="),
        (["{file}", "rollout.temperature=0.01"], 1, "learner and engine differ by"),
    ],
)
def test_what_cannot_be_replayed_is_refused(recorded, tmp_path, capsys, arguments, code, said):
    file = files_of(recorded)[0]
    line = file.read_text().splitlines()[0]
    (tmp_path / "broken.jsonl").write_text(line + "\n{\n")
    record = json.loads(line)
    record["trajectories"][0]["token_ids"][0] = 49_000
    (tmp_path / "foreign.jsonl").write_text(json.dumps(record) + "\n")
    names = {"file": file} | {n: tmp_path / f"{n}.jsonl" for n in ("broken", "foreign")}
    arguments = [argument.format(**names) for argument in arguments]
    assert replay(recorded, tmp_path / "out", *arguments) == code
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error and error.count("error: ") == 1


def test_a_replay_without_files_is_refused(recorded, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        replay(recorded, tmp_path / "out", "optim.learning_rate=1")
    assert "no file of trajectories was given" in capsys.readouterr().err


def test_what_is_collected_is_what_a_run_begins_with_and_can_be_replayed(recorded, tmp_path):
    config = ["--config", str(recorded / "config.yaml")]
    collected = tmp_path / "collected"
    assert collect.main([*config, "--output", str(collected)]) == 0
    ours, theirs = files_of(collected)[0], files_of(recorded)[0]
    for one, two in zip(*map(read_groups, (ours, theirs)), strict=True):
        for a, b in zip(one.trajectories, two.trajectories, strict=True):
            assert (a.token_ids, a.turns, a.reward) == (b.token_ids, b.turns, b.reward)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    assert replay(collected, tmp_path / "replayed") == 0


@pytest.mark.slow
def test_two_processes_replay_what_one_recorded(recorded, tmp_path):
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2",
        "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0",
        "-m", "train.replay", "--config", str(recorded / "config.yaml"),
        "--output", str(tmp_path / "out"), *map(str, files_of(recorded)),
    ]  # fmt: skip
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    for ours, theirs in zip(
        load_metrics(tmp_path / "out" / "metrics.jsonl"),
        load_metrics(recorded / "metrics.jsonl"),
        strict=True,
    ):
        for name in OF_THE_LEARNER:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
