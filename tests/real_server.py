"""A real SGLang server of SmolLM2 on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentrl.config import SGLangConfig
from agentrl.models import SMOLLM2, locate_model
from rollout.server import SpawnedFleet


@contextmanager
def serving(
    python: str, dtype: str, log_folder: Path, arguments: Sequence[str] = ()
) -> Iterator[str]:
    """Its url. Context 2048, cache 16384 tokens, 32 requests at once."""
    fleet = SpawnedFleet(
        SGLangConfig(python=python, server_args=list(arguments)),
        model_path=locate_model(SMOLLM2),
        dtype=dtype,
        context_tokens=2048,
        max_requests=32,
        log_folder=log_folder,
    )
    with asyncio.Runner() as runner:
        runner.run(fleet.start())
        try:
            yield fleet.urls[0]
        finally:
            runner.run(fleet.close())
