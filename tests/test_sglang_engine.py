"""The engine over SGLang servers, in front of fakes that fail in every way a real one may."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.protocols import EngineDied, EngineError, SyncError
from agentrl.types import Completion
from rollout.engines import sglang_pool, sglang_watch
from rollout.engines.sglang_reply import BadReply
from rollout.engines.sglang_server import Unavailable
from tests.fake_fleet import WEIGHTS, FakeTransport, Rig, rig, sampling
from tests.fake_sglang import FakeSGLang, change, cut, hang, score, status

IDS = [5, 7, 11]


def play(test: Callable[[Rig], Awaitable[Any]], num_servers: int = 1, **made: Any) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(25), rig(num_servers, **made) as engine_and_servers:
            return await test(engine_and_servers)

    return asyncio.run(run())


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def num_generated(r: Rig) -> int:
    return sum(len(server.bodies) for server in r.servers)


def assert_scored(completion: Completion, ids: list[int] = IDS, weights: Any = WEIGHTS) -> None:
    """The logprobs are those of the model with `weights`."""
    expected = score(weights, ids + completion.token_ids)[len(ids) - 1 :]
    assert completion.logprobs == pytest.approx(expected, abs=1e-9)


# Retries, breaker, errors.


def test_a_server_that_is_always_busy_is_asked_max_tries_times() -> None:
    """F029: retries are at one layer, capped, with pauses that grow."""

    async def test(r: Rig) -> None:
        (server,) = r.servers
        before = num_generated(r)
        server.spoilers.extend([status(503)] * 99)
        began = time.perf_counter()
        with pytest.raises(Unavailable, match="503"):
            await r.engine.generate(IDS, sampling(), session="s")
        assert num_generated(r) - before == 4
        assert 0.35 <= time.perf_counter() - began < 3
        assert r.engine.pop_metrics()["engine/retries"] == 3

    play(test, config={"max_tries": 4})


def test_a_healthy_server_answers_at_the_second_try() -> None:
    """F029: the episode moves, with its tokens verbatim."""

    async def test(r: Rig) -> None:
        first, second = r.servers
        await r.engine.generate(IDS, sampling(), session="s")
        if second.bodies[1:]:
            first, second = second, first
        first.spoilers.extend([status(503, **{"Retry-After": "60"})] * 99)
        began, before = time.perf_counter(), num_generated(r)
        context = [*IDS, 8, 9]
        assert_scored(await r.engine.generate(context, sampling(), session="s"), context)
        assert time.perf_counter() - began < 1
        assert num_generated(r) - before == 2
        assert second.bodies[-1]["input_ids"] == context
        assert r.engine.pop_metrics()["engine/moved_sessions"] == 1

    play(test, 2)


def test_a_busy_server_gets_the_pause_that_it_asks_for() -> None:
    """F029, F030: 503, 503, 200 are three requests."""

    async def test(r: Rig) -> None:
        (server,) = r.servers
        server.spoilers.extend([status(503, **{"Retry-After": "1"}), status(503)])
        began, before = time.perf_counter(), num_generated(r)
        assert_scored(await r.engine.generate(IDS, sampling(), session="s"))
        assert num_generated(r) - before == 3
        assert time.perf_counter() - began >= 1

    play(test)


def test_a_bad_request_is_not_sent_again() -> None:
    """F030"""

    async def test(r: Rig) -> None:
        (server,) = r.servers
        before = num_generated(r)
        server.spoilers.append(status(400, "top_p must be in (0, 1]"))
        with pytest.raises(EngineError, match="top_p"):
            await r.engine.generate(IDS, sampling(), session="s")
        server.spoilers.append(status(401, "no key"))
        with pytest.raises(EngineDied, match="no key"):
            await r.engine.generate(IDS, sampling(), session="s")
        assert num_generated(r) - before == 2

    play(test)


def test_a_full_context_ends_the_turn_by_length() -> None:
    """F030, F031: no error, and one request."""

    async def test(r: Rig) -> None:
        before = num_generated(r)
        completion = await r.engine.generate([5] * 4090, sampling(20), session="s")
        assert completion == Completion(
            token_ids=[], logprobs=[], finish_reason="length", versions=[]
        )
        assert num_generated(r) - before == 1
        with pytest.raises(EngineError, match="no tokens"):
            await r.engine.generate(IDS, sampling(0), session="s")
        assert num_generated(r) - before == 1

    play(test)


def strip(reply: Any) -> None:
    reply["meta_info"]["finish_reason"] = {"type": "stop", "matched": 31}


def nan(reply: Any) -> None:
    reply["meta_info"]["output_token_logprobs"][0][0] = float("nan")


def fewer(reply: Any) -> None:
    del reply["meta_info"]["output_token_logprobs"][0]


@pytest.mark.parametrize("fault", [strip, nan, fewer])
def test_a_reply_that_could_be_wrong_is_thrown_away_and_asked_again(fault: Any) -> None:
    async def test(r: Rig) -> None:
        (server,) = r.servers
        server.spoilers.append(change(fault))
        assert_scored(await r.engine.generate(IDS, sampling(), session="s"))
        server.spoilers.extend([change(fault)] * 3)
        with pytest.raises(BadReply):
            await r.engine.generate(IDS, sampling(), session="s")
        metrics = r.engine.pop_metrics()
        assert metrics["engine/bad_replies"] == 4
        assert metrics["engine/retries"] == 1 + 2

    play(test, config={"max_tries": 3})


def test_half_an_answer_is_none_and_the_request_is_sent_again() -> None:
    async def test(r: Rig) -> None:
        (server,) = r.servers
        server.spoilers.append(cut)
        assert_scored(await r.engine.generate(IDS, sampling(), session="s"))

    play(test)


def test_a_server_that_fails_again_and_again_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """F029, F033: the breaker opens, lets one request through, and closes when it is answered."""
    monkeypatch.setattr(sglang_pool, "REST_S", 0.3)

    async def test(r: Rig) -> None:
        bad, _ = r.servers
        bad.spoilers.extend([status(500)] * sglang_pool.BREAKER_FAILURES)
        for n in range(2 * sglang_pool.BREAKER_FAILURES):
            await r.engine.generate(IDS, sampling(), session=f"a{n}")
        asked = len(bad.bodies)
        for n in range(5):
            await r.engine.generate(IDS, sampling(), session=f"b{n}")
        assert len(bad.bodies) == asked
        await asyncio.sleep(0.4)
        for n in range(40):
            await r.engine.generate(IDS, sampling(), session=f"c{n}")
        assert len(bad.bodies) > asked + 5
        assert r.engine.pop_metrics()["engine/servers"] == 2

    play(test, 2)


def test_the_last_server_is_asked_although_it_rests() -> None:
    """F033: it is never removed in silence."""

    async def test(r: Rig) -> None:
        (server,) = r.servers
        server.spoilers.extend([status(500)] * 6)
        with pytest.raises(Unavailable):
            await r.engine.generate(IDS, sampling(), session="s")
        assert_scored(await r.engine.generate(IDS, sampling(), session="s"))

    play(test, config={"max_tries": 6})


# Routing.


def test_episodes_stay_and_new_ones_go_where_the_least_is() -> None:
    async def test(r: Rig) -> None:
        for turn in range(3):
            for n in range(8):
                await r.engine.generate([*IDS, *[9] * turn], sampling(), session=f"s{n}")
        for server in r.servers:
            assert len(server.bodies) == 1 + 3 * 2  # the one that verified, and two episodes
        for n in range(7):
            await r.engine.release(f"s{n}")
        for n in range(3):
            await r.engine.generate(IDS, sampling(), session=f"new{n}")
        assert sorted(len(server.bodies) for server in r.servers) == [7, 8, 8, 8]

    play(test, 4)


def test_later_turns_find_their_prefix_in_the_cache() -> None:
    async def test(r: Rig) -> None:
        ids = list(IDS)
        for _ in range(4):
            completion = await r.engine.generate(ids, sampling(), session="s")
            assert_scored(completion, ids)
            ids += [*completion.token_ids, 8, 9, 10]
        metrics = r.engine.pop_metrics()
        assert metrics["engine/prefix_hit_fraction_later_turns"] == 1.0
        assert 0 < metrics["engine/cache_hit_fraction"] < 1

    play(test)


def test_no_request_id_begins_with_another() -> None:
    """SGLang aborts every request whose id begins with the one it is given."""

    async def test(r: Rig) -> None:
        for n in range(12):
            await r.engine.generate(IDS, sampling(), session=f"s{n}")
        rids = [body["rid"] for body in r.servers[0].bodies[1:]]
        assert len(set(rids)) == 12 and len({len(rid) for rid in rids}) == 1

    play(test)


def test_requests_name_the_adapter_that_holds_the_weights() -> None:
    async def test(r: Rig) -> None:
        await r.engine.generate(IDS, sampling(), session="s")
        assert [body["lora_path"] for body in r.servers[0].bodies] == ["policy", "policy"]

    play(test, transport=FakeTransport(adapter="policy"))


# Cancel, time-out, interrupt.


def test_a_cancelled_request_ends_in_its_server() -> None:
    """F026: cancel 4 of 8, and 4 are left."""

    async def test(r: Rig) -> None:
        (server,) = r.servers
        server.token_s = 0.05
        tasks = [
            asyncio.create_task(r.engine.generate([5, n], sampling(500), session=f"s{n}"))
            for n in range(8)
        ]
        await until(lambda: len(server.running) == 8)
        for task in tasks[:4]:
            task.cancel()
        await until(lambda: len(server.running) == 4)
        await asyncio.sleep(0.2)
        assert len(server.running) == 4
        await r.engine.interrupt()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(d) for d in done] == [asyncio.CancelledError] * 4 + [Completion] * 4
        assert r.engine.pop_metrics()["engine/aborts"] == 8

    play(test)


def test_a_reply_that_never_comes_ends_at_the_callers_deadline() -> None:
    """F024"""

    async def test(r: Rig) -> None:
        (server,) = r.servers
        server.spoilers.append(hang)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await r.engine.generate(IDS, sampling(), session="s")
        assert_scored(await r.engine.generate(IDS, sampling(), session="t"))
        await until(lambda: server.counts["/abort_request"] == 2)

    play(test)


def test_an_interrupted_turn_keeps_its_tokens_and_goes_on() -> None:
    """F028: tokens and logprobs so far, then the rest from context and partial."""

    async def test(r: Rig) -> None:
        (server,) = r.servers
        server.token_s = 0.02
        task = asyncio.create_task(r.engine.generate(IDS, sampling(300), session="s"))
        await asyncio.sleep(0.3)
        await r.engine.interrupt()
        first = await task
        assert first.finish_reason in ("abort", "stop") and first.token_ids
        assert_scored(first)
        assert first.versions == [0] * len(first.token_ids)
        server.token_s = 0.0
        newer = {"a": 0.5, "b": 0.1}
        await r.sync(1, newer)
        context = IDS + first.token_ids
        rest = await r.engine.generate(context, sampling(), session="s")
        assert_scored(rest, context, newer)
        assert rest.versions == [1] * len(rest.token_ids)

    play(test)


# Weights.


def test_weights_change_logprobs_and_old_keys_and_values_are_never_used() -> None:
    """F070, F079: the prefix cache does not outlive the weights that made it."""

    async def test(r: Rig) -> None:
        for version in range(1, 4):
            ids = list(IDS)
            for _ in range(3):
                completion = await r.engine.generate(ids, sampling(), session="s")
                assert_scored(completion, ids, {"a": 0.3, "b": 0.1 * version})
                assert completion.versions == [version - 1] * len(completion.token_ids)
                ids += [*completion.token_ids, 8]
            metrics = await r.sync(version, {"a": 0.3, "b": 0.1 * (version + 1)})
            assert metrics["sync/probe_abs_diff"] < 1e-9
            assert (metrics["sync/num_servers"], metrics["sync/failed_servers"]) == (2, 0)
            assert {s.weight_version for s in r.servers} == {f"run/{version}"}
            assert r.engine.version == version

    play(test, 2)


def test_a_flush_that_does_nothing_is_found_out() -> None:
    """F070: the probe's own prefix was cached with the old weights."""

    async def test(r: Rig) -> None:
        r.servers[0].stale_flushes = True
        with pytest.raises(EngineError, match="differ from the learner's"):
            await r.sync(1, {"a": 0.5, "b": 0.5})
        assert r.engine.version == 0

    play(test)


def test_weights_come_when_nothing_is_in_flight() -> None:
    """F027, F070: also where an abort was lost, and where a request came late."""

    async def test(r: Rig) -> None:
        (server,) = r.servers
        server.token_s = 0.02
        stray = asyncio.create_task(r.engine.generate(IDS, sampling(900), session="s"))
        await until(lambda: server.running)
        server.lose_aborts = 3
        await r.sync(1)
        assert server.running_at_update == 0
        assert (await stray).finish_reason in ("abort", "stop")
        assert server.counts["/abort_request"] >= 4

    play(test)


def test_requests_that_do_not_end_keep_the_weights_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """F027, F070: an error that names them, and nothing serves."""
    monkeypatch.setattr("rollout.engines.sglang_sync.QUIET_S", 0.3)

    async def test(r: Rig) -> None:
        (server,) = r.servers
        server.running["somebody"] = asyncio.Event()
        with pytest.raises(EngineError, match="still has 1 running and 0 waiting requests"):
            await r.sync(1)
        assert (r.engine.version, r.transport.num_sends) == (0, 2)
        assert server.counts["/update_weights_from_tensor"] == 2  # those of the first sync
        assert r.engine.pop_metrics()["engine/servers"] == 0

    play(test)


def test_a_busy_scheduler_does_not_keep_its_server_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it computes a long prompt, only what needs no scheduler is answered."""
    monkeypatch.setattr("rollout.engines.sglang_server.CONTROL_S", 0.1)

    async def test(r: Rig) -> None:
        (server,) = r.servers
        server.slow = {"/v1/loads": 0.3}
        asyncio.get_running_loop().call_later(0.25, server.slow.clear)
        assert (await r.sync(1))["sync/num_servers"] == 1

    play(test)


def test_a_flush_that_fails_for_a_while_is_repeated() -> None:
    async def test(r: Rig) -> None:
        (server,) = r.servers
        replies = [400, 400, 400]
        server.answers["/flush_cache"] = lambda: refuse(replies.pop()) if replies else None
        await r.sync(1)
        assert server.counts["/flush_cache"] == 1 + 4

    play(test)


def refuse(code: int, text: str = "Flush cache failed.") -> Any:
    from aiohttp import web

    return web.json_response({"success": False, "message": text}, status=code)


def test_a_flush_that_never_succeeds_fails_the_update() -> None:
    """F070"""

    async def test(r: Rig) -> None:
        r.servers[0].answers["/flush_cache"] = lambda: refuse(400)
        with pytest.raises(EngineError, match="did not flush its cache"):
            await r.sync(1)
        assert r.engine.pop_metrics()["engine/servers"] == 0

    play(test, config={"sync_timeout_s": 1.0}, synced=False)


def test_a_failure_reported_with_status_200_is_one() -> None:
    """F072: the reason is told, the version stays, and nothing serves."""

    async def test(r: Rig) -> None:
        r.servers[0].answers["/update_weights_from_tensor"] = lambda: refuse(200, "no memory")
        with pytest.raises(EngineError, match="no memory"):
            await r.sync(1)
        assert (r.engine.version, r.servers[0].weight_version) == (0, "run/0")
        assert r.engine.pop_metrics()["engine/servers"] == 0
        del r.servers[0].answers["/update_weights_from_tensor"]
        await r.sync(1)
        assert_scored(await r.engine.generate(IDS, sampling(), session="s"))

    play(test)


def test_a_lost_bucket_is_found_out() -> None:
    """F072: success was reported, and nothing was loaded."""

    async def test(r: Rig) -> None:
        r.servers[0].lose_buckets = 1
        with pytest.raises(EngineError, match="differ from the learner's"):
            await r.sync(1, {"a": 0.7, "b": 0.7})
        assert r.engine.version == 0

    play(test)


def test_a_wrong_version_echoed_fails_the_update() -> None:
    async def test(r: Rig) -> None:
        r.servers[0].answers["/update_weight_version"] = lambda: refuse(200)
        with pytest.raises(EngineError, match="says its weights are 'run/0'"):
            await r.sync(1)

    play(test)


def test_a_server_that_does_not_take_the_weights_is_out_until_it_does() -> None:
    """F072: the others serve; the next full update brings it back."""

    async def test(r: Rig) -> None:
        bad, _ = r.servers
        bad.lose_buckets = 1
        newer = {"a": 0.7, "b": 0.7}
        metrics = await r.sync(1, newer)
        assert (metrics["sync/failed_servers"], metrics["sync/num_servers"]) == (1, 1)
        assert not r.engine.wants_weights.is_set()  # it would fail again and again
        before = len(bad.bodies)
        for n in range(6):
            completion = await r.engine.generate(IDS, sampling(), session=f"s{n}")
            assert_scored(completion, weights=newer)
        assert len(bad.bodies) == before
        assert (await r.sync(2))["sync/num_servers"] == 2
        assert r.engine.pop_metrics()["engine/servers"] == 2

    play(test, 2)


def test_weights_that_cannot_be_read_leave_nothing_that_serves() -> None:
    async def test(r: Rig) -> None:
        def weights() -> Any:
            yield "a", 0.5
            raise MemoryError("gather")

        with pytest.raises(MemoryError):
            await r.engine.update_weights(weights(), 1, None)  # type: ignore[arg-type]
        assert r.engine.version == 0
        assert r.engine.pop_metrics()["engine/servers"] == 0

    play(test, 2)


def test_a_hung_server_does_not_hold_up_the_update_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout.engines.sglang_server.CONTROL_S", 0.3)

    async def test(r: Rig) -> None:
        r.servers[0].hung = True
        began = time.perf_counter()
        metrics = await r.sync(1)
        assert (metrics["sync/failed_servers"], metrics["sync/num_servers"]) == (1, 1)
        assert time.perf_counter() - began < 3

    play(test, 2)


@pytest.mark.parametrize("deaf_to", ["/abort_request", "/resume_memory_occupation"])
def test_a_server_that_does_not_get_ready_does_not_hold_up_the_others(deaf_to: str) -> None:
    async def test(r: Rig) -> None:
        await r.engine.sleep()
        r.servers[0].slow = {deaf_to: 3600.0}
        metrics = await r.sync(1)
        assert (metrics["sync/failed_servers"], metrics["sync/num_servers"]) == (1, 1)

    play(test, 2, config={"sync_timeout_s": 3.0})


def test_a_server_of_another_run_gets_no_weights() -> None:
    """F034"""

    async def test(_: Rig) -> None:
        raise AssertionError("the engine started")

    servers = [FakeSGLang(weight_version="theirs/3"), FakeSGLang()]
    with pytest.raises(EngineDied, match=r"'theirs/3' of another run.*sglang\.take_over"):
        play(test, servers=servers)
    assert not any("/update_weights_from_tensor" in server.counts for server in servers)

    async def taken(r: Rig) -> None:
        assert_scored(await r.engine.generate(IDS, sampling(), session="s"))

    play(taken, servers=[FakeSGLang(weight_version="theirs/3")], config={"take_over": True})


def test_a_run_that_is_over_leaves_its_servers_to_the_next() -> None:
    mine, theirs = FakeSGLang(), FakeSGLang()

    async def test(r: Rig) -> None:
        assert mine.weight_version != "default"
        theirs.weight_version = "theirs/9"

    play(test, servers=[mine, theirs], config={"mode": "connect", "urls": ["http://there"]})
    assert (mine.weight_version, theirs.weight_version) == ("default", "theirs/9")


def test_a_server_that_somebody_else_gave_weights_serves_no_more() -> None:
    async def test(r: Rig) -> None:
        first, second = r.servers
        first.weight_version = second.weight_version = "theirs/9"
        task = asyncio.create_task(r.engine.generate(IDS, sampling(), session="s"))
        await r.engine.wants_weights.wait()
        await until(lambda: r.engine.pop_metrics()["engine/servers"] == 0)
        await r.engine.interrupt()
        assert (await task).finish_reason == "abort"
        await r.sync(0)
        assert_scored(await r.engine.generate(IDS, sampling(), session="s"))

    play(test, 2)


def test_lent_memory_comes_back_with_weights_only() -> None:
    """F071: SERVING, RELEASED, and SERVING again after all weights have come."""

    async def test(r: Rig) -> None:
        (server,) = r.servers
        await r.engine.sleep()
        assert server.released == {"weights", "kv_cache"}
        with pytest.raises(EngineError, match="lent to the learner"):
            await r.engine.generate(IDS, sampling(), session="s")
        server.lose_buckets = 1
        with pytest.raises(EngineError, match="differ from the learner's"):
            await r.sync(1)
        with pytest.raises(EngineError, match="lent to the learner"):
            await r.engine.generate(IDS, sampling(), session="s")
        await r.sync(1)
        assert not server.released
        assert_scored(await r.engine.generate(IDS, sampling(), session="s"))
        assert r.engine.version == 1

    play(test)


def test_a_dead_server_has_no_memory_to_lend_and_takes_none_while_the_learner_has_it() -> None:
    async def test(r: Rig) -> None:
        (server,) = r.servers
        await r.fleet.kill(server)
        await r.engine.sleep()
        await until(lambda: not r.engine._pool.alive)
        await asyncio.sleep(0.1)
        assert r.fleet.recovered == []
        assert (await r.sync(1))["sync/num_servers"] == 1
        assert_scored(await r.engine.generate(IDS, sampling(), session="s"))

    play(test)


def test_a_server_that_is_being_started_is_waited_for_before_the_learner_takes_the_memory() -> None:
    async def test(r: Rig) -> None:
        starting, _ = r.servers
        r.fleet.may_recover.clear()
        await r.fleet.kill(starting)
        await until(lambda: r.engine._pool.members[0].starting)
        sleeping = asyncio.create_task(r.engine.sleep())
        await asyncio.sleep(0.1)
        assert not sleeping.done()
        r.fleet.may_recover.set()
        await sleeping
        assert all(server.released for server in r.servers)
        assert (await r.sync(1))["sync/num_servers"] == 2

    play(test, 2)


def test_memory_is_asked_for_when_nothing_is_in_flight() -> None:
    """F071: SGLang dies of a release under a running request."""

    async def test(r: Rig) -> None:
        (server,) = r.servers
        server.token_s = 0.02
        stray = asyncio.create_task(r.engine.generate(IDS, sampling(900), session="s"))
        await until(lambda: server.running)
        await r.engine.sleep()
        assert server.released == {"weights", "kv_cache"}
        assert (await stray).finish_reason in ("abort", "stop")

    play(test)


# Death and return.


def test_the_episodes_of_a_dead_server_move_with_their_tokens() -> None:
    """F033: and the server that comes back is used again, once it has weights."""

    async def test(r: Rig) -> None:
        for server in r.servers:
            server.token_s = 0.02
        tasks = [
            asyncio.create_task(r.engine.generate([5, n], sampling(20), session=f"s{n}"))
            for n in range(8)
        ]
        await until(lambda: all(len(server.running) == 4 for server in r.servers))
        r.fleet.may_recover.clear()
        dead, alive = r.servers
        asked = len(dead.bodies)
        await r.fleet.kill(dead)
        for n, completion in enumerate(await asyncio.gather(*tasks)):
            assert_scored(completion, [5, n])
        assert r.engine.pop_metrics()["engine/moved_sessions"] == 4
        assert not r.engine.wants_weights.is_set()
        r.fleet.may_recover.set()
        await asyncio.wait_for(r.engine.wants_weights.wait(), 5)
        for server in r.servers:
            server.token_s = 0.0
        await r.engine.generate(IDS, sampling(), session="early")
        assert len(dead.bodies) == asked
        updates = alive.counts["/update_weights_from_tensor"]
        metrics = await r.sync(0)
        assert metrics["sync/num_servers"] == 1  # the other one has them
        assert alive.counts["/update_weights_from_tensor"] == updates
        assert not r.engine.wants_weights.is_set()
        for n in range(8):
            assert_scored(await r.engine.generate(IDS, sampling(), session=f"new{n}"))
        assert len(dead.bodies) > asked + 1
        metrics = r.engine.pop_metrics()
        assert (metrics["engine/restarts"], metrics["engine/servers"]) == (1, 2)

    play(test, 2)


def test_who_waits_for_a_dead_server_is_let_go_so_that_weights_can_come() -> None:
    async def test(r: Rig) -> None:
        (server,) = r.servers
        server.token_s = 0.02
        task = asyncio.create_task(r.engine.generate(IDS, sampling(300), session="s"))
        await until(lambda: server.running)
        await r.fleet.kill(server)
        await asyncio.wait_for(r.engine.wants_weights.wait(), 5)
        assert not task.done()
        await r.engine.interrupt()
        assert await task == Completion(
            token_ids=[], logprobs=[], finish_reason="abort", versions=[]
        )
        await r.sync(0)
        server.token_s = 0.0
        assert_scored(await r.engine.generate(IDS, sampling(), session="s"))

    play(test)


def test_an_update_waits_for_the_only_server_to_come_back() -> None:
    async def test(r: Rig) -> None:
        (server,) = r.servers
        r.fleet.may_recover.clear()
        await r.fleet.kill(server)
        await until(lambda: r.engine.pop_metrics()["engine/servers"] == 0)
        sync = asyncio.create_task(r.sync(1))
        await asyncio.sleep(0.1)
        assert not sync.done()
        r.fleet.may_recover.set()
        assert (await sync)["sync/num_servers"] == 1
        assert not r.engine.wants_weights.is_set(), "there is nobody left to want them"

    play(test)


def test_a_server_that_does_not_come_back_is_given_up() -> None:
    async def test(r: Rig) -> None:
        first, second = r.servers
        r.fleet.recovers = False
        await r.fleet.kill(first)
        for n in range(4):
            assert_scored(await r.engine.generate(IDS, sampling(), session=f"s{n}"))
        second.token_s = 0.02
        waiting = asyncio.create_task(r.engine.generate(IDS, sampling(300), session="w"))
        await until(lambda: second.running)
        await r.fleet.kill(second)
        with pytest.raises(EngineDied, match="every server is gone"):
            await waiting
        for call in (r.engine.generate(IDS, sampling(), session="x"), r.engine.score(IDS)):
            with pytest.raises(EngineDied, match="does not come back"):
                await call
        with pytest.raises(EngineDied):
            await r.sync(1)

    play(test, 2)


def test_requests_wait_for_a_server_no_longer_than_it_may_take_to_start() -> None:
    async def test(r: Rig) -> None:
        with pytest.raises(EngineDied, match=r"start_timeout_s=0\.2"):
            await r.engine.generate(IDS, sampling(), session="s")

    play(test, synced=False, config={"start_timeout_s": 0.2})


@pytest.fixture
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_watch, "PROBE_EVERY_S", 0.05)
    monkeypatch.setattr(sglang_watch, "PROBE_S", 0.1)
    monkeypatch.setattr(sglang_watch, "PROBE_AGAIN_S", 0.02)


def test_a_hung_server_is_found_and_its_requests_move(quick_probes: None) -> None:
    async def test(r: Rig) -> None:
        hung, _ = r.servers
        for server in r.servers:
            server.token_s = 0.02
        tasks = [
            asyncio.create_task(r.engine.generate([5, n], sampling(40), session=f"s{n}"))
            for n in range(4)
        ]
        await until(lambda: all(len(server.running) == 2 for server in r.servers))
        hung.token_s, hung.hung = 3600.0, True
        r.fleet.may_recover.clear()  # nobody cuts the connections
        for n, completion in enumerate(await asyncio.gather(*tasks)):
            assert_scored(completion, [5, n])
        r.fleet.may_recover.set()
        await asyncio.wait_for(r.engine.wants_weights.wait(), 5)
        assert r.fleet.recovered == [hung.url]

    play(test, 2)


def test_a_server_that_loads_weights_may_be_silent(quick_probes: None) -> None:
    """F033: no probe tells death during an update, for as long as an update may take."""

    async def test(r: Rig) -> None:
        (server,) = r.servers

        class Slow(FakeTransport):
            async def send(self, weights: Any, servers: Any) -> Any:
                server.hung = True
                await asyncio.sleep(1.0)
                server.hung = False
                return await super().send(weights, servers)

        r.engine._transport = Slow()
        assert (await r.sync(1))["sync/num_servers"] == 1
        assert r.fleet.recovered == []

    play(test)


def test_a_silence_longer_than_an_update_may_take_is_death(quick_probes: None) -> None:
    """F033: the lease is bounded; after it, the server is brought back, and used."""

    async def test(r: Rig) -> None:
        (server,) = r.servers

        class Stuck(FakeTransport):
            async def send(self, weights: Any, servers: Any) -> Any:
                server.hung = True
                await asyncio.sleep(3600)

        transport, r.engine._transport = r.engine._transport, Stuck()
        with pytest.raises(EngineError, match="did not reach the servers within"):
            await r.sync(1)
        await asyncio.wait_for(r.engine.wants_weights.wait(), 5)
        assert r.fleet.recovered == [server.url]
        r.engine._transport = transport
        await r.sync(1)
        assert_scored(await r.engine.generate(IDS, sampling(), session="s"))

    play(test, config={"sync_timeout_s": 0.5})


def test_a_server_that_ends_during_an_update_is_brought_back() -> None:
    """F033: its end is no silence."""

    async def test(r: Rig) -> None:
        dying, _ = r.servers

        class Deadly(FakeTransport):
            async def send(self, weights: Any, servers: Any) -> Any:
                await r.fleet.kill(dying)
                return await super().send(weights, servers)

        r.engine._transport = Deadly()
        metrics = await r.sync(1)
        assert (metrics["sync/failed_servers"], metrics["sync/num_servers"]) == (1, 1)
        await asyncio.wait_for(r.engine.wants_weights.wait(), 5)
        r.engine._transport = FakeTransport()
        assert (await r.sync(1))["sync/num_servers"] == 1
        assert r.engine.pop_metrics()["engine/servers"] == 2

    play(test, 2)


def test_when_the_only_server_ends_during_an_update_the_next_one_waits_for_it() -> None:
    async def test(r: Rig) -> None:
        (server,) = r.servers

        class Deadly(FakeTransport):
            async def send(self, weights: Any, servers: Any) -> Any:
                await server.die()
                return await super().send(weights, servers)

        transport, r.engine._transport = r.engine._transport, Deadly()
        with pytest.raises(SyncError, match="no server took version 1"):
            await r.sync(1)
        r.engine._transport = transport
        assert (await r.sync(1))["sync/num_servers"] == 1
        assert r.fleet.recovered == [server.url]

    play(test)


def test_a_server_that_came_back_during_an_update_is_not_taken_for_updated() -> None:
    """Also where what it started with is so near to the new weights that the probe passes."""

    async def test(r: Rig) -> None:
        dying, _ = r.servers
        close_to_those_of_a_start = {"a": 0.2, "b": 0.1}

        class Deadly(FakeTransport):
            async def send(self, weights: Any, servers: Any) -> Any:
                sent = await super().send(weights, servers)
                await r.fleet.kill(dying)
                await asyncio.wait_for(r.engine.wants_weights.wait(), 5)
                return sent

        r.engine._transport = Deadly()
        metrics = await r.sync(1, close_to_those_of_a_start)
        assert (metrics["sync/failed_servers"], metrics["sync/num_servers"]) == (1, 1)
        assert r.engine.wants_weights.is_set()

    play(test, 2)


# Many, and the end.


def test_requests_in_flight_are_bounded() -> None:
    async def test(r: Rig) -> None:
        (server,) = r.servers
        server.token_s = 0.001
        calls = [r.engine.generate([5, n % 30], sampling(2), session=f"s{n}") for n in range(500)]
        assert len(await asyncio.gather(*calls)) == 500
        assert 1 < server.most_running <= 16
        assert server.most_connections <= 32

    play(test, max_concurrent=16)


MANY = """
import asyncio, os, resource
from tests.fake_fleet import rig, sampling
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
URL = os.environ["FAKE_URL"]

class Remote:
    url = URL
    async def start(self): ...
    async def die(self): ...

async def main():
    most = 0
    async with rig(servers=[Remote()], max_concurrent=2000) as r:
        async def episode(n):
            nonlocal most
            await r.engine.generate([5, n % 30], sampling(1), session=f"s{n}")
            most = max(most, len(os.listdir("/proc/self/fd")))
            await r.engine.release(f"s{n}")
            return True
        done = await asyncio.gather(*(episode(n) for n in range(2000)))
    print(sum(done), most)

asyncio.run(main())
"""


def test_two_thousand_episodes_need_few_files() -> None:
    """F032: with 256 open files allowed, all succeed, and fewer than 200 are ever open."""

    async def run() -> str:
        fake = await FakeSGLang(token_s=0.05).start()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", MANY),
                cwd=Path(__file__).parents[1],
                env=os.environ | {"FAKE_URL": fake.url},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            out, err = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 0, err.decode()[-2000:]
            assert "need more open files" in err.decode()
            return out.decode()
        finally:
            await fake.die()

    done, most = map(int, asyncio.run(run()).split())
    assert done == 2000
    assert 50 < most < 200


def test_a_closed_engine_leaves_nothing_open() -> None:
    async def test(r: Rig) -> None:
        (server,) = r.servers
        server.token_s = 0.05
        task = asyncio.create_task(r.engine.generate(IDS, sampling(300), session="s"))
        await until(lambda: server.running)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await r.engine.close()
        await r.engine.close()
        assert r.transport.closed and r.fleet.closed
        with pytest.raises(EngineDied, match="closed"):
            await r.engine.generate(IDS, sampling(), session="t")
        assert not server.running
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [t for t in others if "rollout/engines" in str(t.get_coro())]

    before = psutil.Process().num_fds()
    play(test)
    assert psutil.Process().num_fds() <= before


def test_an_engine_that_cannot_start_closes_what_it_opened() -> None:
    async def run() -> None:
        async with rig(servers=[FakeSGLang(version="0.4.1")]):
            raise AssertionError("the engine started")

    before = psutil.Process().num_fds()
    with pytest.raises(EngineDied, match=r"runs SGLang 0\.4\.1"):
        asyncio.run(run())
    assert psutil.Process().num_fds() <= before
