"""The tape: two doors, columns of one length, and the parts of it that are trained."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.trajectory import AlignmentError, Trajectory, TrajectoryGroup, write_groups
from agentrl.types import Completion, Message, Task


def completion(ids, logprobs=None, finish_reason="stop", version=0):
    return Completion(
        token_ids=list(ids),
        logprobs=[-1.0] * len(ids) if logprobs is None else logprobs,
        finish_reason=finish_reason,
        versions=[version] * len(ids),
    )


def columns(tape):
    return tape.token_ids, tape.loss_mask, tape.logprobs, tape.versions


def prompted():
    tape = Trajectory(id="e")
    tape.observe([1, 2, 3])
    return tape


@pytest.mark.parametrize("logprobs", [[-1.0], [-1.0] * 3, [-1.0, float("nan")], [-1.0, 0.5]])
def test_sampled_tokens_without_a_logprob_each_are_refused_whole(logprobs):
    """F002: no silent zip to the shorter one; the tape stays as it was."""
    tape = prompted()
    before = [list(column) for column in columns(tape)]
    with pytest.raises(AlignmentError):
        tape.act(completion([7, 8], logprobs))
    assert [list(column) for column in columns(tape)] == before and tape.turns == []


def test_an_episode_begins_with_what_was_observed():
    with pytest.raises(AlignmentError, match="observed"):
        Trajectory().act(completion([7]))


def test_sampled_ids_are_kept_whatever_their_value():
    """F013: control tokens in the middle of a turn are ordinary sampled tokens."""
    tape = prompted()
    tape.act(completion([5, 1, 6, 2]))
    tape.observe([9])
    assert tape.token_ids[3:] == [5, 1, 6, 2, 9]
    assert tape.loss_mask[3:] == [True] * 4 + [False]


def test_every_turn_is_trained_and_nothing_else():
    """F005: turns of 4, 2 and 5 tokens with two tool blocks of 6."""
    tape = prompted()
    for count in (4, 2, 5):
        if tape.turns:
            tape.observe([9] * 6)
        tape.act(completion([7] * count))
    assert sum(tape.loss_mask) == tape.num_sampled_tokens == 11
    assert len(tape) - 3 == 23


def test_the_training_sample_ends_at_the_last_sampled_token():
    tape = prompted()
    tape.act(completion([7, 8]))
    tape.observe([9, 9])
    assert tape.segments() == [slice(0, 5)]


def test_a_new_segment_is_a_context_and_a_sample_of_its_own():
    """F011: no token is trained twice."""
    tape = prompted()
    tape.act(completion([7, 8], version=3))
    tape.observe([1, 2, 4], new_segment=True)
    assert tape.context == [1, 2, 4]
    tape.act(completion([6], version=5))
    assert tape.segments() == [slice(0, 5), slice(5, 9)]
    assert tape.oldest_version == 3
    assert tape.versions == [-1, -1, -1, 3, 3, -1, -1, -1, 5]


@pytest.mark.parametrize("turns", [[], [[]], [[], []]])
def test_an_episode_without_sampled_tokens_has_nothing_to_train(turns):
    tape = prompted()
    for ids in turns:
        tape.act(completion(ids, finish_reason="abort"))
    assert tape.segments() == [] and tape.num_sampled_tokens == 0 and tape.oldest_version == -1


@pytest.mark.parametrize("parts", [[[4], [5, 6], [2]], [[], [4, 5, 6], [2]], [[4, 5, 6], [], [2]]])
def test_a_turn_in_parts_is_one_turn_whose_tokens_keep_their_logprobs_and_versions(parts):
    """F028: new weights aborted it, twice."""
    tape = prompted()
    logprobs = []
    for version, ids in enumerate(parts):
        reason = "stop" if version == 2 else "abort"
        tape.act(completion(ids, [-0.5 - version] * len(ids), reason, version))
        logprobs += [-0.5 - version] * len(ids)
    assert [(turn.start, turn.end, turn.finish_reason) for turn in tape.turns] == [(3, 7, "stop")]
    assert tape.token_ids[3:] == [4, 5, 6, 2] and tape.logprobs[3:] == logprobs
    assert tape.versions[3:] == [v for v, ids in enumerate(parts) for _ in ids]
    assert tape.segments() == [slice(0, 7)] and tape.num_sampled_tokens == 4


def test_an_aborted_turn_after_which_something_was_observed_is_over():
    tape = prompted()
    tape.act(completion([4], finish_reason="abort"))
    tape.observe([9])
    tape.act(completion([5]))
    assert [(turn.start, turn.end) for turn in tape.turns] == [(3, 4), (5, 6)]


@given(st.lists(st.tuples(st.sampled_from(["observe", "act", "segment"]), st.integers(0, 4))))
def test_columns_always_have_one_length_and_segments_hold_each_sampled_token_once(steps):
    """F002."""
    tape = prompted()
    for kind, count in steps:
        if kind == "act":
            tape.act(completion([7] * count))
        else:
            tape.observe([5] * count, new_segment=kind == "segment" and count > 0)
        assert {len(column) for column in columns(tape)} == {len(tape)}
    held = [t for part in tape.segments() for t in range(part.start, part.stop)]
    assert len(held) == len(set(held))
    assert {t for t, sampled in enumerate(tape.loss_mask) if sampled} <= set(held)
    assert all(tape.loss_mask[part][-1] and not tape.loss_mask[part][0] for part in tape.segments())


def test_any_text_an_env_says_can_be_written_and_read_back(tmp_path):
    """A lone surrogate has no encoding; the record must not end the run."""
    tape = prompted()
    tape.messages.append(Message(role="user", content="北京 \ud800 é"))
    group = TrajectoryGroup(id="g", task=Task(id="t"), trajectories=[tape])
    write_groups(tmp_path / "groups.jsonl", [group])
    record = json.loads((tmp_path / "groups.jsonl").read_text(encoding="utf-8"))
    assert record["trajectories"][0]["messages"][0]["content"] == "北京 \ud800 é"
