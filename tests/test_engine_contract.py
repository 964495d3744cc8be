"""What every engine promises, asked of the local one, of a fake SGLang, and of a real one.

With one seed the local engine and the fake sample the same; a real SGLang does in its deterministic
inference alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agentrl.protocols import Engine, EngineDied, EngineError, SyncError
from agentrl.types import Completion, Sampling
from tests.engine_kinds import Kind, fake_kind, local_kind, sglang_kind


@pytest.fixture(
    scope="module",
    params=["local", "fake", pytest.param("sglang", marks=pytest.mark.sglang)],
)
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "local":
        return local_kind()
    if request.param == "fake":
        return fake_kind()
    return sglang_kind(request.getfixturevalue("sglang_server"))


def sampling(max_new_tokens: int = 4, **values: Any) -> Sampling:
    return Sampling(max_new_tokens=max_new_tokens, **values)


async def long_turn(
    engine: Engine, context: list[int], n: int = 100, seeds: Sequence[int] = range(30)
) -> Completion:
    """One that does not stop by itself before somebody interrupts it."""
    for seed in seeds:
        task = asyncio.create_task(
            engine.generate(context, sampling(n, seed=seed, temperature=1.5), session="long")
        )
        await asyncio.sleep(0.05 if n < 1000 else 1.0)
        await engine.interrupt()
        completion = await task
        if completion.finish_reason == "abort" and completion.token_ids:
            return completion
    raise AssertionError("no turn was interrupted")


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_logprobs_are_the_models_own_at_the_sampling_temperature(
    kind: Kind, temperature: float
) -> None:
    async def test(engine: Engine) -> None:
        turns = await asyncio.gather(
            *(
                engine.generate(context, sampling(seed=n, temperature=temperature), session=f"s{n}")
                for n, context in enumerate(contexts)
            )
        )
        for context, turn in zip(contexts, turns, strict=True):
            kind.check(turn, context, temperature=temperature)
            assert turn.versions == [0] * len(turn.token_ids)

    contexts = [[5], [5, 9], [7] * 20, [3, 8, 11, 12]]
    kind.play(test)


def test_a_score_is_the_models_own_at_temperature_one(kind: Kind) -> None:
    async def test(engine: Engine) -> None:
        ids = [5, 9, 12, 7, 7, 3]
        assert await engine.score(ids) == pytest.approx(
            kind.logprobs("old", ids), abs=kind.tolerance
        )

    kind.play(test)


def test_a_turn_ends_at_exactly_max_new_tokens_or_with_its_stop_token(kind: Kind) -> None:
    """F001: the stop token is part of the turn, with its logprob."""

    async def test(engine: Engine) -> None:
        for token in range(4, 30):  # a context whose turn does not stop by itself
            context = [5, token]
            greedy = await engine.generate(context, sampling(6, temperature=0.0), session="a")
            if greedy.finish_reason == "length":
                break
        assert len(greedy.token_ids) == len(greedy.logprobs) == 6
        third = greedy.token_ids[2]
        end = greedy.token_ids.index(third) + 1
        stopped = await engine.generate(
            context, sampling(6, temperature=0.0, stop_token_ids=(third,)), session="b"
        )
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == greedy.token_ids[:end]
        assert len(stopped.logprobs) == end
        cut = await engine.generate(context, sampling(1, temperature=0.0), session="c")
        assert (cut.token_ids, cut.finish_reason) == (greedy.token_ids[:1], "length")

    kind.play(test)


def test_one_seed_samples_one_turn(kind: Kind) -> None:
    async def test(engine: Engine) -> None:
        async def turn(seed: int) -> list[int]:
            completion = await engine.generate(
                [5, 9], sampling(seed=seed, temperature=1.5), session=f"s{seed}"
            )
            return completion.token_ids

        first, again = [await asyncio.gather(*map(turn, range(5))) for _ in range(2)]
        assert len({tuple(ids) for ids in first}) > 1
        if kind.repeats:
            assert first == again

    kind.play(test)


def test_the_prefix_that_is_kept_between_turns_changes_no_logprob(kind: Kind) -> None:
    async def test(engine: Engine) -> None:
        context = [5, 9, 12]
        for turn in range(3):
            completion = await engine.generate(context, sampling(seed=turn), session="s")
            kind.check(completion, context)
            context += [*completion.token_ids, 8, 13, 4]

    kind.play(test)


def test_sessions_side_by_side_do_not_mix(kind: Kind) -> None:
    async def test(engine: Engine) -> None:
        async def episode(n: int) -> None:
            context = [5, 4 + n]
            for turn in range(2):
                completion = await engine.generate(
                    context, sampling(4, seed=10 * n + turn), session=f"s{n}"
                )
                kind.check(completion, context)
                context += [*completion.token_ids, 6 + n]
            await engine.release(f"s{n}")

        await asyncio.gather(*(episode(n) for n in range(8)))

    kind.play(test)


def test_new_weights_sample_and_keys_and_values_of_old_ones_never_do(kind: Kind) -> None:
    """F070: the same context before and after, and in the turn that follows."""

    async def test(engine: Engine) -> None:
        context = [5, 9, 12, 7, 11, 13, 4, 6]
        first = await engine.generate(context, sampling(4), session="s")
        kind.check(first, context)
        metrics = await kind.sync(engine, 1, "new")
        assert metrics["sync/probe_abs_diff"] <= kind.tolerance
        assert engine.version == 1
        for after in (context, context + first.token_ids):
            completion = await engine.generate(after, sampling(4), session="s")
            kind.check(completion, after, "new")
            assert completion.versions == [1] * len(completion.token_ids)
            with pytest.raises(AssertionError):  # the weights do differ
                kind.check(completion, after, "old")
        await kind.sync(engine, 2, "old")
        kind.check(await engine.generate(context, sampling(4), session="s"), context)

    kind.play(test)


def test_weights_that_are_not_the_learners_are_refused(kind: Kind) -> None:
    """F072: the probe's logprobs tell."""

    async def test(engine: Engine) -> None:
        with pytest.raises(SyncError, match="differ from the learner's"):
            await engine.update_weights(kind.weights("new"), 1, kind.probe("old"))
        await kind.sync(engine, 2)
        context = [5, 9]
        kind.check(await engine.generate(context, sampling(), session="s"), context)

    kind.play(test)


def test_an_interrupted_turn_keeps_what_it_has_and_goes_on(kind: Kind) -> None:
    """F028"""

    async def test(engine: Engine) -> None:
        context = [5, 9, 12]
        part = await long_turn(engine, context, 1500 if not kind.repeats else 100)
        kind.check(part, context, temperature=1.5)
        await kind.sync(engine, 1, "new")
        going_on = context + part.token_ids
        rest = await engine.generate(going_on, sampling(), session="long")
        kind.check(rest, going_on, "new")
        assert (part.versions[0], rest.versions[0]) == (0, 1)

    kind.play(test)


def test_nothing_is_in_flight_after_a_cancel(kind: Kind) -> None:
    """F026: new weights come at once, which they do not under a running request."""

    async def test(engine: Engine) -> None:
        n = 1500 if not kind.repeats else 100
        tasks = [
            asyncio.create_task(
                engine.generate([5, 9 + m], sampling(n, temperature=1.5), session=f"s{m}")
            )
            for m in range(4)
        ]
        await asyncio.sleep(0.5 if not kind.repeats else 0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await kind.sync(engine, 1))["sync/probe_abs_diff"] <= kind.tolerance
        kind.check(await engine.generate([5, 9], sampling(), session="s0"), [5, 9])

    kind.play(test)


def test_more_than_the_context_holds_is_no_turn(kind: Kind) -> None:
    """F030: an empty one that ends by length, or an error before anything is computed."""

    async def test(engine: Engine) -> None:
        call = engine.generate([5] * 2050, sampling(4), session="s")
        if kind.refuses_overflow:
            with pytest.raises(EngineError, match="do not fit"):
                await call
        else:
            completion = await call
            assert (completion.token_ids, completion.finish_reason) == ([], "length")
        kind.check(await engine.generate([5, 9], sampling(), session="s"), [5, 9])

    kind.play(test)


def test_closing_twice_is_closing_once(kind: Kind) -> None:
    async def test(engine: Engine) -> None:
        await engine.release("nobody")
        await engine.close()
        await engine.close()
        with pytest.raises(EngineDied, match="closed"):
            await engine.generate([5, 9], sampling(), session="s")

    kind.play(test)
