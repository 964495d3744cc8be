"""Checkpoints: complete or absent, in Hugging Face's format, with all an exact resume needs."""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from train.learner import Learner

_MARKER = "complete.json"  # written last: a folder without it is no checkpoint
_POINTER = "latest"


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

    The states may hold tensors and plain values. Every rank calls it; the first one writes. A name
    that is taken gets a number; nothing is ever overwritten.

    Raises:
        CheckpointError: the disk is full or refuses; nothing that was there before is lost.
    """
    folder = Path(folder)
    final = _free_name(folder, f"checkpoint-{step:06d}")
    if not learner.accelerator.is_main_process:
        return final
    temporary = folder / f".writing-{learner.run_id}"
    try:
        _require_plain({"rollouts": rollouts_state, "metrics": metrics_state})
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        learner.model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "config.yaml").write_text(config_text, encoding="utf-8")
        state = {
            "step": step,
            "learner": learner.state_dict(),
            "rollouts": rollouts_state,
            "metrics": metrics_state,
        }
        torch.save(state, temporary / "state.pt")
        for file in temporary.iterdir():
            _sync(file)
        marker = {"run_id": learner.run_id, "step": step, "time": time.time()}
        _write(temporary / _MARKER, json.dumps(marker))
        _sync(temporary)
        temporary.rename(final)
        _sync(folder)
        _write(folder / f".{_POINTER}", final.name)
        os.replace(folder / f".{_POINTER}", folder / _POINTER)
        _sync(folder)
    except Exception as error:  # torch and safetensors wrap a full disk in errors of their own
        raise CheckpointError(
            f"checkpoint of step {step} could not be written to {folder}: {error}. Earlier "
            "checkpoints are intact; free space or set another output_dir, then resume"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _rotate(folder, final, learner)
    return final


def load_checkpoint(path: str | Path, learner: Learner) -> Checkpoint:
    """Put weights and state into `learner`, and return the rest.

    Raises:
        CheckpointError: the folder is no complete checkpoint, or that of another model.
    """
    path = Path(path)
    if _marker(path) is None:
        raise CheckpointError(f"{path} is no complete checkpoint: it has no readable {_MARKER}")
    try:
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            weights |= load_file(file)
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        missing, unexpected = learner.model.load_state_dict(weights, strict=False)
        differ = {*unexpected, *missing} - set(learner.model.all_tied_weights_keys)
        if differ:
            raise ValueError(f"weights of another model; differing: {sorted(differ)[:5]}")
        learner.load_state_dict(state["learner"])
    except Exception as error:
        raise CheckpointError(f"checkpoint {path} cannot be resumed from: {error}") from error
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
        return _read(path)["run_id"]
    except (OSError, ValueError, KeyError):
        return None


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


def _rotate(folder: Path, newest: Path, learner: Learner) -> None:
    own = [
        path
        for path in folder.glob("checkpoint-*")
        if path != newest and _marker(path) == learner.run_id
    ]
    own.sort(key=lambda path: _read(path)["time"])
    keep = learner.config.checkpoint.save_total_limit - 1
    for path in own[: max(0, len(own) - keep)]:
        (path / _MARKER).unlink()  # half deleted, it must not look complete
        shutil.rmtree(path)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
