"""A checkpoint as a plain Hugging Face folder, and as a model on the hub.

python -m train.export runs/x/checkpoints/checkpoint-000100 my-agent --dtype bfloat16
python -m train.export … --push-to-hub user/my-agent --private

The folder holds weights (LoRA merged into its base), config, tokenizer, chat template, generation
config and a model card: what `from_pretrained` and `sglang.launch_server --model-path` load.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.config import ConfigError, RunConfig
from agentrl.config_file import load_config
from agentrl.models import ModelError, locate_model
from train.checkpoint import Checkpoint, CheckpointError, latest_checkpoint, read_checkpoint
from train.record import held_out_changes

_CARD_SECTIONS = (
    "model", "lora", "rollout", "advantage", "loss", "optim", "max_steps", "seed"
)  # fmt: skip
"""Of the config; other sections name machines and folders."""


class ExportError(RuntimeError):
    """What was asked for cannot be exported, or not to that place."""


class PushError(RuntimeError):
    """The hub did not take the model; the folder is as it was written."""


def main(arguments: list[str] | None = None) -> int:
    """0: done. 1: the disk or the hub failed. 2: bad input."""
    options = parse(arguments)
    transformers.utils.logging.disable_progress_bar()
    disable_progress_bars()
    try:
        if options.push_to_hub:
            require_repository(options.push_to_hub)
        export(options.checkpoint, options.folder, getattr(torch, options.dtype))
        print(f"the model: {options.folder}")
        if options.push_to_hub:
            print(f"on the hub: {push(options.folder, options.push_to_hub, options.private)}")
        return 0
    except (ExportError, CheckpointError, ConfigError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (PushError, OSError, SafetensorError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m train.export", description="Write a checkpoint as a plain model folder."
    )
    parser.add_argument("checkpoint", type=Path, help="a folder such as checkpoint-000100")
    parser.add_argument("folder", type=Path, help="to be made")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of the weights; float32 (the default) is what was trained, bfloat16 is half its size",
    )
    parser.add_argument("--push-to-hub", metavar="USER/NAME", help="put the folder there too")
    parser.add_argument("--private", action="store_true", help="where that is a new repository")
    options = parser.parse_args(arguments)
    if options.private and not options.push_to_hub:
        parser.error("--private only goes with --push-to-hub")
    return options


def export(checkpoint: Path, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write `folder`, which is complete or absent.

    Raises:
        ExportError: `folder` exists.
        CheckpointError: `checkpoint` is not complete.
        ModelError: the base of an adapter cannot be reached.
    """
    if folder.exists():
        raise ExportError(f"{folder} exists already; name a folder that does not")
    try:
        state = read_checkpoint(checkpoint)
    except CheckpointError as error:
        newest = latest_checkpoint(checkpoint) or latest_checkpoint(checkpoint / "checkpoints")
        hint = f"; the newest one in it is {newest}" if newest else ""
        raise ExportError(f"{error}{hint}") from error
    config = load_config(checkpoint / "config.yaml")
    model, tokenizer = _load(checkpoint, config, dtype)
    temporary = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        model_card(folder.name, config, state).save(temporary / "README.md")
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def model_card(name: str, config: RunConfig, state: Checkpoint) -> ModelCard:
    """What it was trained from, on and with, and what held-out episodes said before and after."""
    base = config.model.name_or_path
    on_hub = base.count("/") == 1 and not Path(base).exists()
    shown = base if on_hub else Path(base).name
    envs = ", ".join(f"`{env.id}`" for env in config.envs.values())
    data = ModelCardData(
        base_model=base if on_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "tool-use", "agentrl"],
    )
    lines = [
        f"# {name}",
        f"`{shown}` after {state.step} steps of reinforcement "
        f"learning (advantages: {config.advantage.estimator}, loss: {config.loss.loss_type}) on "
        f"{envs}, by agentrl.",
    ]
    if changes := held_out_changes(state.metrics["evaluations"], config):
        rows = [f"| {key} | {old:.3f} | {new:.3f} |" for key, (old, new) in changes.items()]
        lines.append("\n".join(["| held-out | before | after |", "|---|---|---|", *rows]))
    settings: dict[str, Any] = config.model_dump(include=set(_CARD_SECTIONS))
    settings["model"]["name_or_path"] = shown
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    lines.append(f"How it was trained:\n\n```yaml\n{text}```")
    body = "\n\n".join(lines)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")


def require_repository(name: str) -> None:
    """Raises ExportError where the hub has no place for such a name."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ExportError(f"--push-to-hub {name}: {error}") from error
    if name.count("/") != 1:
        raise ExportError(f"--push-to-hub {name}: write user/name")


def push(folder: Path, repository: str, private: bool) -> str:
    """Put the folder into a repository of the hub, which is made if need be; returns its address.

    Raises:
        PushError: the hub cannot be reached, or refuses.
    """
    api = HfApi()
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Trained with agentrl"
        )
    except Exception as error:  # the client's transport has errors of its own, in every version
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise PushError(f"{repository} was not pushed: {cause}. The model: {folder}") from error
    return str(url)


def _load(checkpoint: Path, config: RunConfig, dtype: torch.dtype) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    if config.lora is None:
        return _load_weights(checkpoint, dtype), tokenizer
    if importlib.util.find_spec("peft") is None:
        raise ModelError("a LoRA checkpoint needs the package peft: pip install -e '.[lora]'")
    from peft import PeftModel

    base = _load_weights(locate_model(config.model.name_or_path), torch.float32)
    try:
        model: Any = PeftModel.from_pretrained(base, str(checkpoint))
    except (ValueError, RuntimeError) as error:
        raise ModelError(
            f"the adapter in {checkpoint} does not fit {config.model.name_or_path}: {error}"
        ) from error
    return model.merge_and_unload().to(dtype), tokenizer


def _load_weights(path: str | Path, dtype: torch.dtype) -> Any:
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be loaded: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
