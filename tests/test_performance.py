"""What a person reads of speed, engine, syncs and mismatch: right figures, and none that lack."""

from __future__ import annotations

import io

from rich.console import Console

from train.display import Display
from train.performance import (
    engine_words,
    mean_metrics,
    mismatch_words,
    speed_words,
    staleness_words,
    sync_words,
    time_words,
)

METRICS = {
    "step_time": 12.3,
    "time/generate": 6.1,
    "time/env": 1.0,
    "time/logprob": 0.5,
    "time/update": 3.4,
    "time/sync": 0.7,
    "engine/ttft_s": 0.123,
    "engine/tpot_s": 0.0211,
    "engine/cache_hit_fraction": 0.912,
    "engine/waiting": 3.0,
    "rollout/running_requests": 61.4,
    "rollout/queued_requests": 17.0,
    "rollout/staleness_0": 0.6,
    "rollout/staleness_1": 0.4,
    "sync/seconds": 0.71,
    "sync/bytes": 269e6,
    "sync/num_servers": 1.0,
    "sync/failed_servers": 0.0,
    "sync/probe_abs_diff": 0.00021,
    "mismatch/abs_diff": 0.0112,
    "mismatch/max": 0.41,
    "mismatch/kl": 0.0003,
    "mismatch/k3": 0.00021,
    "mismatch/ess": 0.9987,
    "mismatch/clip_frac": 0.001,
}


def test_times_queues_and_the_cache_are_told_apart():
    """TTFT holds queue and prefill, TPOT is the pace after it; queues here and there differ."""
    assert engine_words(METRICS) == (
        "first token 0.12 s, 21.1 ms a token, cached 91%, running 61, queued 17, "
        "in servers' queues 3"
    )


def test_a_step_is_split_into_its_parts():
    assert time_words(METRICS) == (
        "12.3 s a step: generate 6.1, env 1.0, logprob 0.5, update 3.4, sync 0.7"
    )


def test_throughput_stands_beside_what_it_is_of_the_peak_and_the_peak_of_memory():
    metrics = {
        "rollout/tokens_per_second": 1812.4,
        "train/tokens_per_second": 903.6,
        "train/mfu": 0.4312,
        "train/peak_memory_gib": 6.08,
    }
    assert speed_words(metrics) == (
        "rollout 1,812 tok/s, train 904 tok/s, mfu 43%, peak memory 6.1 GiB"
    )


def test_a_sync_says_what_it_moved_and_which_servers_failed():
    assert sync_words(METRICS) == "0.71 s, 269 MB, 1 server, probe differs by 0.00021"
    assert "2 FAILED" in sync_words(METRICS | {"sync/failed_servers": 2.0})


def test_staleness_is_a_histogram_where_there_is_any():
    assert staleness_words(METRICS) == "0 late 60%, 1 late 40%"
    assert staleness_words({"rollout/staleness_0": 1.0}) == "", "a synchronous run"


def test_the_mismatch_panel_is_whole():
    assert mismatch_words(METRICS) == (
        "mean 0.011, max 0.41, KL 0.0003, k3 0.0002, ESS 0.999, clipped 0.1%"
    )


def test_what_was_not_measured_is_not_said():
    for words in (engine_words, sync_words, staleness_words, mismatch_words, time_words):
        assert words({"reward": 1.0}) == ""


def test_a_mean_is_over_the_steps_that_have_the_metric():
    assert mean_metrics([{"a": 1.0, "b": 4.0}, {"a": 2.0}]) == {"a": 1.5, "b": 4.0}


def test_the_picture_has_a_row_for_each_and_still_fits_a_terminal():
    console = Console(force_terminal=True, width=80, height=24, file=io.StringIO())
    display = Display(console, max_steps=3, title="calculator")
    display.step(1, METRICS)
    lines = console.render_lines(display._picture(), console.options)
    text = ["".join(segment.text for segment in line) for line in lines]
    assert len(text) <= 23 and all(len(line) <= 80 for line in text)
    for label in ("engine", "late", "sync", "mismatch", "time"):
        assert any(line.startswith(f"│ {label}") for line in text), label
