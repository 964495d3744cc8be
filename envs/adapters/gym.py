"""Any gymnasium env as text: what it shows is written out, and an action is read in the reply."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator

from agentrl.env import TextEnv

MAX_CHARS = 1000
"""Of a reply, its last ones, in which an action is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """How a game is told."""

    actions: tuple[str, ...]  # the names of 0, 1, …
    rules: str
    show: Callable[[Any, str], str] = lambda observation, picture: picture


WORDS = {
    "FrozenLake": Words(
        actions=("left", "down", "right", "up"),
        rules="Cross the frozen lake to the goal G without stepping into a hole H. "
        "You stand at P, S is the start, F is ice.",
        show=lambda _, picture: re.sub(r"\[\w\]", "P", re.sub(r"^.*\n", "", picture)),
    ),
    "Blackjack": Words(
        actions=("stick", "hit"),
        rules="Play Blackjack: come closer to 21 than the dealer, and not above it.",
        show=lambda hand, _: (
            f"Your cards sum to {hand[0]}{', with a usable ace' if hand[2] else ''}. "
            f"The dealer shows {'an ace' if hand[1] == 1 else f'a {hand[1]}'}."
        ),
    ),
    "CliffWalking": Words(
        actions=("up", "right", "down", "left"),
        rules="Walk to T and never step on the cliff C. You stand at x.",
    ),
}


class GymText(TextEnv):
    """Rewards, ends and seeds are the inner env's; a reply without an action is answered in words.

    What is shown is the inner env's `ansi` picture where it draws one, else its observation.
    """

    def __init__(
        self,
        env_id: str,
        *,
        rules: str = "",
        max_unreadable: int = 3,
        unreadable_reward: float = 0.0,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            env_id: As `gymnasium.make` takes it.
            rules: What is said first; "" where this adapter has words for the env, or its name.
            max_unreadable: The episode is truncated with so many replies without an action.
            unreadable_reward: Of such a reply; below that of the worst action where that is < 0.
            kwargs: Of the inner env.
        """
        spec = gymnasium.spec(env_id)
        entry_point = spec.entry_point
        creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
        if "ansi" in (getattr(creator, "metadata", None) or {}).get("render_modes", ()):
            kwargs.setdefault("render_mode", "ansi")
        self.inner = gymnasium.make(spec, disable_env_checker=True, **kwargs)
        self.words = WORDS.get(spec.name)
        self.rules = rules or (self.words.rules if self.words else f"Play {spec.name}.")
        self.max_unreadable, self.unreadable_reward = max_unreadable, unreadable_reward
        self.num_unreadable = 0
        self._running = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        observation, _ = self.inner.reset(seed=seed)
        self.num_unreadable = 0
        self._running = True
        return f"{self.rules} {self._how()}\n\n{self._show(observation)}", self._info()

    def step(self, action: str) -> Any:
        if not self._running:
            raise RuntimeError("the episode is over; call reset before step")
        said = getattr(action, "content", action)
        act = read_action(self.inner.action_space, said, self.words.actions if self.words else ())
        if act is None:
            self.num_unreadable += 1
            self._running = self.num_unreadable < self.max_unreadable
            answer = f"There is no action in your reply. {self._how()}"
            return answer, self.unreadable_reward, False, not self._running, self._info()
        observation, reward, terminated, truncated, _ = self.inner.step(act)
        self._running = not (terminated or truncated)
        return self._show(observation), float(reward), terminated, truncated, self._info()

    def close(self) -> None:
        self.inner.close()

    def _info(self) -> dict[str, Any]:
        return {"metrics": {"gym/unreadable": self.num_unreadable}}

    def _show(self, observation: Any) -> str:
        picture = ""
        if self.inner.render_mode == "ansi":
            highlighted = re.sub(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", r"[\1]", str(self.inner.render()))
            picture = highlighted.rstrip()
        if self.words:
            return self.words.show(observation, picture)
        return picture or describe(self.inner.observation_space, observation)

    def _how(self) -> str:
        if self.words:
            return f"Reply with one of: {', '.join(self.words.actions)}."
        return f"Reply with {describe_actions(self.inner.action_space)}."


class FrozenLake(GymText):
    """FrozenLake as text; the ice does not slip, unless `is_slippery` says so."""

    def __init__(self, *, is_slippery: bool = False, **kwargs: Any) -> None:
        super().__init__("FrozenLake-v1", is_slippery=is_slippery, **kwargs)


class Blackjack(GymText):
    """Blackjack as text; the reward is 1, 0 or -1."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("Blackjack-v1", **kwargs)


def describe(space: spaces.Space[Any], value: Any) -> str:
    """An observation in words."""
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{key}: {describe(space[key], value[key])}" for key in space)
    if isinstance(space, spaces.Tuple):
        return ", ".join(describe(part, v) for part, v in zip(space, value, strict=True))
    if isinstance(value, np.ndarray):
        return np.array2string(value, precision=3, separator=", ", suppress_small=True)
    return str(value)


def describe_actions(space: spaces.Space[Any]) -> str:
    """What a reply must hold, in words."""
    match space:
        case spaces.Discrete():
            return f"a number from {space.start} to {space.start + space.n - 1}"
        case spaces.Text():
            return f"a text of {space.min_length} to {space.max_length} characters"
        case spaces.MultiDiscrete():
            first, last = space.start.tolist(), (space.start + space.nvec - 1).tolist()
            return f"a JSON list of whole numbers from {first} to {last}"
        case spaces.MultiBinary():
            return f"a JSON list of 0 or 1, of shape {list(space.shape)}"
        case spaces.Box():
            low, high = np.unique(space.low).tolist(), np.unique(space.high).tolist()
            return f"a JSON list of numbers, shape {list(space.shape)}, from {low} to {high}"
        case spaces.Dict():
            parts = "; ".join(f"{key}: {describe_actions(space[key])}" for key in space)
            return f"a JSON object of {parts}"
        case spaces.Tuple():
            return f"a JSON list of: {'; '.join(map(describe_actions, space))}"
    raise TypeError(f"there are no words for actions of {space}")


def read_action(space: spaces.Space[Any], text: str, names: tuple[str, ...] = ()) -> Any:
    """The last action in `text`: a name, a number or JSON; None where there is none."""
    text = text[-MAX_CHARS:]
    if isinstance(space, spaces.Text):
        action = text.strip()
    elif isinstance(space, spaces.Discrete):
        number = r"(?<![\w.])-?\d{1,18}(?!\w|\.\d)"
        named = [rf"(?<!\w){re.escape(name)}(?!\w)" for name in names]
        # Lowered first: re.I would find "stick" in words with other letters that fold to s.
        found = re.findall("|".join([*named, number]), text.lower())
        if not found:
            return None
        word = found[-1]
        action = np.int64(names.index(word) + space.start if word in names else int(word))
    else:
        action = _from_json(space, _last_json(text))
    return action if action is not None and space.contains(action) else None


def _last_json(text: str) -> Any:
    """The last list, object or number."""
    decoder, value, at = json.JSONDecoder(), None, 0
    while start := re.compile(r"[\[{]|-?\d").search(text, at):
        try:
            value, at = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            at = start.end()
    return value


def _from_json(space: spaces.Space[Any], value: Any) -> Any:
    try:
        if isinstance(space, spaces.Dict):
            return {key: _from_json(part, value[key]) for key, part in space.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(_from_json(part, v) for part, v in zip(space, value, strict=True))
        if isinstance(space, spaces.Discrete):
            return np.int64(value) if isinstance(value, int) else None
        if isinstance(space, spaces.Text):
            return value
        if not isinstance(space, spaces.Box) and np.asarray(value).dtype.kind == "f":
            return None
        return np.asarray(value, dtype=space.dtype).reshape(space.shape or ())
    except (TypeError, ValueError, KeyError, OverflowError):
        return None
