"""`play`: a person, or the model of a server, acts in an env; all that happens is shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import aiohttp

from agentrl.env import EnvNotFound, make_env, open_env, tasks_of
from agentrl.threads import run_in_thread
from agentrl.tool import Tool, Unavailable
from agentrl.types import Action, Message, ParseError, ToolCall
from envs.cli.game import Game


class PlayError(RuntimeError):
    """The env or the server failed while it was played."""


async def play(name: str, seed: int, row: int, url: str | None, model: str) -> None:
    """One episode, on the `row`-th training task.

    Raises:
        EnvNotFound: no such env or task.
        PlayError: as it says.
    """
    env = open_env(name, {})
    tasks = tasks_of(env, "train")
    if tasks is not None and not 0 <= row < len(tasks):
        raise EnvNotFound(f"env {name!r} has {len(tasks)} training tasks; there is no {row}")
    for line in await run_in_thread(env.preflight) if hasattr(env, "preflight") else ():
        print(line)
    tools: Sequence[Tool] = getattr(env, "tools", ())
    for tool in tools:
        print(f"tool {tool.name} {json.dumps(tool.schema['function']['parameters']['properties'])}")
        print(f"     {tool.description}")
    async with Game(make_env(name)) as game:
        try:
            _show(await game.begin(tasks[row] if tasks else None, seed=seed))
            while not game.over:
                action = await (_ask(url, model, game, tools) if url else _read(tools))
                if action is None:
                    break
                if url:
                    _show([action.to_message()])
                _show(await game.act(action))
            rewards = await game.rewards()
        except Unavailable as error:
            raise PlayError(str(error)) from error
    print("\n== " + (f"over {game.stop_reason}".rstrip() if game.over else "left before the end"))
    for name, value in rewards.items():
        print(f"   {name}: {value:g}")
    print(f"   reward: {game.total(rewards):g}")


def _show(messages: Sequence[Message]) -> None:
    for message in messages:
        print(f"\n-- {message.role}{f' {message.name}' if message.name else ''}")
        if message.reasoning:
            print(f"(thinks: {message.reasoning})")
        if message.content:
            print(message.content)
        for call in message.tool_calls:
            print(f"-> {call.name} {json.dumps(call.arguments, ensure_ascii=False)}")


async def _read(tools: Sequence[Tool]) -> Action | None:
    """A line of stdin as a turn; None at its end."""
    print("\n> ", end="", flush=True)
    line = await run_in_thread(sys.stdin.readline)
    if not line:
        return None
    text = line.rstrip("\n")
    name, _, written = text.partition(" ")
    if name not in {tool.name for tool in tools}:
        return Action(text)
    return _calling([("typed", name, written or "{}")], "")


def _calling(calls: Sequence[tuple[str, str, str]], content: str, **said: Any) -> Action:
    """A turn with calls: (id, name, JSON of the arguments)."""
    attempts = []
    for id, name, written in calls:
        try:
            arguments = json.loads(written)
            if not isinstance(arguments, dict):
                raise ValueError("arguments are a JSON object")
            attempts.append(ToolCall(id=id, name=name, arguments=arguments))
        except ValueError as error:
            attempts.append(ParseError(id=id, text=written, error=str(error)))
    return Action(content, attempts=tuple(attempts), **said)


async def _ask(url: str, model: str, game: Game, tools: Sequence[Tool]) -> Action:
    """A turn of the model."""
    request: dict[str, Any] = {"model": model, "messages": []}
    for message in game.tape.messages:
        shaped = message.to_dict()
        for call in shaped.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        request["messages"].append(shaped)
    if tools:
        request["tools"] = [tool.schema for tool in tools]
    try:
        async with (
            aiohttp.ClientSession(raise_for_status=True) as session,
            session.post(f"{url}/chat/completions", json=request) as response,
        ):
            said = (await response.json())["choices"][0]["message"]
    except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
        raise PlayError(f"no answer from {url}: {type(error).__name__}: {error}") from error
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in said.get("tool_calls") or ()
    ]
    return _calling(calls, said.get("content") or "", reasoning=said.get("reasoning_content"))
