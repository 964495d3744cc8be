"""The env contract: a `gymnasium.Env` over text, sync or async, made from one string."""

from __future__ import annotations

import asyncio
import atexit
import difflib
import importlib
import importlib.util
import inspect
import sys
import threading
import traceback
from collections.abc import Sequence
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import gymnasium
import yaml
from gymnasium import spaces

from agentrl.rubric import Rubric
from agentrl.shutdown import shut_down
from agentrl.threads import run_in_thread
from agentrl.tool import Tool
from agentrl.types import Message, Task

Observation = str | Message | Sequence[Message]
"""What an env says: a string is a user message."""


class EnvNotFound(ValueError):
    """No env to be had: a name that leads to none, or code that fails, with what to do."""


class AnyText(spaces.Space[str]):
    """Any string (gymnasium's own `Text` refuses ordinary sentences)."""

    def __init__(self) -> None:
        super().__init__(dtype=str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return f"text {self.np_random.integers(10**6)}"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def __repr__(self) -> str:
        return "AnyText()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyText)

    __hash__ = None  # type: ignore[assignment]


class Conversation(spaces.Space[Any]):
    """A string, a message, or a sequence of messages."""

    def __init__(self) -> None:
        super().__init__()

    def sample(self, mask: Any = None, probability: Any = None) -> Message:
        return Message(role="user", content=f"text {self.np_random.integers(10**6)}")

    def contains(self, x: Any) -> bool:
        if isinstance(x, str | Message):
            return True
        return isinstance(x, Sequence) and all(isinstance(message, Message) for message in x)

    def __repr__(self) -> str:
        return "Conversation()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Conversation)

    __hash__ = None  # type: ignore[assignment]


class TextEnv(gymnasium.Env[Any, str]):
    """A base for envs over text; `reset` and `step` may be async.

    Example:
        class Guess(TextEnv):
            def reset(self, *, seed=None, options=None):
                super().reset(seed=seed)
                self.secret = str(self.np_random.integers(10))
                return "Guess my digit.", {}

            def step(self, action):
                return "", float(self.secret in action), True, False, {}
    """

    observation_space: spaces.Space[Any] = Conversation()
    action_space: spaces.Space[str] = AnyText()
    tools: Sequence[Tool] = ()
    rubric: Rubric | None = None

    def tasks(self, split: str) -> Sequence[Task] | None:
        """The rows of `split` ("train" or "test"); None: every seed is a task of its own."""
        return None

    def preflight(self) -> list[str]:
        """Look before a run whether all that an episode needs is there; lines to print about it.

        Raises:
            EnvNotFound: it is not; says what to do.
        """
        return []

    async def acquire(self) -> None:
        """Wait for what an episode must have to itself, such as a sandbox.

        Called before `reset`, outside of the limits on time and number of env calls. `close` gives
        it back.
        """


def to_messages(observation: Observation) -> list[Message]:
    """An observation as messages; an empty string is no message."""
    if isinstance(observation, Message):
        return [observation]
    if isinstance(observation, str):
        return [Message(role="user", content=observation)] if observation else []
    return list(observation)


async def call_env(env: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of `env`: on the loop where it is async, else in a thread.

    The env itself is asked which it is, because wrappers are plain functions either way.
    """
    function = getattr(env, method)
    if not inspect.iscoroutinefunction(getattr(env.unwrapped, method)):
        return await run_in_thread(partial(function, *args, **kwargs))
    return await function(*args, **kwargs)


_schemes: dict[str, str] = {}


def register_scheme(scheme: str, target: str) -> None:
    """Have `make_env("scheme:rest")` call `target`, a "module:Class", with `rest` and the kwargs.

    `target` is imported when it is first asked for.
    """
    _schemes[scheme] = target


def schemes() -> dict[str, str]:
    """The registered schemes and their targets."""
    if importlib.util.find_spec("envs") is not None:
        importlib.import_module("envs")  # registers those of this project
    return dict(_schemes)


@cache
def third_party() -> dict[str, list[EntryPoint]]:
    """What installed packages offer in the entry-point group `agentrl.envs`, by name."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group="agentrl.envs"):
        found.setdefault(entry.name, []).append(entry)
    return found


def make_env(name: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """An env from one string.

    That is a gymnasium id, `package.module:Class`, `path/to/file.py:Class`, `scheme:rest` of a
    registered scheme, or `NAME` or `NAME:rest` of an installed package. `?key=value&key=value`
    after any of them adds to `kwargs`; values are YAML.

    Raises:
        EnvNotFound: no such env; the message says which names are close.
    """
    name, kwargs = _read_query(name, kwargs)
    head, _, rest = name.partition(":")
    if rest and head in schemes():
        return _attribute(_import(_schemes[head], name), name)(rest, **kwargs)
    module_name, _, class_name = name.rpartition(":")
    if module_name.endswith(".py"):
        return _attribute((_load_file(Path(module_name)), class_name), name)(**kwargs)
    if name.startswith("agentrl/"):
        importlib.import_module("envs")  # registers them
    if name not in gymnasium.registry and head in third_party():
        return _offered(head)(*([rest] if rest else []), **kwargs)
    if module_name and "/" not in name:
        return _attribute(_import(name, name), name)(**kwargs)
    try:
        spec = gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise EnvNotFound(_not_registered(name)) from error
    # The checker would take an async step's coroutine for a malformed result.
    return gymnasium.make(spec, disable_env_checker=True, **kwargs)


def open_env(name: str, kwargs: dict[str, Any]) -> Any:
    """The env without its wrappers, to ask for its tools and tasks before a run.

    Raises:
        EnvNotFound: no such env, its module fails, or it refuses `env.kwargs`.
    """
    try:
        return make_env(name, **kwargs).unwrapped
    except EnvNotFound:
        raise
    except Exception as error:
        raise EnvNotFound(
            f"env {name!r} cannot be made with env.kwargs={kwargs}: {_cause(error)}"
        ) from error


def tasks_of(env: Any, split: str) -> Sequence[Task] | None:
    """What `env.tasks(split)` gives; None for an env without tasks.

    Raises:
        EnvNotFound: it fails.
    """
    try:
        return getattr(env, "tasks", lambda split: None)(split)
    except Exception as error:
        raise EnvNotFound(
            f"env {type(env).__name__} has no tasks {split!r}: {_cause(error)}"
        ) from error


def _cause(error: Exception) -> str:
    """The error and the line that raised it."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):  # says it itself
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({frame.filename}, line {frame.lineno})"


def _read_query(name: str, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    bare, mark, query = name.partition("?")
    merged = dict(kwargs)
    for part in query.split("&") if mark else ():
        key, equals, value = part.partition("=")
        if not (key and equals):
            raise EnvNotFound(f"env {name!r}: after ? comes key=value&key=value, not {part!r}")
        if key in merged:
            raise EnvNotFound(f"env {name!r}: {key} is given twice")
        try:
            merged[key] = yaml.safe_load(unquote(value))
        except yaml.YAMLError as error:
            raise EnvNotFound(f"env {name!r}: the value of {key} is no YAML: {error}") from error
    return bare, merged


def _offered(name: str) -> Any:
    first, *others = third_party()[name]
    if others:
        owners = ", ".join(str(entry.dist and entry.dist.name) for entry in [first, *others])
        raise EnvNotFound(f"env {name!r} is offered by several packages: {owners}; keep one")
    return first.load()


def _not_registered(name: str) -> str:
    ids = [*gymnasium.registry, *third_party()]
    close = difflib.get_close_matches(name, ids, n=3, cutoff=0.5)
    ours = sorted(id for id in gymnasium.registry if id.startswith("agentrl/"))
    return (
        f"env {name!r} is not registered with gymnasium. "
        + (f"Did you mean {' or '.join(close)}? " if close else "")
        + (f"Those of this project: {', '.join(ours)}. " if ours else "")
        + "An env of your own is named by package.module:Class or by path/to/file.py:Class, one of "
        f"another library by a scheme: {', '.join(schemes())}."
    )


def _import(target: str, name: str) -> tuple[Any, str]:
    """The module and the attribute that `target`, a "module:attribute", names."""
    module_name, _, attribute = target.rpartition(":")
    try:
        return importlib.import_module(module_name), attribute
    except ModuleNotFoundError as error:
        known = [*schemes(), *third_party()]
        close = difflib.get_close_matches(name.partition(":")[0], known, n=1, cutoff=0.5)
        raise EnvNotFound(
            f"env {name!r}: there is no module {error.name!r}"
            + (f". Did you mean {close[0]}:…? " if close else ". ")
            + f"Schemes are {', '.join(known) or 'not registered'}."
        ) from error


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise EnvNotFound(f"there is no file {path} to take an env from")
    module_name = f"agentrl_env_{path.stem}_{abs(hash(path.resolve()))}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]  # half of a module is none
            raise
    return sys.modules[module_name]


def _attribute(found: tuple[Any, str], name: str) -> Any:
    module, class_name = found
    if not hasattr(module, class_name):
        raise EnvNotFound(f"env {name!r}: {module.__file__} has no {class_name!r}")
    return getattr(module, class_name)


class Blocking(gymnasium.Wrapper[Any, Any, Any, Any], gymnasium.utils.RecordConstructorArgs):
    """An async env seen through plain `reset` and `step`: for gymnasium's tools and notebooks."""

    def __init__(
        self, env: gymnasium.Env[Any, Any], *, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """
        Args:
            env: The env.
            loop: A running event loop of another thread; None: one that all of these share.
        """
        # Recorded, so that `check_env` can make it again.
        gymnasium.utils.RecordConstructorArgs.__init__(self)
        gymnasium.Wrapper.__init__(self, env)
        self._loop = loop

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._wait(self.env.reset(seed=seed, options=options))

    def step(self, action: Any) -> Any:
        return self._wait(self.env.step(action))

    def close(self) -> None:
        self._wait(self.env.close())

    def _wait(self, result: Any) -> Any:
        if not inspect.isawaitable(result):
            return result

        async def finish() -> Any:
            return await result

        loop = self._loop or _shared_loop()
        return asyncio.run_coroutine_threadsafe(finish(), loop).result()


@cache
def _shared_loop() -> asyncio.AbstractEventLoop:
    """A loop in a thread of its own: what envs share on it, such as sandboxes, lives on."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="agentrl-blocking").start()
    atexit.register(lambda: asyncio.run_coroutine_threadsafe(shut_down(), loop).result())
    return loop
