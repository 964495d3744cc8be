"""A real SGLang on the CPU: does the fake speak like it, does its cache hit, does a run survive it.

What every engine promises is asked of it in test_engine_contract.py.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from agentrl.config import SGLangConfig
from agentrl.models import SMOLLM2, locate_model
from agentrl.protocols import Engine
from agentrl.renderer import Renderer
from agentrl.types import Sampling
from rollout.engines.sglang import SGLangEngine
from rollout.engines.sglang_server import Refused, SGLangServer, open_http
from rollout.manager import RolloutManager
from rollout.server import SpawnedFleet
from rollout.stage import EnvSetup
from rollout.tasks import TaskStream
from tests.engine_kinds import Kind, sglang_kind
from tests.engines import CountEnv, config, make_tasks
from tests.fake_sglang import FakeSGLang
from tests.processes import assert_gone, descendants

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def kind(sglang_server: str) -> Kind:
    return sglang_kind(sglang_server)


async def asked(url: str) -> dict[str, Any]:
    """What a server answers to all that the client asks of it."""
    http, _ = open_http(8)
    answers: dict[str, Any] = {}
    async with http, asyncio.timeout(120):
        server = SGLangServer(url, http)
        sampling = {"max_new_tokens": 3, "temperature": 1.0, "stop_token_ids": [2]}
        body = {"rid": "a-0", "input_ids": [5, 9, 12], "return_logprob": True}
        answers["generate"] = await server.post("/generate", body | {"sampling_params": sampling})
        body |= {"rid": "a-1", "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 1}}
        body["sampling_params"]["temperature"] = 0.0
        answers["score"] = await server.post("/generate", body)
        long = {"max_new_tokens": 1500, "temperature": 1.5}
        body = {"rid": "a-2", "input_ids": [5], "return_logprob": True, "sampling_params": long}
        aborted = asyncio.create_task(server.post("/generate", body))
        while sum(await server.loads()) == 0:
            await asyncio.sleep(0.02)
        answers["flush while running"] = await server.flush_cache()
        answers["abort"] = await server.post("/abort_request", {"rid": "a-2"})
        answers["aborted"] = await aborted
        while sum(await server.loads()):
            await asyncio.sleep(0.02)
        answers["flush"] = await server.flush_cache()
        for route in ("/model_info", "/server_info", "/v1/loads", "/openapi.json"):
            answers[route] = await server.get(route)
        version = answers["/model_info"]["weight_version"]
        answers["version"] = await server.post("/update_weight_version", {"new_version": version})
        with pytest.raises(Refused) as refused:
            body = {"rid": "a-3", "input_ids": [5], "sampling_params": {"max_new_tokens": 10**6}}
            body["sampling_params"]["temperature"] = 1.0
            await server.post("/generate", body)
        answers["refused"] = type(refused.value).__name__
    return answers


def shape(value: Any) -> Any:
    """Types in place of values; of a list, those of its first entry."""
    if isinstance(value, dict):
        # Null unless something was cached, which nobody reads.
        return {k: shape(inner) for k, inner in value.items() if k != "cached_tokens_details"}
    if isinstance(value, list):
        return (
            [shape(inner) for inner in value[:3]] if _is_entry(value) else [*map(shape, value)][:1]
        )
    return type(value).__name__


def _is_entry(value: list[Any]) -> bool:
    return len(value) == 3 and not isinstance(value[0], dict | list | int)


def unlike(fake: Any, real: Any, where: str) -> Iterator[str]:
    """What the fake says that the real one does not."""
    if isinstance(fake, dict) and isinstance(real, dict):
        for key in fake:
            if key not in real:
                yield f"{where}.{key} is the fake's alone"
            else:
                yield from unlike(fake[key], real[key], f"{where}.{key}")
    elif isinstance(fake, list) and isinstance(real, list):
        for ours, theirs in zip(fake, real, strict=False):
            yield from unlike(ours, theirs, f"{where}[]")
    elif fake != real:
        yield f"{where}: {fake} is {real} in truth"


def test_the_fake_speaks_like_the_real_one(sglang_server: str) -> None:
    async def both() -> tuple[Any, Any]:
        fake = await FakeSGLang(token_s=0.05, context_length=2048).start()
        try:
            return await asked(fake.url), await asked(sglang_server)
        finally:
            await fake.die()

    fake, real = asyncio.run(both())
    missing = fake["/openapi.json"]["paths"].keys() - real["/openapi.json"]["paths"].keys()
    newer = {"/begin_weight_update", "/end_weight_update"}  # than 0.5.21
    assert missing - {"/openapi.json"} <= newer
    del fake["/openapi.json"], real["/openapi.json"]
    assert list(unlike(shape(fake), shape(real), "")) == []
    for answer in ("generate", "score"):
        assert real[answer].keys() == fake[answer].keys()
        assert real[answer]["meta_info"].keys() == fake[answer]["meta_info"].keys()
    assert (real["flush while running"], real["flush"]) == (False, True)
    assert real["aborted"]["meta_info"]["finish_reason"]["type"] == "abort"
    assert real["refused"] == "ContextOverflow"


def test_later_turns_find_nine_tenths_of_their_prefix(kind: Kind) -> None:
    async def test(engine: Engine) -> None:
        async def episode(n: int) -> None:
            context = [5, *range(100 + n, 140 + n)]
            for turn in range(3):
                sampling = Sampling(max_new_tokens=8, seed=turn)
                completion = await engine.generate(context, sampling, session=f"s{n}")
                context += [*completion.token_ids, *range(200, 212)]

        await asyncio.gather(*(episode(n) for n in range(4)))
        metrics = engine.pop_metrics()
        assert metrics["engine/prefix_hit_fraction_later_turns"] >= 0.9
        assert metrics["engine/request_s"] > 0

    kind.play(test)


class KillingEnv(CountEnv):
    """Kills the server when all episodes have sent their first request."""

    resets = itertools.count(1)
    kill: Any = None

    async def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if next(KillingEnv.resets) == 6:
            asyncio.get_running_loop().call_later(0.5, KillingEnv.kill)
        return await super().reset(seed=seed, options=options)


@pytest.mark.slow
def test_a_run_survives_the_death_of_its_server(
    kind: Kind, sglang_python: str, tmp_path: Path
) -> None:
    """F037: kill -9 in mid-rollout: it comes back and gets weights; no group is lost."""
    others = descendants()
    path = locate_model(SMOLLM2)
    servers = SGLangConfig(python=sglang_python, sync_timeout_s=60.0)
    fleet = SpawnedFleet(
        servers,
        model_path=path,
        dtype="float32",
        context_tokens=512,
        max_requests=8,
        log_folder=tmp_path,
    )
    transport = kind.transport()
    engine = SGLangEngine(
        fleet, transport, servers, run_id="killed", max_context_tokens=256, max_concurrent=8
    )

    def kill() -> None:
        port = fleet.urls[0].rpartition(":")[2]
        (server,) = (  # beside its keeper, which names the same command
            process
            for process in psutil.process_iter(["cmdline"])
            if (process.info["cmdline"] or [""])[1:4] == ["-P", "-m", "sglang.launch_server"]
            and any(argument.endswith(port) for argument in process.info["cmdline"])
        )
        for process in [server, *server.children(recursive=True)]:
            process.send_signal(signal.SIGKILL)

    KillingEnv.kill = staticmethod(kill)
    rollout = config(
        prompts_per_step=2,
        num_generations=3,
        max_turns=3,
        max_new_tokens=24,
        max_context_tokens=256,
        max_episode_tokens=72,
        generate_timeout_s=300.0,
        min_group_size=3,
        max_attempts=3,
    )
    with RolloutManager(
        engine=engine,
        envs={
            "": EnvSetup(
                make_env=lambda: KillingEnv(3),
                renderer=Renderer(AutoTokenizer.from_pretrained(path), tool_format="none"),
            )
        },
        config=rollout,
        tasks=TaskStream(make_tasks(4), seed=0),
    ) as manager:
        asks = 0

        def sync() -> None:
            manager.update_weights(kind.weights("old"), 0, kind.probe("old"))

        sync()
        while (groups := manager.next_groups(2)) is None:
            asks += 1
            sync()
        metrics = manager.pop_metrics()
        started = [
            process
            for process in descendants()
            if process not in others
            and process.name() != "torch_shm_manager"  # this process's own, and ends with it
        ]
    assert started
    assert_gone(started)
    assert asks == 1
    assert [len(group.trajectories) for group in groups] == [3, 3]
    assert None not in [reward for group in groups for reward in group.rewards]
    assert Counter(group.id for group in groups) == {"g0": 1, "g1": 1}
    assert not any("retry" in tape.id for group in groups for tape in group.trajectories)
    assert metrics["engine/restarts"] == 1
