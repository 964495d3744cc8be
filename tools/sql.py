"""The SQL tool: read-only queries of an SQLite database, each in a small process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agentrl.tool import Tool, ToolOutcome, ToolResult, Unavailable

_WORKER = Path(__file__).with_name("sql_worker.py")
_ENV = ("LD_LIBRARY_PATH",)
_GRACE_S = 5.0  # beyond its time, for the process to start and to say what came of the query

Cell = str | int | float | None


class QueryError(ValueError):
    """What SQLite had to say against a query, in words for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """
    Example:
        Rows(columns=["name", "age"], rows=[["Ada", 36]], more=False)
    """

    columns: list[str]
    rows: list[list[Cell]]  # a blob is the text <n bytes>
    more: bool  # there are rows beyond the limits

    def __str__(self) -> str:
        lines = [" | ".join(self.columns)]
        lines += [" | ".join(_shown(cell) for cell in row) for row in self.rows]
        number = len(self.rows)
        what = f"{number} row{'s' * (number != 1)}"
        return "\n".join([*lines, f"(the first {what} of more)" if self.more else f"({what})"])


async def run_query(
    database: str | Path,
    sql: str,
    *,
    timeout_s: float = 5.0,
    max_rows: int = 50,
    max_cell_chars: int = 200,
    max_chars: int = 20_000,
) -> Rows:
    """The rows of one statement that reads.

    It may not write, attach, load, or change settings, and has 512 MiB of memory and no disk. The
    database must not change meanwhile: it is opened as immutable.

    Args:
        max_cell_chars: The rest of a longer text is left out.
        max_chars: Of all cells; no row is added beyond it.

    Raises:
        QueryError: SQLite refuses the query, or it needs too much.
        TimeoutError: it takes longer than `timeout_s` seconds.
        Unavailable: there is no such database, or no process that answers.
    """
    path = Path(database).resolve()
    if not path.is_file():
        raise Unavailable(f"there is no database {path}")
    request = {
        "uri": f"file:{quote(str(path))}?mode=ro&immutable=1",
        "sql": sql,
        "timeout_s": timeout_s,
        "max_rows": max_rows,
        "max_cell_chars": max_cell_chars,
        "max_chars": max_chars,
    }
    status, out, err = await _run(json.dumps(request).encode(), timeout_s + _GRACE_S)
    if status == -signal.SIGXCPU:  # within one step of SQLite's machine
        raise TimeoutError(f"the query was stopped after {timeout_s:g} s")
    if status < 0:
        raise QueryError(f"the query ended its process by signal {-status}")
    if not out:
        raise Unavailable(f"the SQL worker ended with {status}: {err.decode(errors='replace')}")
    answer: dict[str, Any] = json.loads(out)
    if "error" in answer:
        raise QueryError(answer["error"])
    if "timed_out" in answer:
        raise TimeoutError(f"the query was stopped after {timeout_s:g} s")
    return Rows(**answer)


def sql_tool(
    database: str | Path | Callable[[], str | Path],
    *,
    timeout_s: float = 5.0,
    max_rows: int = 50,
) -> Tool:
    """A tool `query(sql)`.

    Args:
        database: A function is asked with each call, where it is the task's.
    """

    async def query(sql: str) -> ToolResult:
        """Ask the SQLite database; it can only be read.

        Args:
            sql: One SELECT statement.
        """
        path = database() if callable(database) else database
        try:
            rows = await run_query(path, sql, timeout_s=timeout_s, max_rows=max_rows)
        except QueryError as error:
            return ToolResult(content=f"Error: {error}", outcome=ToolOutcome.ERROR)
        except TimeoutError as error:
            return ToolResult(content=f"Error: {error}", outcome=ToolOutcome.TIMEOUT)
        return ToolResult(content=str(rows))

    return Tool(query, timeout_s=timeout_s + 2 * _GRACE_S)


def describe_schema(database: str | Path, *, num_rows: int = 0) -> str:
    """The CREATE statements of tables and views, each with its first rows; for a prompt.

    Raises:
        sqlite3.Error: it is no database.
    """
    path = Path(database).resolve()
    with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
        found = connection.execute(
            "SELECT name, sql FROM sqlite_schema WHERE type IN ('table', 'view') "
            "AND name NOT LIKE 'sqlite!_%' ESCAPE '!' ORDER BY rowid"
        ).fetchall()
        parts = []
        for name, statement in found:
            parts.append(f"{statement};")
            if num_rows:
                cursor = connection.execute(f"SELECT * FROM {_quoted(name)} LIMIT {num_rows}")
                columns = [column[0] for column in cursor.description]
                rows = [[_blob(cell) for cell in row] for row in cursor]
                parts.append(f"/*\n{Rows(columns=columns, rows=rows, more=False)}\n*/")
    return "\n".join(parts)


async def _run(request: bytes, timeout_s: float) -> tuple[int, bytes, bytes]:
    """The worker's exit status and outputs; it is gone when this returns."""
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(_WORKER),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={name: os.environ[name] for name in _ENV if name in os.environ},
        )  # fmt: skip
    except OSError as error:
        raise Unavailable(f"no process for a query: {error}") from error
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate(request)
    except TimeoutError:
        raise Unavailable(f"a query's process did not answer within {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, out, err


def _shown(cell: Cell) -> str:
    if cell is None:
        return "NULL"
    return " ".join(cell.split("\n")) if isinstance(cell, str) else str(cell)


def _blob(cell: Any) -> Cell:
    return f"<{len(cell)} bytes>" if isinstance(cell, bytes) else cell


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
