"""Text-to-SQL: the rows count, as often as they come, and their order where it was asked for."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from agentrl.rubric import RewardError
from agentrl.types import Action, Message, Task
from envs import music_store
from envs.gold import calling
from envs.sql_questions import questions
from envs.text_to_sql import TextToSQL, same_rows, sql_of
from tests.solving import last_result, play
from tools.sql import Rows

LIST = "SELECT name FROM artists WHERE country = 'Japan'"


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        music_store.music_store_file.cache_clear()
        yield
    music_store.music_store_file.cache_clear()


def task(sql: str, *, ordered: bool = False) -> Task:
    question = Message(role="user", content="?")
    return Task(id="t", prompt=(question,), answer=sql, info={"ordered": ordered})


def score(gold: str, said: str, *, ordered: bool = False) -> float:
    return asyncio.run(play(TextToSQL(), task(gold, ordered=ordered), [Action(said)]))[0][
        "right_rows"
    ]


def rows(*values: tuple[object, ...]) -> Rows:
    return Rows(columns=["c"], rows=[list(row) for row in values], more=False)  # type: ignore[arg-type]


def test_gold_solutions_of_every_kind_earn_the_full_reward():
    env = TextToSQL()
    kinds = {" ".join(t.answer.split()[:3]): t for s in ("train", "test") for t in env.tasks(s)}
    assert len(kinds) >= 10
    for one in kinds.values():
        rewards, _ = asyncio.run(play(env, one, env.gold(one)))
        assert rewards == {"right_rows": 1.0, "called_tool": 1.0}


def test_no_gold_answer_is_empty_or_beyond_what_is_compared():
    store = sqlite3.connect(":memory:")
    store.deserialize(music_store.music_store())
    for question in questions():
        answer = store.execute(question.sql).fetchall()
        assert 0 < len(answer) < 100
        assert ("ORDER BY" in question.sql) == (question.ordered or "LIMIT 1" in question.sql)
    store.close()


def test_splits_are_disjoint_and_the_database_is_always_the_same():
    env = TextToSQL()
    asked = {s: {t.prompt[0].content for t in env.tasks(s)} for s in ("train", "test")}
    assert (len(asked["train"]), len(asked["test"])) == (537, 63)
    assert not asked["train"] & asked["test"]
    before = env.database.read_bytes()
    env.database.write_bytes(before[:100])  # a file that someone broke is written anew
    music_store.music_store.cache_clear()
    music_store.music_store_file.cache_clear()
    assert TextToSQL().database.read_bytes() == before
    assert [file.name for file in env.database.parent.iterdir()] == [env.database.name]


def test_rows_count_whatever_their_order_and_the_way_of_asking():
    assert score(LIST, f"```sql\n{LIST} ORDER BY name DESC;\n```") == 1.0
    assert score(LIST, LIST) == 1.0
    assert score(LIST, f"First ```sql\nSELECT 1\n``` but then ```SQL\n{LIST}\n```") == 1.0
    assert score(LIST, f"{LIST} LIMIT 1") == 0.0
    assert score(LIST, f"{LIST} UNION ALL {LIST}") == 0.0
    assert score(LIST, LIST.replace("name", "name, country", 1)) == 0.0


def test_order_counts_where_the_question_asks_for_one():
    gold = f"{LIST} ORDER BY name"
    assert score(gold, gold, ordered=True) == 1.0
    assert score(gold, f"{LIST} ORDER BY name DESC", ordered=True) == 0.0
    assert score(gold, f"{LIST} ORDER BY name DESC") == 1.0


def test_equal_rows_are_equal_as_often_as_they_come():
    assert same_rows(rows((1, "a"), (2, "b")), rows((2, "b"), (1, "a")), ordered=False)
    assert not same_rows(rows((1,), (1,), (2,)), rows((1,), (2,), (2,)), ordered=False)
    assert not same_rows(rows((1, "a")), rows(("a", 1)), ordered=False)
    assert same_rows(rows((0.1 + 0.2,), (3.0,)), rows((3,), (0.3,)), ordered=False)
    assert not same_rows(rows(("1",)), rows((1,)), ordered=False)
    assert not same_rows(rows((None,)), rows((0,)), ordered=False)


@pytest.mark.parametrize(
    "said",
    [
        "",
        " \n",
        "```sql\n```",
        "I do not know.",
        "DELETE FROM artists",
        "SELECT name FROM nowhere",
        "SELECT 1; SELECT 2",
        "SELECT \udcff",
        "ATTACH 'x.sqlite' AS x",
        "SELECT zeroblob(1000000000)",
    ],
)
def test_text_that_is_no_good_query_is_worth_nothing(said: str):
    """F051, F053: and it breaks nothing."""
    assert score(LIST, said) == 0.0


def test_a_query_without_end_is_worth_nothing(monkeypatch: pytest.MonkeyPatch):
    """F050."""
    from envs import text_to_sql

    run_query = text_to_sql.run_query
    monkeypatch.setattr(
        text_to_sql,
        "run_query",
        lambda *args, **options: run_query(*args, timeout_s=0.3, **options),
    )
    endless = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
    )
    assert score(LIST, endless) == 0.0


def test_a_database_that_is_gone_is_a_fault_and_no_zero():
    """F052."""
    env = TextToSQL()

    async def main() -> None:
        env.database = Path("gone.sqlite")
        await play(env, task(LIST), [Action(LIST)])

    with pytest.raises(RewardError, match="there is no database"):
        asyncio.run(main())


def test_the_tools_show_the_schema_and_rows():
    env = TextToSQL()
    _, calling_turn, result, _ = TextToSQL.demonstrations[0]
    arguments = calling_turn.tool_calls[0].arguments
    tape = asyncio.run(play(env, task(LIST), [calling("query", **arguments)]))[1]
    assert last_result(tape) == result.content
    tape = asyncio.run(play(env, task(LIST), [calling("schema")]))[1]
    assert last_result(tape).count("CREATE TABLE") == 6


def test_an_own_database_and_its_questions_are_read(tmp_path: Path):
    database = tmp_path / "own.sqlite"
    with sqlite3.connect(database) as store:
        store.execute("CREATE TABLE t AS SELECT 1 AS a UNION SELECT 2")
    store.close()
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "All of t?", "sql": "SELECT a FROM t"}\n')
    env = TextToSQL(database=str(database), path=str(path))
    (own,) = env.tasks("train")
    assert asyncio.run(play(env, own, [Action("SELECT 3 - a FROM t")]))[0]["right_rows"] == 1.0
    assert len(asyncio.run(env.reset(seed=0))[0]) == 2  # no demonstration of another database
    path.write_text('{"question": "All of t?", "sql": "SELECT a FROM t", "ordered": "yes"}\n')
    with pytest.raises(ValueError, match=r"other\.jsonl:1: a row must be"):
        other = path.rename(tmp_path / "other.jsonl")
        TextToSQL(database=str(database), path=str(other)).tasks("test")
    with pytest.raises(FileNotFoundError, match=r"there is no database .*none\.sqlite"):
        TextToSQL(database=str(tmp_path / "none.sqlite"), path=str(path))


def test_the_last_block_is_the_query():
    assert sql_of("```\nA\n``` then ```sqlite\nB\n```") == "B\n"
    assert sql_of("```sql\nSELECT 1") == "SELECT 1"
    assert sql_of("SELECT 2") == "SELECT 2"
