import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.metrics import MeanMetrics, MetricLog, MetricsError, load_metrics


def test_a_mean_is_over_what_was_added_and_a_count_is_a_sum():
    metrics = MeanMetrics()
    metrics.update({"reward": 1.0, "correct/word": 1.0})
    metrics.update({"reward": 0.0})
    metrics.count("rollout/faults/env_error")
    metrics.count("rollout/faults/env_error", 2)
    assert metrics.pop() == {"reward": 0.5, "correct/word": 1.0, "rollout/faults/env_error": 3.0}


def test_an_absent_metric_is_absent_and_never_nan():
    metrics = MeanMetrics()
    metrics.add("kl", 0.3, weight=0.0)
    assert metrics.pop() == {}


def test_pop_starts_anew():
    metrics = MeanMetrics()
    metrics.add("reward", 1.0)
    metrics.pop()
    metrics.add("reward", 0.0)
    assert metrics.pop() == {"reward": 0.0}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 20).map(float), min_size=1), st.integers(0, 5))
def test_a_mean_of_parts_weighted_by_size_is_the_mean_of_all(values, split):
    """F084: a mean of means of unequal parts is wrong; padding repeats have weight 0."""
    metrics = MeanMetrics()
    for part in (values[:split], values[split:]):
        if part:
            metrics.add("reward", sum(part) / len(part), weight=len(part))
    metrics.add("reward", 99.0, weight=0.0)
    assert metrics.pop()["reward"] == pytest.approx(sum(values) / len(values))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_not_finite_is_refused_by_name(tmp_path, value):
    with pytest.raises(MetricsError, match="'kl'"):
        MeanMetrics().add("kl", value)
    with pytest.raises(MetricsError, match="'kl' of step 3"):
        MetricLog(tmp_path / "metrics.jsonl").write(3, {"kl": value})


def test_steps_logged_again_after_a_resume_count_once_and_carry_the_new_segment(tmp_path):
    """F088: resumed at 500 after 510 were logged, 501.. are there, with the next segment."""
    path = tmp_path / "run" / "metrics.jsonl"
    first = MetricLog(path)
    for step in range(495, 511):
        first.write(step, {"loss": 1.0})
    second = MetricLog(path)
    for step in range(501, 504):
        second.write(step, {"loss": 2.0})
    records = load_metrics(path)
    assert [record["step"] for record in records] == list(range(495, 504))
    assert [record["segment"] for record in records] == [0] * 6 + [1] * 3
    assert records[-1]["loss"] == 2.0
    assert len(path.read_text().splitlines()) == 19, "nothing already written is lost"


def test_training_and_evaluation_of_one_step_are_one_record(tmp_path):
    log = MetricLog(tmp_path / "metrics.jsonl")
    log.write(5, {"reward": 0.5})
    log.write(5, {"eval/correct": 0.4})
    [record] = load_metrics(log.path)
    assert record["reward"] == 0.5 and record["eval/correct"] == 0.4


def test_a_line_cut_by_a_crash_is_dropped_and_the_next_run_appends_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricLog(path).write(1, {"reward": 0.5})
    with path.open("a") as file:
        file.write('{"step": 2, "segm')
    assert [record["step"] for record in load_metrics(path)] == [1]
    MetricLog(path).write(2, {"reward": 0.6})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_broken_line_is_named_by_file_and_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricLog(path).write(1, {})
    with path.open("a") as file:
        file.write("hello\n")
    with pytest.raises(MetricsError, match=r"metrics\.jsonl, line 2"):
        load_metrics(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no metrics file"):
        load_metrics(tmp_path / "metrics.jsonl")
