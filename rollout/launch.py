"""What one SGLang server is started with: its GPUs, port, command and environment; why it ended."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from agentrl.config import ConfigError, SGLangConfig

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
UNUSED_CONTEXT_TOKENS = 8  # it refuses prompts that come so near to the end of its context
CPU_KV_TOKENS = 16384  # SGLang itself would take half of the memory
TAIL_BYTES, TAIL_LINES, LINE_CHARACTERS = 64 * 1024, 15, 300
PROMPT = "$ "
# A launcher of several learners tells them of each other; a server that reads this waits for them.
LAUNCHERS_OWN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|PYTHONPATH|VIRTUAL_ENV"
    r"|(TORCHELASTIC|ACCELERATE|FSDP)_.*"
)
HINTS = {
    r"No module named '?sglang": "install it: make sglang-cpu, or on GPUs pip install sglang",
    r"(?i)out ?of ?memory|not enough memory": "lower sglang.mem_fraction, or give it more GPUs",
    r"(?i)address already in use": "another program took its port; start again",
    r"unrecognized arguments": "look at sglang.server_args",
}


def assign_gpus(
    config: SGLangConfig, gpus: Sequence[int], *, num_learner_gpus: int
) -> list[list[int]]:
    """The GPUs of each server, as torch counts them; empty lists where there are none.

    The learner keeps the first `num_learner_gpus`, servers take the last; colocated they take all.

    Raises:
        ConfigError: they are too few, or some would be left over.
    """
    size, wanted = config.tensor_parallel_size, config.num_servers
    if not gpus:
        return [[] for _ in range(wanted or 1)]
    free = list(gpus if config.colocate else gpus[num_learner_gpus:])
    num_servers = wanted or len(free) // size
    have = f"{len(gpus)} GPUs" if len(gpus) > 1 else "1 GPU"
    if not config.colocate:
        have += f", of which the learner keeps {num_learner_gpus}"
    if not num_servers or num_servers * size > len(free):
        raise ConfigError(
            f"sglang.num_servers={num_servers or 1} x sglang.tensor_parallel_size={size} needs "
            f"{(num_servers or 1) * size} GPUs for servers, and there are {have}; lower one of "
            "them, start fewer learners, or set sglang.colocate=true"
        )
    if not wanted and len(free) % size:
        raise ConfigError(
            f"sglang.tensor_parallel_size={size} does not divide the {len(free)} GPUs that servers "
            f"may have ({have}); set sglang.num_servers to leave some idle"
        )
    used = free[len(free) - num_servers * size :]
    return [used[n * size : (n + 1) * size] for n in range(num_servers)]


def find_interpreter(python: str | None) -> str:
    """The interpreter that runs SGLang.

    Raises:
        ConfigError: there is none.
    """
    if python is not None:
        found = shutil.which(python)
        if found is None:
            raise ConfigError(f"sglang.python={python} is no program that can be run")
        return found
    own = ROOT / ".venv-sglang" / "bin" / "python"
    if own.exists():
        return str(own)
    if importlib.util.find_spec("sglang") is not None:
        return sys.executable
    raise ConfigError(
        "SGLang is not installed. It needs an environment of its own, .venv-sglang or the one that "
        "sglang.python names: `make sglang-cpu` makes it for a CPU (0.5.15.post1); for GPUs "
        "`python3.11 -m venv .venv-sglang && .venv-sglang/bin/pip install 'sglang>=0.5.15'` "
        "(0.5.15 or newer). Or set rollout.engine=local"
    )


def context_length(max_context_tokens: int, max_positions: int) -> int:
    """Of a server whose requests have up to `max_context_tokens`, as far as the model goes."""
    return min(max_context_tokens + UNUSED_CONTEXT_TOKENS, max_positions)


def hold_port() -> socket.socket:
    """A free port of this machine, which only a server that reuses addresses can still listen on.

    As long as the socket is open no other program is given the port, and none that asks for it
    exclusively gets it: the server may be away and come back.
    """
    holder = socket.socket()
    holder.bind((HOST, 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the servers of a run have in common, beside their config."""

    model_path: str
    dtype: str  # of the weights: "float32", "bfloat16", …
    context_tokens: int  # of the longest request, with what it samples
    max_requests: int  # in one server at once
    log_folder: Path  # of `sglang-<n>.log`, one per server
    gpus: Sequence[int] = ()  # as torch counts them; none: the servers compute on the CPU
    num_learner_gpus: int = 1  # the first ones, which servers leave alone unless colocated
    lora_rank: int = 0  # of the adapters that they are sent; 0: they are sent all weights
    lora_targets: Sequence[str] = ()  # names of the layers that have adapters


def launch_command(
    config: SGLangConfig, launch: Launch, *, python: str, port: int, nccl_port: int
) -> list[str]:
    """`-P` keeps the working directory, and the folders of this project in it, off the path."""
    options = {
        "model-path": launch.model_path,
        "dtype": launch.dtype,
        "context-length": launch.context_tokens,
        "max-running-requests": launch.max_requests,
        "tp-size": config.tensor_parallel_size,
        "mem-fraction-static": config.mem_fraction,
        "host": HOST,
        "port": port,
        "nccl-port": nccl_port,
        "log-level-http": "warning",
    }
    # The probe of the first update warms it up; SGLang's own request would run into that update.
    flags = ["--skip-server-warmup"]
    if config.colocate:
        flags += ["--enable-memory-saver"]
    if launch.gpus:
        flags += ["--enable-metrics"]
    else:
        options |= {
            "device": "cpu",
            "attention-backend": "torch_native",
            "max-total-tokens": max(launch.context_tokens, CPU_KV_TOKENS),
        }
        flags += ["--sleep-on-idle"]
    if launch.lora_rank:
        # The present one, and the one that follows it.
        options |= {"max-lora-rank": launch.lora_rank, "max-loras-per-batch": 2}
        flags += ["--enable-lora", "--lora-target-modules", *launch.lora_targets]
    for argument in config.server_args:
        if argument.split("=")[0] in ("--host", "--port"):
            raise ConfigError(
                f"sglang.server_args: {argument} cannot be chosen, it is worked out per server"
            )
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [python, "-P", "-m", "sglang.launch_server", *given, *flags, *config.server_args]


def launch_environment(
    base: Mapping[str, str],
    *,
    gpus: Sequence[int],
    learner_gpus: Sequence[int] = (),
    model_path: str,
) -> dict[str, str]:
    """GPUs count among those that `base` makes visible."""
    environment = {k: v for k, v in base.items() if not LAUNCHERS_OWN.fullmatch(k)}
    # Not opened, yet checked; its default is the port + 10000, which may be none.
    environment.setdefault("SGLANG_GRPC_PORT", "65535")
    if os.path.isdir(model_path):
        environment["HF_HUB_OFFLINE"] = "1"
    if gpus:
        visible = [name for name in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        # Behind its own, those whose memory it maps to read the learner's weights.
        seen = [*gpus, *(gpu for gpu in learner_gpus if gpu not in gpus)]
        names = [visible[gpu] if visible else str(gpu) for gpu in seen]
        return environment | {"CUDA_VISIBLE_DEVICES": ",".join(names)}
    return environment | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",  # more wait for each other on a busy machine
        "TORCHDYNAMO_DISABLE": "1",  # the first request would compile for half a minute
    }


def begin_log(log: BinaryIO, command: Sequence[str]) -> None:
    """Set off what this start writes from what an earlier one wrote."""
    log.write(f"{PROMPT}{shlex.join(command)}\n".encode())
    log.flush()


def last_line(log: Path) -> str:
    """The last that SGLang logged, rather than what it or a library merely printed."""
    lines = _tail(log) or ["(nothing yet)"]
    return next((line for line in reversed(lines) if line.startswith("[")), lines[-1])


def explain_end(status: int, log: Path) -> str:
    """How it ended, what its log says, and what to do."""
    code = -status if status < 0 else status - 128
    how = f"exit status {status}" if code <= 0 else signal.Signals(code).name
    lines = _tail(log)
    starts = [
        n for n, line in enumerate(lines) if line.endswith("Traceback (most recent call last):")
    ]
    text = "\n".join(lines[starts[-1] if starts else 0 :][-TAIL_LINES:])
    hints = [hint for pattern, hint in HINTS.items() if re.search(pattern, text)]
    if code == signal.SIGKILL and not hints:
        hints = ["something killed it; has the machine run out of memory?"]
    return "\n".join([f"ended with {how}; the end of {log}:", text, *hints])


def _tail(log: Path) -> list[str]:
    """The last lines since the latest start that are not empty, shortened."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line.rstrip()[:LINE_CHARACTERS] for line in text.splitlines() if line.strip()]
    starts = [n + 1 for n, line in enumerate(lines) if line.startswith(PROMPT)]
    return lines[starts[-1] :] if starts else lines
