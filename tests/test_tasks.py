"""The order of tasks and the seeds of everything."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.types import Task
from rollout.seeds import derive_seed
from rollout.tasks import TaskStream

TASKS = [Task(id=str(i)) for i in range(10)]


def ids(stream, count):
    return [draw.task.id for draw in itertools.islice(stream, count)]


def test_every_epoch_shows_each_task_once_in_a_new_order():
    stream = TaskStream(TASKS, seed=0)
    first, second = ids(stream, 10), ids(stream, 10)
    assert sorted(first) == sorted(second) == sorted(task.id for task in TASKS)
    assert first != second


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(-5, 2**40), consumed=st.integers(0, 45))
def test_a_resumed_stream_equals_the_uninterrupted_one(seed, consumed):
    """F081: also in the middle of a later epoch."""
    whole = TaskStream(TASKS, seed)
    expected = list(itertools.islice(whole, 60))[consumed:]
    stopped = TaskStream(TASKS, seed)
    list(itertools.islice(stopped, consumed))
    resumed = TaskStream(TASKS, seed)
    resumed.load_state_dict(stopped.state_dict())
    assert list(itertools.islice(resumed, 60 - consumed)) == expected


def test_a_draw_is_a_function_of_its_number():
    stream = TaskStream(TASKS, seed=3)
    draws = list(itertools.islice(stream, 25))
    assert [stream.draw(number) for number in (24, 3, 11)] == [draws[24], draws[3], draws[11]]


def test_another_seed_is_another_order():
    assert ids(TaskStream(TASKS, seed=0), 10) != ids(TaskStream(TASKS, seed=1), 10)


def test_a_position_in_another_order_is_refused():
    state = TaskStream(TASKS, seed=3).state_dict()
    with pytest.raises(ValueError, match="resume with seed=3"):
        TaskStream(TASKS, seed=4).load_state_dict(state)
    with pytest.raises(ValueError, match=r"10 tasks.*now has 9"):
        TaskStream(TASKS[:9], seed=3).load_state_dict(state)


def test_without_tasks_every_draw_is_an_env_seed_of_its_own():
    draws = list(itertools.islice(TaskStream(None, seed=0), 50))
    assert len({draw.env_seed for draw in draws}) == len({draw.task.id for draw in draws}) == 50
    assert all(0 <= draw.env_seed < 2**31 for draw in draws)


def test_too_few_tasks_are_refused_with_both_numbers():
    """F093."""
    with pytest.raises(ValueError, match=r"3 tasks, fewer than rollout.prompts_per_step=4"):
        TaskStream(TASKS[:3], seed=0).require(4, "rollout.prompts_per_step")
    TaskStream(None, seed=0).require(4, "rollout.prompts_per_step")
    TaskStream(TASKS[:4], seed=0).require(4, "rollout.prompts_per_step")


def test_an_empty_split_is_refused():
    with pytest.raises(ValueError, match="no tasks"):
        TaskStream([], seed=0)


def test_a_checkpoint_of_other_tasks_is_refused():
    state = TaskStream(TASKS, seed=0).state_dict()
    with pytest.raises(ValueError, match=r"10 tasks.*3"):
        TaskStream(TASKS[:3], seed=0).load_state_dict(state)


def test_seeds_are_stable_and_tell_their_parts_apart():
    assert derive_seed(0, "a", 1) == derive_seed(0, "a", 1)
    parts = [(s, m, a) for s in range(10) for m in range(10) for a in range(10)]
    assert len({derive_seed(*p) for p in parts}) == 1000
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert all(derive_seed(i, bits=8) < 256 for i in range(100))
