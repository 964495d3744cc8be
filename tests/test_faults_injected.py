"""A fifth of all episodes is spoiled, in every way there is: no group is lost that could be had."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections import Counter
from typing import ClassVar

import psutil
import pytest

from agentrl.env import TextEnv
from agentrl.tool import Unavailable, tool
from agentrl.types import Action, Message, StopReason, ToolCall
from envs.sandboxed import SandboxedEnv
from tests.engines import CountEnv, ScriptedEngine, alternate, byte_renderer, forever
from tests.processes import descendants
from tests.sandboxes import require_level
from tests.stages import manager_of
from tools.python import python_tool
from tools.sandbox.protocol import SandboxConfig

NUM_BATCHES, BATCH, SIZE = 3, 4, 8
PATIENT = {
    "prompts_per_step": BATCH,
    "num_generations": SIZE,
    "min_group_size": SIZE,
    "max_attempts": 6,
    "env_timeout_s": 0.5,
}


@pytest.fixture(scope="module")
def renderer():
    return byte_renderer()


@tool
async def look(place: str) -> str:
    """Look somewhere."""
    match place:
        case "sandbox gone":
            raise Unavailable("the sandbox was lost")
        case "tool raises":
            raise KeyError(place)
        case "tool hangs":
            await asyncio.sleep(3600)
    return "seen"


class Faulty(CountEnv):
    """Every fifth has a fault, each time the next of `KINDS`; all use a tool in the first turn."""

    made = itertools.count()
    spoiled: ClassVar[Counter[str]] = Counter()
    things = asyncio.Semaphore(4)
    KINDS: ClassVar = {
        "acquire raises": StopReason.ENV_ERROR,
        "reset raises": StopReason.ENV_ERROR,
        "reset hangs": StopReason.ENV_TIMEOUT,
        "step raises": StopReason.ENV_ERROR,
        "step exits": StopReason.ENV_ERROR,
        "step hangs": StopReason.ENV_TIMEOUT,
        "sandbox gone": StopReason.ENV_ERROR,
        "constructor raises": StopReason.ENV_ERROR,
    }

    def __init__(self):
        super().__init__(num_turns=2)
        self.fault, self.has = "", False
        number = next(self.made)
        if number % 5 == 4:
            self.fault = list(self.KINDS)[number // 5 % len(self.KINDS)]
            self.spoiled[self.fault] += 1
        if self.fault == "constructor raises":
            raise OSError(self.fault)

    async def acquire(self):
        await self.things.acquire()
        self.has = True
        if self.fault == "acquire raises":
            raise Unavailable(self.fault)

    async def reset(self, *, seed=None, options=None):
        if self.fault == "reset raises":
            raise ConnectionError(self.fault)
        if self.fault == "reset hangs":
            await forever()
        return await super().reset(seed=seed, options=options)

    async def step(self, action):
        if self.turn == 0:
            await look({"place": self.fault})
        if self.fault == "step raises":
            raise ZeroDivisionError(self.fault)
        if self.fault == "step exits":
            raise SystemExit(self.fault)
        if self.fault == "step hangs":
            await forever()
        return await super().step(action)

    async def close(self):
        if self.has:
            self.things.release()
        self.has = False
        await super().close()


def assert_whole(groups, num_groups):
    """Every group is there, in its full size and without a fault."""
    assert [group.id for group in groups] == [f"g{number}" for number in range(num_groups)]
    for group in groups:
        assert len(group.trajectories) == SIZE and None not in group.rewards
        assert not any(tape.stop_reason.is_fault or tape.error for tape in group.trajectories)
        members = [tape.id.split("-")[1] for tape in group.trajectories]
        assert members == [str(member) for member in range(SIZE)]


def test_a_fifth_of_faults_loses_no_group_and_is_counted_one_by_one(renderer):
    """F019, F052, F053: no fault is a reward of 0, and none is forgotten."""
    Faulty.made, Faulty.things = itertools.count(), asyncio.Semaphore(4)
    Faulty.spoiled.clear()
    attempts = []
    manager = manager_of(
        ScriptedEngine(renderer, alternate),
        Faulty,
        rollout=PATIENT,
        on_episode=attempts.append,
    )
    with manager:
        groups = [group for _ in range(NUM_BATCHES) for group in manager.next_groups(BATCH)]
        metrics = manager.pop_metrics()
    assert_whole(groups, NUM_BATCHES * BATCH)
    for group in groups:
        assert group.rewards == [2.0, 0.0] * (SIZE // 2), "what the policy said, and nothing else"
    faults = [tape for tape in attempts if tape.reward is None]
    assert set(Faulty.spoiled) == set(Faulty.KINDS), "each kind came up"
    expected = Counter()
    for kind, count in Faulty.spoiled.items():
        expected[Faulty.KINDS[kind]] += count
    assert Counter(tape.stop_reason for tape in faults) == expected
    counted = {name: n for name, n in metrics.items() if name.startswith("rollout/faults/")}
    assert counted == {f"rollout/faults/{reason}": count for reason, count in expected.items()}
    assert len(attempts) == NUM_BATCHES * BATCH * SIZE + len(faults)
    wasted = sum(tape.num_sampled_tokens for tape in faults)
    assert metrics["rollout/wasted_tokens"] == wasted > 0
    assert Faulty.things._value == 4, "each gave back what it had"


class Blocks(TextEnv):
    """Every fifth blocks its thread for longer than a step may take."""

    made = itertools.count()

    def __init__(self):
        self.hangs = next(self.made) % 5 == 4

    def reset(self, *, seed=None, options=None):
        return "go", {}

    def step(self, action):
        time.sleep(0.6 if self.hangs else 0.0)
        return "", float("yes" in action), True, False, {}


def test_steps_that_block_their_threads_lose_no_group(renderer):
    """F023."""
    Blocks.made = itertools.count()
    rollout = PATIENT | {"env_timeout_s": 0.3}
    with manager_of(ScriptedEngine(renderer, alternate), Blocks, rollout=rollout) as manager:
        groups = manager.next_groups(BATCH)
        metrics = manager.pop_metrics()
    assert_whole(groups, BATCH)
    assert metrics["rollout/faults/env_timeout"] == (next(Blocks.made)) // 5 >= 6


class Adaptive(SandboxedEnv):
    """Runs a cell in its sandbox in each of two turns; tools that fail are the policy's to see."""

    CELLS = ("import time; time.sleep(0.15); x = 6", "print(x * 7)")

    def make_tools(self, lease):
        return [python_tool(lease, timeout_s=5.0), look]

    def tasks(self, split):
        return None

    def prompt(self, task):
        return [Message(role="user", content="go")]

    async def step(self, action):
        place = self.metrics["tool/python/ok"]
        if place == len(self.CELLS):
            return await super().step(Action(str(action)))
        calls = (
            ToolCall(id="a", name="python", arguments={"code": self.CELLS[int(place)]}),
            ToolCall(id="b", name="look", arguments={"place": "tool raises"}),
        )
        return await super().step(Action(str(action), attempts=calls))


def kill_some(pid: int, num_kills: int) -> int:
    """Kill so many sandboxes of this process, one after another; how many it were."""
    killed, end = 0, time.monotonic() + 20
    while killed < num_kills and time.monotonic() < end:
        time.sleep(0.12)
        try:
            helpers = [p for p in descendants(pid) if "spawner.py" in " ".join(p.cmdline())]
            boxes = [box for helper in helpers for box in helper.children()]
            if len(boxes) > 2:
                boxes[len(boxes) // 2].send_signal(signal.SIGKILL)
                killed += 1
        except psutil.NoSuchProcess:  # it ended while it was looked at
            continue
    return killed


def test_sandboxes_killed_in_mid_call_lose_no_group(renderer):
    """F052, F098: whole groups, every answer right, and nothing is left of any sandbox."""
    sandbox = {"level": "bubblewrap", "max_sandboxes": 4, "memory_mb": 128}
    require_level(SandboxConfig(**sandbox))
    rollout = PATIENT | {"env_timeout_s": 20.0, "max_turns": 4, "prompts_per_step": 2}
    rollout |= {"num_generations": SIZE, "max_context_tokens": 4096}
    engine, attempts = ScriptedEngine(renderer, "done"), []
    before = set(descendants())
    manager = manager_of(
        engine,
        lambda: Adaptive(sandbox=sandbox, max_errors_per_episode=9),
        rollout=rollout,
        on_episode=attempts.append,
        rubric=None,
    )
    with manager:
        loop, pid = asyncio.new_event_loop(), os.getpid()
        killing = loop.run_in_executor(None, kill_some, pid, 4)
        groups = manager.next_groups(2)
        num_killed = loop.run_until_complete(killing)
        loop.close()
        metrics = manager.pop_metrics()
    assert num_killed >= 3
    assert_whole(groups, 2)
    for group in groups:
        for tape in group.trajectories:
            results = [message.content for message in tape.messages if message.role == "tool"]
            assert results == ["(no output)", "Error: KeyError: 'tool raises'", "42", results[1]]
            assert tape.metrics["sandbox/bubblewrap"] == 1.0
            assert tape.metrics["sandbox/restarts"] == 0
    lost = [tape for tape in attempts if tape.reward is None]
    assert 1 <= len(lost) <= num_killed, "one may have been killed between two episodes"
    assert {tape.stop_reason for tape in lost} == {StopReason.ENV_ERROR}
    assert metrics["rollout/faults/env_error"] == len(lost)
    left = [p for p in descendants() if p not in before]
    psutil.wait_procs(left, timeout=5)
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
