"""Text-to-SQL: questions on a music store's database; the rows that the final query gives count."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.rubric import Rubric
from agentrl.tool import tool
from agentrl.types import Action, Message, Task
from envs.answers import final_answer
from envs.arithmetic import called_tool
from envs.gold import calling
from envs.music_store import music_store_file
from envs.rows import in_split, require_split, rows_of_split, tasks_of_rows
from envs.sql_questions import questions
from envs.tool_env import ToolEnv, demonstration
from tools.sql import QueryError, Rows, describe_schema, run_query, sql_tool

MAX_ROWS = 1000  # of a gold answer
MAX_CELL_CHARS = 10_000

_BLOCK = re.compile(r"```(?:sql|sqlite)?[ \t]*\n(.*?)(?:```|\Z)", re.S | re.I)


async def right_rows(env: Any, task: Task, messages: Sequence[Message]) -> bool:
    """Whether the final answer's query gives the rows that the gold query gives."""
    sql = sql_of(final_answer(messages))
    if not sql.strip():
        return False
    database = env.unwrapped.database
    gold = await _rows(database, task.answer, MAX_ROWS)
    if gold.more:
        raise ValueError(f"the gold query of {task.id} gives more than {MAX_ROWS} rows")
    try:
        said = await _rows(database, sql, len(gold.rows))
    except (QueryError, TimeoutError):
        return False
    return not said.more and same_rows(said, gold, ordered=task.info["ordered"])


def same_rows(said: Rows, gold: Rows, *, ordered: bool) -> bool:
    """Whether both are the same rows as often; order counts where the question asks for one.

    The columns must come in one order, whatever their names. Floats are compared to four places.
    """
    if ordered:
        return _plain(said) == _plain(gold)
    return Counter(_plain(said)) == Counter(_plain(gold))


def sql_of(text: str) -> str:
    """The last fenced block of a text; a text without one is all SQL."""
    text = text.rpartition("</think>")[2]
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else text


class TextToSQL(ToolEnv):
    """The reward is 1 where the final query's rows equal those of the gold query, else 0.

    `same_rows` says what is equal. Both run read-only and under limits; a query that fails or takes
    too long is worth 0.
    """

    system_prompt = (
        "Answer with one SQLite query whose columns are in the order of the question. "
        "Look at the tables with schema, try queries with query. End with the final query in a "
        "```sql block."
    )
    demonstrations = (
        demonstration(
            "How many customers are there?",
            [("query", {"sql": "SELECT COUNT(*) FROM customers"}, "COUNT(*)\n70\n(1 row)")],
            "```sql\nSELECT COUNT(*) FROM customers\n```",
        ),
    )
    rubric = Rubric([right_rows, called_tool], weights=[1.0, 0.0])

    def __init__(
        self, *, database: str | None = None, path: str | None = None, **limits: Any
    ) -> None:
        """
        Args:
            database: An SQLite file that nobody writes meanwhile. None: a small music store.
            path: The questions on that database: a folder with train.jsonl and test.jsonl, or one
                file, which then is every split; each line is {"question": text, "sql": text,
                "ordered": whether order counts (may be left out: false)}.
            limits: As `ToolEnv` takes them.

        Raises:
            FileNotFoundError: there is no such database.
        """
        if (database is None) != (path is None):
            raise ValueError("database and path belong together: give both, or none")
        if database is not None:
            self.demonstrations = ()  # they are of the music store
        super().__init__(**limits)
        self.path = path
        self.database = music_store_file() if database is None else Path(database)
        if not self.database.is_file():
            raise FileNotFoundError(f"there is no database {self.database}")
        self.tools = (tool(inline=True)(self.schema), sql_tool(self.database))

    def schema(self) -> str:
        """Show the tables of the database and their columns."""
        return _schema(self.database)

    def tasks(self, split: str) -> Sequence[Task]:
        """About 540 training and 60 test questions on the music store, or those of `path`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: there is no such split, or a line that is no question, by file and line.
        """
        require_split(split)
        return _made_tasks(split) if self.path is None else _tasks_of_file(self.path, split)

    def gold(self, task: Task) -> list[Action]:
        """Turns that earn the full reward."""
        return [
            calling("schema"),
            calling("query", sql=task.answer),
            Action(f"```sql\n{task.answer}\n```"),
        ]


async def _rows(database: Path, sql: str, max_rows: int) -> Rows:
    return await run_query(
        database, sql, max_rows=max_rows, max_cell_chars=MAX_CELL_CHARS, max_chars=1_000_000
    )


def _plain(rows: Rows) -> list[tuple[Any, ...]]:
    return [
        tuple(round(cell, 4) if isinstance(cell, float) else cell for cell in row)
        for row in rows.rows
    ]


@cache
def _schema(database: Path) -> str:
    return describe_schema(database)


@cache
def _made_tasks(split: str) -> tuple[Task, ...]:
    asked = [question for question in questions() if in_split(question.text, split)]
    random.Random(split).shuffle(asked)
    return tuple(
        Task(
            id=f"sql-{split}-{index}",
            prompt=(Message(role="user", content=question.text),),
            answer=question.sql,
            info={"ordered": question.ordered},
        )
        for index, question in enumerate(asked)
    )


@cache
def _tasks_of_file(path: str, split: str) -> tuple[Task, ...]:
    return tasks_of_rows(rows_of_split(Path(path), split), f"sql-{split}", _task)


def _task(row: Any, *, id: str, where: str) -> Task:
    if (
        not isinstance(row, dict)
        or not all(isinstance(row.get(key), str) for key in ("question", "sql"))
        or not isinstance(row.get("ordered", False), bool)
    ):
        raise ValueError(
            f'{where}: a row must be {{"question": text, "sql": text, "ordered": true or false}}'
        )
    return Task(
        id=id,
        prompt=(Message(role="user", content=row["question"]),),
        answer=row["sql"],
        info={"ordered": row.get("ordered", False)},
    )
