"""Rows of data sets: JSON lines read with their places, and made ones told apart by split."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from agentrl.types import Task

SPLITS = ("train", "test")
TEST_SHARE = 0.1  # of all problems that can be made


def require_split(split: str) -> None:
    """Raises ValueError unless `split` is "train" or "test"."""
    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r}; there are {', '.join(SPLITS)}")


def in_split(key: str, split: str) -> bool:
    """Whether a made problem belongs to `split`: by a hash of what is asked, for ever the same."""
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return (int.from_bytes(digest, "big") < TEST_SHARE * 2**32) == (split == "test")


def rows_of_split(path: Path, split: str) -> Iterator[tuple[str, Any]]:
    """The rows of `path`/`split`.jsonl, or of the one file `path`, each with its file:line.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line that is no JSON.
    """
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


def tasks_of_rows(
    rows: Iterable[tuple[str, Any]], name: str, to_task: Callable[..., Task]
) -> tuple[Task, ...]:
    """Each row as `to_task(row, id=…, where=…)` reads it; ids are `name`-0, `name`-1, …"""
    return tuple(
        to_task(row, id=f"{name}-{index}", where=where) for index, (where, row) in enumerate(rows)
    )
