"""Metrics: means and counts gathered during a step, and the append-only file of a run's steps.

Names follow TRL's where TRL has one: `reward`, `reward_std`, `completions/mean_length`, `kl`,
`entropy`, `frac_reward_zero_std`, `step_time`, `num_tokens`, ….
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricsError(ValueError):
    """A metric that is no finite number, or a metrics file that cannot be read."""


class MeanMetrics:
    """Means and counts since the last `pop`.

    A name that nobody added is absent from what `pop` returns, so an empty mean is never NaN.

    Example:
        metrics = MeanMetrics()
        metrics.add("reward", 1.0)
        metrics.add("reward", 0.0)
        metrics.count("rollout/faults/env_error")
        metrics.pop()  ->  {"reward": 0.5, "rollout/faults/env_error": 1.0}
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._counts: dict[str, float] = {}

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Take `value` into the mean `name`; weight 0 leaves the mean as it is.

        Raises:
            MetricsError: `value` is not finite.
        """
        if not math.isfinite(value):
            raise MetricsError(f"metric {name!r} is {value}, not a finite number")
        if weight:
            self._sums[name] = self._sums.get(name, 0.0) + value * weight
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def update(self, values: Mapping[str, float]) -> None:
        """`add` each value under its name: the metrics of one episode, say."""
        for name, value in values.items():
            self.add(name, value)

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add `amount` to the sum `name`."""
        self._counts[name] = self._counts.get(name, 0.0) + amount

    def pop(self) -> dict[str, float]:
        """The means and the counts, which then start anew."""
        means = {name: total / self._weights[name] for name, total in self._sums.items()}
        result = means | self._counts
        self._sums, self._weights, self._counts = {}, {}, {}
        return result


class MetricLog:
    """Appends one JSON object a step to a file.

    A log opened on a file that already has steps starts its next segment, so that steps logged
    again after a resume are told from those before it. A last line that a crash cut short is
    removed.

    Example line:
        {"step": 12, "segment": 0, "time": 1764442800.1, "reward": 0.5}
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _cut_partial_line(self.path)
        records = _read(self.path)
        self.segment: int = records[-1]["segment"] + 1 if records else 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of optimizer step `step`; they are in the file when this returns.

        Raises:
            MetricsError: a value is not finite.
        """
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise MetricsError(f"metric {name!r} of step {step} is {value}, not finite")
        record = {"step": step, "segment": self.segment, "time": round(time.time(), 3), **metrics}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")


def load_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The records of a run by step, each step once.

    A resumed run goes back to its checkpoint: from the first step of a segment on, what earlier
    segments logged did not become part of the run. Records of one step and segment (training and
    evaluation) are merged.

    Raises:
        FileNotFoundError: there is no such file.
        MetricsError: a line of it is no JSON object with a step and a segment.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no metrics file {path}")
    steps: dict[int, dict[str, Any]] = {}
    segment = -1
    for record in _read(path):
        if record["segment"] != segment:
            segment = record["segment"]
            steps = {step: kept for step, kept in steps.items() if step < record["step"]}
        steps[record["step"]] = steps.get(record["step"], {}) | record
    return [steps[step] for step in sorted(steps)]


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    records = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break  # still being written, or cut by a crash
        try:
            record = json.loads(line)
            records.append(record | {"step": record["step"], "segment": record["segment"]})
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise MetricsError(f"{path}, line {number}: not a metrics record ({error})") from error
    return records


def _cut_partial_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        os.truncate(path, end)
