"""A real OpenEnv server for tests: guess a digit; run as a script with a port.

Not imported by tests: its classes need `openenv`, and a process that can be killed.
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    digit: int


class Said(Observation):
    text: str


class GuessDigit(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.secret = 0

    def reset(self, seed: int | None = None, **more: Any) -> Said:
        self.secret = (seed or 0) % 10
        return Said(text=f"Guess my digit. It is not {(self.secret + 5) % 10}.")

    def step(self, action: Guess, **more: Any) -> Said:
        if action.digit > 9:
            raise RuntimeError("the server stumbles")
        right = action.digit == self.secret
        return Said(text="right" if right else "wrong", reward=float(right), done=right)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(GuessDigit, Guess, Said, max_concurrent_envs=200)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
