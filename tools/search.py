"""The search tool: BM25 over a local corpus, and the documents that it finds, page by page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from agentrl.env import EnvNotFound
from agentrl.tool import Tool, ToolOutcome, ToolResult

PAGE_CHARS = 3000
SNIPPET_CHARS = 240
MAX_RESULTS = 20
_TOKEN = r"(?u)\b\w+\b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """
    Example:
        Document(id="7", title="Ada Lovelace", text="Ada Lovelace was a mathematician.")
    """

    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    document: Document
    score: float
    snippet: str  # of the text, from shortly before a word of the query on


class Corpus:
    """Documents under a BM25 index in memory, the same for all who search; safe in any thread.

    Example:
        corpus = Corpus.load("wiki.jsonl")
        corpus.search("who wrote the first program")[0].document.title
    """

    def __init__(self, documents: Iterable[Document]) -> None:
        """
        Raises:
            ValueError: two documents have one id, or there is nothing to search for.
            EnvNotFound: bm25s is not installed.
        """
        bm25s = _bm25s()
        self.documents: dict[str, Document] = {}
        for document in documents:
            if document.id in self.documents:
                raise ValueError(f"two documents have the id {document.id!r}")
            self.documents[document.id] = document
        self._ordered = list(self.documents.values())
        texts = [f"{document.title}\n{document.text}" for document in self._ordered]
        tokens = bm25s.tokenize(texts, token_pattern=_TOKEN, show_progress=False)
        if not tokens.vocab:
            raise ValueError("the corpus has no words to search for")
        self._index = bm25s.BM25()
        self._index.index(tokens, show_progress=False)

    @classmethod
    def build(cls, rows: Iterable[Mapping[str, Any]]) -> Self:
        """From rows with `id`, `title` (may be missing) and `text`.

        Raises:
            ValueError: a row without them, by number, or as `Corpus` does.
        """
        return cls(_document(row, f"row {number}") for number, row in enumerate(rows, start=1))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """From a file with a row of JSON in each line; read and indexed once in a process.

        Raises:
            ValueError: a line that is no row, by file and line, or as `Corpus` does.
            OSError: the file cannot be read.
        """
        return _load(cls, Path(path).resolve())

    def search(self, query: str, num_results: int = 5) -> list[Hit]:
        """The documents that have a word of the query, best first; equal ones as in the corpus.

        Words such as "the" do not count.
        """
        import numpy

        words = _bm25s().tokenize(
            query, token_pattern=_TOKEN, return_ids=False, show_progress=False
        )[0]
        known = [word for word in words if word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)
        found = numpy.flatnonzero(scores > 0)
        order = found[numpy.argsort(-scores[found], kind="stable")][:num_results]
        return [
            Hit(
                document=self._ordered[index],
                score=float(scores[index]),
                snippet=_snippet(self._ordered[index].text, known),
            )
            for index in order
        ]

    def tools(self) -> list[Tool]:
        """The tools `search(query, num_results)` and `open_document(id, page)`."""
        return [Tool(self._search_tool()), Tool(self._open_tool(), inline=True)]

    def _search_tool(self) -> Any:
        def search(query: str, num_results: int = 5) -> str:
            """Search the documents for words.

            Args:
                query: The words to look for.
                num_results: How many documents to list, 1 to 20.
            """
            hits = self.search(query, min(max(num_results, 1), MAX_RESULTS))
            if not hits:
                return f"No document has any of the words of {query[:200]!r}. Try other words."
            return "\n\n".join(
                f"[{hit.document.id}] {hit.document.title}\n{hit.snippet}" for hit in hits
            )

        return search

    def _open_tool(self) -> Any:
        def open_document(id: str, page: int = 1) -> str | ToolResult:
            """Read a document that a search has found.

            Args:
                id: As the search shows it in brackets.
                page: From 1 on.
            """
            document = self.documents.get(id.strip().removeprefix("[").removesuffix("]"))
            if document is None:
                return _error(f"there is no document {id[:200]!r}; a search shows their ids")
            num_pages = max(1, -(-len(document.text) // PAGE_CHARS))
            if not 1 <= page <= num_pages:
                return _error(f"document {document.id} has pages 1 to {num_pages}, not {page}")
            text = document.text[(page - 1) * PAGE_CHARS : page * PAGE_CHARS]
            return f"{document.title} (page {page} of {num_pages})\n{text}"

        return open_document


@cache
def _load(cls: type[Corpus], path: Path) -> Any:
    with path.open(encoding="utf-8") as lines:
        return cls(
            _document(_parse(line, f"{path}:{number}"), f"{path}:{number}")
            for number, line in enumerate(lines, start=1)
            if line.strip()
        )


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: no JSON: {error}") from error


def _document(row: Any, where: str) -> Document:
    if not isinstance(row, Mapping) or "id" not in row or not isinstance(row.get("text"), str):
        raise ValueError(f'{where}: a document must be {{"id": …, "title": text, "text": text}}')
    return Document(id=str(row["id"]), title=str(row.get("title") or ""), text=row["text"])


def _snippet(text: str, words: list[str]) -> str:
    """From the first of the words that is in the text, with a little of what is before it."""
    found = (re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in words)
    start = next((match.start() for match in found if match), 0)
    start = max(0, start - SNIPPET_CHARS // 4)
    shown = " ".join(text[start : start + SNIPPET_CHARS].split())
    return f"{'…' if start else ''}{shown}{'…' if start + SNIPPET_CHARS < len(text) else ''}"


def _error(text: str) -> ToolResult:
    return ToolResult(content=f"Error: {text}", outcome=ToolOutcome.ERROR)


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise EnvNotFound("search needs bm25s: pip install bm25s") from error
    return bm25s
