"""TextArena's games for one player; each has its own random generator, not the global one."""

from __future__ import annotations

import random
from typing import Any

from agentrl.env import EnvNotFound, TextEnv
from envs.adapters import library
from envs.adapters.randomness import drawing_from, tame


class TextArena(TextEnv):
    """What the game says to its player, turn by turn; the reward comes with the end.

    A move that makes the game itself fail ends it with reward 0: moves are all that it is given.
    """

    def __init__(self, game: str, **kwargs: Any) -> None:
        """
        Args:
            game: As TextArena names it, such as GuessTheNumber-v0.
            kwargs: Of the game.
        """
        arena = library("ta")
        if game not in arena.envs.registration.ENV_REGISTRY:
            raise EnvNotFound(f"textarena has no {game!r}; see textarena.pprint_registry_detailed")
        self.game = arena.make(game, **kwargs)
        while isinstance(self.game, arena.Wrapper):  # they repeat what was said before
            self.game = self.game.env
        tame("textarena")
        self._running = False

    def preflight(self) -> list[str]:
        try:
            self.reset(seed=0)
        except Exception as error:
            raise EnvNotFound(
                f"textarena's {self.game.env_id} cannot be played by one player here: "
                f"{type(error).__name__}: {error}"
            ) from error
        return []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        seed = int(self.np_random.integers(2**31))
        self._generator = random.Random(seed)
        with drawing_from(self._generator):
            self.game.reset(num_players=1, seed=seed)
        self._running = True
        return self._say(), {}

    def step(self, action: str) -> Any:
        if not self._running:
            raise RuntimeError("the episode is over; call reset before step")
        move = getattr(action, "content", action)
        try:
            with drawing_from(self._generator):
                done, _ = self.game.step(action=move)
        except Exception as error:
            self._running = False
            return f"The game ends: {error}", 0.0, True, False, {"metrics": {"ta/game_errors": 1}}
        self._running = not done
        rewards, about = self.game.close() if done else ({}, {})
        said = about[0].get("reason", "") if done else self._say()
        return (
            said,
            float((rewards or {}).get(0, 0)),
            done,
            False,
            {"metrics": {"ta/game_errors": 0}},
        )

    def _say(self) -> str:
        """What the game said since its player's last move."""
        _, messages = self.game.get_observation()
        own = library("ta").ObservationType.PLAYER_ACTION
        # Countdown puts its player's moves elsewhere: their text is a number.
        said = (text for _, text, kind in messages if kind is not own and isinstance(text, str))
        return "\n".join(said)
