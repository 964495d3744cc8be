"""Ranks as real processes, forked off one that has imported what they need."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    ["doctor", "train.record", "tests.test_learner", "tests.test_door_ranks"]
)


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of one rank."""

    exit_code: int | None  # -9: killed; None: it hung
    value: Any  # what its function returned
    output: str


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 60
) -> list[Ended]:
    """Call a function of a module in processes of which each has a rank: [num_ranks]."""
    with TemporaryDirectory() as name, socket.socket() as free:
        folder = Path(name)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        processes = [
            _processes.Process(target=_run, args=(function, args, rank, num_ranks, port, folder))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        ended = []
        for rank, process in enumerate(processes):
            process.join(max(0.0, deadline - time.monotonic()))
            code = process.exitcode
            if code is None:
                process.kill()
                process.join()
            value = folder / f"{rank}.pkl"
            output = (folder / f"{rank}.txt").read_text() if process.pid else ""
            found = pickle.loads(value.read_bytes()) if value.exists() else None
            ended.append(Ended(code, found, output))
        return ended


def values(ended: list[Ended]) -> list[Any]:
    """What all returned; none may have failed."""
    failed = [
        f"rank {rank}, exit code {each.exit_code}\n{each.output}"
        for rank, each in enumerate(ended)
        if each.exit_code != 0
    ]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)
    return [each.value for each in ended]


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    num_ranks: int,
    port: int,
    folder: Path,
) -> None:
    output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
    import torch

    torch.set_num_threads(1)
    try:
        value = function(*args)
        (folder / f"{rank}.pkl").write_bytes(pickle.dumps(value))
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None
