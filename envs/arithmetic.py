"""Arithmetic with a calculator or Python: products, expressions and word problems, made here."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import cycle, islice
from typing import Any, Literal, get_args

from agentrl.rubric import Rubric
from agentrl.threads import inline
from agentrl.tool import Tool
from agentrl.types import Message, Task
from envs.answers import final_answer, is_correct
from envs.rows import in_split, require_split
from envs.sandboxed import SandboxedEnv
from envs.tool_env import Demonstration, ToolEnv, demonstration
from envs.word_problems import word_problems
from tools.calculator import calc, evaluate
from tools.python import python_tool
from tools.sandbox.pool import Lease

Kind = Literal["product", "expression", "word"]
Problem = tuple[str, str, str]  # question, answer, and a key that is equal for equal problems

NUM_TASKS = {"train": 2000, "test": 200}  # per kind

# Question, expression and answer; the n-th has n operations.
_SHOWN: dict[Kind, tuple[tuple[str, str, str], ...]] = {
    "product": (("What is 12 * 34?", "12*34", "408"),),
    "expression": (
        ("What is 58 - 23?", "58-23", "35"),
        ("What is 15 + 4 * 22?", "15+4*22", "103"),
    ),
    "word": (
        ("Tom has 28 pens and finds 17 more. How many pens does Tom have?", "28+17", "45"),
        (
            "Zoe has 14 bags with 25 nuts each and eats 30 nuts. How many nuts are left?",
            "14*25-30",
            "320",
        ),
    ),
}


@inline
def correct(messages: Sequence[Message], answer: str) -> bool:
    """Whether the last number of the final message is the answer."""
    return is_correct(final_answer(messages), answer)


@inline
def correct_by_kind(messages: Sequence[Message], task: Task) -> dict[str, bool]:
    return {f"correct/{task.info['kind']}": correct(messages, task.answer)}


@inline
def called_tool(env: Any) -> bool:
    """Whether a tool ran in the episode."""
    return env.unwrapped.metrics["tool/calls"] > 0


class Arithmetic(ToolEnv):
    """Problems of the given kinds in turn, to be solved with the calculator.

    A problem is of "train" or of "test" by a hash of its numbers, so that no test problem is ever
    trained on.
    """

    system_prompt = "Use the calculator calc, then give the answer."
    tools = (calc,)
    shown_call = ("calc", "expression")  # tool and argument in the demonstrations
    rubric = Rubric([correct, correct_by_kind, called_tool], weights=[1.0, 0.0, 0.0])

    def __init__(
        self,
        *,
        kinds: Sequence[Kind] = ("product", "word"),
        max_operations: int = 2,
        **limits: Any,
    ) -> None:
        """
        Args:
            kinds: Of "product", "expression" and "word", in turn; one written twice comes twice as
                often. One or two demonstrations of each are shown.
            max_operations: In an expression or word problem, 1 to 3.
            limits: As `ToolEnv` takes them.
        """
        self.demonstrations = _demonstrations(kinds, max_operations, *self.shown_call)
        self.kinds = tuple(kinds)
        self.max_operations = max_operations
        super().__init__(**limits)

    def tasks(self, split: str) -> Sequence[Task]:
        """2,000 training or 200 test problems per kind."""
        return _tasks(split, self.kinds, self.max_operations)


class ArithmeticPython(SandboxedEnv, Arithmetic):
    """The problems and rewards of `Arithmetic`, solved with Python in a sandbox."""

    system_prompt = "Use the tool python, then give the answer."
    shown_call = ("python", "code")

    def make_tools(self, lease: Lease) -> Sequence[Tool]:
        return [python_tool(lease, timeout_s=2.0)]


def _demonstrations(
    kinds: Sequence[Kind], max_operations: int, tool: str, argument: str
) -> tuple[Demonstration, ...]:
    """Raises ValueError for what no problem can be made of."""
    unknown = [kind for kind in kinds if kind not in get_args(Kind)]
    if unknown or not kinds:
        raise ValueError(f"kinds must be of {', '.join(get_args(Kind))}, not {list(kinds)}")
    if not 1 <= max_operations <= 3:
        raise ValueError(f"max_operations must be 1, 2 or 3, not {max_operations}")
    return tuple(
        demonstration(
            question, [(tool, {argument: expression}, answer)], f"The answer is {answer}."
        )
        for kind in dict.fromkeys(kinds)
        for question, expression, answer in _SHOWN[kind][:max_operations]
    )


@cache
def _tasks(split: str, kinds: tuple[Kind, ...], max_operations: int) -> tuple[Task, ...]:
    require_split(split)
    problems = {
        kind: _unseen(
            _problems(kind, random.Random(f"{kind} {split} {max_operations}"), max_operations),
            split,
        )
        for kind in kinds
    }
    rows = []
    for index, kind in enumerate(islice(cycle(kinds), NUM_TASKS[split] * len(problems))):
        question, answer, _ = next(problems[kind])
        rows.append(
            Task(
                id=f"{split}-{index}-{kind}",
                prompt=(Message(role="user", content=question),),
                answer=answer,
                info={"kind": kind},
            )
        )
    return tuple(rows)


def _unseen(problems: Iterator[Problem], split: str) -> Iterator[Problem]:
    """Those of the split, each once."""
    seen = {"12 34"}  # shown as a demonstration
    for problem in problems:
        key = problem[2]
        if key not in seen and in_split(key, split):
            seen.add(key)
            yield problem


def _problems(kind: Kind, generator: random.Random, max_operations: int) -> Iterator[Problem]:
    if kind == "word":
        for problem in word_problems(generator, max_operations=max_operations):
            yield problem.question, problem.answer, problem.key
    while True:
        if kind == "product":
            a, b = generator.randint(10, 99), generator.randint(10, 99)
            yield f"What is {a} * {b}?", str(a * b), _key(f"{a} {b}")
        else:
            expression = _expression(generator, max_operations)
            yield f"What is {expression}?", str(evaluate(expression)), _key(expression)


def _key(text: str) -> str:
    """The numbers alone: 23 * 47, 47 * 23 and 23 + 47 lie in one split."""
    return " ".join(sorted(re.findall(r"\d+", text)))


def _expression(generator: random.Random, max_operations: int) -> str:
    """Whole numbers under + - and *, part of them in parentheses."""
    text = str(generator.randint(2, 99))
    for place in range(generator.randint(1, max_operations)):
        if place and generator.random() < 0.4:
            text = f"({text})"
        number = generator.randint(2, 99)
        text = f"{text} {generator.choice('+-*')} {number}"
    return text
