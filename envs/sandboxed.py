"""SandboxedEnv: a ToolEnv whose tools work in a sandbox that is the episode's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from agentrl.env import EnvNotFound
from agentrl.tool import Tool
from agentrl.types import Message
from envs.tool_env import ToolEnv
from tools.sandbox.levels import resolve
from tools.sandbox.pool import Lease
from tools.sandbox.protocol import Sandbox, SandboxConfig, SandboxUnavailable


class SandboxedEnv(ToolEnv):
    """An environment with a fresh sandbox for each episode.

    A subclass gives `make_tools(lease)` in place of `tools`, and, where its tasks come with files,
    `setup(sandbox)`. The sandbox is taken by `acquire`, or else by `reset`, and given back by
    `close`.

    Example:
        class Notebook(SandboxedEnv):
            rubric = Rubric([correct])

            def make_tools(self, lease):
                return [python_tool(lease)]
    """

    def __init__(self, *, sandbox: Mapping[str, Any] | None = None, **limits: Any) -> None:
        """
        Args:
            sandbox: The keys of `SandboxConfig` that are not to be its defaults, such as
                {"level": "bubblewrap", "memory_mb": 256}.
            limits: As `ToolEnv` takes them.

        Raises:
            ValueError: a bad key or value, named sandbox.KEY.
        """
        super().__init__(**limits)
        self.sandbox_config = sandbox_config(sandbox or {})
        self.lease = Lease(self.sandbox_config)
        self.tools = self.make_tools(self.lease)
        self._untouched = False

    def make_tools(self, lease: Lease) -> Sequence[Tool]:
        """The tools, before there is a sandbox: they take it from the lease when they are called.

        What they need of the env must be set before `SandboxedEnv.__init__`.
        """
        raise NotImplementedError

    async def setup(self, sandbox: Sandbox) -> None:
        """Prepare the sandbox for `self.task`."""

    def preflight(self) -> list[str]:
        try:
            _, line = resolve(self.sandbox_config)
        except SandboxUnavailable as error:
            raise EnvNotFound(str(error)) from error
        return [line]

    async def acquire(self) -> None:
        await self.lease.release()
        await self.lease.acquire()
        self._untouched = True

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        if not self._untouched:
            await self.acquire()
        self._untouched = False
        observation, _ = await super().reset(seed=seed, options=options)
        sandbox = self.lease.sandbox
        await self.setup(sandbox)
        self.metrics[f"sandbox/{sandbox.level}"] = 1.0
        self.metrics["sandbox/wait_s"] = self.lease.wait_s
        self.metrics["sandbox/restarts"] = 0
        return observation, {"metrics": dict(self.metrics)}

    async def step(self, action: str) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        answers, reward, terminated, truncated, info = await super().step(action)
        info["metrics"]["sandbox/restarts"] = self.lease.sandbox.num_restarts
        return answers, reward, terminated, truncated, info

    async def close(self) -> None:
        self._untouched = False
        await self.lease.release()


def sandbox_config(values: Mapping[str, Any]) -> SandboxConfig:
    """
    Raises:
        ValueError: names the key as sandbox.KEY.
    """
    try:
        return SandboxConfig.model_validate(dict(values))
    except ValidationError as error:
        raise ValueError("; ".join(_explain(detail) for detail in error.errors())) from error


def _explain(detail: Any) -> str:
    key = ".".join(["sandbox", *map(str, detail["loc"])])
    if detail["type"] == "extra_forbidden":
        return f"unknown key {key}; there are {', '.join(SandboxConfig.model_fields)}"
    return f"{key}: {detail['msg']} (got {detail['input']!r})"
