"""A tiny model, small envs and the config of a run that takes a second, to test the doors with."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.env import EnvNotFound, TextEnv
from agentrl.types import Message, Task
from tests.engines import byte_tokenizer

ROOT = Path(__file__).resolve().parents[1]


def save_model(folder: Path, *, template: bool = True, max_positions: int = 512) -> Path:
    """A random Llama of two layers with a tokenizer of bytes."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        mlp_bias=True,
    )
    model = LlamaForCausalLM(shape)
    with torch.no_grad():  # it ends a turn with every second token or so
        model.model.layers[-1].mlp.down_proj.bias.fill_(0.2)
        model.lm_head.weight[byte_tokenizer().eos_token_id] = 5.5 / 32
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    if not template:
        (folder / "chat_template.jinja").unlink()
    return folder


def write_config(folder: Path, model: Path, **changes: Any) -> Path:
    """A config of two steps of 2 x 4 episodes; `section__key=value` changes it."""
    values: dict[str, Any] = {
        "model": {"name_or_path": str(model), "mixed_precision": "no"},
        "env": {"id": "tests.runs:Tiny"},
        "rollout": {
            "engine_dtype": "float32",
            "tool_format": "none",
            "prompts_per_step": 2,
            "num_generations": 4,
            "max_new_tokens": 6,
            "max_episode_tokens": 16,
            "max_context_tokens": 128,
            "max_attempts": 1,
            "max_concurrent_generations": 8,
        },
        "optim": {"learning_rate": 1e-2},
        "eval": {"num_tasks": 2, "temperature": 1.0},
        "max_steps": 2,
        "output_dir": str(folder / "run"),
    }
    for name, value in changes.items():
        *sections, key = name.split("__")
        section = values
        for each in sections:
            section = section.setdefault(each, {})
        section[key] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """Of a step's metrics, what must be the same when it is done again."""
    timed = (
        "time", "seconds", "per_second", "lag", "memory", "engine/", "segment", "_requests", "mfu",
    )  # fmt: skip
    return {k: v for k, v in record.items() if not any(word in k for word in timed)}


def episodes(run: Path, step: int) -> list[tuple[Any, ...]]:
    """Task, tokens, logprobs and versions of every episode of a step."""
    lines = (run / f"trajectories/step-{step:06d}.jsonl").read_text().splitlines()
    return [
        (group["task"], tape["token_ids"], tape["logprobs"], tape["versions"])
        for group in map(json.loads, lines)
        for tape in group["trajectories"]
    ]


class Tiny(TextEnv):
    """Two turns; the more different characters, the better."""

    def __init__(self, num_tasks: int = 8, prompt: str = "go") -> None:
        if num_tasks < 0:
            raise ValueError("num_tasks must not be negative")
        self.num_tasks, self.prompt = num_tasks, prompt

    def tasks(self, split):
        message = Message(role="user", content=self.prompt)
        return [Task(id=f"{split}{i}", prompt=(message,)) for i in range(self.num_tasks)]

    def reset(self, *, seed=None, options=None):
        self.turn = 0
        return list(options["task"].prompt), {}

    def step(self, action):
        self.turn += 1
        return "more", len(set(action)) / 8, self.turn == 2, False, {}


class Needy(Tiny):
    """Says before a run what it needs, and may lack it."""

    def __init__(self, lacks: str = "", **more: Any) -> None:
        super().__init__(**more)
        self.lacks = lacks

    def preflight(self):
        if self.lacks == "time":
            time.sleep(0.5)
        if self.lacks == "code":
            raise ZeroDivisionError("a bug")
        if self.lacks:
            raise EnvNotFound(f"there is no {self.lacks}; install it")
        return ["needs nothing, at level none"]


class InTurn(Tiny):
    """On the event loop: with one request at a time, every rounding error happens again."""

    async def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)

    async def step(self, action):
        return super().step(action)


class Breaks(Tiny):
    """Raises in every so-manieth `reset` or `step`."""

    calls = itertools.count(1)

    def __init__(self, where: str, every: int = 1) -> None:
        super().__init__()
        self.where, self.every = where, every

    def reset(self, **kwargs):
        self._maybe("reset")
        return super().reset(**kwargs)

    def step(self, action):
        self._maybe("step")
        return super().step(action)

    def _maybe(self, method: str) -> None:
        if self.where == method and next(self.calls) % self.every == 0:
            raise LookupError("the database is gone")


class Hangs(Tiny):
    """A step that does not return in time."""

    def step(self, action):
        time.sleep(1.5)
        return super().step(action)


class Sleeps(Tiny):
    """A reset that does not return in time."""

    def reset(self, **kwargs):
        time.sleep(0.5)
        return super().reset(**kwargs)


class Kills(Tiny):
    """Sends its own process a signal in the first `step` after `after` of them."""

    calls = itertools.count(1)

    def __init__(self, number: int, after: int = 0) -> None:
        super().__init__()
        self.number, self.after = number, after

    def step(self, action):
        if next(self.calls) == self.after + 1:
            os.kill(os.getpid(), self.number)
        return super().step(action)


class Announces(Tiny):
    """Touches a file in `phase` of the second step, which it makes slow."""

    def __init__(self, path: str, phase: str) -> None:
        from train.learner import Learner

        super().__init__()
        self.path, self.phase = Path(path), phase
        if phase == "update" and Learner.update.__name__ == "update":
            update = Learner.update

            def slow(learner, groups):
                self._announce(learner.version)
                return update(learner, groups)

            Learner.update = slow

    def step(self, action):
        if self.phase == "rollout" and self.path.parent.joinpath("run/metrics.jsonl").exists():
            lines = self.path.parent.joinpath("run/metrics.jsonl").read_text()
            self._announce('"step": 1' in lines)
        return super().step(action)

    def _announce(self, version: int) -> None:
        if version == 1:
            self.path.touch()
            time.sleep(1.0)


def fails(completion):
    raise ZeroDivisionError("no reward today")


def not_a_number(completion):
    return float("nan")


def length(completion):
    return len(completion) / 10


def by_chance(completion):
    """Some signal in every group, whatever is sampled."""
    return random.random()
