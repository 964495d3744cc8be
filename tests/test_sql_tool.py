"""The SQL tool: reads, within limits, and nothing else."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import psutil
import pytest

from agentrl.tool import ToolOutcome, ToolResult, Unavailable
from tools.sql import Rows, describe_schema, run_query, sql_tool

ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM r)"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sql") / "some people.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE people (name TEXT, age INT, face BLOB)")
        rows = [(f"P{n}", n, b"\xff" * n) for n in range(100)]
        connection.executemany("INSERT INTO people VALUES (?, ?, ?)", [("Ada", None, b""), *rows])
    connection.close()
    return path


def ask(database: Path, sql: str, timeout_s: float = 3.0) -> ToolResult:
    return asyncio.run(sql_tool(database, timeout_s=timeout_s)({"sql": sql}))


def test_a_query_gives_a_table(database: Path):
    result = ask(database, "SELECT name, age, face FROM people LIMIT 3")
    assert result == ToolResult(
        content="name | age | face\n"
        "Ada | NULL | <0 bytes>\n"
        "P0 | 0 | <0 bytes>\n"
        "P1 | 1 | <1 bytes>\n"
        "(3 rows)"
    )


def test_rows_cells_and_all_of_it_are_bounded(database: Path):
    """F100."""
    assert ask(database, "SELECT age FROM people").content.endswith(
        "\n48\n(the first 50 rows of more)"
    )
    long = asyncio.run(run_query(database, "SELECT printf('%.*c', 9000, 'x') || 'y' AS x"))
    assert long == Rows(columns=["x"], rows=[["x" * 200 + "… (9001 characters)"]], more=False)
    many = run_query(database, f"{ENDLESS} SELECT hex(zeroblob(90)) FROM r", max_rows=10**9)
    assert len(asyncio.run(many).rows) <= 112


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO people VALUES ('x', 1, 1)",
        "DELETE FROM people",
        "DROP TABLE people",
        "CREATE TEMP TABLE t (x)",
        "ATTACH '/tmp/other.db' AS other",
        "VACUUM INTO '/tmp/other.db'",
        "PRAGMA query_only = OFF",
        "PRAGMA journal_mode = WAL",
        "PRAGMA temp_store_directory = '/'",
        "SELECT * FROM pragma_database_list",
        "SELECT load_extension('evil')",
        "SELECT readfile('/etc/passwd')",
        "BEGIN",
        "SELECT 1; DELETE FROM people",
        "",
        "SELECT \ud800",
        "SELECT (" * 400 + "1" + ")" * 400,
    ],
)
def test_what_does_not_read_is_refused_in_words(database: Path, sql: str):
    before = database.read_bytes()
    result = ask(database, sql)
    assert result.outcome == ToolOutcome.ERROR
    assert result.content.startswith("Error: ")
    assert "Traceback" not in result.content
    assert database.read_bytes() == before


@pytest.mark.parametrize(
    "sql",
    [
        f"{ENDLESS} SELECT count(*) FROM r",
        "SELECT count(*) FROM people a, people b, people c, people d, people e",
    ],
)
def test_a_query_without_end_is_stopped_at_its_time(database: Path, sql: str):
    """F024."""
    start = time.monotonic()
    result = ask(database, sql, timeout_s=0.3)
    assert result == ToolResult(
        content="Error: the query was stopped after 0.3 s", outcome=ToolOutcome.TIMEOUT
    )
    assert time.monotonic() - start < 4


def test_one_step_without_end_is_stopped_too(database: Path):
    """SQLite looks at the clock between its steps; this is one of many seconds."""
    sql = "SELECT instr(printf('%.*c', 900000, 'a'), printf('%.*c', 450000, 'a') || 'b')"
    assert ask(database, sql, timeout_s=0.1).outcome == ToolOutcome.TIMEOUT
    assert not [p for p in psutil.Process().children() if "sql_worker" in " ".join(p.cmdline())]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT zeroblob(1000000000)",
        "SELECT randomblob(1000000000)",
        "SELECT replace(hex(zeroblob(400000)), '0', 'bomb')",
        f"{ENDLESS} SELECT s FROM (SELECT n, printf('%.*c', 900000, 'x') AS s FROM r LIMIT 9999) "
        "ORDER BY s, n DESC",
    ],
)
def test_a_query_that_wants_much_memory_is_refused(database: Path, sql: str):
    """F099: sorting goes to memory that is bounded, and not to the disk."""
    result = ask(database, sql, timeout_s=9)
    assert result.outcome == ToolOutcome.ERROR
    assert "too big" in result.content or "out of memory" in result.content


def test_a_value_that_a_format_makes_too_wide_takes_no_memory(database: Path):
    assert "NULL" in ask(database, "SELECT printf('%.*c', 100000000, 'x')").content


def test_text_that_is_not_utf8_is_read(database: Path):
    """F101."""
    assert "\n\ufffdA\n" in ask(database, "SELECT CAST(x'ff41' AS TEXT)").content


def test_a_database_that_is_missing_is_no_fault_of_the_model(tmp_path: Path):
    with pytest.raises(Unavailable, match="there is no database"):
        ask(tmp_path / "none.db", "SELECT 1")


def test_a_function_says_which_database_is_the_tasks(database: Path):
    result = asyncio.run(sql_tool(lambda: database)({"sql": "SELECT max(age) AS a FROM people"}))
    assert result.content == "a\n99\n(1 row)"


def test_the_schema_is_described_for_a_prompt(database: Path):
    assert describe_schema(database) == "CREATE TABLE people (name TEXT, age INT, face BLOB);"
    assert "Ada | NULL | <0 bytes>" in describe_schema(database, num_rows=1)
