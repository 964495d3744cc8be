"""Advantages against plain loops, hand-computed cases and what must not change them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config_file import make_config
from agentrl.config_section import ConfigError
from agentrl.trajectory import Trajectory, TrajectoryGroup
from agentrl.types import Completion, StopReason, Task
from tests import oracles_advantage as oracles
from tests.oracles_advantage import Played
from train.advantage import (
    ESTIMATORS,
    AdvantageInputs,
    advantage_inputs,
    estimate,
    overlong_penalty,
    relative_penalty,
)

BETA = 0.3


def config_of(**advantage):
    return make_config(
        {
            "model": {"name_or_path": "tiny"},
            "env": {"id": "none"},
            "rollout": {"max_episode_tokens": 20},
            "loss": {"mask_truncated_completions": True},
            "advantage": advantage,
        }
    )


def tape_of(played, env_tokens=2):
    tape = Trajectory()
    tape.observe([1] * 3)
    for tokens, reward in played.turns:
        tape.act(
            Completion(
                token_ids=[5] * tokens,
                logprobs=[-1.0] * tokens,
                finish_reason="stop",
                versions=[0] * tokens,
            )
        )
        tape.turns[-1] = replace(tape.turns[-1], reward=reward)
        tape.observe([1] * env_tokens)
    tape.reward = 0.7 if played.reward is None else played.reward
    tape.stop_reason = StopReason.TURN_LENGTH if played.reward is None else StopReason.DONE
    return tape


def inputs_of(episodes, config):
    """Through the tape; `episodes` stand in the order of their groups."""
    groups = [
        TrajectoryGroup(
            id=str(group), task=Task(id=str(group)), trajectories=[tape_of(e) for e in members]
        )
        for group, members in itertools.groupby(episodes, key=lambda e: e.group)
    ]
    inputs = advantage_inputs(groups, config)
    if config.advantage.estimator not in ("gae", "reinforce_plus_plus"):
        return inputs
    return replace(
        inputs,
        kl=np.array([x for e in episodes for x in e.kl]),
        values=np.array([x for e in episodes for x in e.values]),
        beta=BETA,
    )


def of_rewards(rewards, groups=None, **advantage):
    """Advantages of episodes with one token each."""
    one = np.arange(len(rewards))
    rewards = np.array(rewards, dtype=float)
    groups = np.zeros(len(rewards), dtype=int) if groups is None else np.array(groups)
    inputs = AdvantageInputs(
        groups=groups, rewards=rewards, episodes=one, turns=one, token_rewards=rewards
    )
    return estimate(inputs, config_of(**advantage).advantage).advantages


REWARDS = st.sampled_from([-2.0, -1.0, 0.0, 0.1, 0.2, 0.3, 0.9, 1.0, 1 / 3])
NUMBERS = st.integers(-8, 8).map(lambda n: n / 4)


@st.composite
def batches(draw):
    """Up to three groups of up to five episodes of up to three turns, some of them masked."""
    episodes = []
    for group in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 5))):
            turns = draw(st.lists(st.tuples(st.integers(1, 3), REWARDS), min_size=1, max_size=3))
            n = sum(tokens for tokens, _ in turns)
            episodes.append(
                Played(
                    group=group,
                    reward=draw(REWARDS | REWARDS | st.none()),
                    turns=turns,
                    values=draw(st.lists(NUMBERS, min_size=n, max_size=n)),
                    kl=draw(st.lists(NUMBERS, min_size=n, max_size=n)),
                )
            )
    return episodes


CASES = [
    ({"estimator": "grpo"}, lambda e: oracles.grpo(e)),
    ({"scale_rewards": "batch"}, lambda e: oracles.grpo(e, "batch")),
    ({"scale_rewards": "none"}, lambda e: oracles.grpo(e, "none")),
    ({"estimator": "rloo"}, oracles.rloo),
    ({"level": "turn"}, lambda e: oracles.per_turn(e, 1.0, "group")),
    (
        {"level": "turn", "scale_rewards": "batch", "gamma": 0.5},
        lambda e: oracles.per_turn(e, 0.5, "batch"),
    ),
    (
        {"level": "turn", "scale_rewards": "none", "gamma": 0.9},
        lambda e: oracles.per_turn(e, 0.9, "none"),
    ),
    ({"estimator": "rloo", "level": "turn"}, lambda e: oracles.per_turn(e, 1.0)),
    (
        {"estimator": "reinforce_plus_plus"},
        lambda e: oracles.reinforce_plus_plus(e, BETA, 1.0),
    ),
    (
        {"estimator": "reinforce_plus_plus", "gamma": 0.9},
        lambda e: oracles.reinforce_plus_plus(e, BETA, 0.9),
    ),
    ({"estimator": "reinforce_plus_plus_baseline"}, oracles.reinforce_plus_plus_baseline),
    ({"estimator": "pass_at_k", "pass_k": 1}, lambda e: oracles.pass_at_k(e, 1)),
    ({"estimator": "pass_at_k", "pass_k": 2}, lambda e: oracles.pass_at_k(e, 2)),
    ({"estimator": "pass_at_k", "pass_k": 3}, lambda e: oracles.pass_at_k(e, 3)),
    ({"estimator": "gae"}, lambda e: oracles.gae(e, BETA, 1.0, 0.95, True)[0]),
    (
        {"estimator": "gae", "gamma": 0.9, "lam": 0.5, "whiten_advantages": False},
        lambda e: oracles.gae(e, BETA, 0.9, 0.5, False)[0],
    ),
    (
        {"estimator": "gae", "lam": 0.0, "whiten_advantages": False},
        lambda e: oracles.gae(e, BETA, 1.0, 0.0, False)[0],
    ),
]


def test_every_estimator_has_an_oracle():
    assert {options.get("estimator", "grpo") for options, _ in CASES} == set(ESTIMATORS)


@pytest.mark.parametrize(
    ("options", "oracle"), CASES, ids=[",".join(map(str, o.values())) for o, _ in CASES]
)
@settings(max_examples=25, deadline=None)
@given(episodes=batches())
def test_an_estimator_agrees_with_a_plain_loop(options, oracle, episodes):
    config = config_of(**options)
    found = estimate(inputs_of(episodes, config), config.advantage)
    expected = np.array([x for column in oracle(episodes) for x in column])
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-9, atol=1e-9)
    masked = [e.reward is None for e in episodes for _ in range(e.num_tokens)]
    assert not found.advantages[masked].any()  # exactly 0, not nearly
    if config.advantage.estimator == "gae":
        advantage = config.advantage
        returns = oracles.gae(episodes, BETA, advantage.gamma, advantage.lam, False)[1]
        np.testing.assert_allclose(found.returns, [x for c in returns for x in c], atol=1e-9)
    else:
        assert found.returns is None


@pytest.mark.parametrize("options", [options for options, _ in CASES], ids=str)
@settings(max_examples=8, deadline=None)
@given(episodes=batches(), random=st.randoms())
def test_the_order_of_groups_and_members_changes_nothing(options, episodes, random):
    """F055: groups are known by their ids, also where their members do not stand together."""
    config = config_of(**options)
    inputs = inputs_of(episodes, config)
    order = np.array(random.sample(range(len(episodes)), len(episodes)))
    tokens = np.concatenate([np.flatnonzero(inputs.episodes == e) for e in order])
    turns = inputs.turns[tokens]
    shuffled = replace(
        inputs,
        groups=inputs.groups[order],
        rewards=inputs.rewards[order],
        episodes=np.repeat(np.arange(len(order)), [episodes[e].num_tokens for e in order]),
        turns=np.cumsum(np.diff(turns, prepend=turns[:1]) != 0),
        token_rewards=inputs.token_rewards[tokens],
        kl=None if inputs.kl is None else inputs.kl[tokens],
        values=None if inputs.values is None else inputs.values[tokens],
    )
    found = estimate(shuffled, config.advantage).advantages
    expected = estimate(inputs, config.advantage).advantages[tokens]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_grpo_by_hand():
    """LESSONS: mean 0.5, sample standard deviation 0.577."""
    expected = [0.8660, -0.8660, 0.8660, -0.8660]
    assert of_rewards([1, 0, 1, 0]) == pytest.approx(expected, abs=1e-4)
    assert of_rewards([1, 0, 1, 0], scale_rewards="none").tolist() == [0.5, -0.5, 0.5, -0.5]


def test_grpo_over_the_deviation_of_the_batch_by_hand():
    """Rewards 1, 0, 3, 1: mean 1.25, deviation 1.2583; groups are centred by themselves."""
    found = of_rewards([1, 0, 3, 1], [0, 0, 1, 1], scale_rewards="batch")
    assert found == pytest.approx(np.array([0.5, -0.5, 1, -1]) / 1.2583, abs=1e-4)


def test_rloo_by_hand():
    """1 - (0 + 1 + 0) / 3."""
    expected = [2 / 3, -2 / 3, 2 / 3, -2 / 3]
    assert of_rewards([1, 0, 1, 0], estimator="rloo") == pytest.approx(expected)


def test_reinforce_plus_plus_by_hand():
    """Rewards 1 and 0, of two tokens and of one, with a KL of 1 at each token and beta 0.3.

    Returns 0.4, 0.7, -0.3: mean 0.26667, deviation 0.51316.
    """
    config = config_of(estimator="reinforce_plus_plus")
    episodes = [Played(0, 1.0, [(2, 0.0)], [0, 0], [1, 1]), Played(0, 0.0, [(1, 0.0)], [0], [1])]
    found = estimate(inputs_of(episodes, config), config.advantage).advantages
    assert found == pytest.approx([0.25983, 0.84444, -1.10427], abs=1e-5)


def test_reinforce_plus_plus_with_baseline_by_hand():
    """Centred 0.5, -0.5, 1, -1: deviation sqrt(2.5 / 3) = 0.91287."""
    found = of_rewards([1, 0, 3, 1], [0, 0, 1, 1], estimator="reinforce_plus_plus_baseline")
    assert found == pytest.approx([0.54772, -0.54772, 1.09545, -1.09545], abs=1e-5)


def test_pass_at_k_by_hand():
    """One of four is right, k = 2: half of the six pairs hold it, so mean 0.5, deviation 0.5.

    All pairs of the right one succeed; of a wrong one's three pairs, one does.
    """
    found = of_rewards([0, 1, 0, 0], estimator="pass_at_k", pass_k=2)
    assert found == pytest.approx([-1 / 3, 1, -1 / 3, -1 / 3], abs=1e-5)


def test_pass_at_k_with_rewards_between_right_and_wrong_by_hand():
    """Rewards 0, 1, 3 in pairs: bests 1, 3, 3, mean 7/3, deviation sqrt(8) / 3."""
    found = of_rewards([0, 1, 3], estimator="pass_at_k", pass_k=2)
    expected = np.array([2 - 7 / 3, 2 - 7 / 3, 3 - 7 / 3]) / (math.sqrt(8) / 3)
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_group_where_every_draw_succeeds_teaches_pass_at_k_nothing():
    """Exactly 0, also where the best of the draws has a rounded mean."""
    for size in range(3, 12):
        assert not of_rewards([0.1] + [0.9] * size, estimator="pass_at_k", pass_k=2).any()
        assert of_rewards([0.1] * 2 + [0.9] * size, estimator="pass_at_k", pass_k=2).all()


def test_pass_at_1_is_grpo_with_the_deviation_of_the_population():
    found = of_rewards([1, 0, 1, 0], estimator="pass_at_k", pass_k=1)
    assert found == pytest.approx([1, -1, 1, -1], abs=1e-5)


def test_gae_by_hand():
    """Deltas 0.4 - 0.5, 0.2 - 0.4, 1 - 0.2, each halved with every step back."""
    config = config_of(estimator="gae", lam=0.5, whiten_advantages=False)
    episode = Played(0, 1.0, [(2, 0.0), (1, 0.0)], [0.5, 0.4, 0.2], [0, 0, 0])
    found = estimate(inputs_of([episode], config), config.advantage)
    assert found.advantages == pytest.approx([0.0, 0.2, 0.8])
    assert found.returns == pytest.approx([0.5, 0.6, 1.0])


def test_turns_are_compared_with_their_siblings_turns_by_hand():
    """Returns from each turn on: 1 + 2 and 2; 0 + 1 and 1; 4.

    First turns 3, 1, 4; second turns 2, 1; the third episode has none and is no baseline there.
    """
    episodes = [
        Played(0, 3.0, [(2, 1.0), (1, 2.0)], [], []),
        Played(0, 1.0, [(1, 0.0), (1, 1.0)], [], []),
        Played(0, 4.0, [(1, 4.0)], [], []),
    ]
    config = config_of(level="turn", scale_rewards="none")
    found = estimate(inputs_of(episodes, config), config.advantage).advantages
    third = 8 / 3
    expected = [3 - third, 3 - third, 0.5, 1 - third, -0.5, 4 - third]
    assert found == pytest.approx(expected)


def test_a_turn_that_no_sibling_has_is_not_pushed():
    episodes = [Played(0, 1.0, [(1, 0.0), (1, 1.0)], [], []), Played(0, 0.0, [(1, 0.0)], [], [])]
    config = config_of(level="turn")
    found = estimate(inputs_of(episodes, config), config.advantage).advantages
    assert found[0] > 0 > found[2] and found[1] == 0


@pytest.mark.parametrize("estimator", sorted(set(ESTIMATORS) - {"gae", "reinforce_plus_plus"}))
@pytest.mark.parametrize("reward", [1 / 3, 0.9, 0.1, 0.0, -2.7])
def test_equal_rewards_give_exactly_zero_despite_rounding(estimator, reward):
    """LESSONS 14: the rounded mean of equal numbers must not become an advantage."""
    for size in (2, 7, 10):
        groups = [0] * size + [1, 1]
        options = {"pass_k": 1} if estimator == "pass_at_k" else {}
        found = of_rewards([reward] * size + [1, 0], groups, estimator=estimator, **options)
        assert not found[:size].any() and found[size:].all()


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_equal_tokens_are_normalised_to_exactly_zero(estimator):
    config = config_of(estimator=estimator, **({"lam": 1.0} if estimator == "gae" else {}))
    episodes = [Played(0, 0.9, [(3, 0.0)], [0.0] * 3, [0.0] * 3) for _ in range(7)]
    assert not estimate(inputs_of(episodes, config), config.advantage).advantages.any()


def test_groups_are_known_by_their_ids():
    """F055: interleaved and uneven."""
    found = of_rewards([1, 5, 0, 5], [0, 1, 0, 1])
    assert found == pytest.approx([0.7071, 0, -0.7071, 0], abs=1e-4)
    assert found[1] == found[3] == 0
    assert of_rewards([1, 0, 7], [0, 0, 1])[2] == 0


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_nothing_and_one_episode_have_no_advantage(estimator):
    """F055, F056."""
    for episodes in ([], [Played(0, 0.7, [(1, 0.0)], [0.2], [0.1])]):
        config = config_of(estimator=estimator)
        found = estimate(inputs_of(episodes, config), config.advantage).advantages
        assert found.tolist() == [0.0] * len(episodes)


def test_an_unscored_episode_is_no_member_and_a_masked_one_no_baseline():
    """F051: the mean of [1, None, 0, 0] is 1/3, over three."""
    played = [Played(0, reward, [(1, 0.0)], [], []) for reward in (1.0, None, 0.0, 0.0)]
    config = config_of(scale_rewards="none")
    inputs = inputs_of(played, config)
    expected = [2 / 3, 0, -1 / 3, -1 / 3]
    assert estimate(inputs, config.advantage).advantages == pytest.approx(expected)
    tapes = [tape_of(p) for p in played]
    tapes[1].reward = None
    groups = [TrajectoryGroup(id="g", task=Task(id="g"), trajectories=tapes)]
    inputs = advantage_inputs(groups, config)
    assert len(inputs.rewards) == 3
    assert estimate(inputs, config.advantage).advantages == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_segments_of_an_episode_count_once():
    """LESSONS 14."""

    def tape(new_segment):
        tape = Trajectory()
        for ids in ([5, 6], [7]):
            tape.observe([1, 2], new_segment=new_segment)
            n = len(ids)
            tape.act(
                Completion(
                    token_ids=ids, logprobs=[-1.0] * n, finish_reason="stop", versions=[0] * n
                )
            )
        tape.reward = 1.0
        return tape

    def inputs(new_segment):
        tapes = [tape(new_segment), tape_of(Played(0, 0.0, [(1, 0.0)], [], []))]
        group = TrajectoryGroup(id="g", task=Task(id="g"), trajectories=tapes)
        return advantage_inputs([group], config_of())

    whole, split = inputs(False), inputs(True)
    assert split.episodes.tolist() == [0, 0, 0, 1] and split.rewards.tolist() == [1.0, 0.0]
    for name in ("groups", "rewards", "episodes", "turns", "token_rewards"):
        assert getattr(split, name).tolist() == getattr(whole, name).tolist()


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 6),
    cuts=st.sets(st.integers(1, 5)),
    env_tokens=st.integers(0, 4),
    data=st.data(),
)
def test_what_the_env_says_between_is_no_time_step(n, cuts, env_tokens, data):
    """The same sampled tokens in one turn, and in several with env tokens between them."""
    values = np.array(data.draw(st.lists(NUMBERS, min_size=n, max_size=n)))
    bounds = [0, *sorted(cut for cut in cuts if cut < n), n]
    turns = [(stop - start, 0.0) for start, stop in itertools.pairwise(bounds)]
    config = config_of(estimator="gae", gamma=0.9, whiten_advantages=False)

    def advantages(turns, env_tokens):
        tape = tape_of(Played(0, 1.0, turns, [], []), env_tokens)
        group = TrajectoryGroup(id="g", task=Task(id="g"), trajectories=[tape])
        inputs = replace(advantage_inputs([group], config), values=values)
        return estimate(inputs, config.advantage).advantages.tolist()

    assert advantages(turns, env_tokens) == advantages([(n, 0.0)], 0)


def test_the_envs_rewards_stand_at_the_end_of_their_turns_and_the_rest_on_the_last_token():
    config = config_of()
    inputs = inputs_of([Played(0, 1.0, [(2, 0.25), (3, 0.5)], [], [])], config)
    assert inputs.token_rewards.tolist() == [0.0, 0.25, 0.0, 0.0, 0.75]
    assert inputs.turns.tolist() == [0, 0, 1, 1, 1] and inputs.rewards.tolist() == [1.0]


def test_overlong_penalty_by_hand():
    """DAPO, eq. 13, with a maximum of 20 and a buffer of 8."""
    lengths = np.array([1, 12, 14, 16, 20, 25])
    assert overlong_penalty(lengths, 20, 8).tolist() == [0, 0, -0.25, -0.5, -1, -1]


def test_relative_penalty_by_hand():
    """Kimi k1.5: a short bad episode gains nothing, a long one loses like any other."""
    lengths = np.array([10, 20, 30, 10, 30, 50, 50])
    rewards = np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, math.nan])
    found = relative_penalty(lengths, rewards, np.zeros(7, dtype=int))
    assert found.tolist() == [0.5, 0.25, 0.0, 0.0, 0.0, -0.5, 0.0]


def test_relative_penalty_leaves_episodes_of_one_length_alone():
    rewards, groups = np.array([1.0, 0.0, 1.0]), np.array([0, 0, 1])
    assert not relative_penalty(np.array([7, 7, 3]), rewards, groups).any()


def test_no_episode_of_equal_ones_is_above_their_rounded_mean():
    found = relative_penalty(np.arange(9), np.full(9, 0.9), np.zeros(9, dtype=int))
    assert np.full(9, 0.9).mean() < 0.9
    assert found.max() == 0 and found.min() == -0.5


def test_a_length_penalty_is_part_of_the_reward_by_its_weight():
    """Over env tokens too, an episode of 16 sampled tokens would be too long."""
    long, short = Played(0, 1.0, [(8, 0.5), (8, 0.0)], [], []), Played(0, 0.0, [(1, 0.0)], [], [])
    options = {"length_penalty": "overlong", "overlong_buffer_tokens": 8}
    inputs = inputs_of([long, short], config_of(length_penalty_weight=2.0, **options))
    assert inputs.rewards.tolist() == [0.0, 0.0]
    assert inputs.token_rewards[[7, 15, 16]].tolist() == [0.5, -0.5, 0.0]
    inputs = inputs_of([long, short], config_of(length_penalty="relative"))
    assert inputs.rewards.tolist() == [0.5, 0.0]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"estimator": "pass_at_k", "pass_k": 8}, "num_generations=8"),
        ({"gamma": 0.9}, "without level=turn"),
        (
            {"estimator": "rloo", "scale_rewards": "none"},
            "scale_rewards=none does nothing without estimator=grpo",
        ),
        ({"length_penalty": "overlong"}, "overlong_buffer_tokens"),
        ({"length_penalty": "overlong", "overlong_buffer_tokens": 21}, "max_episode_tokens=20"),
        ({"estimator": "gae", "level": "turn"}, "estimator=grpo or rloo"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(options, word):
    with pytest.raises(ConfigError, match=word):
        config_of(**options)
