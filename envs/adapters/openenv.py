"""Envs behind an OpenEnv server: text in, text out, one session of the server an episode.

Speaks the server's own protocol, JSON over a websocket: the client of openenv-core loads the
server's web interface with it, seconds and hundreds of MiB that no trainer needs.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from agentrl.env import EnvNotFound, TextEnv
from agentrl.tool import Unavailable

CONNECT_S = 10.0
"""For the server to answer first; a step has as long as the run gives it."""
AWAY = (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError)
"""What a server that is away, or is no OpenEnv server, makes of a request."""


class OpenEnv(TextEnv):
    """A reply is the one field that the server's action must have, else the action as JSON.

    What the server refuses of an action is told; a server that is away makes the episode a fault.
    """

    def __init__(self, url: str, *, action_field: str = "", observation_field: str = "") -> None:
        """
        Args:
            url: Of the server.
            action_field: Takes the reply; "": the only one that an action must have.
            observation_field: Is shown; "": all, or the text alone where there is no more.
        """
        self.url = url.rstrip("/")
        self.observation_field = observation_field
        self._takes: dict[str, str] = {action_field: "text"} if action_field else {}
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._rejected = 0

    def preflight(self) -> list[str]:
        try:
            asyncio.run(self._look())
        except AWAY as error:
            raise EnvNotFound(
                f"no OpenEnv server answers at {self.url}: {error!r}; start it first"
            ) from error
        return [f"OpenEnv server {self.url}: {self._how()}"]

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        await self.close()
        self._rejected = 0
        try:
            self._session = aiohttp.ClientSession()
            await self._read_schema(self._session)
            self._socket = await self._session.ws_connect(f"{self.url}/ws", max_msg_size=0)
            said = await self._ask("reset", {} if seed is None else {"seed": seed})
        except AWAY as error:
            raise Unavailable(f"OpenEnv server {self.url}: {error!r}") from error
        if said is None:
            raise Unavailable(f"OpenEnv server {self.url} refuses to reset")
        return self._show(said["observation"]), self._info()

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._socket is None:
            raise RuntimeError("the episode is over; call reset before step")
        act = self._read_action(getattr(action, "content", action))
        try:
            said = None if act is None else await self._ask("step", act)
        except AWAY as error:
            raise Unavailable(f"OpenEnv server {self.url}: {error!r}") from error
        if said is None:
            self._rejected += 1
            return f"Error: this is no action; {self._how()}.", 0.0, False, False, self._info()
        done = bool(said.get("done"))
        if done:
            await self.close()
        reward = float(said.get("reward") or 0.0)
        return self._show(said["observation"]), reward, done, False, self._info()

    async def close(self) -> None:
        session, self._session, self._socket = self._session, None, None
        if session is not None:
            await session.close()

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any] | None:
        """What the server answers; None where it refuses `data`."""
        assert self._socket is not None
        await self._socket.send_json({"type": kind, "data": data})
        answer = await self._socket.receive_json()
        said = answer["data"]
        if answer["type"] != "error":
            return said
        if said.get("code") == "VALIDATION_ERROR":
            return None
        raise Unavailable(f"OpenEnv server {self.url}: {said['code']}: {said['message']}")

    async def _look(self) -> None:
        async with aiohttp.ClientSession() as session:
            await self._read_schema(session)

    async def _read_schema(self, session: aiohttp.ClientSession) -> None:
        """Learn the fields that an action must have."""
        if self._takes:
            return
        timeout = aiohttp.ClientTimeout(total=CONNECT_S)
        async with session.get(f"{self.url}/schema", timeout=timeout) as response:
            response.raise_for_status()
            schema = (await response.json())["action"]
        properties = schema["properties"]
        self._takes = {
            name: properties[name].get("type", "any") for name in schema.get("required", [])
        }

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

    def _show(self, observation: dict[str, Any]) -> str:
        if self.observation_field:
            return str(observation[self.observation_field])
        values = list(observation.values())
        if len(values) == 1 and isinstance(values[0], str):
            return values[0]
        return json.dumps(observation, ensure_ascii=False)
