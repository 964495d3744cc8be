"""Fixtures that more than one test file uses."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

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
