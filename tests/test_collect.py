"""Collecting episodes without a learner; test_replay.py has what a run and a replay make of it."""

from __future__ import annotations

import pytest
import yaml

from agentrl.config_file import load_config
from agentrl.metrics import load_metrics
from agentrl.trajectory import read_groups
from rollout.collect import main
from tests.runs import save_model, write_config


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def few_threads(monkeypatch):
    monkeypatch.setattr("rollout.engines.local_load.use_all_cores", lambda: None)


def collect(tmp_path, model, *arguments, **changes):
    path = write_config(tmp_path, model, **changes)
    return main(["--config", str(path), "--output", str(tmp_path / "out"), *arguments])


def test_every_step_has_its_episodes_and_metrics_and_nothing_is_overwritten(
    tmp_path, model, capsys
):
    assert collect(tmp_path, model, "--steps", "2") == 0
    assert f"episodes and metrics: {tmp_path}/out" in capsys.readouterr().out
    files = sorted((tmp_path / "out" / "trajectories").iterdir())
    steps = [read_groups(file) for file in files]
    assert [[len(group.trajectories) for group in groups] for groups in steps] == [[4, 4], [4, 4]]
    assert steps[0][0].task.id != steps[1][0].task.id
    records = load_metrics(tmp_path / "out" / "metrics.jsonl")
    rewards = [reward for group in steps[0] for reward in group.rewards]
    assert [record["step"] for record in records] == [1, 2]
    assert records[0]["reward"] == pytest.approx(sum(rewards) / 8)
    config = load_config(tmp_path / "out" / "config.yaml")
    assert config.model.name_or_path == str(model)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["output_dir"] == config.output_dir
    assert collect(tmp_path, model) == 0
    assert (tmp_path / "out-2" / "trajectories" / "step-000001.jsonl").exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.engine=sglang", "write rollout.engine=local"),
        ("rollout.prompts_per_step=9", "8 tasks, fewer than rollout.prompts_per_step=9"),
        ("env.kwargs.num_tasks=0", "has no tasks in this split"),
        ("env.reward_funcs=[tests.runs:lenght]", "has no function 'lenght'"),
    ],
)
def test_bad_input_is_refused(tmp_path, model, capsys, override, said):
    assert collect(tmp_path, model, override) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_fewer_than_one_step_is_refused(tmp_path, model, capsys):
    with pytest.raises(SystemExit, match="2"):
        collect(tmp_path, model, "--steps", "0")
    assert "--steps must be at least 1" in capsys.readouterr().err


def test_a_batch_whose_every_episode_fails_ends_it(tmp_path, model, capsys):
    changes = {"env__id": "tests.runs:Breaks", "env__kwargs": {"where": "reset"}}
    assert collect(tmp_path, model, **changes) == 1
    assert "the database is gone" in capsys.readouterr().err
