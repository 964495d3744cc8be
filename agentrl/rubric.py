"""Rewards: functions that ask by parameter name for what they need."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.threads import FOREIGN_ERRORS, call, name_of
from agentrl.trajectory import Trajectory, TrajectoryGroup
from agentrl.types import Task

_EPISODE = ("completion", "answer", "info", "messages", "task", "trajectory", "env")
_GROUP = ("completions", "answers", "infos", "tasks", "trajectories", "envs")


class RewardError(RuntimeError):
    """A reward function that raised or returned no finite number, or two of one name."""


class Rubric:
    """Weighted reward functions; one of weight 0 is a metric.

    A function of an episode takes any of: `completion` (the text of the last assistant message, ""
    if there is none), `answer` and `info` (of the task), `messages`, `task`, `trajectory`, `env`.
    One with plural names (`completions`, `answers`, `infos`, `tasks`, `trajectories`, `envs`)
    takes lists over a group and returns a list of numbers. It may be async; a plain one runs in a
    thread, unless marked `agentrl.threads.inline`. Who asks for a score bounds its time. A metric
    of an episode may return a dictionary: then its keys name the values.

    Example:
        def correct(completion, answer):
            return completion.strip() == answer

        Rubric([correct, brevity], weights=[1.0, 0.1])

    Raises:
        ValueError: a parameter name that means nothing, two functions of one name, or weights that
            do not fit.
    """

    def __init__(
        self,
        funcs: Sequence[Callable[..., Any]],
        weights: Sequence[float] | None = None,
    ) -> None:
        weights = [1.0] * len(funcs) if weights is None else list(weights)
        if len(weights) != len(funcs):
            raise ValueError(f"{len(funcs)} reward functions came with {len(weights)} weights")
        if not all(map(math.isfinite, weights)):
            raise ValueError(f"reward weights must be finite: {weights}")
        self.weights: dict[str, float] = {}
        self._of_episode: list[tuple[str, Callable[..., Any], list[str]]] = []
        self._of_group: list[tuple[str, Callable[..., Any], list[str]]] = []
        for function, weight in zip(funcs, weights, strict=True):
            name = name_of(function)
            if name in self.weights:
                raise ValueError(f"two reward functions are named {name!r}")
            self.weights[name] = weight
            wanted = _wanted(function, name)
            plural = bool(wanted) and wanted[0] in _GROUP
            (self._of_group if plural else self._of_episode).append((name, function, wanted))

    @property
    def scores_groups(self) -> bool:
        """Whether a function waits for the whole group."""
        return bool(self._of_group)

    async def score(self, *, task: Task, trajectory: Trajectory, env: Any) -> dict[str, float]:
        """The rewards of one episode by function name, without those that score a group.

        Raises:
            RewardError: naming the function and the episode.
        """
        known = _knowledge(task, trajectory, env)
        rewards: dict[str, float] = {}
        for name, function, wanted in self._of_episode:
            value = await self._call(name, function, [known[key] for key in wanted], trajectory.id)
            if isinstance(value, Mapping) and self.weights[name] == 0:
                for key, metric in value.items():
                    rewards[key] = _number(metric, f"{name}[{key!r}]", trajectory.id)
            else:
                rewards[name] = _number(value, name, trajectory.id)
        return rewards

    async def score_group(
        self, group: TrajectoryGroup, envs: Sequence[Any]
    ) -> list[dict[str, float]]:
        """The rewards that compare the episodes of a group: [G] dictionaries by function name.

        Raises:
            RewardError: naming the function and the group, or the episode.
        """
        rewards: list[dict[str, float]] = [{} for _ in group.trajectories]
        if not self._of_group:
            return rewards
        episodes = [
            _knowledge(group.task, trajectory, env)
            for trajectory, env in zip(group.trajectories, envs, strict=True)
        ]
        known = {
            plural: [episode[key] for episode in episodes]
            for plural, key in zip(
                _GROUP, ("completion", "answer", "info", "task", "trajectory", "env"), strict=True
            )
        }
        for name, function, wanted in self._of_group:
            values = await self._call(name, function, [known[key] for key in wanted], group.id)
            if not hasattr(values, "__len__") or len(values) != len(episodes):
                raise RewardError(
                    f"reward {name} must return a list of {len(episodes)} numbers "
                    f"for group {group.id!r}, not {values!r:.100}"
                )
            for scores, value, trajectory in zip(rewards, values, group.trajectories, strict=True):
                scores[name] = _number(value, name, trajectory.id)
        return rewards

    def total(self, rewards: dict[str, float]) -> float:
        """The weighted sum; what has weight 0 or no weight is a metric."""
        return sum(weight * rewards[name] for name, weight in self.weights.items() if weight != 0)

    async def _call(
        self, name: str, function: Callable[..., Any], args: list[Any], episode: str
    ) -> Any:
        try:
            return await call(function, *args)
        except FOREIGN_ERRORS as error:
            raise RewardError(
                f"reward {name} failed on {episode!r}: {type(error).__name__}: {error}"
            ) from error


def load_rewards(names: Sequence[str], weights: Sequence[float] | None = None) -> Rubric | None:
    """A rubric of functions named `package.module:function`; None if there are none.

    Raises:
        ValueError: a name that leads to no function, or as `Rubric` does.
    """
    return Rubric([_load(name) for name in names], weights) if names else None


def _load(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"reward {name!r} must be named package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"reward {name!r}: there is no module {error.name!r}") from error
    except Exception as error:
        raise ValueError(
            f"reward {name!r}: its module failed with {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"reward {name!r}: {module.__name__} has no function {function_name!r}")
    return function


def _wanted(function: Callable[..., Any], name: str) -> list[str]:
    wanted = []
    for key, parameter in inspect.signature(function).parameters.items():
        if key in _EPISODE or key in _GROUP:
            if parameter.kind is parameter.KEYWORD_ONLY:
                raise ValueError(f"reward {name}: parameter {key!r} must not be keyword-only")
            wanted.append(key)
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            raise ValueError(
                f"reward {name}: no such parameter as {key!r}. "
                f"For an episode: {', '.join(_EPISODE)}; for a group: {', '.join(_GROUP)}"
            )
    if any(key in _EPISODE for key in wanted) and any(key in _GROUP for key in wanted):
        raise ValueError(f"reward {name} asks for an episode and for a group: {', '.join(wanted)}")
    return wanted


def _knowledge(task: Task, trajectory: Trajectory, env: Any) -> dict[str, Any]:
    texts = (m.content for m in reversed(trajectory.messages) if m.role == "assistant")
    return {
        "completion": next(texts, ""),
        "answer": task.answer,
        "info": task.info,
        "messages": trajectory.messages,
        "task": task,
        "trajectory": trajectory,
        "env": env,
    }


def _number(value: Any, name: str, episode: str) -> float:
    try:
        if value is None or isinstance(value, str):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise RewardError(
            f"reward {name} returned {value!r:.100} for {episode!r}, not a number"
        ) from None
    if not math.isfinite(number):
        raise RewardError(f"reward {name} returned {number} for {episode!r}")
    return number
