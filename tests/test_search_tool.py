"""The search tool: BM25 over local documents, the same each time."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentrl.tool import ToolOutcome, ToolResult
from tools.search import PAGE_CHARS, Corpus

pytest.importorskip("bm25s")

ROWS = [
    {"id": 1, "title": "Ada Lovelace", "text": "Ada wrote the first program. " * 3},
    {"id": 2, "title": "Charles Babbage", "text": "He built an engine. Ada knew him."},
    {
        "id": 3,
        "title": "Tea",
        "text": "The leaves of a plant in hot water. C" + "." * 2 * PAGE_CHARS,
    },
]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.build(ROWS)


def call(corpus: Corpus, name: str, **arguments: Any) -> ToolResult:
    tool = {tool.name: tool for tool in corpus.tools()}[name]
    return asyncio.run(tool(arguments))


def test_the_best_documents_come_first_with_id_title_and_snippet(corpus: Corpus):
    hits = corpus.search("Ada's first program")
    assert [hit.document.id for hit in hits] == ["1", "2"]
    assert hits[0].score > hits[1].score
    result = call(corpus, "search", query="hot WATER", num_results=1)
    assert result.content.startswith("[3] Tea\nThe leaves of a plant in hot water.")


def test_equal_documents_come_in_the_order_of_the_corpus_in_every_thread():
    same = Corpus.build({"id": n, "text": "one two"} for n in range(50))
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda _: [hit.document.id for hit in same.search("two", 5)], range(20))
    assert set(map(tuple, found)) == {("0", "1", "2", "3", "4")}


@pytest.mark.parametrize("query", ["", "the of and", "zebra", "?!", "\ud800"])
def test_a_query_without_a_known_word_is_answered_in_words(corpus: Corpus, query: str):
    result = call(corpus, "search", query=query)
    assert result.outcome == ToolOutcome.OK
    assert result.content.startswith("No document has any of the words")


def test_words_of_one_letter_count(corpus: Corpus):
    assert [hit.document.id for hit in corpus.search("C")] == ["3"]


def test_a_document_is_read_page_by_page(corpus: Corpus):
    first = call(corpus, "open_document", id="3").content
    assert first.startswith("Tea (page 1 of 3)\nThe leaves")
    pages = [call(corpus, "open_document", id=" [3]", page=n).content for n in (1, 2, 3)]
    assert "".join(page.partition("\n")[2] for page in pages) == ROWS[2]["text"]
    for wrong in ({"id": "9"}, {"id": "3", "page": 4}, {"id": "3", "page": 0}):
        assert call(corpus, "open_document", **wrong).outcome == ToolOutcome.ERROR


def test_a_file_is_read_once_and_a_bad_line_is_named(tmp_path: Path):
    file = tmp_path / "docs.jsonl"
    file.write_text('{"id": "a", "title": "T", "text": "some words"}\n\n')
    assert Corpus.load(file) is Corpus.load(str(file))
    bad = tmp_path / "bad.jsonl"
    for line, said in [('{"id": 1}', "must be"), ("{", "no JSON"), ("[]", "must be")]:
        bad.write_text('{"id": 0, "text": "a"}\n' + line)
        with pytest.raises(ValueError, match=rf"bad\.jsonl:2: .*{said}"):
            Corpus.load(bad)


def test_ids_are_unique_and_there_is_something_to_find():
    with pytest.raises(ValueError, match="two documents have the id '1'"):
        Corpus.build([{"id": 1, "text": "a"}, {"id": "1", "text": "b"}])
    for empty in ([], [{"id": 1, "text": "the"}]):
        with pytest.raises(ValueError, match="the corpus has no words"):
            Corpus.build(empty)
