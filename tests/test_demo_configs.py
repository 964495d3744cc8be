"""The shipped configs of sandboxes and mixes, each in its smallest form."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from accelerate.state import AcceleratorState, PartialState

from agentrl.metrics import load_metrics
from agentrl.types import Completion
from rollout.engines.local import LocalEngine
from tests.engines import byte_tokenizer
from tests.processes import descendants
from tests.runs import ROOT, save_model
from tests.sandboxes import require_level
from tools.sandbox.protocol import SandboxConfig

pytestmark = pytest.mark.filterwarnings("ignore:learner and engine differ")

spec = importlib.util.spec_from_file_location("door", ROOT / "train.py")
assert spec is not None and spec.loader is not None
door = importlib.util.module_from_spec(spec)
spec.loader.exec_module(door)

TINY = [
    "model.freeze_embeddings=false",
    "rollout.engine_dtype=float32",
    "model.mixed_precision=no",
    "rollout.max_context_tokens=4096",
    "optim.micro_batch_tokens=4096",
    "rollout.max_concurrent_generations=8",
    "rollout.max_new_tokens=32",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), max_positions=4096)


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch, tmp_path) -> Iterator[None]:
    """What a run changes of its process is put back; no process and no file of it is left."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(door, "use_all_cores", lambda: None)
    monkeypatch.chdir(ROOT)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    before = set(descendants())
    AcceleratorState._reset_state(True)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    _, left = psutil.wait_procs([p for p in descendants() if p not in before], timeout=5)
    assert left == []
    assert list((tmp_path / "tmp").iterdir()) == []


def run(config: str, model: Path, folder: Path, *overrides: str) -> int:
    arguments = ["--config", f"configs/{config}.yaml", f"model.name_or_path={model}", *TINY]
    return door.main([*arguments, f"output_dir={folder}", *overrides])


def episodes(path: Path) -> list[dict]:
    return [
        episode | {"env": group["env"]}
        for group in map(json.loads, path.read_text().splitlines())
        for episode in group["trajectories"]
    ]


def assert_masked(episode: dict) -> None:
    """Trained is what a request sampled, and nothing else; all else has logprob 0."""
    turns = {at for start, end, *_ in episode["turns"] for at in range(start, end)}
    assert {at for at, sampled in enumerate(episode["loss_mask"]) if sampled} == turns
    assert all(
        episode["logprobs"][at] == 0 for at in range(len(episode["token_ids"])) if at not in turns
    )


def test_python_in_a_sandbox_is_called_trained_and_cleared_away(
    tmp_path, model, monkeypatch, capsys
):
    """Each first turn is put into the model's mouth, with the logprobs it has for it."""
    require_level(SandboxConfig(level="bubblewrap"))
    generate, begun = LocalEngine.generate, set()

    async def call_first(self, token_ids, sampling, *, session):
        if session in begun:
            return await generate(self, token_ids, sampling, session=session)
        begun.add(session)
        ids = byte_tokenizer().encode("<python>6*7</python><e>", add_special_tokens=False)
        return Completion(
            token_ids=ids,
            logprobs=(await self.score([*token_ids, *ids]))[-len(ids) :],
            finish_reason="stop",
            versions=[self.version] * len(ids),
        )

    monkeypatch.setattr(LocalEngine, "generate", call_first)
    overrides = ["max_steps=1", "eval.num_tasks=0", "rollout.prompts_per_step=2"]
    overrides += ["rollout.num_generations=2", "env.kwargs.sandbox.level=bubblewrap"]
    overrides += ["env.kwargs.num_demonstrations=0"]
    assert run("python_tool_smollm2_cpu", model, tmp_path / "run", *overrides) == 0
    assert "bubblewrap" in capsys.readouterr().out, "the level that was chosen is printed"
    [metrics] = load_metrics(tmp_path / "run/metrics.jsonl")
    assert metrics["tool/python/ok"] == metrics["sandbox/bubblewrap"] == 1.0
    played = episodes(tmp_path / "run/trajectories/step-000001.jsonl")
    assert len(played) == 4
    for episode in played:
        assert_masked(episode)
        [result] = [m for m in episode["messages"] if m["role"] == "tool"]
        assert result["content"] == "42"
        start, end = episode["turns"][0][1], episode["turns"][1][0]
        assert "42" in byte_tokenizer().decode(episode["token_ids"][start:end])
        assert not any(episode["loss_mask"][start:end])


@pytest.fixture
def higher_server(tmp_path) -> Iterator[str]:
    pytest.importorskip("openenv", reason="openenv-core is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "configs/mix/higher_server.py", str(port)]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}) as server:
        yield f"http://127.0.0.1:{port}"
        server.terminate()


def wait_for(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            socket.create_connection((host, int(port)), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(url)


def test_a_mix_of_a_sandbox_and_every_adapter_trains_and_measures_each(
    tmp_path, model, monkeypatch, higher_server
):
    require_level(SandboxConfig(level="bubblewrap"))
    for library in ("reasoning_gym", "textarena", "verifiers", "mcp.client.client"):
        pytest.importorskip(library)
    monkeypatch.syspath_prepend(str(ROOT / "configs" / "mix"))
    wait_for(higher_server)
    overrides = [
        "max_steps=1", "eval.num_tasks=7", "rollout.prompts_per_step=9", "mix.python.weight=1.0",
        "rollout.num_generations=2", "mix.python.kwargs.sandbox.level=bubblewrap",
        f"mix.higher.id=openenv:{higher_server}",
        f"mix.prices.id=mcp:{sys.executable} configs/mix/prices_server.py",
    ]  # fmt: skip
    assert run("mix_smollm2_cpu", model, tmp_path / "run", *overrides) == 0
    envs = {"python", "lake", "sums", "guess", "doubles", "prices", "higher"}
    before, after = load_metrics(tmp_path / "run/metrics.jsonl")
    for env in envs:
        assert f"eval/{env}/reward" in before
        assert f"{env}/reward" in after and f"mix/{env}/share" in after
    assert not [name for name in after if "fault" in name]
    played = episodes(tmp_path / "run/trajectories/step-000001.jsonl")
    assert {episode["env"] for episode in played} == envs
    for episode in played:
        assert_masked(episode)
    assert (tmp_path / "run/curve.png").exists()
