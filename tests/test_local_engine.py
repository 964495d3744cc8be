"""The embedded engine samples what the model says, once per token, whoever else is in the batch."""

import asyncio
import copy
import math
from collections import Counter

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.attention import register_attention
from agentrl.protocols import EngineDied, EngineError
from agentrl.types import Sampling
from rollout.engines.local import LocalEngine
from rollout.engines.local_load import fast_dtype
from rollout.engines.local_sampling import sample
from tests.engines import ANY_PROBE

STOP = 3


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        pad_token_id=0,
        hidden_size=48,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
        attn_implementation=register_attention(),
    )
    return LlamaForCausalLM(config).float()


@pytest.fixture(scope="module")
def reference(model):
    """The same weights through transformers' own attention."""
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return other


def engine_for(model, **options):
    return LocalEngine(model, **({"num_slots": 8, "max_context_tokens": 128} | options))


def run(engine, play):
    async def main():
        try:
            return await play(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def true_logprobs(reference, prompt, sampled, temperature=1.0):
    logits = reference(torch.tensor([prompt + sampled])).logits[0] / temperature
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()


def prompt_of(seed, length):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 61, (length,), generator=generator).tolist()


def test_logprobs_are_the_models_own_at_the_sampling_temperature(model, reference):
    """Prompts of many lengths, joined in one batch, give the logprobs of each sequence alone."""

    async def play(engine):
        return await asyncio.gather(
            *[
                engine.generate(
                    prompt_of(n, n),
                    Sampling(max_new_tokens=12, temperature=0.7, seed=n),
                    session=str(n),
                )
                for n in (1, 2, 9, 30, 31)
            ]
        )

    for n, completion in zip((1, 2, 9, 30, 31), run(engine_for(model), play), strict=True):
        expected = true_logprobs(reference, prompt_of(n, n), completion.token_ids, 0.7)
        assert completion.logprobs == pytest.approx(expected, abs=2e-5)
        assert completion.finish_reason == "length" and len(completion.token_ids) == 12


def test_greedy_decoding_equals_transformers_generate(model, reference):
    prompt = prompt_of(1, 10)

    async def play(engine):
        return await engine.generate(
            prompt, Sampling(max_new_tokens=20, temperature=0.0), session="a"
        )

    expected = reference.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=20, eos_token_id=None
    )
    assert run(engine_for(model), play).token_ids == expected[0, len(prompt) :].tolist()


def test_no_token_of_an_episode_is_prefilled_twice(model, reference):
    """Three turns: each request computes only the last sampled token and what the env added."""

    async def play(engine):
        tape, turns = prompt_of(5, 40), []
        for turn in range(3):
            engine.pop_metrics()
            completion = await engine.generate(
                tape, Sampling(max_new_tokens=6, seed=turn), session="episode"
            )
            turns.append((len(tape), engine.pop_metrics()))
            expected = true_logprobs(reference, tape, completion.token_ids)
            assert completion.logprobs == pytest.approx(expected, abs=2e-5)
            tape = tape + completion.token_ids + prompt_of(50 + turn, 7)
        return turns

    (first, a), (_, b), (third, c) = run(engine_for(model), play)
    assert a["engine/prefilled_tokens"] == first == 40
    assert b["engine/prefilled_tokens"] == c["engine/prefilled_tokens"] == 1 + 7
    assert c["engine/cached_tokens"] == third - 8


def test_a_group_prefills_its_prompt_once(model, reference):
    prompt = prompt_of(7, 50)

    async def play(engine):
        completions = await asyncio.gather(
            *[
                engine.generate(prompt, Sampling(max_new_tokens=5, seed=i), session=str(i))
                for i in range(8)
            ]
        )
        return completions, engine.pop_metrics()

    completions, metrics = run(engine_for(model), play)
    # The siblings compute the last token only, whose logits they sample from.
    assert metrics["engine/prefilled_tokens"] == 50 + 7
    assert metrics["engine/cached_tokens"] == 7 * 49
    for completion in completions:
        expected = true_logprobs(reference, prompt, completion.token_ids)
        assert completion.logprobs == pytest.approx(expected, abs=2e-5)


def test_groups_that_decode_together_read_their_prompts_once(model, reference, monkeypatch):
    monkeypatch.setattr("rollout.engines.local_kv.FAMILY_TOKENS", 1)
    shown = prompt_of(1, 20)  # to all groups
    prompts = [shown + prompt_of(10 + i // 4, 30) for i in range(8)]

    async def play(engine):
        held = []
        families = engine._kv.families
        monkeypatch.setattr(
            engine._kv, "families", lambda slots: held.append(families(slots)) or held[-1]
        )
        completions = await asyncio.gather(
            *[
                engine.generate(p, Sampling(max_new_tokens=8, seed=i), session=str(i))
                for i, p in enumerate(prompts)
            ]
        )
        return completions, held

    completions, held = run(engine_for(model), play)
    assert (50, [4, 4]) in [(shared, sorted(map(len, each))) for shared, each in held]
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = true_logprobs(reference, prompt, completion.token_ids)
        assert completion.logprobs == pytest.approx(expected, abs=2e-5)


def test_families_stay_right_while_neighbours_leave_and_new_prompts_come(
    model, reference, monkeypatch
):
    monkeypatch.setattr("rollout.engines.local_kv.FAMILY_TOKENS", 1)
    prompts = [prompt_of(20 + i // 4, 30) + prompt_of(i, i % 3) for i in range(16)]

    async def play(engine):
        async def one(i):
            sampling = Sampling(max_new_tokens=3 + 5 * i % 17, seed=i)
            completion = await engine.generate(prompts[i], sampling, session=str(i))
            await engine.release(str(i))
            return completion

        return await asyncio.gather(*map(one, range(16)))

    for prompt, completion in zip(prompts, run(engine_for(model), play), strict=True):
        expected = true_logprobs(reference, prompt, completion.token_ids)
        assert completion.logprobs == pytest.approx(expected, abs=2e-5)


def test_seeds_differ_within_a_group_and_repeat_on_replay(model):
    prompt = prompt_of(7, 20)

    async def play(engine, batch):
        return [
            c.token_ids
            for c in await asyncio.gather(
                *[
                    engine.generate(prompt, Sampling(max_new_tokens=16, seed=i), session=str(i))
                    for i in batch
                ]
            )
        ]

    together = run(engine_for(model), lambda e: play(e, range(6)))
    alone = [run(engine_for(model), lambda e, i=i: play(e, [i]))[0] for i in range(6)]
    assert together == alone
    assert len({tuple(ids) for ids in together}) == 6


def test_the_stop_token_ends_a_turn_and_is_part_of_it(model):
    async def play(engine):
        return [
            await engine.generate(
                prompt_of(3, 8),
                Sampling(max_new_tokens=100, seed=seed, stop_token_ids=(STOP,)),
                session=str(seed),
            )
            for seed in range(12)
        ]

    stopped = [c for c in run(engine_for(model), play) if c.finish_reason == "stop"]
    assert stopped, "no seed sampled the stop token"
    for completion in stopped:
        assert completion.token_ids.count(STOP) == 1 and completion.token_ids[-1] == STOP
        assert len(completion.token_ids) == len(completion.logprobs)


def test_more_sessions_than_slots_evict_the_longest_idle_and_stay_right(model, reference):
    async def play(engine):
        async def episode(i):
            tape = prompt_of(i, 12)
            for turn in range(2):
                completion = await engine.generate(
                    tape, Sampling(max_new_tokens=5, seed=i), session=str(i)
                )
                expected = true_logprobs(reference, tape, completion.token_ids)
                assert completion.logprobs == pytest.approx(expected, abs=2e-5)
                tape = tape + completion.token_ids + prompt_of(100 + turn, 3)

        await asyncio.gather(*[episode(i) for i in range(9)])
        return engine.pop_metrics()

    assert run(engine_for(model, num_slots=3), play)["engine/evicted_sessions"] > 0


def test_a_long_prompt_is_prefilled_in_chunks(model, reference, monkeypatch):
    monkeypatch.setattr("rollout.engines.local.PREFILL_TOKENS_PER_STEP", 16)
    prompts = [prompt_of(i, 30 + i) for i in range(4)]

    async def play(engine):
        return await asyncio.gather(
            *[
                engine.generate(p, Sampling(max_new_tokens=4, seed=1), session=str(i))
                for i, p in enumerate(prompts)
            ]
        )

    for prompt, completion in zip(prompts, run(engine_for(model), play), strict=True):
        expected = true_logprobs(reference, prompt, completion.token_ids)
        assert completion.logprobs == pytest.approx(expected, abs=2e-5)


def test_a_cancelled_request_leaves_the_batch_and_its_neighbours_finish(model):
    """F026: the slot of a cancelled request is free for the next one."""

    async def play(engine):
        doomed = asyncio.create_task(
            engine.generate(prompt_of(1, 5), Sampling(max_new_tokens=120), session="doomed")
        )
        neighbour = asyncio.create_task(
            engine.generate(prompt_of(2, 5), Sampling(max_new_tokens=30), session="neighbour")
        )
        await asyncio.sleep(0.02)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        await engine.release("doomed")
        assert len((await neighbour).token_ids) == 30
        third = await engine.generate(prompt_of(3, 5), Sampling(max_new_tokens=3), session="third")
        assert len(third.token_ids) == 3
        assert not engine._busy

    run(engine_for(model, num_slots=2), play)


def test_new_weights_never_meet_old_keys(model, reference):
    """F070: the same prompt after an update gives the new model's logprobs."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    changed_reference = copy.deepcopy(changed)
    changed_reference.set_attn_implementation("eager")
    prompt = prompt_of(4, 30)

    async def play(engine):
        await engine.generate(prompt, Sampling(max_new_tokens=4), session="a")
        await engine.update_weights(changed.named_parameters(), 1, ANY_PROBE)
        return await engine.generate(prompt, Sampling(max_new_tokens=4), session="a")

    completion = run(engine_for(model, share_weights=False), play)
    assert completion.versions == [1] * 4
    expected = true_logprobs(changed_reference, prompt, completion.token_ids)
    assert completion.logprobs == pytest.approx(expected, abs=2e-5)


def test_shared_weights_are_the_learners_own_memory(model):
    engine = engine_for(model)
    assert engine.shares_weights
    assert all(
        own is theirs
        for own, theirs in zip(engine._model.parameters(), model.parameters(), strict=True)
    )
    run(engine, lambda e: e.update_weights(iter(()), 1, ANY_PROBE))


def test_a_step_of_the_learner_in_shared_weights_is_the_engines_from_the_next_update(model):
    learner = copy.deepcopy(model)
    prompt = prompt_of(9, 20)

    async def play(engine):
        with torch.no_grad():
            for parameter in learner.parameters():
                parameter.mul_(0.9)
        await engine.update_weights(iter(()), 1, ANY_PROBE)
        return await engine.generate(prompt, Sampling(max_new_tokens=8), session="a")

    completion = run(engine_for(learner), play)
    learner.set_attn_implementation("eager")
    expected = true_logprobs(learner, prompt, completion.token_ids)
    assert completion.logprobs == pytest.approx(expected, abs=2e-5)


def test_the_model_that_an_engine_took_keeps_its_plain_layers(model):
    run(engine_for(model), lambda engine: engine.score(prompt_of(1, 5)))
    assert type(model.lm_head) is torch.nn.Linear


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_weights_are_matched_by_name_exactly(model, change):
    async def play(engine):
        weights = dict(model.named_parameters())
        if change == "missing":
            weights.pop("model.norm.weight")
        else:
            weights["model.nrom.weight"] = torch.zeros(1)
        with pytest.raises(EngineError, match=r"model\.n"):
            await engine.update_weights(weights.items(), 1, ANY_PROBE)
        assert engine.version == 0

    run(engine_for(model, share_weights=False), play)


def test_weights_cannot_change_under_a_running_request(model):
    async def play(engine):
        running = asyncio.create_task(
            engine.generate(prompt_of(1, 5), Sampling(max_new_tokens=100), session="a")
        )
        await asyncio.sleep(0.02)
        with pytest.raises(EngineError, match="running request"):
            await engine.update_weights(iter(()), 1, ANY_PROBE)
        await running

    run(engine_for(model), play)


def test_score_is_the_teacher_forced_logprob(model, reference):
    ids = prompt_of(8, 20)
    scores = run(engine_for(model), lambda e: e.score(ids))
    assert scores == pytest.approx(true_logprobs(reference, ids[:1], ids[1:]), abs=2e-5)


def test_a_command_that_nobody_waits_for_any_more_does_no_harm(model):
    async def play(engine):
        busy = asyncio.create_task(
            engine.generate(prompt_of(1, 5), Sampling(max_new_tokens=60), session="a")
        )
        await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.score(prompt_of(2, 5)), 0)
        assert len((await busy).token_ids) == 60
        assert len(await engine.score(prompt_of(2, 5))) == 4

    run(engine_for(model), play)


def test_a_dead_engine_fails_its_requests_and_names_the_cause(model):
    """F021: nobody waits for an engine that is gone."""

    def explode(*args, **kwargs):
        raise RuntimeError("out of memory")

    async def play(engine):
        engine._model.model.forward = explode
        for _ in range(2):
            with pytest.raises(EngineDied, match="out of memory"):
                await asyncio.wait_for(
                    engine.generate(prompt_of(1, 5), Sampling(max_new_tokens=2), session="a"), 5
                )

    run(engine_for(model), play)


def test_a_request_that_does_not_fit_is_refused(model):
    async def play(engine):
        with pytest.raises(EngineError, match="do not fit"):
            await engine.generate(prompt_of(1, 100), Sampling(max_new_tokens=100), session="a")

    run(engine_for(model), play)


def test_sampling_follows_the_distribution():
    """20,000 draws: each frequency within five standard errors."""
    logits = torch.tensor([2.0, 0.0, -1.0, float("-inf"), 1.0])
    n = 20_000
    samplings = [Sampling(max_new_tokens=1, temperature=0.8, seed=seed) for seed in range(n)]
    tokens, logprobs = sample(logits.repeat(n, 1), samplings, [0] * n)
    probabilities = (logits / 0.8).softmax(0)
    counts = Counter(tokens)
    assert counts[3] == 0
    for token, p in enumerate(probabilities.tolist()):
        assert abs(counts[token] / n - p) <= 5 * math.sqrt(p * (1 - p) / n)
    for token, logprob in zip(tokens[:100], logprobs[:100], strict=True):
        assert logprob == pytest.approx(math.log(probabilities[token]), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "support", "first"),
    [({"top_p": 0.8}, {0, 1}, math.log(0.625)), ({"top_k": 1}, {0}, 0.0)],
)
def test_truncated_sampling_reports_the_truncated_distribution(options, support, first):
    """F062: p = (.5, .3, .2) under top_p = .8 is drawn from (.625, .375)."""
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).repeat(300, 1)
    samplings = [Sampling(max_new_tokens=1, seed=seed, **options) for seed in range(300)]
    tokens, logprobs = sample(logits, samplings, [0] * 300)
    assert set(tokens) == support
    assert logprobs[tokens.index(0)] == pytest.approx(first, abs=1e-6)


def test_bfloat16_is_chosen_only_where_the_hardware_multiplies_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    for fast, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda fast=fast: fast)
        assert fast_dtype() is expected


async def until_sampled(engine, count):
    while engine._counts["engine/sampled_tokens"] < count:
        await asyncio.sleep(0.001)


def test_an_interrupt_answers_who_runs_and_who_waits_and_nobody_who_left(model, reference):
    """F028: each with what it sampled so far; afterwards the engine is as good as new."""

    async def play(engine):
        def ask(name, length):
            sampling = Sampling(max_new_tokens=120 - length, seed=length)
            return asyncio.create_task(
                engine.generate(prompt_of(length, length), sampling, session=name)
            )

        running = [ask("a", 9), ask("b", 17)]
        left = ask("c", 5)
        await until_sampled(engine, 12)
        waiting = [ask("d", 8), ask("e", 30)]
        left_waiting = ask("f", 4)
        await asyncio.sleep(0.01)
        left.cancel(), left_waiting.cancel()
        await engine.interrupt()
        answers = await asyncio.wait_for(asyncio.gather(*running, *waiting), 5)
        assert left.cancelled() or await asyncio.wait([left], timeout=1)
        await engine.interrupt()  # nobody is there any more
        again = await asyncio.gather(*(ask(name, 8) for name in "abcdef"))
        return answers, again

    answers, again = run(engine_for(model, num_slots=3), play)
    assert [answer.finish_reason for answer in answers] == ["abort"] * 4
    sizes = [len(answer.token_ids) for answer in answers]
    assert min(sizes[:2]) > 0 and sizes[2:] == [0, 0]
    for length, answer in zip((9, 17), answers[:2], strict=True):
        expected = true_logprobs(reference, prompt_of(length, length), answer.token_ids)
        assert answer.logprobs == pytest.approx(expected, abs=2e-5)
    for completion in again:
        expected = true_logprobs(reference, prompt_of(8, 8), completion.token_ids)
        assert completion.logprobs == pytest.approx(expected, abs=2e-5)
        assert len(completion.token_ids) == 112


@pytest.mark.parametrize("updated", [False, True])
def test_a_turn_that_goes_on_after_an_interrupt_is_the_turn_that_was_not_interrupted(
    model, updated
):
    """From its context and what it had sampled, whether its keys were kept or computed anew."""
    prompt, greedy = prompt_of(3, 20), {"temperature": 0.0}

    async def whole(engine):
        return await engine.generate(prompt, Sampling(max_new_tokens=90, **greedy), session="a")

    async def in_parts(engine):
        context, parts = list(prompt), []
        for count in (10, 30, 91):
            sampling = Sampling(max_new_tokens=110 - len(context), **greedy)
            task = asyncio.create_task(engine.generate(context, sampling, session="a"))
            if count < 90:
                await until_sampled(engine, count)
                await engine.interrupt()
            parts.append(await task)
            context = context + parts[-1].token_ids
            if updated and count < 90:
                await engine.update_weights([], engine.version + 1, ANY_PROBE)
        return parts

    expected = run(engine_for(model), whole)
    parts = run(engine_for(model), in_parts)
    assert [part.finish_reason for part in parts] == ["abort", "abort", "length"]
    assert all(part.token_ids for part in parts)
    assert [token for part in parts for token in part.token_ids] == expected.token_ids
    logprobs = [logprob for part in parts for logprob in part.logprobs]
    assert logprobs == pytest.approx(expected.logprobs, abs=2e-5)
    assert [set(part.versions) for part in parts] == [{0}, {updated * 1}, {updated * 2}]


def test_a_prompt_that_is_interrupted_in_the_middle_of_its_prefill_is_whole_afterwards(
    model, reference, monkeypatch
):
    monkeypatch.setattr("rollout.engines.local.PREFILL_TOKENS_PER_STEP", 4)
    prompt = prompt_of(6, 100)

    async def play(engine):
        first = asyncio.create_task(
            engine.generate(prompt, Sampling(max_new_tokens=20), session="a")
        )
        while not 0 < engine._kv.lengths.max() < 96:
            await asyncio.sleep(0)
        await engine.interrupt()
        assert (await first).token_ids == []
        return await engine.generate(prompt, Sampling(max_new_tokens=20), session="a")

    completion = run(engine_for(model), play)
    expected = true_logprobs(reference, prompt, completion.token_ids)
    assert completion.logprobs == pytest.approx(expected, abs=2e-5)
