"""Reading numeric answers: F045 to F049, and hostile text."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.types import Message, ToolCall
from envs.answers import (
    final_answer,
    is_correct,
    is_same,
    last_box,
    read_answer,
    stated_answer,
)

RIGHT = [
    # F045: commas, currency, trailing dot, sign
    ("#### 70,000", 70000),
    ("$70,000.", 70000),
    ("70000.00", 70000),
    ("#### -3", -3),
    ("$29.00", 29),
    ("-$5", -5),
    ("$-5", "-$5"),
    ("70000", "48/2 = <<48/2=24>>24 clips\n#### 70000"),
    ("12{,}000", 12000),
    ("**12**", 12),
    (r"It costs \$5.", 5),
    ("48 - 29 = 19", 19),
    ("10-3", 3),
    # F046: percent and units
    ("28%", "28%"),
    ("28 percent", "28%"),
    (r"28\%", "28%"),
    ("28", "28%"),
    ("28% off", "28%"),
    ("5", "5 km"),
    (r"\boxed{5\text{ km}}", "5 km"),
    ("5 apples", 5),
    # F047: boxes
    (r"\boxed{\frac{1}{2}}", "1/2"),
    (r"\boxed{1} .. \boxed{2}", 2),
    (r"\boxed{3} .. \boxed{4", 3),
    (r"\boxed{\boxed{3}}, not 4", 3),
    (r"\fbox{42}", 42),
    (r"\boxed{x = 5}", 5),
    ("<think>no, 3</think> It is 4.", 4),
    # F049: number forms
    ("2/4", r"\frac{1}{2}"),
    ("\u22123", -3),
    ("１２３", 123),
    ("1e3", 1000),
    ("1.5E-3", "0.0015"),
    (r"3 \times 10^{3}", 3000),
    ("1 1/2", "3/2"),
    (r"1\frac12", "1.5"),
    (r"-\frac{1}{2}", "-0.5"),
    (".5", "0.5"),
    ("0.1", "1/10"),
]
WRONG = [
    ("7,00,00", 70000),
    ("#### 3", -3),
    ("0.28", "28%"),
    ("5%", "5 km"),
    ("5 m", "5 km"),
    (r"\boxed{5, 6}", 6),
    (r"<think>\boxed{3}</think> done", 3),
    (r"<think>\boxed{3}", 3),
    ("nan", "nan"),
    ("inf", "inf"),
    ("infinity", "1e999"),
    ("1e999", "1e999"),
    ("1_000", 1000),
    ("1.2.3", "3"),
    ("5/0", 5),
    ("", 5),
    ("", ""),
    ("no number", "no number"),
    ("1081 is not it, 1082 is", 1081),
    ("9" * 5000, "9" * 5000),
    ("0.33", "1/3"),
]


@pytest.mark.parametrize(("prediction", "gold"), RIGHT)
def test_equal_numbers_are_correct_however_they_are_written(prediction: str, gold: object):
    """F045, F046, F047, F049."""
    assert is_correct(prediction, gold)


@pytest.mark.parametrize(("prediction", "gold"), WRONG)
def test_other_numbers_and_no_numbers_are_wrong(prediction: str, gold: object):
    """F045, F046, F047, F049, F051: an empty prediction is wrong even against an empty gold."""
    assert not is_correct(prediction, gold)


def test_a_percentage_is_a_fraction_only_on_request():
    """F046."""
    assert is_correct("0.28", "28%", percent_as_fraction=True)
    assert is_correct("28%", "0.28", percent_as_fraction=True)
    assert not is_correct("0.27", "28%", percent_as_fraction=True)


def test_the_box_that_closes_last_counts():
    """F047."""
    assert last_box(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert last_box(r"\boxed{1} \boxed{\{2\}}") == r"\{2\}"
    assert last_box(r"\boxed{1} {\boxed{2") == "1"
    assert last_box("} 3") is None


HOSTILE = [
    r"\boxed{",
    "1,",
    "1 ",
    "1",
    "1/",
    "-",
    r"\frac{",
    "{",
    "1.",
    "$",
    "####",
    " ",
    "1 1/ ",
    "1e",
    "<think>",
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_text_takes_linear_time(piece: str):
    """F048."""
    text = (piece * 200_000)[:200_000]
    started = time.process_time()
    read_answer(text)
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize("text", ["2**30**5", "10**10**10", "sin(exp(exp(exp(3))))", "1e999999"])
def test_nothing_is_computed_that_could_hang(text: str):
    """F050: numbers are read, expressions are not evaluated."""
    began = time.perf_counter()
    assert not is_correct(text, "7")
    assert time.perf_counter() - began < 0.1


def test_unclosed_boxes_hold_no_answer():
    """F048."""
    assert read_answer("\\boxed{" * 28_000) is None


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="0123456789,._-+/$% eE\\{}boxedfrac#<think>", max_size=60))
def test_any_text_is_read_without_an_error(text: str):
    answer = read_answer(text)
    assert answer is None or isinstance(answer.value, Fraction)


@settings(max_examples=100, deadline=None)
@given(st.integers(-(10**12), 10**12))
def test_integers_survive_every_way_of_writing(number: int):
    for text in (
        f"{number}",
        f"{number:,}",
        f"it is {number:,}.",
        f"\\boxed{{{number}}}",
        f"#### {number}.0",
    ):
        assert is_correct(text, number)
        assert not is_correct(text, number + 1)


def test_the_final_answer_is_the_assistants_last_word_and_no_call():
    said = Message(role="assistant", content="The answer is 5.")
    call = ToolCall(id="c", name="calc", arguments={})
    assert final_answer([said]) == "The answer is 5."
    assert final_answer([said, Message(role="tool", content="5")]) == ""
    assert final_answer([Message(role="assistant", content="5", tool_calls=(call,))]) == ""
    assert final_answer([]) == ""


@pytest.mark.parametrize(
    ("prediction", "gold"),
    [
        ("Paris.", "Paris"),
        ("the  Silent\nLantern", "The silent lantern"),
        ("“An Orchard”", "orchard"),
        ("Ｐａｒｉｓ", "paris"),
        ("1,741", "1741"),
        ("in 1741", "1741"),
        ("a.b.txt", "`a.b.txt`"),
    ],
)
def test_the_same_words_are_the_same_answer(prediction: str, gold: str):
    """F045."""
    assert is_same(prediction, gold)


@pytest.mark.parametrize(
    ("prediction", "gold"),
    [
        ("Paris or Rome", "Paris"),
        ("Pari", "Paris"),
        ("", "Paris"),
        ("...", "Paris"),
        ("", ""),
        ("1742", "1741"),
        ("none", "1741"),
        ("ab.txt", "a.b.txt"),
        ("\udcff", "Paris"),
    ],
)
def test_other_words_and_no_words_are_not(prediction: str, gold: str):
    """F051."""
    assert not is_same(prediction, gold)


def test_the_stated_answer_follows_the_last_mark():
    def stated(text: str) -> str:
        return stated_answer([Message(role="assistant", content=text)])

    assert stated("Answer: x\nso\nAnswer:  Paris \nDone") == "Paris "
    assert stated("Paris") == "Paris"
    assert stated("Answer:") == ""
    assert stated("<think>Answer: x</think>Paris") == "Paris"
    assert stated_answer([]) == ""
