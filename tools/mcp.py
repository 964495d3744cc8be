"""The tools of any MCP server: a session for each trajectory, over stdio or streamable HTTP.

A server given as a command runs on this machine with the rights of the trainer, outside of any
sandbox: what its tools let a model do, the model can do here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from agentrl.env import EnvNotFound
from agentrl.threads import run_apart
from agentrl.tool import Tool, ToolOutcome, ToolResult, Unavailable, to_text

logger = logging.getLogger("agentrl")

CONNECT_S = 30.0  # for a server to start and to answer first
CLOSE_S = 15.0  # for it to end; most of it is the patience of the SDK
_PROBE_S = 5.0  # for one that did not answer in time to show that it lives
_KEEPER = Path(__file__).with_name("mcp_keeper.py")


class MCPServer:
    """A server and, between `connect` and `close`, one session with it.

    Example:
        server = MCPServer("uvx mcp-server-time")
        tools = server.tools()
        await server.connect()
        result = await tools[0]({"timezone": "UTC"})
        await server.close()
    """

    def __init__(
        self,
        where: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """
        Args:
            where: A url, http://… or https://…, or a command with its arguments.
            env: Variables for the command, which else sees only PATH, HOME and the like.
            timeout_s: Of one call. Its time-out is the model's to see, as long as the server
                answers others.
        """
        self.where = where if isinstance(where, str) else shlex.join(where)
        self.env = tuple(sorted((env or {}).items()))
        self.timeout_s = timeout_s
        self._client: Any = None
        self._owner: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    def tools(self) -> list[Tool]:
        """Its tools, with names, descriptions and schemas as they are; they work while connected.

        Blocks when this process asks the server for the first time, for as long as it starts.

        Raises:
            EnvNotFound: the server cannot be had, or `mcp` is not installed; says what is wrong.
        """
        return [
            Tool.from_schema(
                partial(self._call, tool.name),
                name=tool.name,
                description=tool.description or tool.title or tool.name,
                parameters=tool.input_schema,
                timeout_s=self.timeout_s + 2 * _PROBE_S,
            )
            for tool in _listed(self.where, self.env)
        ]

    async def connect(self) -> None:
        """Begin a session.

        Raises:
            Unavailable: the server does not start, or does not answer.
        """
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._owner = asyncio.create_task(self._hold(ready, self._closing))
        try:
            async with asyncio.timeout(CONNECT_S):
                self._client = await ready
        except TimeoutError:
            await self.close()
            raise Unavailable(f"no answer from {self.where} within {CONNECT_S:g} s") from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the session, and the processes of a command; may be called twice."""
        owner, self._owner = self._owner, None
        client, self._client = self._client, None
        if owner is None:
            return
        self._closing.set()
        if client is None:
            owner.cancel()
        _, late = await asyncio.wait({owner}, timeout=CLOSE_S)
        if late:
            owner.cancel()
            await asyncio.wait({owner})
        if not owner.cancelled() and (error := owner.exception()):
            logger.warning("the session with %s ended in an error: %s", self.where, error)

    async def _hold(self, ready: asyncio.Future[Any], closing: asyncio.Event) -> None:
        """Open the session and close it, in one task, as its task groups want it."""
        try:
            async with _session(self.where, dict(self.env)) as client:
                if not ready.done():
                    ready.set_result(client)
                await closing.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(Unavailable(str(error)))
                return
            raise

    async def _call(self, name: str, /, **arguments: Any) -> ToolResult:
        client = self._client
        if client is None:
            raise Unavailable(f"there is no session with {self.where}")
        try:
            async with asyncio.timeout(self.timeout_s):
                result = await client.call_tool(name, arguments)
        except Exception as error:
            late = isinstance(error, TimeoutError)
            said = f"{name} timed out after {self.timeout_s:g} s" if late else str(error)
            if not await _lives(client):
                raise Unavailable(f"{self.where} does not answer: {said}") from error
            outcome = ToolOutcome.TIMEOUT if late else ToolOutcome.ERROR
            return ToolResult(content=f"Error: {said}", outcome=outcome)
        outcome = ToolOutcome.ERROR if result.is_error else ToolOutcome.OK
        return ToolResult(content=_text(result), outcome=outcome)


async def _lives(client: Any) -> bool:
    """Whether the server of a call that failed answers still."""
    try:
        async with asyncio.timeout(_PROBE_S):
            await client.list_tools(cache_mode="bypass")
    except Exception:  # whatever it is, it is no answer
        return False
    return True


@asynccontextmanager
async def _session(where: str, env: dict[str, str]) -> AsyncIterator[Any]:
    """An open `mcp.client.Client`."""
    try:
        from mcp import StdioServerParameters
        from mcp.client import Client
        from mcp.client.stdio import stdio_client
    except ImportError as error:
        raise EnvNotFound("MCP servers need mcp 2: pip install 'mcp>=2'") from error
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        if where.startswith(("http://", "https://")):
            server: Any = where
        else:
            command = ["-I", "-S", str(_KEEPER), str(os.getpid()), *shlex.split(where)]
            server = stdio_client(
                StdioServerParameters(command=sys.executable, args=command, env=env), errlog=log
            )
        try:
            async with Client(server) as client:
                yield client
        except Exception as error:
            log.seek(0)
            said = log.read()[-2000:].strip()
            raise ConnectionError("\n".join([f"{where}: {_cause(error)}", said]).strip()) from error


@cache
def _listed(where: str, env: tuple[tuple[str, str], ...]) -> tuple[Any, ...]:
    async def ask() -> tuple[Any, ...]:
        try:
            async with asyncio.timeout(CONNECT_S), _session(where, dict(env)) as client:
                page = await client.list_tools()
                tools = list(page.tools)
                while page.next_cursor:
                    page = await client.list_tools(cursor=page.next_cursor)
                    tools += page.tools
                return tuple(tools)
        except TimeoutError:
            raise ConnectionError(f"{where}: no answer within {CONNECT_S:g} s") from None

    try:
        return run_apart(ask())
    except EnvNotFound:
        raise
    except Exception as error:
        raise EnvNotFound(f"no tools from the MCP server {error}") from error


def _cause(error: BaseException) -> str:
    """The first error in the groups that task groups make."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _text(result: Any) -> str:
    """The content as text; what is no text is named."""
    parts = []
    for block in result.content:
        match block.type:
            case "text":
                parts.append(block.text)
            case "resource" if hasattr(block.resource, "text"):
                parts.append(block.resource.text)
            case "resource":
                parts.append(f"[{block.resource.mime_type or 'data'}: {block.resource.uri}]")
            case "resource_link":
                parts.append(f"[link: {block.uri}]")
            case kind:
                parts.append(f"[{kind}: {block.mime_type}]")
    if not parts and result.structured_content is not None:
        return to_text(result.structured_content)
    return "\n".join(parts)
