"""Fixtures that more than one test file uses."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real_server import serving
from tests.sandboxes import IMAGE, Leased, LoopThread, require_level
from tools.sandbox.protocol import SandboxConfig

# A shell that starts `make test` in the background has Ctrl-C ignored, by the tests of it too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of real tokenizers and data sets, or a skip that says how to provide it."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "assets"
    folder = Path(os.environ.get("AGENTRL_TEST_ASSETS", beside))
    if not folder.is_dir():
        pytest.skip(f"no test assets at {folder}; set AGENTRL_TEST_ASSETS to their folder")
    return folder


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter of a real SGLang, or a skip that says how to get one."""
    own = Path(__file__).resolve().parents[1] / ".venv-sglang" / "bin" / "python"
    python = os.environ.get("AGENTRL_SGLANG_PYTHON", str(own))
    if shutil.which(python) is None:
        pytest.skip(f"no SGLang at {python}: make sglang-cpu, or set AGENTRL_SGLANG_PYTHON")
    return python


@pytest.fixture(scope="session")
def sglang_server(sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The url of a real server in float32, one for all tests.

    A test that changes its weights sends the model's own before it ends.
    """
    with serving(sglang_python, "float32", tmp_path_factory.mktemp("sglang")) as url:
        yield url


@pytest.fixture(scope="module")
def sandbox_loop() -> Iterator[LoopThread]:
    """An event loop with the pools of sandboxes that a file's tests share."""
    loop = LoopThread()
    yield loop
    loop.close()


@pytest.fixture(scope="module", params=["docker", "bubblewrap", "process"])
def sandbox_config(request: pytest.FixtureRequest) -> SandboxConfig:
    """Of each level that walls something off, with limits that tests reach soon."""
    config = SandboxConfig(
        level=request.param,
        image=IMAGE,
        memory_mb=192,
        max_processes=48,
        disk_mb=16,
        max_output_kb=64,
    )
    require_level(config)
    return config


@pytest.fixture
def sandbox(sandbox_config: SandboxConfig, sandbox_loop: LoopThread) -> Iterator[Leased]:
    """A fresh sandbox of the level."""
    leased = Leased(sandbox_loop, sandbox_config)
    yield leased
    leased.release()


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its state in the process: none from before, and none is left."""
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
