"""The learning curve of a run as a picture, drawn from its metrics file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from agentrl.metrics import load_metrics
from agentrl.summary import mixed_envs
from train.performance import PARTS

INK = "#222222"
GREY = "#8a8a8a"
KINDS = ("#0072b2", "#e69f00", "#cc79a7", "#56b4e9", "#d55e00")  # Okabe and Ito's palette
SMOOTHING = 5  # steps in the running mean

Record = dict[str, Any]


def draw_curve(metrics_path: Path | str, png_path: Path | str) -> None:
    """Draw rewards and rates, stop reasons and the time of each step.

    Raises:
        FileNotFoundError, MetricsError: from `load_metrics`.
    """
    records = load_metrics(metrics_path)
    figure = Figure(figsize=(9, 6), dpi=130, layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(2, 1))
    top = figure.add_subplot(grid[0, :])
    bottom = [figure.add_subplot(grid[1, column], sharex=top) for column in range(2)]
    _draw_rates(top, records)
    _draw_stops(bottom[0], records)
    _draw_times(bottom[1], records)
    for axes in (top, *bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e8e8e8", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=GREY, labelcolor=INK, labelsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(png_path)


def _draw_rates(axes: Axes, records: Sequence[Record]) -> None:
    main = "correct" if any("correct" in record for record in records) else "reward"
    kinds = _names(records, "correct/") if main == "correct" else []
    lines = {kind: kind.removeprefix("correct/") for kind in kinds}
    if envs := list(dict.fromkeys(env for record in records for env in mixed_envs(record))):
        main, lines = "reward", {f"{env}/reward": env for env in envs}
    colours = {main: INK} | {name: KINDS[i % len(KINDS)] for i, name in enumerate(lines)}
    for name, colour in colours.items():
        label = lines.get(name, "all")
        eval_steps, evals = _series(records, f"eval/{name}")
        if evals:
            label += f", held out {evals[0]:.2f}"
            axes.plot(eval_steps, evals, "o", color=colour, mec="white", ms=8, zorder=3)
        if len(evals) > 1:
            label += f" → {evals[-1]:.2f}"
        steps, values = _series(records, name)
        axes.plot(steps, values, color=colour, alpha=0.22, linewidth=1)
        width = 2.4 if name == main else 1.5
        axes.plot(steps, _smooth(values), color=colour, linewidth=width, label=label)
    title = f"{main}: lines of sampled episodes, dots of held-out tasks"
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel("optimizer step", fontsize=8, color=GREY)
    if main == "correct":
        axes.set_ylim(-0.02, 1.08)
    axes.margins(x=0.03)
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _draw_stops(axes: Axes, records: Sequence[Record]) -> None:
    axes.set_title("how episodes ended", loc="left", fontsize=9, color=INK)
    names = _names(records, "stop/")
    _stack(axes, [r for r in records if any(name in r for name in names)], names)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1))


def _draw_times(axes: Axes, records: Sequence[Record]) -> None:
    axes.set_title("seconds a step", loc="left", fontsize=9, color=INK)
    names = [f"time/{part}" for part in PARTS if any(f"time/{part}" in r for r in records)]
    _stack(axes, [r for r in records if any(name in r for name in names)], names)


def _stack(axes: Axes, records: Sequence[Record], names: Sequence[str]) -> None:
    if not records:
        return
    colours = ("#4c8c6b", *KINDS, *("#999999", "#bbbbbb", "#dddddd"))
    steps = [record["step"] for record in records]
    layers = [[record.get(name, 0.0) for record in records] for name in names]
    labels = [name.split("/", 1)[1] for name in names]
    axes.stackplot(steps, layers, labels=labels, colors=colours, alpha=0.85, linewidth=0)
    axes.legend(
        frameon=False,
        fontsize=7,
        ncols=3,
        loc="upper left",
        bbox_to_anchor=(0, -0.14),
        handlelength=1,
        columnspacing=1,
    )


def _names(records: Sequence[Record], prefix: str) -> list[str]:
    """The metrics under `prefix`, the largest on the whole first."""
    totals: dict[str, float] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith(prefix):
                totals[name] = totals.get(name, 0.0) + value
    return sorted((name for name in totals if totals[name] > 0), key=lambda name: -totals[name])


def _series(records: Sequence[Record], name: str) -> tuple[list[int], list[float]]:
    points = [(record["step"], record[name]) for record in records if name in record]
    return [step for step, _ in points], [value for _, value in points]


def _smooth(values: Sequence[float]) -> list[float]:
    """The mean over the last SMOOTHING values."""
    windows = [values[max(0, i + 1 - SMOOTHING) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
