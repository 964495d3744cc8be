"""What tests that start processes ask of them."""

from __future__ import annotations

from collections.abc import Sequence

import psutil


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Of a process, or of the one that runs the tests."""
    return psutil.Process(pid).children(recursive=True)


def assert_gone(processes: Sequence[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
