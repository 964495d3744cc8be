"""Ctrl-C and SIGTERM, which end a run only where nothing is half done."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_waiting: list[int] = []


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold signals back until the block is done, or until an `interruptible` one within it."""
    before = _handle(_hold)
    try:
        yield
    finally:
        _restore(before)
        waiting, _waiting[:] = list(_waiting), []
    if waiting:
        raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """Within `uninterrupted`, a block that a signal may end, one that came before too."""
    if _waiting:
        _waiting.clear()
        raise KeyboardInterrupt
    before = _handle(signal.default_int_handler)
    try:
        yield
    finally:
        _restore(before)


def _handle(handler: Any) -> dict[signal.Signals, Any]:
    """The handlers before; a signal that is ignored stays so."""
    taken = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in taken}


def _hold(number: int, _: Any) -> None:
    _waiting.append(number)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
