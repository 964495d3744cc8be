"""The data sets of reasoning-gym as single-turn envs: its own questions, its own scores."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import yaml

from agentrl.env import EnvNotFound
from agentrl.rubric import Rubric
from agentrl.types import Action, Message, Task
from envs.adapters import library
from envs.adapters.randomness import drawing_from, global_state_kept, tame
from envs.rows import require_split
from envs.tool_env import ToolEnv


def score(completion: str, env: ReasoningGym, task: Task) -> float:
    """The data set's score, 0 to 1, of what stands in the last <answer>, else of all that was said.

    An answer that the data set's own scorer cannot read is wrong.
    """
    found = library("rg", "reasoning_gym.utils").extract_answer(completion)
    dataset, entries = env.entries(task.info["split"])
    try:
        return dataset.score_answer(found or completion.strip(), entry=entries[task.info["index"]])
    except Exception:
        return 0.0


class ReasoningGym(ToolEnv):
    """`size` training tasks from one seed, and as many test tasks from another, none in both."""

    rubric = Rubric([score])

    def __init__(self, name: str, *, size: int = 500, seed: int = 0, **kwargs: Any) -> None:
        """
        Args:
            name: Of the data set, such as gsm_symbolic.
            size: How many tasks are made for each split.
            seed: Of the training tasks.
            kwargs: Of the data set.
        """
        super().__init__()
        known = library("rg", "reasoning_gym.factory").DATASETS
        if name not in known:
            raise EnvNotFound(f"reasoning-gym has no {name!r}; it has {', '.join(sorted(known))}")
        self.system_prompt = library("rg", "reasoning_gym.utils").SYSTEM_PROMPTS["simple"]
        self._made = name, size, seed, yaml.safe_dump(kwargs)

    def entries(self, split: str) -> tuple[Any, list[dict[str, Any]]]:
        """The data set and its rows, those of "test" without what "train" has."""
        dataset, rows = _entries(*self._made, split)
        if split == "test":
            seen = {row["question"] for row in _entries(*self._made, "train")[1]}
            return dataset, [row for row in rows if row["question"] not in seen]
        return dataset, rows

    def tasks(self, split: str) -> Sequence[Task]:
        require_split(split)
        return [
            Task(
                id=f"{self._made[0]}-{split}-{index}",
                prompt=(Message(role="user", content=entry["question"]),),
                answer=entry["answer"],
                info={"split": split, "index": index},
            )
            for index, entry in enumerate(self.entries(split)[1])
        ]

    def gold(self, task: Task) -> list[Action] | None:
        """The answer of the data set; None for one that has scores alone."""
        return None if task.answer is None else [Action(f"<answer>{task.answer}</answer>")]


@cache
def _entries(
    name: str, size: int, seed: int, kwargs: str, split: str
) -> tuple[Any, list[dict[str, Any]]]:
    seed = seed if split == "train" else seed + 10**6
    dataset = library("rg").create_dataset(name, size=size, seed=seed, **yaml.safe_load(kwargs))
    with global_state_kept():
        dataset[0]  # loads the rest of the library
    tame("reasoning_gym")
    with drawing_from(random.Random(seed)):
        return dataset, [dataset[index] for index in range(size)]
