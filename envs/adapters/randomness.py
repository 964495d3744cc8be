"""A random generator of its own for code of libraries that draws from the global one."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_generator: ContextVar[random.Random | None] = ContextVar("generator", default=None)


class _Random:
    """Stands for the module `random`: its functions are those of the running game's generator."""

    def __getattr__(self, name: str) -> Any:
        generator = _generator.get()
        ours = generator is not None and hasattr(random.Random, name)
        return getattr(generator if ours else random, name)


_random = _Random()


def tame(package: str) -> None:
    """Have the modules of `package` that are loaded by now draw from `drawing_from` generators."""
    for name, module in list(sys.modules.items()):
        inside = name == package or name.startswith(f"{package}.")
        if inside and vars(module).get("random") is random:
            vars(module)["random"] = _random


@contextmanager
def drawing_from(generator: random.Random) -> Iterator[None]:
    """What tamed code draws inside, in this thread or task, it draws from `generator`."""
    token = _generator.set(generator)
    try:
        yield
    finally:
        _generator.reset(token)


@contextmanager
def global_state_kept() -> Iterator[None]:
    """For what is loaded once: modules that draw while they are imported."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
