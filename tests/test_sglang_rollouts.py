"""The manager over fake SGLang servers: what happens to them in mid-rollout costs no group."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any

import pytest

from agentrl.config import SGLangConfig
from agentrl.types import StopReason
from rollout.engines.sglang import SGLangEngine
from rollout.manager import RolloutManager
from rollout.stage import EnvSetup
from rollout.tasks import TaskStream
from tests.engines import CountEnv, byte_renderer, config, make_tasks
from tests.fake_fleet import WEIGHTS, FakeFleet, FakeTransport
from tests.fake_sglang import FakeSGLang, probe_of, status


class StartedFleet(FakeFleet):
    """Its servers start on the loop of whoever starts it."""

    async def start(self) -> None:
        for server in self.servers:
            await server.start()
        self.__post_init__()


class HookedEnv(CountEnv):
    """Calls `hook` with the number of each step, over all episodes."""

    hook: Any = None
    numbers = itertools.count(1)

    async def step(self, action: str) -> Any:
        await HookedEnv.hook(next(HookedEnv.numbers))
        return await super().step(action)


def rollouts(servers: list[FakeSGLang], hook: Any, **values: Any) -> tuple[Any, Any, Any]:
    fleet = StartedFleet(servers)
    engine = SGLangEngine(
        fleet,
        FakeTransport(),
        SGLangConfig(sync_timeout_s=10.0, start_timeout_s=10.0),
        run_id="run",
        max_context_tokens=512,
        max_concurrent=64,
    )
    HookedEnv.hook, HookedEnv.numbers = staticmethod(hook), itertools.count(1)
    values = {
        "prompts_per_step": 4,
        "num_generations": 4,
        "max_turns": 3,
        "max_new_tokens": 100,
        "max_episode_tokens": 400,
        "max_context_tokens": 512,
        "min_group_size": 4,
        "generate_timeout_s": 20.0,
    } | values
    manager = RolloutManager(
        engine=engine,
        envs={"": EnvSetup(make_env=lambda: HookedEnv(3), renderer=byte_renderer())},
        config=config(**values),
        tasks=TaskStream(make_tasks(8), seed=0),
    )
    return manager, engine, fleet


def next_groups(manager: Any, weights: Any = WEIGHTS, version: int = 0) -> tuple[Any, int]:
    """The groups, and how often the engine wanted weights first."""
    asks = 0
    while (groups := manager.next_groups(4)) is None:
        asks += 1
        manager.update_weights(weights.items(), version, probe_of(weights))
    return groups, asks


def assert_whole(groups: Any) -> None:
    """Every group is complete, scored, without a fault and without a second attempt."""
    assert len({group.id for group in groups}) == 4
    for group in groups:
        assert None not in group.rewards
        assert not any("retry" in tape.id for tape in group.trajectories)
        assert {tape.stop_reason for tape in group.trajectories} <= {
            StopReason.DONE,
            StopReason.TURN_LENGTH,
        }


@pytest.mark.parametrize("on_update", ["keep", "finish"])
@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_server_killed_in_mid_rollout_costs_no_group(num_servers: int, on_update: str) -> None:
    """F033: its episodes wait for it, or move, with the turns that they have."""
    servers = [FakeSGLang(token_s=0.001) for _ in range(num_servers)]

    async def hook(step: int) -> None:
        if step == 5:
            await fleet.kill(servers[0])

    manager, _, fleet = rollouts(servers, hook, on_update=on_update)
    with manager:
        manager.update_weights(WEIGHTS.items(), 0, probe_of(WEIGHTS))
        groups, asks = next_groups(manager)
        metrics = manager.pop_metrics()
    assert_whole(groups)
    assert asks <= 1 and (asks == 1 or num_servers == 2)
    assert metrics["engine/restarts"] == 1 or num_servers == 2


def test_a_server_may_take_longer_to_come_back_than_a_request_may_take() -> None:
    """F033: who waits for it is at no fault."""
    server = FakeSGLang(token_s=0.001)

    async def hook(step: int) -> None:
        if step == 5:
            fleet.may_recover.clear()
            asyncio.get_running_loop().call_later(2.0, fleet.may_recover.set)
            await fleet.kill(server)

    manager, _, fleet = rollouts([server], hook, generate_timeout_s=0.7)
    with manager:
        manager.update_weights(WEIGHTS.items(), 0, probe_of(WEIGHTS))
        groups, _ = next_groups(manager)
    assert_whole(groups)


def test_new_weights_in_mid_rollout_cost_no_group() -> None:
    """Turns go on with them, and each token says which weights sampled it."""
    servers = [FakeSGLang(token_s=0.001) for _ in range(2)]
    newer = {"a": 0.6, "b": 0.2}

    async def hook(step: int) -> None: ...

    manager, engine, _ = rollouts(servers, hook, max_staleness=1)
    with manager:
        manager.update_weights(WEIGHTS.items(), 0, probe_of(WEIGHTS))
        first, _ = next_groups(manager)
        manager.update_weights(newer.items(), 1, probe_of(newer))
        second, _ = next_groups(manager, newer, 1)
    assert_whole(first)
    assert engine.version == 1
    versions = Counter(
        version for group in second for tape in group.trajectories for version in tape.versions
    )
    assert versions.keys() <= {-1, 0, 1} and versions[1] > 0
    assert max(server.running_at_update for server in servers) == 0


def test_servers_that_are_busy_for_a_while_cost_no_group() -> None:
    servers = [FakeSGLang() for _ in range(2)]

    async def hook(step: int) -> None:
        await asyncio.sleep(0)

    manager, _, _ = rollouts(servers, hook)
    with manager:
        manager.update_weights(WEIGHTS.items(), 0, probe_of(WEIGHTS))
        for server in servers:
            server.spoilers.extend([status(503)] * 6)
        groups, _ = next_groups(manager)
        assert manager.pop_metrics()["engine/retries"] == 12
    assert_whole(groups)
