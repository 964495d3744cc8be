"""What envs share on an event loop, such as a pool of sandboxes, and its end with that loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from weakref import WeakKeyDictionary

Close = Callable[[], Awaitable[None]]

_closers: WeakKeyDictionary[asyncio.AbstractEventLoop, list[Close]] = WeakKeyDictionary()


def at_shutdown(close: Close) -> None:
    """Have `close()` awaited when the owner of the running event loop shuts it down."""
    _closers.setdefault(asyncio.get_running_loop(), []).append(close)


async def shut_down() -> None:
    """For the owner of the running event loop: await what was registered, the last first.

    Raises:
        ExceptionGroup: some of it failed; all of it was tried.
    """
    errors = []
    for close in reversed(_closers.pop(asyncio.get_running_loop(), [])):
        try:
            await close()
        except Exception as error:
            errors.append(error)
    if errors:
        raise ExceptionGroup("shutting down what envs share failed", errors)
