"""An OpenEnv server: guess a number from 1 to 9, told higher or lower.

python configs/mix/higher_server.py 8123
"""

from __future__ import annotations

import random
import re
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    text: str


class Hint(Observation):
    text: str = ""


class Higher(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._secret = State(), 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Hint:
        self._state = State(episode_id=episode_id, step_count=0)
        self._secret = random.Random(seed).randint(1, 9)
        return Hint(text="Guess my number from 1 to 9. Reply with a number.")

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Hint:
        self._state.step_count += 1
        numbers = re.findall(r"\d+", action.text)
        guess = int(numbers[-1][:9]) if numbers else 0
        if guess == self._secret:
            return Hint(text="Right.", reward=1.0, done=True)
        way = "higher" if guess < self._secret else "lower"
        return Hint(text=f"My number is {way}.", reward=0.0, done=self._state.step_count >= 4)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Higher, Guess, Hint, max_concurrent_envs=64)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
