"""The door with a real SGLang server on the CPU: the doctor, and a run from start to end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentrl.metrics import load_metrics
from agentrl.models import SMOLLM2, locate_model
from rollout.engines.sglang_server import SGLangServer
from tests.runs import write_config
from tests.test_door import as_it_was, doctor, run  # noqa: F401 - a fixture

pytestmark = pytest.mark.filterwarnings("ignore:learner and engine differ")


@pytest.fixture
def path(tmp_path: Path, sglang_server: str) -> Iterator[Path]:
    """A config of a run on that server, which has its own weights again afterwards."""
    yield write_config(
        tmp_path, Path(SMOLLM2), sglang__mode="connect", sglang__urls=[sglang_server],
        sglang__weight_sync="tensor", rollout__engine="auto", rollout__max_staleness=1,
        rollout__max_context_tokens=1024, eval__num_tasks=0, model__freeze_embeddings=True,
        env__reward_funcs=["tests.runs:by_chance"],
        optim__learning_rate=1e-5,
    )  # fmt: skip
    ask(sglang_server, "/update_weights_from_disk", {"model_path": locate_model(SMOLLM2)})
    ask(sglang_server, "/update_weight_version", {"new_version": "default"})


def ask(url: str, route: str, body: dict[str, Any]) -> Any:
    async def post() -> Any:
        async with aiohttp.ClientSession() as http:
            return await SGLangServer(url, http).post(route, body)

    return asyncio.run(post())


def weight_version(url: str) -> str:
    async def get() -> str:
        async with aiohttp.ClientSession() as http:
            return await SGLangServer(url, http).weight_version()

    return asyncio.run(get())


def test_a_doctor_verifies_a_sync_and_leaves_the_server_to_the_next_run(
    path: Path, sglang_server: str, capsys: Any
) -> None:
    checks = doctor(capsys, path, code=0)
    assert "sync/probe_abs_diff" in checks["weights"], checks
    assert "16384 tokens in 1 of SGLang" in checks["KV cache"]
    assert "tokens in" in checks["one turn"]
    assert weight_version(sglang_server) == "default"


def test_a_run_on_a_server_learns_and_verifies_every_sync(
    path: Path, sglang_server: str, tmp_path: Path, capsys: Any
) -> None:
    assert run(path) == 0
    out = capsys.readouterr().out
    assert "engine: sglang (rollout.engine=auto)" in out
    records = load_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["sync/probe_abs_diff"] < 1e-3 and record["sync/failed_servers"] == 0
        assert record["sync/bytes"] > 200e6
        assert 0 <= record["engine/cache_hit_fraction"] <= 1
        assert record["rollout/staleness_0"] + record["rollout/staleness_1"] == pytest.approx(1)
        for part in ("generate", "update", "logprob", "sync"):
            assert record[f"time/{part}"] >= 0
    assert records[0]["mismatch/abs_diff"] < 1e-3, "sampled with the weights that were trained"
    assert "syncs: " in out and "learner - engine: " in out
    assert weight_version(sglang_server) == "default", "left to the next run"
