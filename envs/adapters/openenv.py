"""Envs behind an OpenEnv server: text in, text out, one session of the server an episode."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import urlopen

from agentrl.env import EnvNotFound, TextEnv
from agentrl.threads import run_in_thread
from agentrl.tool import Unavailable
from envs.adapters import library

TIMEOUT_S = 10.0
"""To connect, and for the schemas."""


class OpenEnv(TextEnv):
    """A reply is the one text that the server's action takes, else the action as a JSON object.

    What the server refuses of an action is told; a server that is away makes the episode a fault.
    """

    def __init__(self, url: str, *, action_field: str = "", observation_field: str = "") -> None:
        """
        Args:
            url: Of the server.
            action_field: Takes the reply; "": the only one that an action must have.
            observation_field: Is shown; "": all, or the text alone where there is no more.
        """
        self.url = url
        self.action_field, self.observation_field = action_field, observation_field
        self._connect = library("openenv", "openenv.core.generic_client").GenericEnvClient
        self._client: Any = None
        self._takes: dict[str, str] = {action_field: "text"} if action_field else {}
        self._rejected = 0

    def preflight(self) -> list[str]:
        try:
            self._read_schema()
        except (OSError, ValueError, KeyError) as error:
            raise EnvNotFound(
                f"no OpenEnv server answers at {self.url}/schema: {error}; start it first"
            ) from error
        return [f"OpenEnv server {self.url}: {self._how()}"]

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        await self.close()
        try:
            if not self._takes:
                await run_in_thread(self._read_schema)
            self._client = self._connect(self.url, connect_timeout_s=TIMEOUT_S)
            result = await self._client.reset(**({} if seed is None else {"seed": seed}))
        except Exception as error:
            raise Unavailable(f"OpenEnv server {self.url}: {error}") from error
        self._rejected = 0
        return self._show(result.observation), self._info()

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._client is None:
            raise RuntimeError("the episode is over; call reset before step")
        act = self._read_action(getattr(action, "content", action))
        if act is None:
            return self._reject()
        try:
            result = await self._client.step(act)
        except Exception as error:
            if "VALIDATION_ERROR" in str(error):  # the client has no type for what a server says
                return self._reject()
            raise Unavailable(f"OpenEnv server {self.url}: {error!r}") from error
        if result.done:
            await self.close()
        reward = float(result.reward or 0.0)
        return self._show(result.observation), reward, result.done, False, self._info()

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _reject(self) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._rejected += 1
        return f"Error: this is no action; {self._how()}.", 0.0, False, False, self._info()

    def _info(self) -> dict[str, Any]:
        return {"metrics": {"openenv/rejected_actions": self._rejected}}

    def _how(self) -> str:
        takes = ", ".join(f"{name} ({kind})" for name, kind in self._takes.items())
        return f"a reply is {takes}" if len(self._takes) == 1 else f"a reply is JSON with {takes}"

    def _read_action(self, said: str) -> dict[str, Any] | None:
        if len(self._takes) == 1:
            return {next(iter(self._takes)): said}
        try:
            action = json.loads(said)
        except ValueError:
            return None
        return action if isinstance(action, dict) else None

    def _show(self, observation: Any) -> str:
        if self.observation_field:
            return str(observation[self.observation_field])
        values = list(observation.values())
        if len(values) == 1 and isinstance(values[0], str):
            return values[0]
        return json.dumps(observation, ensure_ascii=False)

    def _read_schema(self) -> None:
        """Learn the fields that an action must have."""
        with urlopen(f"{self.url}/schema", timeout=TIMEOUT_S) as response:
            schema = json.load(response)["action"]
        if not self._takes:
            properties = schema["properties"]
            self._takes = {
                name: properties[name].get("type", "any") for name in schema.get("required", [])
            }
