"""`check`: whether an env keeps what an env owes, one line a check."""

from __future__ import annotations

import asyncio
import random
import re
import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils.env_checker import check_env

from agentrl.checklist import Checklist
from agentrl.env import (
    Blocking,
    Conversation,
    EnvNotFound,
    call_env,
    make_env,
    open_env,
    tasks_of,
    to_messages,
)
from agentrl.threads import run_in_thread
from agentrl.types import Action, Task
from envs.cli.check_tokens import check_tokens, load_tokenizer
from envs.cli.check_tools import check_tools
from envs.cli.game import Game
from envs.cli.subject import CheckFailed, Subject

NUM_SEEDS = 6
MAX_TURNS = 50
"""Of nonsense, after which an episode should be over."""
PATIENCE_S = 120.0
"""For all instances together."""
# What gymnasium says of spaces and specs that are as they should be here.
FINE = re.compile("different from the unwrapped|not within|spec|Casting|No render|render_modes")


class Measureless(Blocking):
    """Without the metrics in info, which may hold times, and so differ from run to run."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, info = super().reset(seed=seed, options=options)
        return observation, {key: value for key, value in info.items() if key != "metrics"}

    def step(self, action: Any) -> Any:
        *result, info = super().step(action)
        return *result, {key: value for key, value in info.items() if key != "metrics"}


async def check(name: str, tokenizer: str | None, tool_format: str, instances: int) -> bool:
    """Whether all checks passed.

    Raises:
        EnvNotFound: there is no such env, or it lacks what it needs.
        RendererError: there is no such tokenizer.
    """
    loaded = await run_in_thread(load_tokenizer, tokenizer) if tokenizer else None
    env = open_env(name, {})
    rows = tasks_of(env, "train")
    if rows is not None and not rows:
        raise EnvNotFound(f"env {name!r} has no training tasks")
    for line in await run_in_thread(env.preflight) if hasattr(env, "preflight") else ():
        print(line)
    tasks = [rows[i * len(rows) // 4] for i in range(4)] if rows else [None]
    subject = Subject(make=lambda: make_env(name), env=env, tasks=tasks)
    checks = Checklist(CheckFailed)
    with checks.check("text"):
        await _text(subject, name)
    if checks.num_failed:
        checks.finish()
        return False
    with checks.check("gymnasium") as say:
        say(await _gymnasium(subject))
    with checks.check("seed") as say:
        say(await _seed(subject))
    with checks.check("random"):
        await _random(subject)
    with checks.check("close"):
        await _close(subject)
    with checks.check("end") as say:
        say(await _end(subject))
    if subject.tools:
        with checks.check("tools") as say:
            say(await check_tools(subject))
    else:
        checks.skip("tools", f"{type(env).__name__} has none")
    await _gold(subject, checks)
    with checks.check("at once") as say:
        say(await _at_once(subject, instances))
    if loaded is not None:
        with checks.check("tokens") as say:
            say(await check_tokens(subject, loaded, tool_format))
    else:
        checks.skip("tokens", "say --tokenizer FOLDER_OR_ID to check them")
    checks.finish()
    return not checks.num_failed


async def _text(subject: Subject, name: str) -> None:
    async with subject.game() as game:
        observation, info = await call_env(
            game.env, "reset", seed=0, options={"task": subject.tasks[0]}
        )
        if observation not in Conversation():
            raise CheckFailed(
                f"reset gives {type(observation).__name__} as the observation, which is no str, "
                f"Message or list of messages; if it is another library's env, name it gym:{name}"
            )
        if not isinstance(info, dict):
            raise CheckFailed(f"reset gives {type(info).__name__} as info, not a dict")
        if not to_messages(observation):
            raise CheckFailed("the first observation is empty: the policy has nothing to read")


async def _gymnasium(subject: Subject) -> str:
    blocking = Measureless(subject.make(), loop=asyncio.get_running_loop())

    def run() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_env(blocking, skip_render_check=True)
        return [re.sub(r"\x1b\[\d+m", "", str(warning.message)) for warning in caught]

    try:
        said = await run_in_thread(run)
    except (AssertionError, gymnasium.error.Error) as error:
        raise CheckFailed(f"gymnasium's check_env: {error}") from error
    return "; ".join(dict.fromkeys(text for text in said if not FINE.search(text)))


async def _seed(subject: Subject) -> str:
    expected = [await subject.first(seed) for seed in range(NUM_SEEDS)]
    again = await asyncio.gather(*(subject.first(seed) for seed in range(NUM_SEEDS)))
    for seed, (one, other) in enumerate(zip(expected, again, strict=True)):
        if one != other:
            raise CheckFailed(
                f"seed {seed} on one task began in two ways, side by side with other instances: "
                "draw from self.np_random, and share nothing that changes between instances"
            )
    different = len({str(observation) for observation in expected})
    return f"{different} beginnings of {NUM_SEEDS} seeds and {len(subject.tasks)} tasks"


async def _random(subject: Subject) -> None:
    def global_state() -> tuple[Any, ...]:
        _, keys, *rest = np.random.get_state()
        return random.getstate(), keys.tobytes(), *rest  # type: ignore[union-attr]

    kept = random.getstate(), np.random.get_state()
    try:
        begun = []
        for number in (1, 2):
            random.seed(number)
            np.random.seed(number)
            before = global_state()
            async with subject.game() as game:
                begun.append(await game.begin(subject.tasks[0], seed=5))
                await game.act(Action("No."))
            if global_state() != before:
                raise CheckFailed(
                    "an episode moves the global state of random or numpy.random, which runs are "
                    "resumed by: draw from self.np_random"
                )
        if begun[0] != begun[1]:
            raise CheckFailed("the global random state changes an episode: use self.np_random")
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])


async def _close(subject: Subject) -> None:
    unused = subject.game()
    used = subject.game()
    await used.begin(subject.tasks[0], seed=0)
    try:
        for game in (unused, used, used):
            await call_env(game.env, "close")
    except Exception as error:
        raise CheckFailed(
            f"close raises {type(error).__name__}: {error}; it must do before reset, and twice"
        ) from error


async def _end(subject: Subject) -> str:
    async with subject.game() as game:
        await game.begin(subject.tasks[0], seed=0)
        solution = subject.solution(subject.tasks[0])
        nonsense = [Action("No.")] * MAX_TURNS
        for num_turns, action in enumerate([*solution, *nonsense], start=1):
            before = len(game.tape.messages)
            said = await game.act(action)
            if len(said) > before and said[0] in game.tape.messages[:before]:
                raise CheckFailed("step gives the messages of before again: give what is new alone")
            if game.over:
                await _refused(game)
                return f"over with turn {num_turns}, and then step is refused"
    return f"an episode goes on after {MAX_TURNS} turns; max_turns of a run ends it"


async def _refused(game: Game) -> None:
    try:
        await game.act(Action("No."))
    except Exception:
        return
    raise CheckFailed("step goes on after the end: raise RuntimeError until the next reset")


async def _gold(subject: Subject, checks: Checklist) -> None:
    solutions = [(task, subject.solution(task)) for task in subject.tasks]
    if not any(turns for _, turns in solutions):
        checks.skip("gold", "there are no solutions: give the env gold(task)")
        return
    with checks.check("gold") as say:
        for task, turns in solutions:
            if turns:
                await _play_gold(subject, task, turns)
        say(f"full reward on {sum(bool(turns) for _, turns in solutions)} tasks")


async def _play_gold(subject: Subject, task: Task | None, turns: Sequence[Action]) -> None:
    assert task is not None
    async with subject.game() as game:
        await game.begin(task, seed=0)
        for action in turns:
            if game.over:
                raise CheckFailed(f"the gold solution of {task.id} goes on after the end")
            await game.act(action)
        rewards = await game.rewards()
    weights = game.rubric.weights.values() if game.rubric else ()
    full = max([weight for weight in weights if weight > 0], default=1.0)
    total = game.total(rewards)
    if total < full - 1e-6:
        advice = (
            "mend gold(task), or the reward"
            if hasattr(subject.env, "gold")
            else "a plain reply with task.answer is no solution, so give the env gold(task)"
        )
        raise CheckFailed(f"the gold solution of {task.id} gets {total:g} of {full:g}: {advice}")


async def _at_once(subject: Subject, instances: int) -> str:
    async def one(number: int) -> bool:
        seed = number % NUM_SEEDS
        async with subject.game() as game:
            begun = await game.begin(subject.tasks[seed % len(subject.tasks)], seed=seed)
            await game.act(Action("No."))
            return begun == expected[seed]

    expected = [await subject.first(seed) for seed in range(NUM_SEEDS)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            same = await asyncio.gather(*map(one, range(instances)))
    except TimeoutError as error:
        raise CheckFailed(f"{instances} instances did not end in {PATIENCE_S:g} s") from error
    if not all(same):
        raise CheckFailed(f"{same.count(False)} of {instances} instances began in another way")
    return f"{instances} instances"
