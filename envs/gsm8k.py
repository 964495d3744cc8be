"""GSM8K: grade-school word problems, from the hub or from local files, solved with a calculator."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.rubric import Rubric
from agentrl.types import Message, Task
from envs.answers import read_answer
from envs.arithmetic import called_tool, correct
from envs.tool_env import ToolEnv, demonstration
from tools.calculator import calc


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
        if split not in ("train", "test"):
            raise ValueError(f"there is no split {split!r}; there are train, test")
        return _tasks(self.path, split)


@cache
def _tasks(path: str | None, split: str) -> tuple[Task, ...]:
    rows = _rows_of_hub(split) if path is None else _rows_of_file(Path(path), split)
    return tuple(
        _task(row, id=f"gsm8k-{split}-{index}", where=where)
        for index, (where, row) in enumerate(rows)
    )


def _rows_of_hub(split: str) -> Iterable[tuple[str, Any]]:
    import datasets

    for index, row in enumerate(datasets.load_dataset("openai/gsm8k", "main", split=split)):
        yield f"openai/gsm8k {split} row {index}", row


def _rows_of_file(path: Path, split: str) -> Iterable[tuple[str, Any]]:
    file = path / f"{split}.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no {file}; path must be a folder with train.jsonl and test.jsonl, or a file"
        )
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}:{number}"
            if not line.strip():
                continue
            try:
                yield where, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: no JSON: {error}") from error


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
