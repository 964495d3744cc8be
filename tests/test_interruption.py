"""New weights meet a turn in flight: it goes on from its tokens, starts anew, or is waited for."""

import asyncio
from dataclasses import replace

import pytest

from agentrl.types import StopReason
from rollout.episode import play
from tests.engines import CountEnv, InterruptibleEngine, byte_renderer
from tests.stages import episode_of, stage_of
from tests.virtual_time import run_virtual


@pytest.fixture(scope="module")
def renderer():
    return byte_renderer()


def play_through_updates(engine, *, at=(), num_turns=1, **values):
    """One episode, and an update of the weights at each of the seconds `at`."""

    async def run():
        stage = stage_of(engine, lambda: CountEnv(num_turns), **values)
        task = asyncio.create_task(play(episode_of(), stage))
        interrupt = None if stage.config.on_update == "finish" else engine.interrupt
        began = asyncio.get_running_loop().time()
        for second in at:
            await asyncio.sleep(began + second - asyncio.get_running_loop().time())
            async with stage.generation.shut(100, interrupt):
                await engine.update_weights([], engine.version + 1, None)
        return await task, stage.metrics.pop()

    return run_virtual(run())


def forgetful(engine):
    """For turns that start anew: what a request samples begins the turn, whatever was before."""

    class Starts(dict):
        def setdefault(self, session, start):
            self[session] = start
            return start

    engine._turn_starts = Starts()
    return engine


def sampled(tape):
    columns = zip(tape.token_ids, tape.logprobs, tape.versions, tape.loss_mask, strict=True)
    return [(token, logprob, version) for token, logprob, version, mine in columns if mine]


def test_a_kept_turn_goes_on_from_its_tokens_with_their_logprobs_and_versions(renderer):
    """F028 with partial rollouts: what was sampled stays as it was."""
    engine = InterruptibleEngine(renderer)
    tape, metrics = play_through_updates(engine, at=[3.5], max_new_tokens=50)
    assert tape.stop_reason is StopReason.DONE
    (turn,) = tape.turns
    assert renderer.decode(tape.token_ids[turn.start : turn.end]) == "abcdefghi<e>"
    assert turn.finish_reason == "stop"
    assert tape.messages[-1].content == "abcdefghi"
    _, logprobs, versions = zip(*sampled(tape), strict=True)
    assert versions == (0,) * 3 + (1,) * 7
    assert logprobs == pytest.approx([0, -1, -2, *(-(place + 0.1) for place in range(3, 10))])
    first, second = engine.requests
    assert second.token_ids == tape.token_ids[: turn.start + 3]
    assert (first.sampling.max_new_tokens, second.sampling.max_new_tokens) == (50, 47)
    assert first.sampling.seed != second.sampling.seed
    assert engine.in_flight_at_update == 0
    assert metrics == {"rollout/interrupted_turns": 1}


def test_a_dropped_turn_starts_anew_and_leaves_nothing_on_the_tape(renderer):
    engine = forgetful(InterruptibleEngine(renderer, text="abcd"))
    tape, metrics = play_through_updates(engine, at=[3.5, 6], max_new_tokens=50, on_update="drop")
    assert renderer.decode([token for token, _, _ in sampled(tape)]) == "abcd<e>"
    assert {version for _, _, version in sampled(tape)} == {2} and len(tape.turns) == 1
    assert tape.oldest_version == 2
    requests = [(r.token_ids, r.sampling.max_new_tokens) for r in engine.requests]
    assert requests == [(tape.token_ids[: tape.turns[0].start], 50)] * 3
    assert len({request.sampling.seed for request in engine.requests}) == 3
    assert metrics == {"rollout/interrupted_turns": 1, "rollout/wasted_tokens": 3 + 2}


def test_weights_wait_for_a_turn_that_may_finish(renderer):
    engine = InterruptibleEngine(renderer)
    tape, metrics = play_through_updates(engine, at=[3.5], num_turns=2, on_update="finish")
    assert engine.num_interrupts == 0 and engine.in_flight_at_update == 0 and not metrics
    assert [version for _, _, version in sampled(tape)] == [0] * 10 + [1] * 10


def test_an_episode_lives_through_three_updates(renderer):
    engine = InterruptibleEngine(renderer)
    tape, metrics = play_through_updates(engine, at=[2.5, 4.7, 13], num_turns=2)
    assert tape.stop_reason is StopReason.DONE and tape.oldest_version == 0
    texts = [renderer.decode(tape.token_ids[t.start : t.end]) for t in tape.turns]
    assert texts == ["abcdefghi<e>"] * 2
    versions = [version for _, _, version in sampled(tape)]
    assert versions == sorted(versions) and set(versions) == {0, 1, 2, 3}
    assert metrics == {"rollout/interrupted_turns": 2}
    assert len({request.sampling.seed for request in engine.requests}) == 5


def test_an_update_finds_a_request_that_the_engine_does_not_know_of_yet(renderer):
    """F027: it is registered 0.3 s after it was made."""
    engine = InterruptibleEngine(renderer, on_its_way_s=0.3)
    tape, _ = play_through_updates(engine, at=[0.1])
    assert engine.in_flight_at_update == 0 and engine.num_interrupts > 1
    assert len(tape.turns) == 1 and tape.stop_reason is StopReason.DONE
    assert {version for _, _, version in sampled(tape)} == {1}


def test_an_interrupt_that_is_lost_is_repeated(renderer):
    engine = InterruptibleEngine(renderer, num_lost=4)
    tape, _ = play_through_updates(engine, at=[3.5])
    assert engine.num_interrupts == 5 and engine.in_flight_at_update == 0
    assert [version for _, _, version in sampled(tape)] == [0] * 4 + [1] * 6


def test_an_interrupted_turn_that_is_full_is_cut_by_its_length(renderer):
    """F031: a request for 0 tokens is never made."""

    class Late(InterruptibleEngine):
        async def generate(self, token_ids, sampling, *, session):
            completion = await super().generate(token_ids, sampling, session=session)
            while not self.num_interrupts:
                await asyncio.sleep(0.1)
            return replace(completion, finish_reason="abort")

    engine = Late(renderer)
    tape, _ = play_through_updates(engine, at=[7], max_new_tokens=4)
    assert len(engine.requests) == 1 and tape.stop_reason is StopReason.TURN_LENGTH
    assert tape.turns[0].finish_reason == "length" and tape.num_sampled_tokens == 4


def test_an_abort_that_no_update_asked_for_is_a_fault(renderer):
    """F028: what was sampled is kept, and not trained on."""
    engine = InterruptibleEngine(renderer)

    async def run():
        task = asyncio.create_task(play(episode_of(), stage_of(engine)))
        await asyncio.sleep(5.5)
        await engine.interrupt()  # by somebody else
        return await task

    tape = run_virtual(run())
    assert tape.stop_reason is StopReason.ABORTED and tape.reward is None
    assert tape.num_sampled_tokens == 5 and len(engine.requests) == 1


def test_waiting_for_new_weights_does_not_count_as_playing(renderer):
    engine = InterruptibleEngine(renderer)
    update = engine.update_weights

    async def slow_update(*args):
        await asyncio.sleep(500)
        return await update(*args)

    engine.update_weights = slow_update
    limits = {"generate_timeout_s": 20, "env_timeout_s": 5, "episode_timeout_s": 30}
    tape, _ = play_through_updates(engine, at=[3.5], **limits)
    assert tape.stop_reason is StopReason.DONE


@pytest.mark.parametrize("on_update", ["keep", "drop", "finish"])
def test_what_is_on_the_tape_is_what_was_asked_and_sampled(renderer, on_update):
    """Every request is the tape as it stands, however often the weights change."""
    engine = InterruptibleEngine(renderer, token_s=0.7)
    if on_update == "drop":
        forgetful(engine)
    tape, _ = play_through_updates(engine, at=[1, 2, 3, 8, 9, 17], num_turns=3, on_update=on_update)
    assert tape.stop_reason is StopReason.DONE and len(tape.turns) == 3
    assert [r.token_ids for r in engine.requests] == [
        tape.token_ids[: len(request.token_ids)] for request in engine.requests
    ]
    texts = [renderer.decode(tape.token_ids[t.start : t.end]) for t in tape.turns]
    assert texts == ["abcdefghi<e>"] * 3
