"""What a person sees of a run: one live picture in a terminal, one line a step elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from agentrl.config import RunConfig
from agentrl.summary import mixed_envs
from agentrl.trajectory import Trajectory, TrajectoryGroup
from agentrl.types import Message
from train.performance import (
    PARTS,
    engine_words,
    mismatch_words,
    speed_words,
    staleness_words,
    sync_words,
)

COLOURS: dict[str, str] = dict(
    zip(PARTS, ("cyan", "yellow", "magenta", "bright_blue", "blue", "red"), strict=True)
)
ROLE_STYLES = {"user": "bold", "assistant": "cyan", "tool": "yellow", "system": "dim"}
SPARKS = "▁▂▃▄▅▆▇█"
COURSE_WIDTH = 36  # columns of a sparkline
NUM_EPISODES = 3  # of the latest, as far as the terminal has rows for them


class Display:
    """The display of one run; a context manager. `title` may have a few lines.

    Metrics that a step lacks are not shown. Text of models and tools is made printable, so that it
    cannot steer the terminal.

    Example:
        with Display(max_steps=60, title="calculator · SmolLM2-135M") as display:
            display.phase("rollout")
            display.progress(12, 64)
            display.step(1, {"reward": 0.3, "correct": 0.25}, groups)
            display.finish(["held-out correct 0.31 -> 0.94"])
    """

    def __init__(self, console: Console | None = None, *, max_steps: int, title: str) -> None:
        self.console = console or Console()
        self.max_steps = max_steps
        self.title = title
        self._start = time.monotonic()
        self._first_step: int | None = None  # the step this process began with
        self._step = 0
        self.current_phase = "starting"
        self._progress: tuple[int, int] | None = None
        self._metrics: dict[str, float] = {}
        self._courses: dict[str, list[float]] = {"correct": [], "reward": []}
        self._envs: list[str] = []  # of a mix; their rewards are courses too
        self._evals: list[float] = []
        self._episodes: list[Trajectory] = []
        self._live = Live(get_renderable=self._picture, console=self.console, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        if self.console.is_terminal:
            self._live.start()
        else:
            self._print(self.title)
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def phase(self, name: str) -> None:
        """Say what the run does now."""
        self.current_phase, self._progress = name, None

    def progress(self, done: int, total: int) -> None:
        """Say how far the phase is."""
        self._progress = (done, total)

    def step(
        self, step: int, metrics: Mapping[str, float], groups: Sequence[TrajectoryGroup] = ()
    ) -> None:
        """Show that optimizer step `step` (from 1) is done, with its metrics and its episodes."""
        if self._first_step is None:
            self._first_step = step
        self._step = step
        self._metrics = dict(metrics)
        self._envs = mixed_envs(metrics)
        for env in self._envs:
            self._courses.setdefault(f"{env}/reward", [])
        for name, course in self._courses.items():
            if name in metrics:
                course.append(metrics[name])
        self.evaluation(metrics)
        latest = [group.trajectories[0] for group in groups if group.trajectories]
        self._episodes = [episode for episode in latest if episode.turns][-NUM_EPISODES:]
        if self._live.is_started:
            self._live.refresh()
        else:
            self._print(self._line())

    def evaluation(self, metrics: Mapping[str, float]) -> None:
        """Show `eval/correct` of an evaluation outside of a step."""
        if "eval/correct" in metrics:
            self._evals.append(metrics["eval/correct"])

    def finish(self, summary: Iterable[str]) -> None:
        """End the live picture, which stays as it is, and print the summary."""
        self.current_phase, self._progress = "done", None
        self._live.stop()
        for line in summary:
            self._print(line)

    def _print(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def _eta(self) -> str:
        if self._first_step is None:
            return "?"
        steps_done = self._step - self._first_step + 1
        per_step = (time.monotonic() - self._start) / steps_done
        return _clock(per_step * (self.max_steps - self._step))

    def _line(self) -> str:
        metrics = self._metrics
        columns = [f"step {self._step:>{len(str(self.max_steps))}}/{self.max_steps}"]
        for label, name, form in (
            ("correct", "correct", "5.3f"),
            ("reward", "reward", "6.3f"),
            ("loss", "loss", "8.4f"),
            ("held-out", "eval/correct", "5.3f"),
        ):
            if name in metrics:
                columns.append(f"{label} {metrics[name]:{form}}")
        for env in self._envs:
            if f"{env}/reward" in metrics:
                columns.append(f"{env} {metrics[f'{env}/reward']:.3f}")
        columns += [text for text in (speed_words(metrics), _seconds(metrics)) if text]
        columns.append(f"ETA {self._eta()}")
        if stops := _stops(metrics):
            columns.append(_rates(stops))
        return "  ".join(columns)

    def _picture(self) -> RenderableType:
        title, *more = _printable_lines(self.title)
        rows: list[RenderableType] = [_one_line(line, "dim") for line in more[:3]]
        rows.append(self._figures())
        height = self.console.height - 3 - sum(self._height(row) for row in rows)
        episodes = list(self._episode_rows(height - 1))
        if episodes:
            rows += [Rule("latest episodes", style="dim", align="left"), *episodes]
        return Panel(Group(*rows), title=_one_line(title, "bold"), title_align="left")

    def _height(self, row: RenderableType) -> int:
        options = self.console.options.update_width(self.console.width - 4)
        return len(self.console.render_lines(row, options))

    def _figures(self) -> Table:
        metrics = self._metrics
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(style="dim", width=8, no_wrap=True)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        elapsed = _clock(time.monotonic() - self._start)
        clock = f"{self._step}/{self.max_steps} · elapsed {elapsed} · ETA {self._eta()}"
        table.add_row("step", _bar(self._step, self.max_steps, clock))
        if self._progress is None:
            table.add_row("now", _one_line(self.current_phase))
        else:
            done, total = self._progress
            table.add_row("now", _bar(done, total, f"{self.current_phase} {done}/{total}"))
        for name, style in (("correct", "bold green"), ("reward", "green")):
            if course := self._courses[name]:
                text = Text(f"{course[-1]:5.2f} ", style)
                text.append(f"{_sparkline(course):<{COURSE_WIDTH}}", "green")
                if name == "correct":
                    text.append("  " + _kinds(metrics, "correct/"))
                table.add_row(name, text)
        for env in self._envs:
            if course := self._courses[f"{env}/reward"]:
                share = f"  {metrics[f'mix/{env}/share']:.0%} of prompts"
                row = f"{course[-1]:5.2f} {_sparkline(course):<{COURSE_WIDTH}}{share}"
                table.add_row(_one_line(env), Text(row))
        if self._evals:
            text = f"{self._evals[0]:5.2f}"
            if len(self._evals) > 1:
                text += f" before, {self._evals[-1]:.2f} now"
            table.add_row("held out", Text(f"{text}   {_kinds(metrics, 'eval/correct/')}"))
        if stops := _stops(metrics):
            table.add_row("stops", _one_line(_rates(stops)))
        for label, words in (
            ("speed", speed_words(metrics)),
            ("engine", engine_words(metrics)),
            ("late", staleness_words(metrics)),
            ("sync", sync_words(metrics)),
            ("mismatch", mismatch_words(metrics)),
        ):
            if words:
                table.add_row(label, _one_line(words))
        parts = {name: metrics.get(f"time/{name}", 0.0) for name in PARTS}
        if any(parts.values()):
            table.add_row("time", _split_bar(parts))
            table.add_row(_seconds(metrics), _split_legend(parts))
        return table

    def _episode_rows(self, height: int) -> Iterator[Text]:
        """Whole episodes, newest first, in at most `height` rows."""
        for episode in reversed(self._episodes):
            rows = list(_episode(episode))
            if len(rows) > height:
                return
            height -= len(rows)
            yield from rows


def _episode(episode: Trajectory) -> Iterator[Text]:
    question, turns = _own_part(episode)
    reward = episode.reward
    head = Text("  -   " if reward is None else f"{reward:+.2f} ")
    head.stylize("dim" if reward is None else "bold green" if reward > 0 else "bold red")
    head.append(_flat(question.content if question else ""), "bold")
    head.append(f"  ({episode.stop_reason})", "dim")
    yield _cut(head)
    for message in turns:
        row = Text(f"{message.role:>11} ", "dim")
        row.append(_flat(_words(message)), ROLE_STYLES[message.role])
        yield _cut(row)


def _own_part(episode: Trajectory) -> tuple[Message | None, list[Message]]:
    """The question and what came after it: the prompt's demonstrations are left out."""
    messages = episode.messages
    sampled = [i for i, message in enumerate(messages) if message.role == "assistant"]
    first = sampled[-len(episode.turns) :][0] if sampled else len(messages)
    question = next((m for m in reversed(messages[:first]) if m.role == "user"), None)
    return question, messages[first:]


def _words(message: Message) -> str:
    calls = [
        f"{call.name}({', '.join(f'{k}={json.dumps(v)}' for k, v in call.arguments.items())})"
        for call in message.tool_calls
    ]
    return " ".join(filter(None, [message.content, *calls]))


def _printable_lines(text: str) -> list[str]:
    return [_flat(line) for line in text.splitlines()] or [""]


def _flat(text: str) -> str:
    """`text` on one line, without what could steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))


def _one_line(text: str, style: str = "") -> Text:
    return _cut(Text(_flat(text), style))


def _cut(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _bar(done: int, total: int, text: str) -> Table:
    row = Table.grid(padding=(0, 1))
    row.add_row(ProgressBar(total=max(total, 1), completed=done, width=30), _one_line(text))
    return row


def _sparkline(values: Sequence[float]) -> str:
    """The course of `values` in at most COURSE_WIDTH columns; the scale holds 0 and 1."""
    num, width = len(values), min(len(values), COURSE_WIDTH)
    bins = [values[i * num // width : (i + 1) * num // width] for i in range(width)]
    means = [sum(part) / len(part) for part in bins]
    low, high = min(0.0, *means), max(1.0, *means)
    return "".join(SPARKS[round((m - low) / (high - low) * (len(SPARKS) - 1))] for m in means)


def _kinds(metrics: Mapping[str, float], prefix: str) -> str:
    kinds = {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)}
    return " ".join(f"{kind} {rate:.2f}" for kind, rate in sorted(kinds.items()))


def _stops(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Stop reasons that occurred, the commonest first."""
    rates = [(k.removeprefix("stop/"), v) for k, v in metrics.items() if k.startswith("stop/")]
    return sorted((item for item in rates if item[1] > 0), key=lambda item: -item[1])


def _rates(stops: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {rate:.0%}" for name, rate in stops)


def _seconds(metrics: Mapping[str, float]) -> str:
    return f"{metrics['step_time']:.1f} s" if "step_time" in metrics else ""


def _split_bar(parts: Mapping[str, float]) -> Text:
    width, total = 48, sum(parts.values())
    bar, end, drawn = Text(), 0.0, 0
    for name, seconds in parts.items():
        end += seconds
        columns = round(width * end / total) - drawn
        drawn += columns
        bar.append("█" * columns, COLOURS[name])
    return bar


def _split_legend(parts: Mapping[str, float]) -> Text:
    shown = [
        (f"{name} {seconds:.1f}  ", COLOURS[name]) for name, seconds in parts.items() if seconds
    ]
    return _cut(Text.assemble(*shown))


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class EpisodeCount:
    """Shows how many episodes of the batch or the evaluation are over."""

    def __init__(self, config: RunConfig, display: Display) -> None:
        rollout, evaluation = config.rollout, config.eval
        self._display = display
        self._totals = {
            "rollout": rollout.prompts_per_step * rollout.num_generations,
            "evaluation": evaluation.num_tasks * evaluation.num_generations,
        }
        self._phase, self._done = "", 0

    def __call__(self, trajectory: Trajectory) -> None:
        phase = self._display.current_phase
        self._done = self._done + 1 if phase == self._phase else 1
        self._phase = phase
        if phase in self._totals:
            self._display.progress(self._done, max(self._done, self._totals[phase]))
