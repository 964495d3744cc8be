"""Templates of word problems: the text, and the expression that solves it."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass

from tools.calculator import evaluate

# {a} {b} {c} are numbers from 11 to 98, {m} {n} from 3 to 12.
TEMPLATES: dict[int, tuple[tuple[str, str], ...]] = {  # by the number of operations
    1: (
        (
            "{name} has {a} {things} and buys {b} more. How many {things} does {name} have?",
            "{a}+{b}",
        ),
        ("{name} had {a} {things} and gave {b} away. How many {things} are left?", "{a}-{b}"),
        ("There are {a} boxes with {b} {things} each. How many {things} are there?", "{a}*{b}"),
        ("{name} collects {a} {things} a week. How many {things} is that in {m} weeks?", "{a}*{m}"),
        (
            "{name} shares {a} {things} equally among {m} friends. How many does each get?",
            "{a}/{m}",
        ),
        ("A shelf holds {a} {things}. How many {things} do {b} such shelves hold?", "{a}*{b}"),
        (
            "{name} found {a} {things} and {friend} found {b}. How many did they find together?",
            "{a}+{b}",
        ),
        ("{name} needs {a} {things} and has {b}. How many are missing?", "{a}-{b}"),
        ("One pack costs {a} dollars. How much do {b} packs of {things} cost?", "{a}*{b}"),
        ("{a} {things} go into bags of {m}. How many bags are filled?", "{a}/{m}"),
    ),
    2: (
        (
            "{name} has {a} {things}, buys {b} more and gives {c} away. "
            "How many {things} does {name} have now?",
            "{a}+{b}-{c}",
        ),
        (
            "{name} buys {m} boxes with {a} {things} each and finds {b} more. "
            "How many {things} does {name} have?",
            "{m}*{a}+{b}",
        ),
        (
            "A shop gets {a} crates of {b} {things}. It sells {c} {things}. How many are left?",
            "{a}*{b}-{c}",
        ),
        (
            "{name} has {a} {things} and {friend} has {b}. They share them equally among "
            "{m} children. How many does each child get?",
            "({a}+{b})/{m}",
        ),
        (
            "{name} makes {a} {things} a day for {m} days. Each sells for {n} dollars. "
            "How many dollars is that?",
            "{a}*{m}*{n}",
        ),
        (
            "Each of {m} friends brings {a} red and {b} blue {things}. How many {things} is that?",
            "{m}*({a}+{b})",
        ),
        (
            "{name} had {a} {things}, lost {b}, and then lost {c} more. How many are left?",
            "{a}-{b}-{c}",
        ),
        (
            "{name} puts {a} {things} into bags of {m}. Each bag sells for {n} dollars. "
            "How much money is that?",
            "{a}/{m}*{n}",
        ),
        (
            "A ticket costs {a} dollars and a meal {b} dollars. "
            "How much do {m} people pay for both?",
            "({a}+{b})*{m}",
        ),
        (
            "{name} saves {a} dollars a month for {m} months and then spends {b}. "
            "How many dollars are left?",
            "{a}*{m}-{b}",
        ),
    ),
    3: (
        (
            "{name} has {m} boxes of {a} {things} and {n} boxes of {b}. "
            "How many {things} are there?",
            "{m}*{a}+{n}*{b}",
        ),
        (
            "{name} buys {m} books for {a} dollars each and {n} pens for {b} dollars each. "
            "How much is that in all?",
            "{m}*{a}+{n}*{b}",
        ),
        (
            "A farm fills {m} crates with {a} {things} each. It keeps {b} and shares the rest "
            "equally among {n} shops. How many does each shop get?",
            "({m}*{a}-{b})/{n}",
        ),
        (
            "{name} earns {a} dollars a day for {m} days, gets a gift of {b}, and spends {c}. "
            "How many dollars are left?",
            "{a}*{m}+{b}-{c}",
        ),
        (
            "{name} has {a} {things}, finds {b}, loses {c}, and sells the rest for {n} dollars "
            "each. How many dollars is that?",
            "({a}+{b}-{c})*{n}",
        ),
        (
            "Each of {m} teams has {a} players and {b} helpers. {c} of all these people are ill. "
            "How many are well?",
            "{m}*({a}+{b})-{c}",
        ),
        (
            "{name} reads {a} pages a day for {m} days and {b} pages a day for {n} days. "
            "How many pages is that?",
            "{a}*{m}+{b}*{n}",
        ),
    ),
}
NAMES = (
    "Ada", "Ben", "Carla", "Dev", "Elif", "Femi", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena",
    "Mira", "Nils", "Omar", "Pia", "Quinn", "Rosa", "Sami", "Tara", "Uma", "Vito", "Wen", "Yara",
)  # fmt: skip
THINGS = (
    "apples", "marbles", "stamps", "shells", "cards", "coins", "books", "pencils", "eggs",
    "cookies", "stickers", "beads", "balloons", "oranges", "buttons", "tickets", "candles",
    "toys", "plums",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WordProblem:
    """One problem; `key` names the template and its numbers, whoever the problem tells of."""

    question: str
    answer: str
    key: str


def word_problems(generator: random.Random, *, max_operations: int) -> Iterator[WordProblem]:
    """Problems without end whose answer is a positive whole number."""
    templates = [pair for size in range(1, max_operations + 1) for pair in TEMPLATES[size]]
    while True:
        text, expression = generator.choice(templates)
        wanted = [name for _, name, _, _ in string.Formatter().parse(expression) if name]
        numbers = {
            name: generator.randint(11, 98) if name in "abc" else generator.randint(3, 12)
            for name in wanted
        }
        value = evaluate(expression.format(**numbers))
        if not isinstance(value, int) or value <= 0:
            continue
        name, friend = generator.sample(NAMES, 2)
        question = text.format(**numbers, name=name, friend=friend, things=generator.choice(THINGS))
        yield WordProblem(
            question=question, answer=str(value), key=f"{text} {sorted(numbers.items())}"
        )
