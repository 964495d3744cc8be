"""Which groups make a batch: none too old, none lost, none played twice, whatever the timing."""

import asyncio
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.protocols import EngineDied, EngineError
from rollout.faults import RolloutError
from rollout.tasks import held_out
from tests.engines import (
    ANY_PROBE,
    CountEnv,
    InterruptibleEngine,
    ScriptedEngine,
    byte_renderer,
    forever,
    make_tasks,
)
from tests.stages import manager_of, slots_of, update_weights
from tests.virtual_time import run_virtual


@pytest.fixture(scope="module")
def renderer():
    return byte_renderer()


def ids(groups):
    return [group.id for group in groups]


def versions_of(groups):
    tapes = [tape for group in groups for tape in group.trajectories if tape.reward is not None]
    return {version for tape in tapes for version in tape.versions if version >= 0}


class Patient(CountEnv):
    """Steps take as many seconds as the action says."""

    async def step(self, action):
        await asyncio.sleep(float(action))
        return await super().step(action)


def slow_groups(renderer, **seconds):
    """Says a second for each step, or what is given for the group."""
    return ScriptedEngine(renderer, lambda r: str(seconds.get(r.session.partition("-")[0], 1)))


@settings(deadline=None, max_examples=40)
@given(
    max_staleness=st.integers(0, 3),
    num_groups=st.integers(1, 3),
    on_update=st.sampled_from(["keep", "drop", "finish"]),
    learner_s=st.sampled_from([0, 3, 30]),
    seed=st.integers(0, 2**32),
)
def test_no_token_is_ever_too_old_and_no_group_lost_or_played_twice(
    max_staleness, num_groups, on_update, learner_s, seed
):
    """With heavy-tailed tools, members that fail, and weights that change in mid-turn."""
    drawn, played = random.Random(seed), []

    class Env(CountEnv):
        async def step(self, action):
            await asyncio.sleep(drawn.paretovariate(0.8))
            if drawn.random() < 0.1:
                raise OSError("no sandbox")
            return await super().step(action)

    class Engine(InterruptibleEngine):
        async def release(self, session):
            self._turn_starts.pop(session, None)

    async def run():
        engine = Engine(byte_renderer(), text="abc", token_s=0.5)
        slots = slots_of(
            engine,
            lambda: Env(drawn.randint(1, 4)),
            prompts_per_step=num_groups,
            min_group_size=2,
            max_attempts=3,
            max_fault_fraction=1.0,
            max_staleness=max_staleness,
            on_update=on_update,
        )
        slots.on_group = lambda group: played.append(group.id)
        taken = []
        for version in range(8):
            groups = await slots.next_batch(num_groups)
            assert groups is not None and len(groups) == num_groups
            taken += ids(groups)
            assert min(versions_of(groups)) >= version - max_staleness
            assert len(slots.state_dict()["in_flight"]) <= max_staleness * num_groups
            await asyncio.sleep(learner_s)
            if max_staleness == 0:
                assert versions_of(groups) == {version} and engine.in_flight == 0
            await update_weights(slots, version + 1)
        left = {f"g{number}" for number in slots.state_dict()["in_flight"]}
        metrics = slots.metrics.pop()
        await slots.cancel()
        assert len(taken) == len(set(taken)) and not left & set(taken)
        dropped = metrics.get("rollout/dropped_groups", 0)
        assert len(set(taken) | left) + dropped == slots.tasks.position
        assert "rollout/stale_groups" not in metrics
        assert len(played) == len(set(played))

    run_virtual(run())


def test_a_batch_waits_for_the_group_that_would_be_too_old_for_the_next(renderer):
    """Dropping it instead would lose work, and long episodes before all others."""
    engine = slow_groups(renderer, g1=100)

    async def run():
        slots = slots_of(engine, Patient, max_staleness=1)
        assert ids(await slots.next_batch(2)) == ["g0", "g2"]
        await update_weights(slots, 1)
        assert ids(await slots.next_batch(2)) == ["g1", "g3"]
        metrics = slots.metrics.pop()
        assert "rollout/stale_groups" not in metrics
        # g0 and g2 at version 0, and two that version 0 began, at version 1
        assert metrics["rollout/staleness"] == 0.5
        await slots.cancel()

    run_virtual(run())


def test_a_batch_waits_for_nobody_who_can_come_later(renderer):
    engine = slow_groups(renderer, g1=100, g2=100)

    async def run():
        slots, loop = slots_of(engine, Patient, max_staleness=2), asyncio.get_running_loop()
        assert not {"g1", "g2"} & set(ids(await slots.next_batch(2)))
        await update_weights(slots, 1)
        assert not {"g1", "g2"} & set(ids(await slots.next_batch(2)))
        assert loop.time() < 10
        await update_weights(slots, 2)
        assert ids(await slots.next_batch(2)) == ["g1", "g2"]
        await slots.cancel()

    run_virtual(run())


def test_more_old_groups_than_a_batch_can_take_are_begun_with_in_time(renderer):
    """Of six begun at version 0, two must be trained at each of the versions 0, 1 and 2."""
    slow = {f"g{number}": 50 for number in range(2, 6)}
    engine = slow_groups(renderer, **slow)

    async def run():
        slots = slots_of(engine, Patient, max_staleness=2)
        taken = []
        for version in range(4):
            groups = await slots.next_batch(2)
            assert min(versions_of(groups)) >= version - 2
            taken += ids(groups)
            await update_weights(slots, version + 1)
        assert sorted(taken[:6]) == [f"g{number}" for number in range(6)]
        assert "rollout/stale_groups" not in slots.metrics.pop()
        await slots.cancel()

    run_virtual(run())


def test_groups_that_became_too_old_all_the_same_are_replaced(renderer):
    """F022: versions that jump; what is dropped gives its place back."""
    engine = slow_groups(renderer)

    async def run():
        slots = slots_of(engine, Patient, max_staleness=1)
        await slots.next_batch(2)
        await asyncio.sleep(10)
        await update_weights(slots, 5)
        groups = await slots.next_batch(2)
        assert versions_of(groups) == {5} and len(groups) == 2
        assert len(slots.state_dict()["in_flight"]) == 2
        metrics = slots.metrics.pop()
        assert metrics["rollout/stale_groups"] == 2
        assert metrics["rollout/wasted_tokens"] == 2 * 2 * len("1.")
        await slots.cancel()

    run_virtual(run())


def test_the_histogram_counts_trained_tokens_by_their_age(renderer):
    """A turn of ten tokens, three of them older."""
    engine = InterruptibleEngine(renderer)

    async def run():
        slots = slots_of(engine, prompts_per_step=1, num_generations=1, max_staleness=1)
        waiting = asyncio.create_task(slots.next_batch(1))
        await asyncio.sleep(3.5)
        await update_weights(slots, 1)
        await waiting
        metrics = slots.metrics.pop()
        assert metrics["rollout/staleness_0"] == pytest.approx(0.7)
        assert metrics["rollout/staleness_1"] == pytest.approx(0.3)
        assert metrics["rollout/staleness"] == 1
        await slots.cancel()

    run_virtual(run())


def test_tokens_of_attempts_that_failed_are_counted_as_wasted(renderer):
    class Fails(CountEnv):
        failed = 0

        async def step(self, action):
            if Fails.failed < 3:
                Fails.failed += 1
                raise OSError("no sandbox")
            return await super().step(action)

    async def run():
        rollout = {"max_attempts": 2, "num_generations": 2, "max_fault_fraction": 1.0}
        slots = slots_of(ScriptedEngine(renderer, "yes"), Fails, **rollout)
        await slots.next_batch(2)
        assert slots.metrics.pop()["rollout/wasted_tokens"] == 3 * len("yes.")

    run_virtual(run())


def test_oversampling_takes_the_first_and_aborts_the_rest(renderer):
    """Also their members that were complete, whose tokens are wasted."""

    def script(request):
        return forever() if request.session == "g1-0" else "yes"

    engine = ScriptedEngine(renderer, script)
    with manager_of(engine, rollout={"oversampling": 1.5}) as manager:
        assert ids(manager.next_groups(2)) == ["g0", "g2"]
        assert engine.in_flight == 0
        metrics = manager.pop_metrics()
        assert metrics["rollout/aborted_groups"] == 1
        assert metrics["rollout/wasted_tokens"] == len("yes.")
        assert manager.state_dict()["in_flight"] == []


def test_oversampling_and_staleness_exclude_each_other(renderer):
    with pytest.raises(ValueError, match="oversampling"):
        manager_of(ScriptedEngine(renderer), rollout={"oversampling": 2.0, "max_staleness": 1})


def test_synchronous_rollouts_are_idle_between_batches(renderer):
    engine = ScriptedEngine(renderer)
    with manager_of(engine) as manager:
        for version in range(3):
            groups = manager.next_groups(2)
            played = len(engine.requests)
            time.sleep(0.03)
            assert len(engine.requests) == played == 4 * (version + 1) and engine.in_flight == 0
            assert versions_of(groups) == {version}
            manager.update_weights([], version + 1, ANY_PROBE)
        assert manager.pop_metrics()["rollout/staleness_0"] == 1


def test_rollouts_go_on_while_the_learner_trains(renderer):
    engine = ScriptedEngine(renderer)
    with manager_of(engine, rollout={"max_staleness": 1}) as manager:
        manager.next_groups(2)
        time.sleep(0.1)
        assert len(engine.requests) == 8  # a second batch is ready
        manager.update_weights([], 1, ANY_PROBE)
        time.sleep(0.1)
        assert len(engine.requests) == 12  # a third began with the new weights


def test_weights_change_in_between_requests(renderer):
    """F027: the gate waits until nothing is in flight, however long that takes."""

    async def script(request):
        await asyncio.sleep(0.1)
        return "yes"

    engine = ScriptedEngine(renderer, script)
    with manager_of(engine, lambda: CountEnv(3), rollout={"max_staleness": 2}) as manager:
        manager.next_groups(2)
        manager.update_weights([], 1, ANY_PROBE)
        assert engine.in_flight_at_update == 0 and engine.version == 1
        assert len(manager.next_groups(2)) == 2


@pytest.mark.parametrize(("on_update", "num_interrupted"), [("keep", 4), ("finish", 0)])
def test_an_update_interrupts_the_turns_in_flight_or_waits_for_them(
    renderer, on_update, num_interrupted
):
    engine = InterruptibleEngine(renderer, token_s=0.05)
    rollout = {"max_staleness": 1, "on_update": on_update, "max_concurrent_generations": 4}
    with manager_of(engine, rollout=rollout) as manager:
        manager.next_groups(2)
        time.sleep(0.15)  # the next two are in the middle of their turns
        manager.update_weights([], 1, ANY_PROBE)
        assert engine.in_flight_at_update == 0
        groups = manager.next_groups(2)
        metrics = manager.pop_metrics()
    texts = {tape.messages[-1].content for group in groups for tape in group.trajectories}
    assert texts == {"abcdefghi"}
    assert metrics.get("rollout/interrupted_turns", 0) == num_interrupted
    assert metrics.get("rollout/staleness_1", 0) > 0


def test_two_thousand_episodes_are_in_flight_at_once(renderer):
    everybody = asyncio.Event()

    async def script(request):
        if engine.in_flight == 2000:
            everybody.set()
        await everybody.wait()
        return "yes"

    engine = ScriptedEngine(renderer, script)
    rollout = {"prompts_per_step": 125, "num_generations": 8, "max_staleness": 1}
    limits = {"max_concurrent_generations": 2000, "max_concurrent_env_calls": 2000}
    with manager_of(engine, num_tasks=300, rollout=rollout | limits) as manager:
        assert len(manager.next_groups(125)) == 125
    assert engine.most_in_flight == 2000


def test_an_engine_that_wants_weights_gets_them_before_the_batch_is_complete(renderer):
    """What was complete or in play stays: nothing is lost, and nothing is played twice."""

    async def script(request):
        if request.session == "g1-1":
            engine.wants_weights.set()  # a server came back
            await asyncio.sleep(0.1)
        return "yes"

    engine = ScriptedEngine(renderer, script)
    with manager_of(engine) as manager:
        manager.update_weights([], 3, ANY_PROBE)
        assert manager.next_groups(2) is None
        assert manager.state_dict()["in_flight"] == [0, 1]
        manager.update_weights([], 3, ANY_PROBE)  # the same: nothing got older
        assert not engine.wants_weights.is_set()
        assert ids(manager.next_groups(2)) == ["g0", "g1"]
        metrics = manager.pop_metrics()
    assert sorted(r.session for r in engine.requests) == ["g0-0", "g0-1", "g1-0", "g1-1"]
    assert metrics["rollout/staleness"] == 0 and metrics["rollout/staleness_0"] == 1


def test_an_engine_that_wants_weights_already_gets_them_first(renderer):
    async def script(request):
        await asyncio.sleep(0.05)
        return "yes"

    engine = ScriptedEngine(renderer, script)
    engine.wants_weights.set()
    with manager_of(engine) as manager:
        assert manager.next_groups(2) is None and manager.next_groups(2) is None
        manager.update_weights([], 0, ANY_PROBE)
        assert ids(manager.next_groups(2)) == ["g0", "g1"]


def test_a_batch_that_is_complete_is_handed_over_whatever_the_engine_wants(renderer):
    """Else an engine that loses weights all the time would stop the training."""
    engine = ScriptedEngine(renderer)
    with manager_of(engine, rollout={"max_staleness": 1}) as manager:
        manager.next_groups(2)
        time.sleep(0.1)
        engine.wants_weights.set()
        assert ids(manager.next_groups(2)) == ["g2", "g3"]


def test_an_evaluation_goes_on_where_the_engine_wanted_weights(renderer):
    async def script(request):
        if request.session == "eval2-0" and len(engine.requests) <= 3:
            engine.wants_weights.set()
            await asyncio.sleep(0.1)
        return "yes"

    engine = ScriptedEngine(renderer, script)
    with manager_of(engine, eval_draws=held_out({"": make_tasks(3)}, 3)) as manager:
        assert manager.evaluate() is None
        manager.update_weights([], 0, ANY_PROBE)
        assert ids(manager.evaluate()) == ["eval0", "eval1", "eval2"]
        assert len(engine.requests) == 3
        assert ids(manager.evaluate()) == ["eval0", "eval1", "eval2"]  # another one
        assert len(engine.requests) == 6


def test_faults_count_on_while_a_batch_waits_for_weights(renderer):
    """F052: else a server that comes and goes would hide how many episodes it spoils."""

    async def script(request):
        group = request.session[:2]
        if group == "g0":
            engine.wants_weights.set()
            raise EngineError("the server is gone")
        await again.wait()
        if group == "g2":  # which takes the place of g0
            raise EngineError("the server is gone again")
        return "yes"

    engine, again = ScriptedEngine(renderer, script), asyncio.Event()

    async def run():
        slots = slots_of(engine, max_fault_fraction=0.5)
        assert await slots.next_batch(2) is None
        again.set()
        await update_weights(slots, 0)
        with pytest.raises(RolloutError, match="3 of 4 episodes failed"):
            await slots.next_batch(2)

    run_virtual(run())


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_interrupted_turn_of_an_engine_that_wanted_weights_is_not_older(renderer, max_staleness):
    engine = InterruptibleEngine(renderer)

    async def run():
        slots = slots_of(engine, max_staleness=max_staleness)
        await update_weights(slots, 1)
        waiting = asyncio.create_task(slots.next_batch(2))
        await asyncio.sleep(3.5)
        engine.wants_weights.set()
        assert await waiting is None
        await update_weights(slots, 1)
        groups = await slots.next_batch(2)
        assert groups is not None and len(groups) == 2 and versions_of(groups) == {1}
        assert slots.metrics.pop()["rollout/staleness"] == 0
        await slots.cancel()

    run_virtual(run())


def test_a_stopped_run_plays_the_groups_in_flight_again(renderer):
    rollout = {"max_staleness": 1}
    with manager_of(ScriptedEngine(renderer), rollout=rollout) as manager:
        first = manager.next_groups(2)
        state = manager.state_dict()
    assert state["in_flight"] == [2, 3]
    with manager_of(ScriptedEngine(renderer), rollout=rollout) as manager:
        manager.load_state_dict(state)
        second = manager.next_groups(2)
    with manager_of(ScriptedEngine(renderer)) as whole:
        expected = whole.next_groups(4)
    assert [(g.id, g.task) for g in first + second] == [(g.id, g.task) for g in expected]


def test_a_stopped_run_loses_no_group_that_was_complete_but_not_handed_over(renderer):
    engine = ScriptedEngine(renderer, lambda r: forever() if r.session[1] in "35" else "yes")
    with manager_of(engine, rollout={"max_staleness": 2}) as manager:
        assert ids(manager.next_groups(2)) == ["g0", "g1"]
        time.sleep(0.05)
        state = manager.state_dict()
    assert state["in_flight"] == [2, 3, 4, 5] and state["tasks"]["position"] == 6
    with manager_of(ScriptedEngine(renderer), rollout={"max_staleness": 2}) as manager:
        manager.load_state_dict(state)
        assert ids(manager.next_groups(2) + manager.next_groups(2)) == ["g2", "g3", "g4", "g5"]
        assert manager.state_dict()["in_flight"] == [6, 7, 8, 9]


def test_a_request_that_will_not_end_fails_the_update(renderer, monkeypatch):
    for module in ("rollout.manager", "rollout.group"):
        monkeypatch.setattr(f"{module}.CLOSE_S", 0.2)
    stuck = threading.Event()

    async def script(request):
        if request.session.startswith(("g0", "g1")):
            return "yes"
        while not stuck.is_set():  # deaf to its cancellation
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
        return "yes"

    rollout = {"max_staleness": 1, "generate_timeout_s": 0.2}
    with manager_of(ScriptedEngine(renderer, script), rollout=rollout) as manager:
        manager.next_groups(2)
        with pytest.raises(RolloutError, match=r"4 requests did not end[\s\S]*g2-0 +generate"):
            manager.update_weights([], 1, ANY_PROBE)
        stuck.set()


def test_a_failure_between_two_batches_reaches_the_learner(renderer):
    """F021: a background group dies while the learner trains."""

    def script(request):
        if request.session.startswith("g2"):
            raise EngineDied("x")
        return "yes"

    rollout = {"max_staleness": 1}
    with manager_of(ScriptedEngine(renderer, script), rollout=rollout) as manager:
        began = time.monotonic()
        with pytest.raises(EngineDied, match="x"):
            for _ in range(3):
                manager.next_groups(2)
        assert time.monotonic() - began < 2
