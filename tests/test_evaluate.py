"""Evaluation: figures against brute force, and the command with a tiny model."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout.engines.local_load
from agentrl.trajectory import Trajectory, TrajectoryGroup
from agentrl.types import Task
from rollout.evaluate import evaluation, main, pass_at_k
from tests.runs import save_model, write_config


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def few_threads(monkeypatch):
    monkeypatch.setattr(rollout.engines.local_load, "use_all_cores", lambda: None)


def groups(*rewards):
    result = []
    for number, of_task in enumerate(rewards):
        tapes = [Trajectory(id=f"{number}-{i}") for i in range(len(of_task))]
        for tape, reward in zip(tapes, of_task, strict=True):
            tape.reward = reward
        result.append(TrajectoryGroup(id=str(number), task=Task(id="t"), trajectories=tapes))
    return result


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_pass(data):
    n = data.draw(st.integers(1, 7))
    passed = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    k = data.draw(st.integers(1, n))
    draws = list(itertools.combinations(passed, k))
    assert pass_at_k(n, sum(passed), k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_figures_are_means_over_tasks_with_the_error_of_the_tasks_means():
    figures = evaluation(groups([1.0, 0.0], [1.0, 1.0], [0.0, 0.0]), 1.0)
    assert figures["pass@1"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert figures["pass@2"] == pytest.approx(2 / 3)
    assert figures["reward_standard_error"] == pytest.approx(0.5 / math.sqrt(3))
    assert "pass@4" not in figures


def test_an_episode_with_a_fault_counts_neither_as_passed_nor_as_failed():
    figures = evaluation(groups([1.0, None], [None, None], [0.0, 1.0]), 1.0)
    assert figures["pass@1"] == pytest.approx((1 + 0.5) / 2)
    assert "pass@2" not in figures, "the first task has one episode"


def test_one_task_has_no_standard_error():
    assert "reward_standard_error" not in evaluation(groups([1.0, 0.0]), 1.0)


def test_a_model_is_evaluated_and_nothing_is_overwritten(tmp_path, model, capsys):
    path = write_config(tmp_path, model, eval__num_generations=2)
    output = str(tmp_path / "evaluation")
    arguments = ["--config", str(path), "--output", output, "--pass-reward", "0.1"]
    assert main(arguments) == 0
    figures = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert {"reward", "pass@1", "pass@2", "reward_standard_error"} <= figures.keys()
    lines = (tmp_path / "evaluation" / "trajectories.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["trajectories"]) for line in lines] == [2, 2]
    assert "pass@2" in capsys.readouterr().out
    assert main(arguments) == 0
    again = json.loads((tmp_path / "evaluation-2" / "evaluation.json").read_text())
    assert again["reward"] == figures["reward"], "the same tasks with the same seeds"


def test_a_config_file_is_not_needed(tmp_path, model):
    arguments = [
        "--output", str(tmp_path / "out"), f"model.name_or_path={model}", "env.id=tests.runs:Tiny",
        "eval.num_tasks=1", "rollout.tool_format=none", "rollout.max_new_tokens=4",
        "rollout.max_context_tokens=64", "rollout.max_concurrent_generations=2",
    ]  # fmt: skip
    assert main(arguments) == 0


def test_a_mix_is_evaluated_env_by_env(tmp_path, model, capsys):
    mix = {"a": {"id": "tests.runs:Needy"}, "b": {"id": "tests.runs:Tiny"}}
    path = write_config(
        tmp_path,
        model,
        env=None,
        mix=mix,
        eval__num_tasks=3,
        eval__env_kwargs={"b": {"prompt": "!"}},
    )
    assert main(["--config", str(path), "--output", str(tmp_path / "out")]) == 0
    figures = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert figures["reward"] == pytest.approx((2 * figures["a/reward"] + figures["b/reward"]) / 3)
    groups = map(json.loads, (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines())
    said = [(g["env"], g["trajectories"][0]["messages"][0]["content"]) for g in groups]
    assert said == [("a", "go"), ("b", "!"), ("a", "go")]
    captured = capsys.readouterr()
    assert "a: needs nothing" in captured.err
    assert "tests.runs:Needy + tests.runs:Tiny" in captured.out.replace("\n", " ")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("eval.num_tasks=0", "say how many tasks"),
        ("eval.num_task=1", "did you mean eval.num_tasks?"),
        ("rollout.engine=sglang", "write rollout.engine=local"),
        ("eval.num_tasks=9", "8 tasks, fewer than eval.num_tasks=9"),
        ("env.id=tests.runs:Tyni", "has no 'Tyni'"),
        ("env.id=tests.runs:Needy?lacks=engine", "there is no engine; install it"),
        ("env.kwargs.colour=red", "TypeError"),
        ("env.reward_funcs=[tests.runs:lenght]", "has no function 'lenght'"),
        ("model.name_or_path=/no/such/folder", "/no/such/folder"),
    ],
)
def test_bad_input_is_refused(tmp_path, model, capsys, override, said):
    path = write_config(tmp_path, model)
    assert main(["--config", str(path), "--output", str(tmp_path / "out"), override]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_an_output_folder_that_cannot_be_written_is_refused_at_once(tmp_path, model, capsys):
    path = write_config(tmp_path, model)
    assert main(["--config", str(path), "--output", "/dev/null/out"]) == 2
    assert "/dev/null/out cannot be written" in capsys.readouterr().err


def test_an_evaluation_whose_every_episode_fails_is_no_result(tmp_path, model, capsys):
    path = write_config(
        tmp_path, model, env__id="tests.runs:Breaks", env__kwargs={"where": "reset"}
    )
    assert main(["--config", str(path), "--output", str(tmp_path / "out")]) == 1
    assert "2 of 2: LookupError: the database is gone" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())
