"""What a run leaves in its folder, and how it says so."""

from __future__ import annotations

import json

import pytest
import yaml

from agentrl.config import ConfigError
from agentrl.config_file import fresh_folder, load_config
from agentrl.trajectory import Trajectory, TrajectoryGroup
from agentrl.types import Completion, Message, Task
from tests.runs import write_config
from train.checkpoint import Checkpoint
from train.record import RunRecord


class Trackers:
    """Stands for the accelerator of rank 0."""

    is_main_process = True

    def __init__(self):
        self.seen = []

    def log(self, values, step):
        self.seen.append((step, values))


def make_record(folder, resumed=None, **changes):
    config = load_config(write_config(folder, folder, **changes))
    (folder / "run").mkdir(exist_ok=True)
    return RunRecord(folder / "run", config, Trackers(), None, resumed)


def group():
    tape = Trajectory(id="g0-0")
    tape.messages.append(Message(role="user", content="größer?"))
    tape.observe([1, 2])
    tape.act(Completion(token_ids=[3], logprobs=[-0.5], finish_reason="stop", versions=[0]))
    tape.reward = 1.0
    return TrajectoryGroup(id="g0", task=Task(id="t", answer="4"), trajectories=[tape])


def test_a_step_leaves_its_metrics_and_every_token_of_its_episodes(tmp_path):
    record = make_record(tmp_path)
    record.step(1, {"reward": 0.5}, [group()])
    [line] = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["reward"] == 0.5
    assert record._accelerator.seen == [(1, {"reward": 0.5})]
    [written] = (tmp_path / "run/trajectories/step-000001.jsonl").read_text().splitlines()
    [episode] = json.loads(written)["trajectories"]
    assert episode["token_ids"] == [1, 2, 3] and episode["loss_mask"] == [0, 0, 1]
    assert episode["messages"][0]["content"] == "größer?"


def test_episodes_of_training_are_left_out_where_the_config_says_so(tmp_path):
    record = make_record(tmp_path, save_trajectories=False)
    record.step(1, {}, [group()])
    record.evaluation(1, {"eval/reward": 1.0}, [group()])
    assert [p.name for p in (tmp_path / "run/trajectories").iterdir()] == ["eval-000001.jsonl"]


def test_the_config_is_written_as_resolved(tmp_path):
    make_record(tmp_path)
    values = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert values["optim"]["adam_beta2"] == 0.999, "defaults too"


def test_the_summary_compares_the_first_evaluation_with_the_last(tmp_path):
    resumed = Checkpoint(
        step=4,
        rollouts={},
        metrics={"evaluations": {0: {"eval/correct": 0.1}, 4: {"eval/correct": 0.3}}},
    )
    record = make_record(tmp_path, resumed)
    record.evaluation(8, {"eval/correct": 0.9, "eval/reward": 5.0}, [])
    assert "held-out, before -> after: correct 0.100 -> 0.900" in record.summary()
    assert (tmp_path / "run" / "curve.png").stat().st_size > 1000


def test_the_summary_of_a_mix_compares_each_env(tmp_path):
    before = {"eval/reward": 0.1, "eval/a/reward": 0.2, "eval/b/reward": 0.0, "eval/correct": 0.1}
    mix = {name: {"id": "tests.runs:Tiny"} for name in "ab"}
    record = make_record(tmp_path, env=None, mix=mix)
    record.evaluation(0, before, [])
    record.evaluation(8, before | {"eval/b/reward": 0.5}, [])
    changes = "a/reward 0.200 -> 0.200, b/reward 0.000 -> 0.500, reward 0.100 -> 0.100"
    assert f"held-out, before -> after: {changes}" in record.summary()


def test_the_summary_says_where_the_time_went_and_how_learner_and_engine_agree(tmp_path):
    record = make_record(tmp_path)
    for step, seconds in ((1, 2.0), (2, 4.0)):
        metrics = {"step_time": seconds, "time/sync": 1.0, "mismatch/abs_diff": 0.01 * step}
        record.step(step, metrics, [])
    summary = "\n".join(record.summary())
    assert "time: 3.0 s a step: sync 1.0" in summary
    assert "learner - engine: mean 0.015" in summary
    assert "staleness" not in summary, "a synchronous run has none"


def test_how_to_resume_names_the_folder_where_the_run_lies(tmp_path):
    record = make_record(tmp_path)
    assert "nothing to resume" in record.how_to_resume()
    record.last_checkpoint_step = 7
    assert f"--resume output_dir={tmp_path}/run goes on after step 7" in record.how_to_resume()


def test_a_resumed_run_appends_and_counts_a_segment(tmp_path):
    make_record(tmp_path).step(1, {"reward": 0.5}, [])
    make_record(tmp_path).step(2, {"reward": 0.6}, [])
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert [(line["step"], line["segment"]) for line in lines] == [(1, 0), (2, 1)]


def test_a_folder_that_holds_a_run_is_never_given_again(tmp_path):
    for expected in ("run", "run-2", "run-3"):
        folder = fresh_folder(tmp_path / "run", "config.yaml")
        assert folder.name == expected and folder.is_dir()
        (folder / "config.yaml").touch()


def test_a_folder_that_was_made_but_not_used_is_given_again(tmp_path):
    assert fresh_folder(tmp_path / "run", "config.yaml").name == "run"
    assert fresh_folder(tmp_path / "run", "config.yaml").name == "run"


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/run cannot be written: Not a directory"):
        fresh_folder(tmp_path / "file" / "run", "config.yaml")
