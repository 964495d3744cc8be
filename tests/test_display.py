import io
import threading

import pytest
from matplotlib.axes import Axes
from rich.console import Console

from agentrl.metrics import MetricLog
from agentrl.trajectory import Trajectory, TrajectoryGroup
from agentrl.types import Completion, Message, StopReason, Task, ToolCall
from train.curve import draw_curve
from train.display import COURSE_WIDTH, Display, _sparkline

METRICS = {
    "correct": 0.84,
    "correct/product": 0.93,
    "correct/word": 0.75,
    "reward": 0.86,
    "loss": 0.01,
    "step_time": 12.3,
    "stop/done": 0.98,
    "stop/turn_length": 0.02,
    "stop/engine_error": 0.0,
    "rollout/tokens_per_second": 812.0,
    "train/tokens_per_second": 2140.0,
    "time/generate": 6.1,
    "time/update": 3.4,
    "eval/correct": 0.93,
}


def group_of_one(answer: str = "The answer is 509.") -> TrajectoryGroup:
    episode = Trajectory()
    call = ToolCall(id="a", name="calculator", arguments={"expression": "43*12-7"})
    episode.observe([1])
    for _ in range(2):
        completion = Completion(token_ids=[1], logprobs=[-0.1], finish_reason="stop", versions=[0])
        episode.act(completion)
        episode.observe([2])
    episode.messages = [
        Message(role="user", content="a demonstration"),
        Message(role="assistant", content="its answer"),
        Message(role="user", content="43 boxes of 12 pencils, 7 given away?"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="509"),
        Message(role="assistant", content=answer),
    ]
    episode.reward, episode.stop_reason = 1.0, StopReason.DONE
    return TrajectoryGroup(id="g", task=Task(id="t"), trajectories=[episode])


def terminal(width: int = 80, height: int = 24) -> Console:
    return Console(force_terminal=True, width=width, height=height, file=io.StringIO())


def picture(display: Display) -> list[str]:
    console = display.console
    lines = console.render_lines(display._picture(), console.options)
    return ["".join(segment.text for segment in line) for line in lines]


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_picture_fits_a_terminal_of_24_rows_and_80_columns():
    display = Display(terminal(), max_steps=60, title="calculator\nlocal engine\n" + "x" * 200)
    for step in range(1, 61):
        display.phase("rollout")
        display.progress(3, 64)
        display.step(step, METRICS, [group_of_one("long " * 99)] * 8)
    lines = picture(display)
    assert len(lines) <= 23  # a picture as high as the terminal would scroll it
    assert all(len(line) <= 80 for line in lines)


def test_a_person_sees_rates_speed_time_and_the_tool_turns_of_an_episode():
    display = Display(terminal(), max_steps=60, title="calculator")
    display.step(12, METRICS, [group_of_one()])
    text = "\n".join(picture(display))
    for part in (
        "12/60",
        "0.84",
        "product 0.93",
        "done 98%",
        "rollout 812 tok/s",
        "update 3.4",
        "43 boxes",
        'calculator(expression="43*12-7")',
        "509",
    ):
        assert part in text
    assert "engine_error" not in text, "what did not happen takes no room"
    assert "demonstration" not in text, "the prompt's demonstrations are no part of the episode"


def test_what_a_step_lacks_is_not_shown():
    display = Display(terminal(), max_steps=3, title="")
    display.step(1, {})
    text = "\n".join(picture(display))
    for label in ("correct", "reward", "held out", "stops", "speed", "time", "latest", "nan"):
        assert label not in text


def test_a_model_cannot_steer_the_terminal():
    display = Display(terminal(), max_steps=3, title="")
    display.step(1, {}, [group_of_one("\x1b[2J[red]\x07\rhidden\u202e")])
    text = "\n".join(picture(display))
    assert "[red]" in text, "markup of the model is text"
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(text)


def test_without_a_terminal_each_step_is_one_aligned_line():
    console = Console(file=io.StringIO(), width=80)
    with Display(console, max_steps=60, title="calculator") as display:
        display.step(9, METRICS, [group_of_one()])
        display.step(10, METRICS | {"loss": -12.5})
        display.finish(["held-out 0.31 -> 0.93"])
    lines = printed(console).splitlines()
    assert len(lines) == 4 and "\x1b" not in printed(console)
    assert lines[1].startswith("step  9/60") and lines[1].index("ETA") == lines[2].index("ETA")
    assert lines[3] == "held-out 0.31 -> 0.93"


def test_in_a_terminal_the_summary_comes_last():
    console = terminal()
    with Display(console, max_steps=2, title="calculator") as display:
        display.step(1, METRICS)
        display.finish(["held-out 0.31 -> 0.93"])
    assert printed(console).rstrip().endswith("held-out 0.31 -> 0.93")


def test_an_error_inside_a_run_gets_through_and_the_terminal_is_given_back():
    threads = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt), Display(terminal(), max_steps=2, title="") as display:
        display.step(1, METRICS)
        raise KeyboardInterrupt
    for thread in set(threading.enumerate()) - threads:  # told to end, and about to
        thread.join(2.0)
        assert not thread.is_alive()


MIXED = METRICS | {
    "mix/sums/share": 0.75,
    "mix/shop/share": 0.25,
    "sums/reward": 0.91,
    "shop/reward": 0.12,
    "sums/correct": 0.9,
}


def test_each_env_of_a_mix_has_a_row_with_its_reward_and_its_share():
    display = Display(terminal(), max_steps=2, title="")
    display.step(1, MIXED)
    display.step(2, {name: value for name, value in MIXED.items() if name != "shop/reward"})
    rows = {line.split()[1]: line for line in picture(display) if len(line.split()) > 2}
    assert "0.91 ▇▇" in rows["sums"] and "75% of prompts" in rows["sums"]
    assert "0.12" in rows["shop"], "the last one known: a batch may be without it"


def test_without_a_terminal_the_line_of_a_step_has_the_reward_of_each_env():
    console = Console(file=io.StringIO(), width=200)
    with Display(console, max_steps=2, title="") as display:
        display.step(1, MIXED)
    assert "sums 0.910  shop 0.120" in printed(console)


def test_the_learning_curve_of_a_mix_has_a_line_for_each_env(tmp_path, monkeypatch):
    log, labels = MetricLog(tmp_path / "metrics.jsonl"), []
    log.write(0, {"eval/reward": 0.1, "eval/sums/reward": 0.3})
    log.write(1, MIXED)
    legend = Axes.legend
    monkeypatch.setattr(
        Axes,
        "legend",
        lambda axes, **more: (
            labels.append(axes.get_legend_handles_labels()[1]) or legend(axes, **more)
        ),
    )
    draw_curve(log.path, tmp_path / "curve.png")
    assert labels[0] == ["all, held out 0.10", "sums, held out 0.30", "shop"]


def test_the_course_shows_a_climb_and_keeps_its_width():
    course = _sparkline([step / 999 for step in range(1000)])
    assert len(course) == COURSE_WIDTH
    assert course == "".join(sorted(course)) and course[0] == "▁" and course[-1] == "█"
    assert _sparkline([0.0]) == "▁"


def test_the_learning_curve_is_a_picture_of_metrics_that_may_be_missing(tmp_path):
    log = MetricLog(tmp_path / "metrics.jsonl")
    log.write(0, {"eval/correct": 0.3, "eval/correct/word": 0.1})
    draw_curve(log.path, tmp_path / "only_eval.png")
    for step in range(1, 9):
        log.write(step, METRICS)
    draw_curve(log.path, tmp_path / "curve.png")
    empty = MetricLog(tmp_path / "empty.jsonl")
    empty.write(1, {"reward": -2.0})
    draw_curve(empty.path, tmp_path / "reward.png")
    for name in ("only_eval", "curve", "reward"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_curve_of_no_run_names_the_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no metrics file"):
        draw_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
