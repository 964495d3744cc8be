"""An MCP server's tools with tasks from a file: an env without a line of code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.rubric import Rubric
from agentrl.threads import inline
from agentrl.types import Action, Message, Task
from envs.adapters import library
from envs.rows import require_split, rows_of_split, tasks_of_rows
from envs.tool_env import ToolEnv
from tools.mcp import MCPServer


@inline
def exact(completion: str, answer: str) -> float:
    """1 where the last line is the answer, but for case and a final stop."""
    lines = completion.strip().splitlines() or [""]
    return float(_plain(lines[-1]) == _plain(answer))


def _plain(text: str) -> str:
    return " ".join(text.split()).removesuffix(".").casefold()


class MCPEnv(ToolEnv):
    """One session with the server an episode."""

    system_prompt = "Use the tools. Write the answer alone in the last line of your last reply."
    rubric = Rubric([exact])

    def __init__(
        self,
        where: str,
        *,
        tasks: str,
        env: dict[str, str] | None = None,
        timeout_s: float = 30.0,
        **limits: Any,
    ) -> None:
        """
        Args:
            where: The server: a url, or a command, which runs here with your rights.
            tasks: A folder with train.jsonl and test.jsonl, or one file, which then is every split.
                Each line is {"question": …, "answer": …}.
            env: Variables for the command.
            timeout_s: Of one call.
            limits: As `ToolEnv` takes them.
        """
        super().__init__(**limits)
        library("mcp")
        self.server = MCPServer(where, env=env, timeout_s=timeout_s)
        self.tools = self.server.tools()
        self._path = tasks
        self._connected = False

    def tasks(self, split: str) -> Sequence[Task]:
        """
        Raises:
            FileNotFoundError: there is no such file.
            ValueError: there is no such split, or a line that is no row, by file and line.
        """
        require_split(split)
        return _tasks(self._path, split)

    def gold(self, task: Task) -> list[Action]:
        return [Action(task.answer)]

    async def acquire(self) -> None:
        await self.close()
        await self.server.connect()
        self._connected = True

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        if not self._connected:
            await self.acquire()
        self._connected = False  # the next episode gets a session of its own
        return await super().reset(seed=seed, options=options)

    async def close(self) -> None:
        self._connected = False
        await self.server.close()


@cache
def _tasks(path: str, split: str) -> tuple[Task, ...]:
    return tasks_of_rows(rows_of_split(Path(path), split), f"mcp-{split}", _task)


def _task(row: Any, *, id: str, where: str) -> Task:
    match row:
        case {"question": str(question), "answer": str(answer)}:
            return Task(id=id, prompt=(Message(role="user", content=question),), answer=answer)
    raise ValueError(f'{where}: a row must be {{"question": text, "answer": text}}')
