"""Blocking functions under a deadline, in daemon threads that can be left behind.

A pool would not do: a function that hangs would keep its worker for ever, and hold up the exit of
the interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

FOREIGN_ERRORS = (Exception, SystemExit, KeyboardInterrupt)
"""What code of envs, tools and rewards may raise; the last two would end the event loop itself."""

_lock = threading.Lock()
_abandoned: set[threading.Thread] = set()


class DeadlineExceeded(TimeoutError):
    """The deadline passed; a TimeoutError that the function itself raised is none of these."""


def inline(function: F) -> F:
    """Mark a function that is bounded to microseconds: it runs on the event loop."""
    function.inline = True  # type: ignore[attr-defined]
    return function


def num_abandoned_threads() -> int:
    """How many threads still run a function that nobody waits for any more."""
    with _lock:
        return len(_abandoned)


async def run_in_thread(
    function: Callable[..., Any], *args: Any, timeout_s: float | None = None
) -> Any:
    """Call `function(*args)` in a daemon thread of its own.

    At the deadline (None: the caller keeps it), or when the caller is cancelled, the thread is left
    behind and counted until it ends.

    Raises:
        DeadlineExceeded: a TimeoutError; `function` did not return within `timeout_s` seconds.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(value: Any, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((value, error))

    def work() -> None:
        value, failure = None, None
        try:
            value = context.run(function, *args)
        except BaseException as error:
            failure = error
        with _lock:
            finished.append(True)
            _abandoned.discard(thread)
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(deliver, value, failure)

    finished: list[bool] = []
    thread = threading.Thread(target=work, daemon=True, name=f"agentrl-{name_of(function)}")
    thread.start()
    try:
        async with asyncio.timeout(timeout_s):
            value, failure = await outcome
    except TimeoutError:
        raise DeadlineExceeded(_late(function, timeout_s)) from None
    finally:
        with _lock:
            if not finished:
                _abandoned.add(thread)
    if failure is not None:
        raise failure
    return value


async def call(function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
    """Call `function(*args)` where it belongs, under a deadline (None: the caller keeps it).

    A coroutine function and one marked `inline` run on the event loop, any other in a thread of
    its own.

    Raises:
        DeadlineExceeded: it did not return within `timeout_s` seconds.
    """
    if getattr(function, "inline", False):
        return function(*args)
    if not inspect.iscoroutinefunction(function):
        return await run_in_thread(function, *args, timeout_s=timeout_s)
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await function(*args)
    except TimeoutError:
        if deadline.expired():
            raise DeadlineExceeded(_late(function, timeout_s)) from None
        raise


def run_apart(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run `coroutine` on a loop of a thread of its own and wait: this one may be running a loop."""
    with ThreadPoolExecutor(1, thread_name_prefix="agentrl-apart") as apart:
        return apart.submit(asyncio.run, coroutine).result()


def name_of(function: Callable[..., Any]) -> str:
    """What a person calls the function."""
    if isinstance(function, partial):
        return name_of(function.func)
    return getattr(function, "__name__", type(function).__name__)


def _late(function: Callable[..., Any], timeout_s: float | None) -> str:
    return f"{name_of(function)} did not return within {timeout_s:g} s"
