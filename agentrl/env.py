"""The env contract: a `gymnasium.Env` over text, sync or async, made from one string."""

from __future__ import annotations

import asyncio
import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium import spaces

from agentrl.rubric import Rubric
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


def make_env(name: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """An env from its gymnasium id, from `package.module:Class`, or from `path/to/file.py:Class`.

    Raises:
        EnvNotFound: no such env; the message says which names are close.
    """
    module_name, _, class_name = name.rpartition(":")
    if module_name.endswith(".py"):
        return _attribute(_load_file(Path(module_name)), class_name, name)(**kwargs)
    if module_name and "/" not in name:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise EnvNotFound(f"env {name!r}: there is no module {error.name!r}") from error
        return _attribute(module, class_name, name)(**kwargs)
    if name.startswith("agentrl/"):
        importlib.import_module("envs")  # registers them
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


def _not_registered(name: str) -> str:
    ids = list(gymnasium.registry)
    close = difflib.get_close_matches(name, ids, n=3, cutoff=0.5)
    ours = sorted(id for id in ids if id.startswith("agentrl/"))
    return (
        f"env {name!r} is not registered with gymnasium. "
        + (f"Did you mean {' or '.join(close)}? " if close else "")
        + (f"Those of this project: {', '.join(ours)}. " if ours else "")
        + "An env of your own is named by package.module:Class or by path/to/file.py:Class."
    )


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


def _attribute(module: Any, class_name: str, name: str) -> Any:
    if not hasattr(module, class_name):
        raise EnvNotFound(f"env {name!r}: {module.__file__} has no {class_name!r}")
    return getattr(module, class_name)


class Blocking(gymnasium.Wrapper[Any, Any, Any, Any], gymnasium.utils.RecordConstructorArgs):
    """An async env seen through plain `reset` and `step`: for gymnasium's tools and notebooks."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        # Recorded, so that `check_env` can make it again.
        gymnasium.utils.RecordConstructorArgs.__init__(self)
        gymnasium.Wrapper.__init__(self, env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return _wait(self.env.reset(seed=seed, options=options))

    def step(self, action: Any) -> Any:
        return _wait(self.env.step(action))

    def close(self) -> None:
        _wait(self.env.close())


def _wait(result: Any) -> Any:
    if not inspect.isawaitable(result):
        return result

    async def finish() -> Any:
        return await result

    return asyncio.run(finish())
