"""The client of one SGLang server: what it sends, which answers it takes, which errors it makes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentrl.protocols import EngineDied
from agentrl.types import Sampling
from rollout.engines.sglang_reply import BadReply, ForeignWeights, read_reply, read_scores
from rollout.engines.sglang_server import (
    ContextOverflow,
    Lost,
    Refused,
    ServerInfo,
    SGLangServer,
    Unavailable,
    open_http,
)
from tests.fake_sglang import EOS, FakeSGLang, change, cut, status


def with_server(test: Callable[[FakeSGLang, SGLangServer], Awaitable[Any]], **fake: Any) -> Any:
    async def play() -> Any:
        served = await FakeSGLang(**fake).start()
        http, _ = open_http(8)
        async with http, asyncio.timeout(20):
            try:
                return await test(served, SGLangServer(served.url, http))
            finally:
                await served.die()

    return asyncio.run(play())


async def generate(server: SGLangServer, ids: list[int], n: int = 4, **more: Any) -> Any:
    return await server.generate(
        ids, Sampling(max_new_tokens=n), rid="r1", weight_version="default", **more
    )


def answer(**meta: Any) -> dict[str, Any]:
    """A good one, but for `meta`."""
    good = {
        "finish_reason": {"type": "stop", "matched": EOS},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "weight_version": "run/1",
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, EOS, None]],
    }
    output_ids = meta.pop("output_ids", [7, EOS])
    return {"output_ids": output_ids, "meta_info": good | meta}


def test_a_good_answer_is_read() -> None:
    reply = read_reply(answer(), "run/1")
    assert (reply.token_ids, reply.logprobs) == ([7, EOS], [-0.5, -0.25])
    assert (reply.finish_reason, reply.num_prompt_tokens, reply.num_cached_tokens) == ("stop", 3, 1)
    assert reply.completion(1).versions == [1, 1]


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"output_token_logprobs": [[-0.5, 7, None]]}, "1 logprobs came with 2 output_ids"),
        ({"completion_tokens": 3}, "completion_tokens=3"),
        ({"output_ids": [7, 8]}, "of other tokens"),
        ({"output_token_logprobs": [[None, 7, None], [-1.0, EOS, None]]}, r"\(7, None\)"),
        ({"output_token_logprobs": [[float("nan"), 7, None], [-1.0, EOS, None]]}, "nan"),
        ({"output_token_logprobs": [[float("-inf"), 7, None], [-1.0, EOS, None]]}, "inf"),
        ({"finish_reason": {"type": "stop", "matched": 9}}, "stopped at 9"),
        ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, "NaN happened"),
        ({"finish_reason": {"type": "stop"}}, "stopped at None"),
        ({"finish_reason": {"type": "tired"}}, "tired"),
        ({"finish_reason": None}, "missing"),
        ({"output_token_logprobs": None}, "missing"),
    ],
)
def test_an_answer_that_could_be_wrong_is_refused(meta: Any, says: str) -> None:
    with pytest.raises(BadReply, match=says):
        read_reply(answer(**meta), "run/1")


def test_a_stripped_stop_token_is_refused() -> None:
    """Without it the policy never learns to stop."""
    stripped = answer(output_ids=[7], completion_tokens=1, output_token_logprobs=[[-0.5, 7, None]])
    with pytest.raises(BadReply, match="not its last token"):
        read_reply(stripped, "run/1")


def test_an_answer_of_other_weights_is_refused() -> None:
    with pytest.raises(ForeignWeights, match="'run/2', not 'run/1'"):
        read_reply(answer(weight_version="run/2"), "run/1")
    spans = [
        {"version": "run/0", "start": 0, "end": 1},
        {"version": "run/1", "start": 1, "end": 2},
    ]
    with pytest.raises(ForeignWeights, match="run/0"):
        read_reply(answer(weight_versions=spans), "run/1")
    assert read_reply(answer(weight_versions=spans[1:]), "run/1").token_ids == [7, EOS]


def test_an_aborted_request_that_never_ran_has_no_tokens() -> None:
    """F028: SGLang answers such a one without any counts of its prompt."""
    meta = {
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": "run/1",
        "completion_tokens": 0,
    }
    reply = read_reply({"output_ids": [], "meta_info": meta}, "run/1")
    assert (reply.token_ids, reply.finish_reason) == ([], "abort")
    assert reply.num_prompt_tokens is None


def test_times_are_told_only_where_the_server_tells_them() -> None:
    """0.5.15 says queue_time=0.0 and leaves out the times that it would be made of."""
    blind = read_reply(answer(queue_time=0.0, e2e_latency=2.0, decode_throughput=5e5), "run/1")
    assert (blind.latency_s, blind.queue_s, blind.ttft_s, blind.tpot_s) == (2.0, None, None, None)
    seeing = read_reply(
        answer(
            queue_time=0.5,
            request_received_ts=100.0,
            forward_entry_time=100.5,
            prefill_finished_time=101.0,
            request_finished_ts=101.25,
        ),
        "run/1",
    )
    assert (seeing.queue_s, seeing.ttft_s, seeing.tpot_s) == (0.5, 1.0, 0.25)


def test_scores_of_other_tokens_are_refused() -> None:
    meta = {
        "weight_version": "run/1",
        "input_token_logprobs": [[None, 5, None], [-0.5, 6, None], [-0.25, 7, None]],
    }
    assert read_scores({"meta_info": meta}, [5, 6, 7], "run/1") == [-0.5, -0.25]
    with pytest.raises(BadReply, match="others than"):
        read_scores({"meta_info": meta}, [5, 6, 8], "run/1")
    with pytest.raises(BadReply, match="missing"):
        read_scores({"meta_info": {"weight_version": "run/1"}}, [5, 6], "run/1")
    with pytest.raises(ForeignWeights):
        read_scores({"meta_info": meta}, [5, 6, 7], "run/2")


def test_a_request_is_tokens_with_untrimmed_stop_and_without_ignore_eos() -> None:
    async def test(fake: FakeSGLang, server: SGLangServer) -> None:
        sampling = Sampling(max_new_tokens=3, temperature=0.7, seed=2**40 + 5, stop_token_ids=(9,))
        await server.generate((4, 5), sampling, rid="r", weight_version="default", adapter="lora")
        (body,) = fake.bodies
        assert (body["input_ids"], body["rid"], body["lora_path"]) == ([4, 5], "r", "lora")
        assert body["return_logprob"] is True
        assert body["sampling_params"] == {
            "max_new_tokens": 3,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": -1,
            "stop_token_ids": [9],
            "sampling_seed": 5,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }

    with_server(test)


def test_errors_say_whether_the_same_request_may_be_sent_again() -> None:
    """F030: what says that the request is bad would say so again."""

    async def test(fake: FakeSGLang, server: SGLangServer) -> None:
        for code in (408, 425, 429, 500, 502, 503, 504):
            fake.spoilers.append(status(code, **{"Retry-After": "7"}))
            with pytest.raises(Unavailable) as caught:
                await generate(server, [5])
            assert caught.value.retry_after_s == 7.0
            assert not isinstance(caught.value, Lost)
        for code in (400, 404, 422):
            fake.spoilers.append(status(code, "top_p must be in (0, 1]"))
            with pytest.raises(Refused, match="top_p must be"):
                await generate(server, [5])
        fake.spoilers.append(status(401, "no key"))
        with pytest.raises(EngineDied, match="no key"):
            await generate(server, [5])
        fake.spoilers.append(cut)
        with pytest.raises(Lost, match="ClientPayloadError"):
            await generate(server, [5])
        await fake.die()
        with pytest.raises(Lost, match="ClientConnectorError"):
            await generate(server, [5])

    with_server(test)


@pytest.mark.parametrize(("num_prompt", "n"), [(90, 11), (100, 1), (94, 6)])
def test_what_does_not_fit_the_context_is_an_overflow(num_prompt: int, n: int) -> None:
    """F030. SGLang refuses a prompt that leaves fewer than seven tokens in words of its own."""

    async def test(_: FakeSGLang, server: SGLangServer) -> None:
        with pytest.raises(ContextOverflow):
            await generate(server, [5] * num_prompt, n)

    with_server(test, context_length=100)


def test_a_turn_may_be_cut_at_the_end_of_the_context_only() -> None:
    """SGLang never samples the last two tokens of a context."""

    async def test(fake: FakeSGLang, server: SGLangServer) -> None:
        await server.describe()
        fake.weights = {"a": 1.234}
        for prompt in range(3, 30):  # one that does not stop by itself
            ids = [prompt] * 90
            reply = await generate(server, ids, 10)
            if reply.finish_reason == "length":
                break
        assert (reply.finish_reason, len(reply.token_ids)) == ("length", 8)
        fake.spoilers.append(change(lambda r: _shorten(r, 3)))
        with pytest.raises(BadReply, match="asked for 10 tokens and ended at 3, by length"):
            await generate(server, ids, 10)
        fake.spoilers.append(change(lambda r: r["meta_info"].update(prompt_tokens=5)))
        with pytest.raises(BadReply, match="read 5 prompt tokens of 90"):
            await generate(server, ids, 10)
        with pytest.raises(BadReply, match="asked for 1 tokens and ended at"):
            fake.spoilers.append(change(lambda r: _lengthen(r)))
            await generate(server, ids, 1)

    with_server(test, context_length=100)


def _shorten(reply: dict[str, Any], n: int) -> None:
    meta = reply["meta_info"]
    reply["output_ids"] = reply["output_ids"][:n]
    meta["output_token_logprobs"] = meta["output_token_logprobs"][:n]
    meta["completion_tokens"] = n


def _lengthen(reply: dict[str, Any]) -> None:
    meta = reply["meta_info"]
    reply["output_ids"] = [8, 9]
    meta["output_token_logprobs"] = [[-1.0, 8, None], [-1.0, 9, None]]
    meta.update(completion_tokens=2, finish_reason={"type": "length", "length": 2})


def test_a_server_describes_itself() -> None:
    async def test(_: FakeSGLang, server: SGLangServer) -> None:
        info = await server.describe()
        assert (info.sglang, info.weight_version) == ("0.5.15.post1", "default")
        assert (info.context_tokens, info.kv_tokens) == (4096, 100_000)
        assert (server.num_ranks, server.dtype) == (1, "float32")
        assert "/update_weights_from_tensor" in server.routes
        assert objection(info) is None

    with_server(test)


def test_a_server_that_warms_up_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engines.sglang_server.CONTROL_S", 0.1)

    async def test(fake: FakeSGLang, server: SGLangServer) -> None:
        fake.slow = {"/server_info": 0.3}
        assert (await server.describe()).sglang == fake.version

    with_server(test)


def test_what_is_no_sglang_server_is_said_to_be_none() -> None:
    async def test(_: FakeSGLang, server: SGLangServer) -> None:
        with pytest.raises(Refused, match=r"does not answer as SGLang 0\.5\.15 or newer does"):
            await server.describe()

    with_server(test, missing_routes={"/server_info"})


def objection(info: ServerInfo, **run: Any) -> str | None:
    run = {
        "run_id": "run",
        "max_context_tokens": 1000,
        "architecture": "LlamaForCausalLM",
        "take_over": False,
    } | run
    return info.objection(**run)


@pytest.mark.parametrize(
    ("fake", "run", "says"),
    [
        ({"version": "0.5.14"}, {}, "0.5.15 is the oldest that works"),
        ({"version": "0.6.0rc1"}, {}, None),
        ({"missing_routes": {"/v1/loads"}}, {}, "does not serve /v1/loads"),
        ({}, {"architecture": "Qwen2ForCausalLM"}, "the learner's a Qwen2ForCausalLM"),
        ({"dtype": "auto"}, {}, "start it with --dtype"),
        ({"context_length": 999}, {}, "fewer than rollout.max_context_tokens=1000"),
        ({"weight_version": "run/7"}, {}, None),
        ({"weight_version": "other/7"}, {}, "weights 'other/7' of another run"),
        ({"weight_version": "other/7"}, {"take_over": True}, None),
    ],
)
def test_a_server_that_cannot_serve_the_run_is_refused(fake: Any, run: Any, says: Any) -> None:
    """F034: the guard against the servers of another run."""

    async def test(_: FakeSGLang, server: SGLangServer) -> str | None:
        return objection(await server.describe(), **run)

    found = with_server(test, **fake)
    assert found is None if says is None else says in found


def test_the_client_adds_no_time_limit_of_its_own() -> None:
    """F025: a limit that nobody set ends work that was allowed hours."""

    async def test(_: FakeSGLang, server: SGLangServer) -> None:
        timeout = server._http.timeout
        assert (timeout.total, timeout.sock_read) == (None, None)

    with_server(test)
