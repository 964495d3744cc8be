"""GSM8K: real rows, both sources, clear errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import datasets
import pytest

from agentrl.types import Action
from envs.answers import is_correct
from envs.gold import calling
from envs.gsm8k import GSM8K, GSM8KPython
from tests.sandboxes import LoopThread, require_level
from tests.solving import last_result, play
from tools.calculator import calc
from tools.sandbox.protocol import SandboxConfig


def test_every_gold_solution_is_correct_by_its_own_answer(assets: Path):
    """F045."""
    env = GSM8K(path=str(assets / "gsm8k"))
    tasks = env.tasks("test")
    assert len(tasks) == 1319
    assert len(env.tasks("train")) == 7473
    lines = (assets / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    for task, line in zip(tasks, lines, strict=True):
        row = json.loads(line)
        assert task.prompt[0].content == row["question"]
        assert is_correct(row["answer"], task.answer)
        assert is_correct(f"So it is \\boxed{{{task.answer}}}.", task.answer)
        assert not is_correct(f"The answer is {task.answer}1", task.answer)


def test_demonstrations_are_right():
    for demonstration in GSM8K.demonstrations:
        *calls, answer = demonstration[1:]
        for turn, result in zip(calls[::2], calls[1::2], strict=True):
            assert asyncio.run(calc(turn.tool_calls[0].arguments)).content == result.content
        assert is_correct(answer.content, calls[-1].content)


def test_rows_come_from_the_hub_without_a_path(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def load_dataset(*args: str, split: str) -> list[dict[str, str]]:
        asked.append((*args, split))
        return [{"question": "2+3?", "answer": "It is <<2+3=5>>5.\n#### 1,005"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (task,) = GSM8K(num_demonstrations=0).tasks("test")
    assert asked == [("openai/gsm8k", "main", "test")]
    assert (task.id, task.answer) == ("gsm8k-test-0", "1,005")


def test_one_file_may_be_given(tmp_path: Path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "2+3?", "answer": "#### 5"}\n\n')
    assert [task.answer for task in GSM8K(path=str(file)).tasks("train")] == ["5"]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{not json", "no JSON"),
        ('["a list"]', "a row must be"),
        ('{"question": "2+3?"}', "a row must be"),
        ('{"question": "2+3?", "answer": "5"}', "must end in #### and a number"),
        ('{"question": "2+3?", "answer": "#### five"}', "must end in #### and a number"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, error: str):
    file = tmp_path / "train.jsonl"
    file.write_text('{"question": "2+3?", "answer": "#### 5"}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"train\.jsonl:2: .*{error}"):
        GSM8K(path=str(tmp_path)).tasks("train")


def test_a_missing_file_and_an_unknown_split_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*train\.jsonl; path must be"):
        GSM8K(path=str(tmp_path)).tasks("train")
    with pytest.raises(ValueError, match="no split 'dev'"):
        GSM8K().tasks("dev")


def test_the_variant_with_python_has_the_same_tasks_and_rewards(
    tmp_path: Path, sandbox_loop: LoopThread
):
    require_level(SandboxConfig(level="bubblewrap"))
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "14*12-95?", "answer": "#### 73"}\n')
    env = GSM8KPython(path=str(file), sandbox={"level": "bubblewrap"})
    assert env.tasks("train") == GSM8K(path=str(file)).tasks("train")
    _, shown, result, answer = env.demonstrations[0]
    turns = [calling("python", **shown.tool_calls[0].arguments), Action(answer.content)]
    rewards, tape = sandbox_loop.run(play(env, env.tasks("train")[0], turns))
    assert last_result(tape) == result.content
    assert rewards == {"correct": 1.0, "called_tool": 1.0}
    wrong = [turns[0], Action("#### 74")]
    assert sandbox_loop.run(play(env, env.tasks("train")[0], wrong))[0]["correct"] == 0.0


def test_code_that_fails_is_answered_and_the_episode_goes_on(
    tmp_path: Path, sandbox_loop: LoopThread
):
    """F053."""
    require_level(SandboxConfig(level="bubblewrap"))
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "2+3?", "answer": "#### 5"}\n')
    env = GSM8KPython(path=str(file), sandbox={"level": "bubblewrap"})
    turns = [calling("python", code="x = 5\n1/0"), calling("python", code="x"), Action("#### 5")]
    rewards, tape = sandbox_loop.run(play(env, env.tasks("train")[0], turns))
    failed, last = [message.content for message in tape.messages if message.name == "python"][-2:]
    assert "ZeroDivisionError" in failed
    assert last == "5"
    assert env.metrics["tool/errors"] == 1
    assert rewards["correct"] == 1.0
