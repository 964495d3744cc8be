"""Several envs in one run: who is drawn how often, the same again after a stop, metrics of each."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import CurriculumConfig
from agentrl.summary import summarize
from agentrl.trajectory import Trajectory, TrajectoryGroup
from agentrl.types import StopReason, Task
from rollout.manager import RolloutManager
from rollout.mix import TaskMix
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

ROWS = {"a": make_tasks(10), "b": make_tasks(3), "c": None}
WEIGHTS = {"a": 2.0, "b": 1.0, "c": 1.0}


@pytest.fixture(scope="module")
def renderer():
    return byte_renderer()


def mix_of(seed: int = 0, curriculum: CurriculumConfig | None = None, rows=ROWS) -> TaskMix:
    return TaskMix(rows, WEIGHTS, seed, curriculum)


def take(mix, count):
    return list(itertools.islice(iter(lambda: next(mix), None), count))


def group(env: str, *rewards: float | None) -> TrajectoryGroup:
    tapes = [Trajectory(id=str(member)) for member in range(len(rewards))]
    for tape, reward in zip(tapes, rewards, strict=True):
        tape.reward = reward
        tape.stop_reason = StopReason.ENV_ERROR if reward is None else StopReason.DONE
    return TrajectoryGroup(id="g", task=Task(id="t", env=env), trajectories=tapes)


# Who is drawn.


def test_each_env_gets_its_share_of_every_stretch_of_draws():
    draws = take(mix_of(), 400)
    for start in range(0, 400, 20):
        counts = Counter(draw.task.env for draw in draws[start : start + 20])
        assert all(abs(counts[env] - 20 * WEIGHTS[env] / 4) < 3 for env in ROWS), counts


def test_each_env_plays_its_own_tasks_in_its_own_epochs():
    draws = [draw for draw in take(mix_of(), 60) if draw.task.env == "a"]
    assert sorted(draw.task.id for draw in draws[:10]) == sorted(task.id for task in ROWS["a"])
    assert [draw.task.id for draw in draws[:10]] != [draw.task.id for draw in draws[10:20]]


def test_an_env_without_tasks_is_mixed_with_those_that_have_some():
    seeds = [draw for draw in take(mix_of(), 60) if draw.task.env == "c"]
    assert len({draw.task.id for draw in seeds}) == len(seeds) > 10
    assert all(draw.task.id == f"seed-{draw.env_seed}" for draw in seeds)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**40), consumed=st.integers(0, 60), learned=st.lists(st.booleans()))
def test_a_resumed_mix_equals_the_uninterrupted_one(seed, consumed, learned):
    """F081: also with a curriculum, whose weights are part of the state."""
    whole = mix_of(seed, CurriculumConfig())
    take(whole, consumed)
    whole.learn([group("ab"[number % 2], float(won)) for number, won in enumerate(learned)])
    resumed = mix_of(seed, CurriculumConfig())
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert take(resumed, 30) == take(whole, 30)


def test_the_state_of_a_mix_does_not_change_with_what_it_learns_later():
    mix = mix_of(0, CurriculumConfig())
    mix.learn([group("a", 1.0)])
    state = mix.state_dict()
    before = json.dumps(state)
    mix.learn([group("a", 0.0), group("b", 1.0)])
    assert json.dumps(state) == before


def test_a_draw_is_drawn_again_by_its_ticket_whatever_the_weights_are_by_then():
    mix = mix_of(3, CurriculumConfig())
    draws = take(mix, 25)
    mix.learn([group("a", 0.0)] * 30)
    assert [mix.draw(json.loads(json.dumps(draw.ticket))) for draw in draws] == draws


def test_a_checkpoint_of_another_mix_is_refused():
    state = mix_of(3).state_dict()
    with pytest.raises(ValueError, match="resume with seed=3"):
        mix_of(4).load_state_dict(state)
    with pytest.raises(ValueError, match="envs: a, b, c; now there are: a, b; resume"):
        mix_of(3, rows={"a": ROWS["a"], "b": ROWS["b"]}).load_state_dict(state)
    with pytest.raises(ValueError, match="10 tasks, the env a now has 9"):
        mix_of(3, rows=ROWS | {"a": make_tasks(9)}).load_state_dict(state)
    with pytest.raises(ValueError, match="made with a mix"):
        TaskStream(ROWS["a"], 3).load_state_dict(state)
    with pytest.raises(ValueError, match="one of no name"):
        mix_of(3).load_state_dict(TaskStream(ROWS["a"], 3).state_dict())


def test_an_env_with_fewer_tasks_than_its_share_of_a_batch_is_refused_by_name():
    """F093."""
    with pytest.raises(ValueError, match=r"the env b has 3 tasks, fewer than its share of x=4"):
        mix_of().require(16, "x")
    mix_of().require(12, "x")
    with pytest.raises(ValueError, match="the env b has no tasks"):
        mix_of(rows=ROWS | {"b": []})


def test_held_out_tasks_are_dealt_to_the_envs_in_turn():
    draws = held_out(ROWS, 8)
    assert [draw.task.env for draw in draws] == ["a", "b", "c"] * 2 + ["a", "b"]
    assert [draw.number for draw in draws] == list(range(8))
    assert len({(draw.task.env, draw.task.id) for draw in draws}) == 8
    with pytest.raises(ValueError, match=r"env b has 3 tasks.*its share of eval.num_tasks=4"):
        held_out(ROWS, 11)


# The curriculum.


def test_what_is_always_or_never_solved_is_drawn_less_often():
    """Worked: 4 p (1 - p) is 1 at 1/2, 0.75 at 1/4, and the floor at 0 and 1."""
    mix = mix_of(0, CurriculumConfig(floor=0.1))
    assert mix.shares() == {"a": 0.5, "b": 0.25, "c": 0.25}
    mix.learn([group("a", 0.0, 0.5), group("b", 1.0, 0.0), group("c", 1.0, 0.0, 0.0, 0.0)])
    total = 2 * 0.1 + 1.0 + 0.75
    assert mix.shares() == pytest.approx({"a": 0.2 / total, "b": 1 / total, "c": 0.75 / total})
    metrics = mix.metrics()
    assert metrics["mix/b/success"] == 0.5 and metrics["mix/a/share"] == mix.shares()["a"]


def test_success_is_a_mean_that_forgets():
    mix = mix_of(0, CurriculumConfig(success_reward=0.5))
    mix.learn([group("a", 0.6), group("a", 0.4), group("a", 0.4, None), group("a", None)])
    assert mix.metrics()["mix/a/success"] == pytest.approx(1 / 3)
    mix.learn([group("a", 1.0)] * 100)
    assert mix.metrics()["mix/a/success"] > 0.98


def test_without_a_curriculum_shares_stay():
    mix = mix_of()
    mix.learn([group("a", 0.0)] * 30)
    assert mix.shares()["a"] == 0.5 and "mix/a/success" not in mix.metrics()


# A manager of several envs.


class Says(CountEnv):
    """Names itself; "b" is never solved."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    async def step(self, action):
        observation, reward, *rest = await super().step(action)
        return observation, reward * (self.name != "b"), *rest

    async def reset(self, *, seed=None, options=None):
        observation, info = await super().reset(seed=seed, options=options)
        assert options["task"].env == self.name
        return observation, info


def manager_of_mix(engine, curriculum=None, eval_draws=(), **values):
    return RolloutManager(
        engine=engine,
        envs={
            name: EnvSetup(make_env=lambda name=name: Says(name), renderer=engine.renderer)
            for name in ROWS
        },
        config=config(prompts_per_step=8, **values),
        tasks=mix_of(5, curriculum),
        eval_draws=eval_draws,
    )


def test_groups_play_on_the_env_of_their_task_and_are_measured_apart(renderer):
    with manager_of_mix(ScriptedEngine(renderer, alternate)) as manager:
        groups = manager.next_groups(8)
        metrics = manager.pop_metrics()
    assert {group.task.env for group in groups} == set(ROWS)
    assert metrics["a/reward"] == metrics["c/reward"] == 0.5 and metrics["b/reward"] == 0.0
    by_env = Counter(group.task.env for group in groups)
    assert metrics["reward"] == pytest.approx(0.5 * (8 - by_env["b"]) / 8)
    assert metrics["a/asked"] == 1.0 and metrics["a/stop/done"] == 1.0
    assert metrics["mix/a/share"] == 0.5


def test_one_env_has_no_metrics_of_its_own_name():
    assert not [name for name in summarize([group("", 1.0, 0.0)]) if name.startswith("/")]


def test_held_out_episodes_are_measured_by_env_too(renderer):
    engine = ScriptedEngine(renderer, "yes")
    with manager_of_mix(engine, eval_draws=held_out(ROWS, 6)) as manager:
        groups = manager.evaluate()
    assert groups is not None
    metrics = summarize(groups)
    assert metrics["a/reward"] == 1.0 and metrics["b/reward"] == 0.0
    assert metrics["reward"] == pytest.approx(4 / 6)


def test_a_stopped_mix_plays_the_groups_in_flight_again_as_the_same_tasks(renderer):
    def tasks_of(groups):
        return [(group.id, group.task) for group in groups]

    curriculum = CurriculumConfig()
    engine = ScriptedEngine(renderer, lambda r: forever() if r.session[1:3] == "9-" else "yes")
    with manager_of_mix(engine, curriculum, max_staleness=1) as manager:
        first = manager.next_groups(8)
        state = json.loads(json.dumps(manager.state_dict()))
    assert [number for number, _, _ in state["in_flight"]] == list(range(8, 16))
    with manager_of_mix(ScriptedEngine(renderer), curriculum, max_staleness=1) as manager:
        manager.load_state_dict(state)
        second = manager.next_groups(8)
    drawn = [(f"g{draw.number}", draw.task) for draw in take(mix_of(5), 16)]
    assert tasks_of(first + second) == drawn


def test_a_synchronous_curriculum_is_the_same_whatever_the_timing(renderer):
    def run(delay):
        async def script(request):
            await asyncio.sleep(delay * (hash(request.session) % 5))
            return alternate(request)

        with manager_of_mix(ScriptedEngine(renderer, script), CurriculumConfig()) as manager:
            groups = [group for _ in range(4) for group in manager.next_groups(8)]
            return [(g.id, g.task.env, g.task.id) for g in groups], manager.state_dict()

    assert run(0.0) == run(0.003)
    groups, state = run(0.0)
    later = Counter(env for _, env, _ in groups[16:])
    assert later["b"] < later["c"], "never solved, and so drawn less often"
    assert state["tasks"]["success"]["b"][0] == 0.0
