"""The tape: two doors, columns of one length, and the parts of it that are trained."""

import json
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.trajectory import (
    AlignmentError,
    Trajectory,
    TrajectoryFileError,
    TrajectoryGroup,
    Turn,
    read_groups,
    write_groups,
)
from agentrl.types import Completion, Message, StopReason, Task, ToolCall


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
    (read,) = read_groups(tmp_path / "groups.jsonl")
    assert read.trajectories[0].messages[0].content == "北京 \ud800 é"


numbers = st.floats(allow_nan=False, allow_infinity=False)
named_numbers = st.dictionaries(st.text(string.ascii_lowercase, max_size=3), numbers, max_size=2)
call = st.builds(
    ToolCall,
    id=st.text(),
    name=st.text(),
    arguments=st.dictionaries(st.text(), st.text() | st.none() | st.integers(), max_size=2),
)
message = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=st.text(),
    reasoning=st.none() | st.text(),
    tool_calls=st.lists(call, max_size=2).map(tuple),
    tool_call_id=st.none() | st.text(),
    name=st.none() | st.text(),
)


@st.composite
def trajectories(draw):
    tape = Trajectory(id=draw(st.text()))
    tape.observe([1, 2])
    for kind in draw(st.lists(st.sampled_from(["observe", "act", "segment"]), max_size=6)):
        ids = draw(st.lists(st.integers(0, 300_000), max_size=4))
        if kind != "act":
            tape.observe(ids, new_segment=kind == "segment")
            continue
        logprobs = [draw(st.floats(max_value=0.0, allow_infinity=False)) for _ in ids]
        reason = draw(st.sampled_from(["stop", "length", "abort"]))
        tape.act(completion(ids, logprobs, reason, draw(st.integers(0, 9))))
    tape.turns = [
        Turn(start=t.start, end=t.end, finish_reason=t.finish_reason, reward=draw(numbers))
        for t in tape.turns
    ]
    tape.messages = draw(st.lists(message, max_size=2))
    tape.reward, tape.rewards = draw(st.none() | numbers), draw(named_numbers)
    tape.metrics, tape.timings = draw(named_numbers), draw(named_numbers)
    tape.stop_reason = draw(st.none() | st.sampled_from(StopReason))
    tape.error = draw(st.text())
    return tape


group = st.builds(
    TrajectoryGroup,
    id=st.text(),
    task=st.builds(Task, id=st.text(), env=st.text(), answer=st.none() | st.text() | numbers),
    trajectories=st.lists(trajectories(), max_size=2),
)


def everything(tape):
    return {name: getattr(tape, name) for name in Trajectory.__slots__}


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(group, max_size=2))
def test_groups_are_read_back_as_they_were_written(tmp_path_factory, groups):
    """To the last bit of every logprob: a replay computes what the run did."""
    path = tmp_path_factory.getbasetemp() / "groups.jsonl"
    write_groups(path, groups)
    read = read_groups(path)
    assert [(g.id, g.task) for g in read] == [(g.id, g.task) for g in groups]
    assert [[everything(tape) for tape in g.trajectories] for g in read] == [
        [everything(tape) for tape in g.trajectories] for g in groups
    ]


def recorded(tmp_path, **changes):
    """A file of one group of one trajectory, whose record differs in `changes`."""
    tape = prompted()
    tape.act(completion([7, 8]))
    record = TrajectoryGroup(id="g", task=Task(id="t"), trajectories=[tape]).to_dict()
    record["trajectories"][0].update(changes)
    path = tmp_path / "groups.jsonl"
    path.write_text(json.dumps(record) + "\n")
    return path


def test_turns_recorded_before_they_had_rewards_are_read_with_reward_0(tmp_path):
    (read,) = read_groups(recorded(tmp_path, turns=[[3, 5, "stop"]]))
    assert read.trajectories[0].turns == [Turn(start=3, end=5, finish_reason="stop", reward=0.0)]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("{", "JSONDecodeError"),
        ("\xff", "UnicodeDecodeError"),
        ('{"id": "g"}', "KeyError: 'task'"),
        ("[]", "TypeError"),
        ("", "JSONDecodeError"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, cause):
    path = recorded(tmp_path)
    path.write_bytes(path.read_bytes() + line.encode("latin-1") + b"\n")
    with pytest.raises(TrajectoryFileError, match=rf"groups.jsonl, line 2: no group, {cause}"):
        read_groups(path)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"logprobs": [0.0]}, "5 tokens came with 1 logprobs"),
        ({"loss_mask": [0, 0, 1, 1, 1]}, "the loss mask is not that of the turns"),
        ({"turns": [[3, 4, "stop"]]}, "the loss mask is not that of the turns"),
    ],
)
def test_columns_that_do_not_belong_together_are_refused(tmp_path, changes, cause):
    with pytest.raises(TrajectoryFileError, match=f"line 1: no group, AlignmentError: {cause}"):
        read_groups(recorded(tmp_path, **changes))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TrajectoryFileError, match=r"none\.jsonl: No such file"):
        read_groups(tmp_path / "none.jsonl")
