"""Packed rows: what they hold, what they leave out, and that no sequence sees another."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.attention import register_attention
from agentrl.trajectory import Trajectory, TrajectoryGroup
from agentrl.types import Completion, StopReason, Task
from train.packing import Node, counts, pack, single_sequence
from train.policy import Policy


@pytest.fixture(autouse=True)
def share_single_tokens(monkeypatch):
    monkeypatch.setattr("train.packing.SHARED_BLOCK", 1)


def tape(*parts, reward=1.0, stop_reason=StopReason.DONE, new_segments=()):
    """A trajectory from parts that are observed and sampled in turn."""
    trajectory = Trajectory()
    for index, part in enumerate(parts):
        if index % 2:
            trajectory.act(
                Completion(
                    token_ids=list(part),
                    logprobs=[-0.5] * len(part),
                    finish_reason="stop",
                    versions=[3] * len(part),
                )
            )
        else:
            trajectory.observe(list(part), new_segment=index in new_segments)
    trajectory.reward, trajectory.stop_reason = reward, stop_reason
    return trajectory


def group(*trajectories):
    return TrajectoryGroup(id="g", task=Task(id="t"), trajectories=list(trajectories))


def pack_ones(*groups, budget=1000, **options):
    num_tokens = sum(t.num_sampled_tokens for g in groups for t in g.trajectories if counts(t))
    (batch,) = pack(groups, np.ones(num_tokens), micro_batch_tokens=budget, **options)
    return batch


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=register_attention(),
    )
    return LlamaForCausalLM(config)


def test_a_group_lays_its_prompt_down_once():
    batch = pack_ones(group(tape([5, 6], [7, 8]), tape([5, 6], [9])))
    (row,) = batch.micro_batches
    assert row.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 2]
    assert row.previous.tolist() == [-1, 0, 1, 2, 1]
    assert row.trained.tolist() == [2, 3, 4]
    assert row.sampled_index.tolist() == [0, 1, 2]
    assert row.sequence_ids.tolist() == [0, 0, 1]
    assert row.turn_ids.tolist() == [0, 0, 1]
    assert row.trajectory_tokens.tolist() == [2, 2, 1]
    assert row.group_tokens.tolist() == [3, 3, 3]
    assert row.layout == (Node(2, (Node(2), Node(1))),)
    assert (batch.num_loss_tokens, batch.num_trajectories, batch.num_groups) == (3, 2, 1)


def test_exactly_the_sampled_tokens_are_trained():
    """F003, F004: prompt P P P, then R R, then a tool's tokens, then R."""
    (row,) = pack_ones(group(tape([1, 2, 3], [4, 5], [6, 7], [8], [9, 9]))).micro_batches
    assert row.input_ids[row.trained].tolist() == [4, 5, 8]
    assert row.input_ids[row.previous[row.trained]].tolist() == [3, 4, 7]
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]  # the last observation is cut off


def test_the_shared_prefix_ends_before_any_sampled_token():
    # Both begin 5 6 7, but the second one sampled its 7.
    (row,) = pack_ones(group(tape([5, 6, 7], [8]), tape([5, 6], [7, 9]))).micro_batches
    assert row.layout == (Node(2, (Node(2), Node(2))),)
    assert row.input_ids[row.trained].tolist() == [7, 9, 8]


def test_groups_share_what_their_prompts_begin_with():
    """Demonstrations 1 2, then a prompt per group."""
    first = group(tape([1, 2, 5], [7]), tape([1, 2, 5], [8]))
    second = group(tape([1, 2, 6], [7, 9]), tape([1, 2, 6], [8]))
    (row,) = pack_ones(first, second).micro_batches
    families = (Node(1, (Node(1), Node(1))), Node(1, (Node(2), Node(1))))
    assert row.layout == (Node(2, families),)
    assert row.input_ids.tolist() == [1, 2, 5, 7, 8, 6, 7, 9, 8]
    assert row.previous.tolist() == [-1, 0, 1, 2, 2, 1, 5, 6, 5]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 3, 2, 3, 4, 3]


def test_fewer_tokens_in_common_than_a_block_are_not_shared(monkeypatch):
    monkeypatch.setattr("train.packing.SHARED_BLOCK", 4)
    members = [tape([1, 2, 3, 4, 5, 6, end], [9]) for end in (7, 8)]
    (row,) = pack_ones(group(*members)).micro_batches
    assert row.layout == (Node(4, (Node(4), Node(4))),)
    short = [tape([1, 2, end], [9]) for end in (7, 8)]
    assert pack_ones(group(*short)).micro_batches[0].layout == (Node(4), Node(4))


def test_segments_of_a_trajectory_count_once():
    trajectory = tape([1, 2], [3, 4], [1, 9], [5], new_segments=(2,))
    batch = pack_ones(group(trajectory))
    (row,) = batch.micro_batches
    assert row.layout == (Node(1, (Node(3), Node(2))),)
    assert row.sequence_ids.tolist() == [0, 0, 1]
    assert row.turn_ids.tolist() == [0, 0, 1]
    assert row.trajectory_tokens.tolist() == [3, 3, 3]
    assert (batch.num_loss_tokens, batch.num_trajectories) == (3, 1)


def test_unscored_trajectories_are_left_out_everywhere():
    """F051, F056."""
    broken = tape([1], [2], reward=None, stop_reason=StopReason.ENV_ERROR)
    batch = pack_ones(group(tape([1], [2]), broken, tape([1], [2], reward=float("nan")), tape([1])))
    assert (batch.num_loss_tokens, batch.num_trajectories) == (1, 1)
    assert len(batch.micro_batches[0].trained) == 1


def test_episodes_without_advantage_are_counted_but_not_computed():
    groups = [group(tape([1], [2, 3]), tape([1], [4]))]
    advantages = np.array([0.0, 0.0, 0.7])
    (batch,) = pack(groups, advantages, micro_batch_tokens=100)
    assert (batch.num_loss_tokens, batch.num_trajectories) == (3, 2)
    assert batch.micro_batches[0].input_ids.tolist() == [1, 4]
    assert batch.micro_batches[0].sampled_index.tolist() == [2]
    (kept,) = pack(groups, np.zeros(3), micro_batch_tokens=100, keep_zero_advantages=True)
    assert len(kept.micro_batches[0].trained) == 3


def test_one_token_with_an_advantage_keeps_its_whole_episode():
    (batch,) = pack([group(tape([1], [2, 3]))], np.array([0.0, 0.7]), micro_batch_tokens=100)
    assert batch.micro_batches[0].advantages.tolist() == pytest.approx([0.0, 0.7])


def test_masked_truncated_completions_stay_in_the_denominator():
    cut = tape([1], [2, 3], stop_reason=StopReason.TURN_LENGTH)
    batch = pack_ones(group(cut, tape([1], [4])), mask_truncated_completions=True)
    assert (batch.num_loss_tokens, batch.num_trajectories) == (3, 2)
    assert batch.micro_batches[0].input_ids.tolist() == [1, 4]


def test_a_group_larger_than_the_budget_is_split_with_its_prefix():
    members = [tape([1, 2, 3], [10 + i, 20 + i]) for i in range(5)]
    batch = pack_ones(group(*members), budget=7)
    assert [row.layout for row in batch.micro_batches] == [
        (Node(3, (Node(2), Node(2))),),
        (Node(3, (Node(2), Node(2))),),
        (Node(5),),
    ]
    trained = [t for row in batch.micro_batches for t in row.input_ids[row.trained].tolist()]
    assert sorted(trained) == sorted([10 + i for i in range(5)] + [20 + i for i in range(5)])


def test_rows_keep_to_the_budget_and_are_filled():
    groups = [
        group(tape([g] * 3, [7] * n), tape([g] * 3, [8] * n)) for g, n in ((1, 9), (2, 4), (3, 2))
    ]
    rows = pack_ones(*groups, budget=21).micro_batches
    assert [len(row.input_ids) for row in rows] == [21, 18]


def test_a_sequence_over_the_budget_says_what_to_change():
    with pytest.raises(ValueError, match=r"12 tokens .*micro_batch_tokens=10.*at least 12"):
        pack_ones(group(tape([1] * 5, [2] * 7)), budget=10)


def test_a_packed_sequence_has_the_logprobs_it_has_alone(model):
    """F018: alone, behind another row, and with a shared prompt."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 97, 6).tolist()
    members = [tape(prompt, rng.integers(0, 97, n).tolist()) for n in (1, 5, 9)]
    other = tape(rng.integers(0, 97, 4).tolist(), rng.integers(0, 97, 3).tolist())
    (row,) = pack_ones(group(other), group(*members)).micro_batches
    with torch.no_grad():
        packed = Policy(model)(row, 1.0).logprobs
        for sequence_id, trajectory in enumerate([other, *members]):
            alone = Policy(model)(single_sequence(trajectory.token_ids), 1.0).logprobs
            mine = packed[row.sequence_ids == sequence_id]
            torch.testing.assert_close(mine, alone[-len(mine) :], atol=1e-5, rtol=0)
    batch = pack_ones(group(*members))
    changed = [tape(prompt, [3] * 5), *members[1:]]
    with torch.no_grad():
        first = Policy(model)(batch.micro_batches[0], 1.0).logprobs
        second = Policy(model)(pack_ones(group(*changed)).micro_batches[0], 1.0).logprobs
    torch.testing.assert_close(first[1:], second[5:], atol=1e-6, rtol=0)


def test_packed_attention_equals_transformers_own(model):
    ids = torch.arange(11)[None]
    reference = LlamaForCausalLM(copy.deepcopy(model.config))
    reference.load_state_dict(model.state_dict())
    reference.set_attn_implementation("eager")
    with torch.no_grad():
        expected = reference(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        actual = Policy(model)(single_sequence(ids[0].tolist()), 1.0).logprobs
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def sampled(min_size, max_size):
    return st.lists(st.integers(0, 3), min_size=min_size, max_size=max_size)


@st.composite
def tapes(draw):
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        parts += [draw(sampled(1, 4)), draw(sampled(0, 4))]
    begins = {index for index in range(2, len(parts), 2) if draw(st.booleans())}
    reward = draw(st.sampled_from([1.0, 0.0, None, float("nan")]))
    return tape(*parts, reward=reward, new_segments=begins)


batches = st.lists(st.lists(tapes(), min_size=1, max_size=4), min_size=1, max_size=4)


def expected_columns(groups, advantages, first_index):
    """Every token to be trained, by `sampled_index`, from the tapes alone."""
    expected, index, turn_id, sequence_id = {}, 0, 0, 0
    for g in groups:
        members = [t for t in g.trajectories if counts(t)]
        of_group = sum(sum(t.loss_mask) for t in members)
        for t in members:
            start, own = index, []
            for part in t.segments():
                for place in range(part.start, part.stop):
                    if t.loss_mask[place]:
                        turn = next(n for n, x in enumerate(t.turns) if x.start <= place < x.end)
                        context = tuple(t.token_ids[part.start : place + 1])
                        columns = (turn_id + turn, sum(t.loss_mask), of_group)
                        own.append((context, *columns, sequence_id))
                        index += 1
                sequence_id += 1
            if np.any(advantages[start:index]):
                expected |= {first_index + start + n: column for n, column in enumerate(own)}
            else:
                sequence_id -= len(list(t.segments()))
            turn_id += len(t.turns)
    return expected


def found_columns(ranks):
    """Likewise from packed rows; no token may come twice."""
    found = {}
    for row in (row for batch in ranks for row in batch.micro_batches):
        for n, place in enumerate(row.trained.tolist()):
            context, at = [], place
            while at >= 0:
                context.append(int(row.input_ids[at]))
                assert int(row.position_ids[at]) == int(row.position_ids[place]) - len(context) + 1
                at = int(row.previous[at])
            index = int(row.sampled_index[n])
            assert index not in found
            found[index] = (
                tuple(reversed(context)),
                int(row.turn_ids[n]),
                int(row.trajectory_tokens[n]),
                int(row.group_tokens[n]),
                int(row.sequence_ids[n]),
            )
    return found


@settings(max_examples=60, deadline=None)
@given(
    batch=batches,
    num_ranks=st.integers(1, 5),
    block=st.sampled_from([1, 2, 4]),
    share_prefixes=st.booleans(),
    first_index=st.sampled_from([0, 17]),
    spare=st.integers(0, 30),
    seed=st.integers(0, 9),
)
def test_every_sampled_token_is_trained_once_with_its_own_columns_on_some_rank(
    batch, num_ranks, block, share_prefixes, first_index, spare, seed
):
    """F080, F087: however many ranks, rows and segments there are."""
    groups = [group(*members) for members in batch]
    members = [t for g in groups for t in g.trajectories if counts(t)]
    lengths = [part.stop - part.start for t in members for part in t.segments()]
    budget = max(lengths, default=1) + spare
    rng = np.random.default_rng(seed)
    advantages = np.concatenate(
        [np.full(t.num_sampled_tokens, rng.integers(-1, 2)) for t in members] or [np.zeros(0)]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.packing.SHARED_BLOCK", block)
        ranks = pack(
            groups,
            advantages,
            micro_batch_tokens=budget,
            num_ranks=num_ranks,
            first_index=first_index,
            share_prefixes=share_prefixes,
        )
    expected = expected_columns(groups, advantages, first_index)
    assert found_columns(ranks) == expected
    rows = [batch.micro_batches for batch in ranks]
    assert len({len(shard) for shard in rows}) == 1  # or some ranks would wait for others
    assert bool(rows[0]) == bool(expected)  # no rank works where nothing is to be learnt
    for row in (row for shard in rows for row in shard):
        assert len(row.input_ids) <= budget
        assert row.advantages.tolist() == [
            advantages[n - first_index] for n in row.sampled_index.tolist()
        ]
    homes = Counter(
        (rank, number, sequence)
        for rank, shard in enumerate(rows)
        for number, row in enumerate(shard)
        for sequence in set(row.sequence_ids.tolist())
    )
    assert len(homes) == len({sequence for *_, sequence in expected.values()})  # none is split
    for one in ranks:
        assert one.num_loss_tokens == len(advantages)
        assert one.num_trajectories == len(members)
        assert one.num_groups == sum(any(counts(t) for t in g.trajectories) for g in groups)


def test_ranks_get_about_as_many_tokens_and_as_many_rows():
    """F080: five long sequences and five short ones; what is missing becomes rows untrained."""
    long = [group(tape([9] * 40, [n] * 55)) for n in range(5)]
    short = [group(tape([1] * 5, [n] * 15)) for n in range(5)]
    ranks = pack(
        [*long, *short], np.ones(5 * 70), micro_batch_tokens=100, num_ranks=2, share_prefixes=False
    )
    tokens = [sum(len(row.input_ids) for row in batch.micro_batches) for batch in ranks]
    assert len(ranks[0].micro_batches) == len(ranks[1].micro_batches)
    assert abs(tokens[0] - tokens[1]) <= 95 and sum(tokens) >= 5 * 95 + 5 * 20


def test_ranks_without_sequences_get_rows_without_trained_tokens():
    """F080, F087: fewer sequences than ranks."""
    ranks = pack([group(tape([1], [2, 3]))], np.ones(2), micro_batch_tokens=10, num_ranks=3)
    trained = [[len(row.trained) for row in batch.micro_batches] for batch in ranks]
    assert sorted(trained) == [[0], [0], [2]]
    assert [batch.num_loss_tokens for batch in ranks] == [2, 2, 2]


def test_a_shared_prompt_is_attended_under_autocast_as_on_a_gpu(model, monkeypatch):
    """There, the mask is a causal bias, which refuses queries and values of two dtypes."""
    from torch.nn.attention.bias import causal_lower_right

    batch = pack_ones(group(tape([5, 6, 7], [8, 9]), tape([5, 6, 7], [9, 3])))
    (row,) = batch.micro_batches
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = Policy(model)(row, 1.0).logprobs
        monkeypatch.setattr(
            "train.packing._lower_right", lambda queries, keys, _: causal_lower_right(queries, keys)
        )
        actual = Policy(model)(row, 1.0).logprobs
    torch.testing.assert_close(actual, expected, atol=0.03, rtol=0)
