"""Rewards: by parameter name, per episode and per group."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agentrl.rubric import RewardError, Rubric, load_rewards
from agentrl.threads import inline
from agentrl.trajectory import Trajectory, TrajectoryGroup
from agentrl.types import Message, Task

TASK = Task(id="t", answer="5", info={"kind": "sum"})


def episode(id: str, text: str) -> Trajectory:
    tape = Trajectory(id=id)
    tape.messages = [
        Message(role="user", content="2+3?"),
        Message(role="assistant", content=text),
        Message(role="tool", content="ignored"),
    ]
    return tape


def score(rubric: Rubric, tape: Trajectory, env: Any = None) -> dict[str, float]:
    return asyncio.run(rubric.score(task=TASK, trajectory=tape, env=env))


def group(*texts: str) -> TrajectoryGroup:
    tapes = [episode(f"e{index}", text) for index, text in enumerate(texts)]
    return TrajectoryGroup(id="g", task=TASK, trajectories=tapes)


def score_group(rubric: Rubric, of: TrajectoryGroup) -> list[dict[str, float]]:
    return asyncio.run(rubric.score_group(of, [None] * len(of.trajectories)))


def test_functions_get_what_their_parameters_name():
    got = {}

    def everything(completion, answer, info, messages, task, trajectory, env, extra=1, **rest):
        got.update(locals())
        return 1

    tape = episode("e", "it is 5")
    score(Rubric([everything]), tape, env="the env")
    assert got["completion"] == "it is 5"
    assert got["answer"] == "5"
    assert got["info"] == {"kind": "sum"}
    assert got["messages"] is tape.messages
    assert got["task"] is TASK
    assert got["trajectory"] is tape
    assert got["env"] == "the env"
    assert got["extra"] == 1


def test_sync_async_and_inline_rewards_are_weighted_and_weight_0_is_a_metric():
    """F051: bools become floats."""

    def right(completion, answer):
        return answer in completion

    async def short(completion):
        return len(completion)

    @inline
    def metric(completion):
        return 100

    rubric = Rubric([right, short, metric], weights=[1.0, -0.5, 0.0])
    rewards = score(rubric, episode("e", "5"))
    assert rewards == {"right": 1.0, "short": 1.0, "metric": 100.0}
    assert all(type(value) is float for value in rewards.values())
    assert rubric.total(rewards) == 0.5


def test_a_metric_may_name_its_values():
    def by_kind(info):
        return {f"correct/{info['kind']}": True}

    assert score(Rubric([by_kind], weights=[0]), episode("e", "")) == {"correct/sum": 1.0}
    with pytest.raises(RewardError, match="by_kind returned"):
        score(Rubric([by_kind]), episode("e", ""))


def test_an_episode_without_a_word_of_the_model_has_an_empty_completion():
    def completion_length(completion):
        return len(completion)

    assert score(Rubric([completion_length]), Trajectory(id="e")) == {"completion_length": 0.0}


def test_plural_names_score_the_group():
    def longest(completions, answers):
        assert answers == ["5", "5"]
        return [len(text) == max(map(len, completions)) for text in completions]

    def right(completion, answer):
        return completion == answer

    rubric = Rubric([longest, right], weights=[0.5, 1.0])
    assert rubric.scores_groups
    pair = group("5", "five")
    assert score_group(rubric, pair) == [{"longest": 0.0}, {"longest": 1.0}]
    first = score(rubric, pair.trajectories[0]) | score_group(rubric, pair)[0]
    assert rubric.total(first) == 1.0


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1", [1.0]])
def test_a_reward_that_is_no_finite_number_is_an_error_by_name(value: Any):
    """F051."""

    def odd(completion):
        return value

    with pytest.raises(RewardError, match=r"reward odd returned .* for 'e7'"):
        score(Rubric([odd]), episode("e7", ""))

    def odd_group(completions):
        return [1.0, value]

    with pytest.raises(RewardError, match=r"reward odd_group returned .* for 'e1'"):
        score_group(Rubric([odd_group]), group("a", "b"))


def test_a_reward_that_raises_is_an_error_with_its_cause_and_no_zero():
    """F052."""

    def broken(completion):
        raise KeyError("gold")

    with pytest.raises(
        RewardError, match=r"reward broken failed on 'e7': KeyError: 'gold'"
    ) as caught:
        score(Rubric([broken]), episode("e7", ""))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_group_reward_of_the_wrong_length_is_an_error():
    def one(completions):
        return [1.0]

    with pytest.raises(RewardError, match="a list of 2 numbers for group 'g'"):
        score_group(Rubric([one]), group("a", "b"))


def test_blocking_rewards_do_not_stall_the_loop():
    """F023."""

    def slow(completion):
        time.sleep(1)
        return 1.0

    async def main() -> tuple[float, float]:
        gaps = []

        async def heartbeat() -> None:
            while True:
                before = time.perf_counter()
                await asyncio.sleep(0.05)
                gaps.append(time.perf_counter() - before)

        beating = asyncio.create_task(heartbeat())
        rubric = Rubric([slow])
        started = time.perf_counter()
        await asyncio.gather(
            *(rubric.score(task=TASK, trajectory=episode("e", ""), env=None) for _ in range(8))
        )
        wall = time.perf_counter() - started
        beating.cancel()
        return wall, max(gaps)

    wall, gap = asyncio.run(main())
    assert wall < 4  # one after another: 8 s
    assert gap < 0.8  # on the loop: 1 s


def test_mistakes_in_a_rubric_show_at_once():
    def typo(completoin): ...

    def both(completion, answers): ...

    def keyword(*, completion): ...

    def fine(completion): ...

    with pytest.raises(ValueError, match=r"'completoin'\. For an episode: completion, answer"):
        Rubric([typo])
    with pytest.raises(ValueError, match="an episode and for a group"):
        Rubric([both])
    with pytest.raises(ValueError, match="keyword-only"):
        Rubric([keyword])
    with pytest.raises(ValueError, match="two reward functions are named 'fine'"):
        Rubric([fine, fine])
    with pytest.raises(ValueError, match="1 reward functions came with 2 weights"):
        Rubric([fine], weights=[1, 2])
    with pytest.raises(ValueError, match="finite"):
        Rubric([fine], weights=[float("nan")])


def test_rewards_are_loaded_by_name():
    assert load_rewards([]) is None
    rubric = load_rewards(["envs.arithmetic:correct"], [0.5])
    assert rubric is not None
    assert rubric.weights == {"correct": 0.5}
    for name, said in {
        "correct": "must be named package.module:function",
        "nowhere.rewards:correct": "no module 'nowhere'",
        "envs.arithmetic:corect": "has no function 'corect'",
    }.items():
        with pytest.raises(ValueError, match=said):
            load_rewards([name])
