"""Groups in flight: faults, refills, seeds, and the crossing from sync to async."""

import asyncio
import logging
import signal
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError

import pytest

from agentrl.config import EvalConfig
from agentrl.env import TextEnv
from agentrl.protocols import EngineDied
from agentrl.rubric import Rubric
from agentrl.shutdown import at_shutdown
from agentrl.summary import summarize
from agentrl.trajectory import Trajectory, TrajectoryGroup
from agentrl.types import Completion, Message, StopReason, Task
from rollout.faults import RolloutError
from rollout.manager import RolloutManager
from rollout.stage import EnvSetup
from rollout.tasks import TaskStream, held_out
from tests.engines import (
    CountEnv,
    ScriptedEngine,
    alternate,
    byte_renderer,
    config,
    forever,
    make_tasks,
)
from tests.stages import manager_of


@pytest.fixture(scope="module")
def renderer():
    return byte_renderer()


class FailingEnv(CountEnv):
    """Fails in `reset` when its number is in `failing`."""

    made = 0
    failing: frozenset[int] = frozenset()

    def __init__(self):
        super().__init__()
        self.number = type(self).made
        type(self).made += 1

    async def reset(self, *, seed=None, options=None):
        if self.number in self.failing:
            raise ValueError("boom")
        return await super().reset(seed=seed, options=options)


def failing(*numbers):
    return type("Failing", (FailingEnv,), {"made": 0, "failing": frozenset(numbers)})


def test_a_group_shares_task_and_env_seed_and_nothing_else(renderer):
    """F055: groups are made by id, whatever the order in which their members end."""
    envs = []

    async def shuffled(request):
        await asyncio.sleep(hash(request.session) % 7 / 100)
        return request.session

    engine = ScriptedEngine(renderer, shuffled)
    make_env = lambda: envs.append(CountEnv()) or envs[-1]  # noqa: E731
    rollout = {"prompts_per_step": 3, "num_generations": 4}
    with manager_of(engine, make_env, rollout=rollout) as manager:
        groups = manager.next_groups(3)
    assert [group.id for group in groups] == ["g0", "g1", "g2"]
    for group in groups:
        ids = [tape.id for tape in group.trajectories]
        assert ids == [f"{group.id}-{member}" for member in range(4)]
        assert [tape.messages[-1].content for tape in group.trajectories] == ids
        assert {tape.messages[0] for tape in group.trajectories} == set(group.task.prompt)
    seeds = Counter((env.task.id, env.seed) for env in envs)
    assert sorted(seeds.values()) == [4, 4, 4]
    assert len({request.sampling.seed for request in engine.requests}) == 12


def test_a_replay_draws_the_same_seeds_whatever_the_timing(renderer):
    def run(delay):
        async def script(request):
            await asyncio.sleep(delay * (hash(request.session) % 5))
            return alternate(request)

        engine = ScriptedEngine(renderer, script)
        with manager_of(engine, lambda: CountEnv(2), seed=5) as manager:
            manager.next_groups(2), manager.next_groups(2)
        return {(r.session, r.turn): (r.sampling.seed, r.token_ids) for r in engine.requests}

    assert run(0.0) == run(0.005)


def test_one_bad_episode_does_not_hurt_its_neighbours(renderer, caplog):
    """F019: 8 episodes, number 3 raises."""
    rollout = {"prompts_per_step": 1, "num_generations": 8}
    with manager_of(ScriptedEngine(renderer), failing(3), rollout=rollout) as manager:
        (group,) = manager.next_groups(1)
        metrics = manager.pop_metrics()
    reasons = [tape.stop_reason for tape in group.trajectories]
    assert Counter(reasons) == {StopReason.DONE: 7, StopReason.ENV_ERROR: 1}
    assert group.trajectories[3].error == "ValueError: boom" and "g0-3" in caplog.text
    assert group.rewards[3] is None
    assert metrics["rollout/faults/env_error"] == 1 and metrics["rollout/group_size"] == 7


def test_a_faulty_episode_is_played_again_with_another_seed(renderer):
    engine = ScriptedEngine(renderer)
    rollout = {"prompts_per_step": 1, "num_generations": 4, "max_attempts": 2}
    with manager_of(engine, failing(1), rollout=rollout) as manager:
        (group,) = manager.next_groups(1)
    assert [tape.id for tape in group.trajectories] == ["g0-0", "g0-1-retry1", "g0-2", "g0-3"]
    assert None not in group.rewards


def test_attempts_on_a_silent_engine_are_bounded(renderer):
    """F024: two attempts, each with its deadline; the siblings are done."""

    def script(request):
        return forever() if request.session.startswith("g0-0") else "yes"

    engine = ScriptedEngine(renderer, script)
    rollout = {"generate_timeout_s": 0.3, "max_attempts": 2, "num_generations": 4}
    began = time.monotonic()
    with manager_of(engine, rollout=rollout) as manager:
        groups = manager.next_groups(2)
    assert 0.6 <= time.monotonic() - began < 2
    assert groups[0].trajectories[0].stop_reason is StopReason.ENGINE_TIMEOUT
    assert groups[0].rewards == [None, 1.0, 1.0, 1.0] and groups[1].rewards == [1.0] * 4


def test_a_group_too_small_is_dropped_and_another_task_takes_its_place(renderer):
    """F056."""
    rollout = {"num_generations": 4, "min_group_size": 3}
    with manager_of(ScriptedEngine(renderer), failing(0, 1), rollout=rollout) as manager:
        groups = manager.next_groups(2)
        metrics = manager.pop_metrics()
    assert [group.id for group in groups] == ["g1", "g2"]
    assert metrics["rollout/dropped_groups"] == 1


def test_a_prompt_that_is_too_long_is_not_tried_again(renderer):
    tasks = make_tasks(5)
    tasks[2] = Task(id="long", prompt=(Message(role="user", content="x" * 500),))
    manager = RolloutManager(
        engine=ScriptedEngine(renderer),
        envs={"": EnvSetup(make_env=CountEnv, renderer=renderer)},
        config=config(prompts_per_step=4, max_attempts=3, max_context_tokens=200),
        tasks=TaskStream(tasks, 0),
    )
    with manager:
        groups = manager.next_groups(4) + manager.next_groups(1)
        metrics = manager.pop_metrics()
    assert "long" not in {group.task.id for group in groups} and len(groups) == 5
    assert metrics["rollout/faults/prompt_too_long"] == 2  # one for each member


def test_too_many_faults_stop_the_run_with_the_commonest_cause(renderer):
    """F052: 5 of 8 with a limit of 0.5; 4 of 8 go on."""
    rollout = {"num_generations": 4, "max_fault_fraction": 0.5}
    with (
        manager_of(ScriptedEngine(renderer), failing(0, 1, 2, 4, 5), rollout=rollout) as manager,
        pytest.raises(RolloutError, match=r"5 of 8 episodes failed.*env_error: ValueError: boom"),
    ):
        manager.next_groups(2)
    with manager_of(ScriptedEngine(renderer), failing(0, 1, 4, 5), rollout=rollout) as manager:
        assert [len(group.trajectories) for group in manager.next_groups(2)] == [4, 4]


def test_an_infrastructure_fault_is_no_reward_of_zero(renderer):
    """F052."""
    rollout = {"prompts_per_step": 1, "num_generations": 4}
    with manager_of(ScriptedEngine(renderer, "yes"), failing(3), rollout=rollout) as manager:
        (group,) = manager.next_groups(1)
        assert manager.pop_metrics()["reward"] == 1.0
    assert group.rewards == [1.0, 1.0, 1.0, None]


def test_refills_end_where_every_group_loses_a_member(renderer):
    """A fault fraction under its limit that still spoils all groups."""

    members: Counter[int] = Counter()

    class First(CountEnv):
        async def reset(self, *, seed=None, options=None):
            members[seed] += 1
            if members[seed] == 1:
                raise ValueError("first")
            return await super().reset(seed=seed, options=options)

    rollout = {"num_generations": 4, "min_group_size": 4}
    with (
        manager_of(ScriptedEngine(renderer), First, rollout=rollout) as manager,
        pytest.raises(RolloutError, match=r"min_group_size=4.*ValueError: first"),
    ):
        manager.next_groups(2)


def test_a_fatal_error_cancels_the_siblings_and_frees_their_slots(renderer, recwarn, caplog):
    """F020."""
    envs = []

    async def script(request):
        if request.session == "g0-0":
            await asyncio.sleep(0.05)
            raise EngineDied("the engine is gone")
        await forever()

    engine = ScriptedEngine(renderer, script)
    rollout = {"num_generations": 3}
    make_env = lambda: envs.append(CountEnv()) or envs[-1]  # noqa: E731
    with manager_of(engine, make_env, rollout=rollout) as manager:
        began = time.monotonic()
        with pytest.raises(EngineDied, match="the engine is gone"):
            manager.next_groups(2)
        assert time.monotonic() - began < 1
        assert engine.in_flight == 0 and len(envs) == 6
        assert all(env.closed == 1 for env in envs) and len(engine.released) == 6
        engine.script = "yes"
        assert [group.id for group in manager.next_groups(2)] == ["g0", "g1"]
    assert not [w for w in recwarn if "never" in str(w.message)]
    assert "never retrieved" not in caplog.text


def test_an_error_in_the_callback_stops_the_run(renderer):
    def show(tape):
        raise ZeroDivisionError("display")

    with (
        manager_of(ScriptedEngine(renderer), on_episode=show) as manager,
        pytest.raises(ZeroDivisionError, match="display"),
    ):
        manager.next_groups(2)


def test_the_callback_sees_every_episode(renderer):
    seen = []
    engine = ScriptedEngine(renderer)
    with manager_of(engine, on_episode=lambda tape: seen.append(tape.id)) as manager:
        manager.next_groups(2)
    assert sorted(seen) == ["g0-0", "g0-1", "g1-0", "g1-1"]


def test_dynamic_sampling_refills_groups_without_signal(renderer):
    def script(request):
        return "yes" if request.session.startswith(("g0", "g2")) else alternate(request)

    rollout = {"dynamic_sampling_rounds": 2}
    with manager_of(ScriptedEngine(renderer, script), rollout=rollout) as manager:
        groups = manager.next_groups(2)
        metrics = manager.pop_metrics()
    assert [group.id for group in groups] == ["g1", "g3"]
    assert all(group.has_signal for group in groups)
    assert metrics["rollout/no_signal_groups"] == 2
    # Over all that was sampled, not over what was kept.
    assert metrics["reward"] == 0.75 and metrics["frac_reward_zero_std"] == 0.5


def test_dynamic_sampling_ends_where_there_is_no_signal(renderer):
    """F035: 3 refills and no more, an empty batch, and the next one goes on."""
    engine = ScriptedEngine(renderer, "yes")
    rollout = {"dynamic_sampling_rounds": 3}
    with manager_of(engine, rollout=rollout) as manager:
        assert manager.next_groups(2) == []
        assert manager.pop_metrics()["rollout/no_signal_groups"] == 2 * (1 + 3)
        engine.script = alternate
        assert len(manager.next_groups(2)) == 2


def test_without_dynamic_sampling_groups_without_signal_are_kept(renderer):
    with manager_of(ScriptedEngine(renderer, "yes")) as manager:
        assert len(manager.next_groups(2)) == 2
        assert manager.pop_metrics()["frac_reward_zero_std"] == 1.0


def test_ctrl_c_in_next_groups_cleans_up_and_loses_no_task(renderer):
    engine = ScriptedEngine(renderer, forever)
    with manager_of(engine) as manager:
        main = threading.get_ident()
        threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            manager.next_groups(2)
        assert time.monotonic() - began < 2
        assert engine.in_flight == 0 and len(engine.released) == 4
        assert manager.state_dict()["in_flight"] == [0, 1]
    assert engine.closed


def test_closing_ends_everything_within_seconds(renderer):
    engine = ScriptedEngine(renderer, lambda r: forever() if r.session[1] in "23" else "yes")
    manager = manager_of(engine, rollout={"max_staleness": 1})
    manager.next_groups(2)
    time.sleep(0.05)
    assert engine.in_flight == 4
    began = time.monotonic()
    manager.close()
    manager.close()
    assert time.monotonic() - began < 2
    assert engine.in_flight == 0 and engine.closed
    assert "agentrl-rollouts" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="closed"):
        manager.next_groups(2)


def test_an_env_that_will_not_close_does_not_hold_up_the_end(renderer, monkeypatch):
    for module in ("rollout.manager", "rollout.group"):
        monkeypatch.setattr(f"{module}.CLOSE_S", 0.2)

    class Clinging(CountEnv):
        async def close(self):
            await forever()

    manager = manager_of(ScriptedEngine(renderer), Clinging, rollout={"max_staleness": 1})
    threading.Timer(0.1, manager.close).start()
    began = time.monotonic()
    with pytest.raises(CancelledError):
        manager.next_groups(2)
    assert time.monotonic() - began < 4


def test_what_envs_share_ends_with_the_manager_after_the_envs_and_before_the_engine(renderer):
    order = []

    class Shares(CountEnv):
        async def reset(self, *, seed=None, options=None):
            if not order:
                at_shutdown(self.end)
                order.append("began")
            return await super().reset(seed=seed, options=options)

        async def end(self):
            order.append(f"ended, engine closed: {engine.closed}")

        async def close(self):
            order.append("env")

    engine = ScriptedEngine(renderer, lambda r: forever() if r.session[1] in "23" else "yes")
    with manager_of(engine, Shares, rollout={"max_staleness": 1}) as manager:
        manager.next_groups(2)
    assert order == ["began", *["env"] * 8, "ended, engine closed: False"] and engine.closed


def test_what_envs_share_has_seconds_to_end(renderer, monkeypatch, caplog):
    monkeypatch.setattr("rollout.manager.SHUT_DOWN_S", 0.1)

    class Clings(CountEnv):
        async def reset(self, *, seed=None, options=None):
            at_shutdown(forever)
            return await super().reset(seed=seed, options=options)

    engine = ScriptedEngine(renderer)
    began = time.monotonic()
    with manager_of(engine, Clings) as manager:
        manager.next_groups(2)
    assert time.monotonic() - began < 2 and engine.closed
    assert "what the envs share did not end well" in caplog.text


def test_a_standstill_prints_what_is_pending(renderer, caplog):
    """F094."""

    class Stuck(CountEnv):
        async def step(self, action):
            if self.seed == self.stuck:
                await forever()
            return await super().step(action)

        stuck = TaskStream(make_tasks(40), 0).draw(1).env_seed

    rollout = {"watchdog_s": 0.3, "env_timeout_s": 1.2}
    caplog.set_level(logging.WARNING, "agentrl")
    with manager_of(ScriptedEngine(renderer), Stuck, rollout=rollout) as manager:
        manager.next_groups(2)
    tables = [r.getMessage() for r in caplog.records if "no progress" in r.getMessage()]
    assert tables and "g1-0" in tables[0] and "step" in tables[0] and "g0-0" not in tables[0]


def test_concurrency_limits_of_generation_and_env_are_apart(renderer):
    inside, most = 0, 0

    class Slow(CountEnv):
        async def step(self, action):
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.05)
            inside -= 1
            return await super().step(action)

    async def script(request):
        await asyncio.sleep(0.01)
        return "yes"

    engine = ScriptedEngine(renderer, script)
    limits = {"max_concurrent_generations": 3, "max_concurrent_env_calls": 5}
    with manager_of(engine, Slow, rollout={"num_generations": 8, **limits}) as manager:
        manager.next_groups(2)
    assert engine.most_in_flight == 3 and most == 5


def test_sizes_and_temperature_reach_the_engine(renderer):
    engine = ScriptedEngine(renderer)
    rollout = {"num_generations": 3, "temperature": 0.7, "max_new_tokens": 9}
    with manager_of(engine, rollout=rollout) as manager:
        manager.next_groups(2)
    assert len(engine.requests) == 6
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.max_new_tokens) == (0.7, 9)
    assert sampling.stop_token_ids == renderer.stop_token_ids


def test_too_few_tasks_are_refused_at_the_start(renderer):
    """F093."""
    with pytest.raises(ValueError, match=r"3 tasks.*prompts_per_step=4"):
        manager_of(ScriptedEngine(renderer), num_tasks=3, rollout={"prompts_per_step": 4})
    with pytest.raises(ValueError, match=r"3 tasks.*eval.num_tasks=5"):
        held_out({"": make_tasks(3)}, 5)


def test_evaluation_is_greedy_repeatable_and_no_part_of_training(renderer):
    engine = ScriptedEngine(renderer, alternate)
    manager = manager_of(
        engine,
        failing(1, 9),
        eval_config=EvalConfig(num_generations=2),
        eval_draws=held_out({"": make_tasks(6)}, 3),
    )
    with manager:
        first = manager.evaluate()
        seeds = {r.session: r.sampling.seed for r in engine.requests}
        assert {request.sampling.temperature for request in engine.requests} == {0.0}
        engine.requests.clear()
        second = manager.evaluate()
        assert manager.state_dict()["tasks"]["position"] == 0
        assert "reward" not in manager.pop_metrics()
    again = {r.session: r.sampling.seed for r in engine.requests}
    assert all(seeds[session] == again[session] for session in seeds.keys() & again.keys())
    assert [group.id for group in first] == ["eval0", "eval1", "eval2"]
    assert [group.task for group in first] == [group.task for group in second]
    assert first[0].rewards == [1.0, None]  # a fault stays, unscored


def test_rewards_that_compare_a_group_are_added(renderer):
    def longest(completions):
        most = max(map(len, completions))
        return [float(len(completion) == most) for completion in completions]

    rubric = Rubric([longest], weights=[2.0])
    with manager_of(ScriptedEngine(renderer, alternate), rubric=rubric) as manager:
        (group, _) = manager.next_groups(2)
    assert group.rewards == [3.0, 0.0]
    assert group.trajectories[0].rewards == {"env": 1.0, "longest": 1.0}


def test_a_group_reward_that_raises_voids_the_group(renderer):
    def broken(completions):
        raise ValueError("boom")

    with (
        manager_of(ScriptedEngine(renderer), rubric=Rubric([broken])) as manager,
        pytest.raises(RolloutError, match=r"reward_error.*broken.*boom"),
    ):
        manager.next_groups(2)


def test_a_group_that_cannot_be_scored_counts_its_attempts_once(renderer):
    """F052: all of them failed, which is more than half of them."""

    def broken(completions):
        raise ValueError("boom")

    rollout = {"max_attempts": 9}
    with (
        manager_of(ScriptedEngine(renderer), rubric=Rubric([broken]), rollout=rollout) as manager,
        pytest.raises(RolloutError, match=r"\d of \d episodes failed"),
    ):
        manager.next_groups(2)


def test_two_rewards_of_one_name_are_refused_in_a_group_too(renderer):
    def env(completions):
        return [0.0] * len(completions)

    with (
        manager_of(ScriptedEngine(renderer), rubric=Rubric([env])) as manager,
        pytest.raises(RolloutError, match="two rewards are named env"),
    ):
        manager.next_groups(2)


def test_what_an_episode_is_worth_is_not_mixed_with_a_reward_of_that_name():
    tape = Trajectory()
    tape.reward, tape.stop_reason, tape.rewards = 3.0, StopReason.DONE, {"reward": 1.0, "b": 2.0}
    metrics = summarize([TrajectoryGroup(id="g", task=Task(id="t"), trajectories=[tape])])
    assert metrics["reward"] == 3.0


def test_abandoned_threads_are_counted(renderer):
    """F023: a blocking call outlives its deadline, and shows."""
    release = threading.Event()

    class Stuck(TextEnv):
        def reset(self, *, seed=None, options=None):
            release.wait()

    rollout = {"env_timeout_s": 0.05, "max_fault_fraction": 1.0, "min_group_size": 1}
    with manager_of(ScriptedEngine(renderer), Stuck, rollout=rollout) as manager:
        before = manager.pop_metrics()["rollout/abandoned_threads"]
        with pytest.raises(RolloutError):
            manager.next_groups(2)
        assert manager.pop_metrics()["rollout/abandoned_threads"] >= before + 4
        release.set()


def test_a_rejected_group_gives_its_place_back(renderer):
    """F022: one place for a group, and the first group is lost."""
    rollout = {
        "prompts_per_step": 1,
        "num_generations": 1,
        "max_concurrent_generations": 1,
        "max_concurrent_env_calls": 1,
        "max_attempts": 2,
        "max_fault_fraction": 1.0,
    }
    with manager_of(ScriptedEngine(renderer), failing(0, 1), rollout=rollout) as manager:
        assert [group.id for _ in range(2) for group in manager.next_groups(1)] == ["g1", "g2"]


def test_metrics_split_the_time_and_start_anew(renderer):
    async def script(request):
        await asyncio.sleep(0.05)
        return alternate(request)

    with manager_of(ScriptedEngine(renderer, script), lambda: CountEnv(2)) as manager:
        manager.next_groups(2)
        metrics = manager.pop_metrics()
        assert "reward" not in manager.pop_metrics()
    assert metrics["reward"] == metrics["env"] == 1.0 and metrics["asked"] == 2.0
    assert metrics["stop/done"] == 1.0 and metrics["completions/mean_turns"] == 2.0
    assert metrics["reward_std"] == pytest.approx(2**0.5)
    parts = ("generate", "env", "queue")
    assert sum(metrics[f"time/{part}"] for part in parts) == pytest.approx(metrics["time/rollout"])
    assert metrics["time/generate"] > 0.08 > metrics["time/env"]
    assert metrics["rollout/tokens_per_second"] > 0 and metrics["rollout/event_loop_lag"] >= 0


def test_a_blocked_loop_shows_in_the_lag(renderer):
    """F023."""

    def script(request):
        time.sleep(0.2)  # an engine that blocks
        return "yes"

    rollout = {"prompts_per_step": 1, "num_generations": 1}
    with manager_of(ScriptedEngine(renderer, script), rollout=rollout) as manager:
        time.sleep(0.1)
        manager.next_groups(2)
        time.sleep(0.1)
        assert manager.pop_metrics()["rollout/event_loop_lag"] > 0.15


def test_lengths_count_sampled_and_env_tokens_apart():
    """F091: mask 000 1111 000 11111."""
    tape = Trajectory()
    for kind, count in (("env", 3), ("act", 4), ("env", 3), ("act", 5), ("env", 2)):
        if kind == "env":
            tape.observe([1] * count)
        else:
            completion = Completion(
                token_ids=[2] * count,
                logprobs=[-1.0] * count,
                finish_reason="stop",
                versions=[0] * count,
            )
            tape.act(completion)
    tape.reward, tape.stop_reason = 1.0, StopReason.DONE
    metrics = summarize([TrajectoryGroup(id="g", task=Task(id="t"), trajectories=[tape])])
    assert metrics["completions/mean_length"] == 9
    assert metrics["completions/mean_env_tokens"] == 3
    assert "reward_std" not in metrics  # a group of one


def test_means_are_over_the_episodes_that_have_the_key():
    def tape(reward, reason=StopReason.DONE, **metrics):
        tape = Trajectory()
        tape.reward, tape.stop_reason, tape.metrics = reward, reason, metrics
        return tape

    tapes = [tape(1.0, a=1.0), tape(0.0), tape(None, StopReason.ENV_ERROR), tape(0.0, a=0.0)]
    metrics = summarize([TrajectoryGroup(id="g", task=Task(id="t"), trajectories=tapes)])
    assert metrics["reward"] == pytest.approx(1 / 3) and metrics["a"] == 0.5
    assert metrics["stop/env_error"] == 0.25 and metrics["stop/done"] == 0.75


def test_the_means_of_what_runs_and_waits_are_taken_while_episodes_play(renderer):
    async def script(request):
        await asyncio.sleep(0.3)
        return "yes"

    rollout = {"prompts_per_step": 1, "num_generations": 4, "max_concurrent_generations": 1}
    with manager_of(ScriptedEngine(renderer, script), rollout=rollout) as manager:
        manager.next_groups(1)
        time.sleep(0.5)  # idle: no part of the means
        metrics = manager.pop_metrics()
    assert metrics["rollout/running_requests"] == pytest.approx(1, abs=0.1)
    assert metrics["rollout/queued_requests"] == pytest.approx(1.5, abs=0.4)
