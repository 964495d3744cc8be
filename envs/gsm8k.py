"""GSM8K: grade-school word problems, from the hub or from local files, with calc or with Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.rubric import Rubric
from agentrl.tool import Tool
from agentrl.types import Message, Task
from envs.answers import read_answer
from envs.arithmetic import called_tool, correct
from envs.rows import require_split, rows_of_split, tasks_of_rows
from envs.sandboxed import SandboxedEnv
from envs.tool_env import ToolEnv, demonstration
from tools.calculator import calc
from tools.python import python_tool
from tools.sandbox.pool import Lease


class GSM8K(ToolEnv):
    """The gold answer stands after `####`; the policy's stands there, in a box, or last."""

    system_prompt = "Solve the problem step by step with the calculator calc. End with: #### answer"
    demonstrations = (
        demonstration(
            "A baker fills 14 trays with 12 rolls each and sells 95. How many rolls are left?",
            [("calc", {"expression": "14*12-95"}, "73")],
            "The baker has 14*12-95 = 73 rolls left.\n#### 73",
        ),
        demonstration(
            "Tom works 6 hours at $17 an hour, then buys 3 shirts for $19 each. How much is left?",
            [
                ("calc", {"expression": "6*17"}, "102"),
                ("calc", {"expression": "102-3*19"}, "45"),
            ],
            "Tom earns 102 dollars and keeps 45.\n#### 45",
        ),
    )
    tools = (calc,)
    rubric = Rubric([correct, called_tool], weights=[1.0, 0.0])

    def __init__(self, *, path: str | None = None, **limits: Any) -> None:
        """
        Args:
            path: A folder with train.jsonl and test.jsonl, or one file, which then is every split.
                Each line is {"question": …, "answer": …}. None: `openai/gsm8k` from the hub.
            limits: As `ToolEnv` takes them.
        """
        super().__init__(**limits)
        self.path = path

    def tasks(self, split: str) -> Sequence[Task]:
        """The rows of "train" (7,473 on the hub) or "test" (1,319).

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: there is no such split, or a line that is no row, by file and line.
        """
        require_split(split)
        return _tasks(self.path, split)


class GSM8KPython(SandboxedEnv, GSM8K):
    """The problems and rewards of `GSM8K`, solved with Python in a sandbox."""

    system_prompt = "Solve the problem step by step with the tool python. End with: #### answer"
    demonstrations = (
        demonstration(
            "A baker fills 14 trays with 12 rolls each and sells 95. How many rolls are left?",
            [("python", {"code": "baked = 14 * 12\nbaked - 95"}, "73")],
            "The baker has 73 rolls left.\n#### 73",
        ),
    )

    def make_tools(self, lease: Lease) -> Sequence[Tool]:
        return [python_tool(lease)]


@cache
def _tasks(path: str | None, split: str) -> tuple[Task, ...]:
    rows = _rows_of_hub(split) if path is None else rows_of_split(Path(path), split)
    return tasks_of_rows(rows, f"gsm8k-{split}", _task)


def _rows_of_hub(split: str) -> Iterable[tuple[str, Any]]:
    import datasets

    for index, row in enumerate(datasets.load_dataset("openai/gsm8k", "main", split=split)):
        yield f"openai/gsm8k {split} row {index}", row


def _task(row: Any, *, id: str, where: str) -> Task:
    if not isinstance(row, dict) or not all(
        isinstance(row.get(key), str) for key in ("question", "answer")
    ):
        raise ValueError(f'{where}: a row must be {{"question": text, "answer": text}}')
    _, mark, gold = row["answer"].rpartition("####")
    if not mark or read_answer(gold) is None:
        raise ValueError(f"{where}: the answer must end in #### and a number")
    question = Message(role="user", content=row["question"])
    return Task(id=id, prompt=(question,), answer=gold.strip())
