"""Checkpoints: complete or absent, written by all ranks, with all an exact resume needs.

checkpoint-000012/
    model*.safetensors, config.json, tokenizer.json, …   what `from_pretrained` loads
    adapter_*                                            with LoRA, in place of the model
    config.yaml                                          of the run
    optimizer/                                           moments and value head, by name
    random-00000-of-00002.pt                             a rank's random generators
    state.pt                                             all else
    complete.json                                        written last
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from train.hf_folder import ADAPTER, MODEL, read_weights, write_config, write_weights
from train.learner import Learner
from train.learner_state import (
    load_tensors,
    random_state,
    save_tensors,
    set_random_state,
    trained_parameters,
)
from train.model import adapter_config
from train.ranks import Ranks
from train.weights import adapter_weights, full_weights, own_adapter, own_weights

logger = logging.getLogger("agentrl")

_MARKER = "complete.json"  # written last: a folder without it is no checkpoint
_POINTER = "latest"
_STATE = "state.pt"
_OPTIMIZER = "optimizer"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; older ones are as they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a checkpoint holds beside the learner's own state."""

    step: int
    rollouts: dict[str, Any]
    metrics: dict[str, Any]


def save_checkpoint(
    folder: str | Path,
    step: int,
    learner: Learner,
    rollouts_state: dict[str, Any],
    metrics_state: dict[str, Any],
    tokenizer: Any,
    config_text: str,
) -> Path:
    """Write `folder/checkpoint-{step}`, point `latest` at it, and delete this run's older ones.

    Every rank calls it; the states are rank 0's, and may hold tensors and plain values. A name
    that is taken gets a number; nothing is ever overwritten.

    Raises:
        CheckpointError: by all ranks, where the disk is full or refuses on any; nothing that was
            there before is lost.
    """
    folder, ranks = Path(folder), learner.ranks
    temporary = folder / f".writing-{learner.run_id}"
    state = {
        "step": step,
        "learner": learner.state_dict(),
        "parameters": list(trained_parameters(learner.policy)),
        "rollouts": rollouts_state,
        "metrics": metrics_state,
    }

    def begin() -> None:
        _require_plain(state)
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / _OPTIMIZER).mkdir(parents=True)

    def finish() -> Path:
        torch.save(state, temporary / _STATE)
        (temporary / "config.yaml").write_text(config_text, encoding="utf-8")
        _sync_tree(temporary)
        marker = {"run_id": learner.run_id, "step": step, "time": time.time()}
        _write(temporary / _MARKER, json.dumps(marker))
        _sync(temporary)
        final = _free_name(folder, f"checkpoint-{step:06d}")
        temporary.rename(final)
        _sync(folder)
        _write(folder / f".{_POINTER}", final.name)
        os.replace(folder / f".{_POINTER}", folder / _POINTER)
        _sync(folder)
        return final

    try:
        with _one_error(
            ranks,
            f"checkpoint of step {step} could not be written to {folder}",
            "Earlier checkpoints are intact; free space or set another output_dir, then resume",
        ):
            ranks.lead(begin)
            with ranks.together():
                if not temporary.is_dir():
                    raise OSError(f"{folder} is not a folder that all ranks share")
                own = _random_file(temporary, ranks)
                torch.save(random_state(), own)
                _sync(own)
            _write_model(temporary, learner, tokenizer)
            save_tensors(temporary / _OPTIMIZER, learner.policy, learner.optimizer, ranks)
            final = ranks.lead(finish)
    finally:
        if ranks.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
    keep = learner.config.checkpoint.save_total_limit
    ranks.lead(lambda: _rotate(folder, final, learner.run_id, keep, temporary))
    return final


def load_checkpoint(path: str | Path, learner: Learner) -> Checkpoint:
    """Put weights and state into `learner`, and return the rest.

    Every rank calls it. Another number of ranks than wrote it, or another way of sharding, is as
    good; only random generators go on where there were as many ranks.

    Raises:
        CheckpointError: by all ranks. The folder is no complete checkpoint, or another model's.
    """
    path, ranks = Path(path), learner.ranks
    with _one_error(ranks, f"checkpoint {path} cannot be resumed from"):
        with ranks.together():
            state = _read_state(path)
            _require_parameters(state["parameters"], learner)
            if state["learner"]["optimizer_steps"] and not any((path / _OPTIMIZER).iterdir()):
                raise ValueError("its folder of moments is empty")
            if learner.config.lora:
                read_weights(path, own_adapter(learner.model), ADAPTER)
            else:
                read_weights(path, own_weights(learner.model))
        load_tensors(path / _OPTIMIZER, learner.policy, learner.optimizer, ranks)
        learner.load_state_dict(state["learner"])
        with ranks.together():
            own = _random_file(path, ranks)
            if own.exists():
                set_random_state(torch.load(own, weights_only=True))
    return _checkpoint(state)


def read_checkpoint(path: Path) -> Checkpoint:
    """What a checkpoint says beside weights and moments.

    Raises:
        CheckpointError: the folder is no complete checkpoint, or broken.
    """
    return _checkpoint(_read_state(path))


def _read_state(path: Path) -> dict[str, Any]:
    if _marker(path) is None:
        raise CheckpointError(f"{path} is no complete checkpoint: it has no readable {_MARKER}")
    try:
        return torch.load(path / _STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch each have their own
        raise CheckpointError(f"{path / _STATE} cannot be read: {error}") from error


def _checkpoint(state: dict[str, Any]) -> Checkpoint:
    return Checkpoint(step=state["step"], rollouts=state["rollouts"], metrics=state["metrics"])


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The checkpoint that `latest` names, else the newest complete one, else None."""
    folder = Path(folder)
    pointer = folder / _POINTER
    if pointer.is_file():
        path = folder / pointer.read_text(encoding="utf-8").strip()
        if _marker(path) is not None:
            return path
    complete = [path for path in folder.glob("checkpoint-*") if _marker(path) is not None]
    return max(complete, key=lambda path: _read(path)["time"], default=None)


def _read(path: Path) -> dict[str, Any]:
    return json.loads((path / _MARKER).read_text(encoding="utf-8"))


def _marker(path: Path) -> str | None:
    """The id of the run that wrote a complete checkpoint; None: there is none."""
    try:
        marker = _read(path)
        return marker["run_id"] if "time" in marker else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_model(folder: Path, learner: Learner, tokenizer: Any) -> None:
    """What `from_pretrained` loads: of an adapter, where that is what is trained."""
    ranks, model = learner.ranks, learner.model
    lora = learner.config.lora is not None
    weights = adapter_weights(model) if lora else full_weights(model)
    with ranks.together():
        write_weights(folder if ranks.is_main else None, weights, ADAPTER if lora else MODEL)

    def write_rest() -> None:
        if lora:
            (folder / "adapter_config.json").write_text(adapter_config(model), encoding="utf-8")
        else:
            write_config(folder, model)
        tokenizer.save_pretrained(folder)

    ranks.lead(write_rest)


@contextmanager
def _one_error(ranks: Ranks, what: str, advice: str = "") -> Iterator[None]:
    """What fails in the block is a CheckpointError, and of all ranks where all of them know."""
    try:
        yield
        return
    except CheckpointException as error:  # by all ranks alike
        rank = min(error.failures)
        cause, everywhere = error.failures[rank][0], True
        words = f"rank {rank}: {cause}" if ranks.size > 1 else str(cause)
    except Exception as error:  # torch and safetensors wrap a full disk in errors of their own
        cause, everywhere = error, ranks.in_step(error)
        words = str(error)
    failed = CheckpointError(f"{what}: {words}" + (f". {advice}" if advice else ""))
    raise (ranks.alike(failed) if everywhere else failed) from cause


def _require_parameters(names: list[str], learner: Learner) -> None:
    if differ := set(names) ^ set(trained_parameters(learner.policy)):
        raise ValueError(
            f"its optimizer state is that of other parameters; differing: {sorted(differ)[:5]}"
        )


def _random_file(folder: Path, ranks: Ranks) -> Path:
    return folder / f"random-{ranks.rank:05d}-of-{ranks.size:05d}.pt"


def _require_plain(state: dict[str, Any]) -> None:
    """Fail now, not at the resume, where a value could not be read back safely."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)


def _free_name(folder: Path, name: str) -> Path:
    """Nothing is replaced: not another run's checkpoint, nor one that this run resumed before."""
    path = folder / name
    number = 2
    while path.exists():
        path = folder / f"{name}-{number}"
        number += 1
    return path


def _rotate(folder: Path, newest: Path, run_id: str, limit: int, trash: Path) -> None:
    own = [
        path for path in folder.glob("checkpoint-*") if path != newest and _marker(path) == run_id
    ]
    own.sort(key=lambda path: _read(path)["time"])
    for path in own[: max(0, len(own) - (limit - 1))]:
        try:
            path.rename(trash)  # half deleted, it must not look complete
            shutil.rmtree(trash)
        except OSError as error:  # the new one is complete, and the next save tries again
            logger.warning("%s could not be removed: %s", path, error)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
