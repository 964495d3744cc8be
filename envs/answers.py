"""Answers: one reading for gold and prediction, numbers exact, in linear time on any text."""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from agentrl.types import Message

MAX_CHARS = 64  # of one number
MAX_EXPONENT = 400

_ASCII = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}  # full-width forms
_ASCII |= dict.fromkeys(map(ord, "−–‒﹣－"), ord("-"))
_ASCII |= dict.fromkeys(map(ord, "\u00a0\u202f\u2009\u2007"), ord(" "))
_THOUSANDS = re.compile(r"\{,\}|\\[,!]")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|(\d)\s*(\d))")
_WORDS = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}")
_MARKUP = re.compile(r"\\([$%])|\*\*|\\[()\[\]]|\\(?:left|right)\b")
_PLAIN_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_AROUND = " .,;:!?\"'`*()[]“”‘’"
_ARTICLE = re.compile(r"(the|an|a) ")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")

# Digits and what may stand between them, taken as a whole: a run that is malformed is no number,
# and no part of it is one. Possessive, so that nothing is tried twice.
_RUN = r"\.?+\d++(?:[,._]+\d++)*+"
_NUMBER = re.compile(
    rf"""
    (?P<sign>(?<![\w)\]}}.%])[-+])?[ ]?(?:[$€£¥](?P<sign2>[-+])?)?
    (?P<number>{_RUN})
    (?:[eE](?P<exponent>[-+]?\d++)
      |[ ]?(?:\\times|\\cdot|[×x*])[ ]?10\^\{{?(?P<power>[-+]?\d++)\}}?
      |[ ](?P<numerator>\d++)[ ]?/[ ]?(?P<denominator>\d++)
      |[ ]?/[ ]?(?P<over>{_RUN})
    )?
    [ ]?(?:(?P<percent>%|percent\b|per[ ]cent\b)|(?P<unit>[^\W\d_]+|°[A-Z]?))?
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A number, with the word or percent sign that followed it.

    Example:
        Answer(value=Fraction(5), unit="km")
    """

    value: Fraction
    unit: str = ""


def read_answer(text: str) -> Answer | None:
    """The answer that a text ends in.

    Reasoning up to `</think>` is left out. The last closed `\\boxed{}` or `\\fbox{}` counts, which
    must hold one number; else the first number after the last `####`; else the last number of the
    text. Currency signs are formatting. "nan", "inf" and underscores are no numbers, and a
    malformed number (7,00,00) is not read in part.
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    box = last_box(text)
    if box is not None:
        found = list(_NUMBER.finditer(_plain(box)))
        return _read(found[0]) if len(found) == 1 else None
    _, mark, tail = text.rpartition("####")
    if mark:
        first = _NUMBER.search(_plain(tail))
        return _read(first) if first else None
    ends = deque(_NUMBER.finditer(_plain(text)), maxlen=1)
    return _read(ends[0]) if ends else None


def is_correct(prediction: str, gold: object, *, percent_as_fraction: bool = False) -> bool:
    """Whether both texts end in the same number, compared as exact rationals.

    Units are compared by letter where both texts name one, and never converted. A percent sign may
    be left out (28 is 28%); 0.28 is 28% only with `percent_as_fraction`. An empty prediction is
    wrong whatever the gold is.
    """
    said, wanted = read_answer(prediction), read_answer(str(gold))
    if said is None or wanted is None:
        return False
    if "%" in (said.unit, wanted.unit):
        if percent_as_fraction and said.unit != wanted.unit:
            said, wanted = _as_fraction(said), _as_fraction(wanted)
        other = ({said.unit, wanted.unit} - {"%"}) or {""}
        return said.value == wanted.value and other == {""}
    same_unit = not said.unit or not wanted.unit or said.unit.lower() == wanted.unit.lower()
    return said.value == wanted.value and same_unit


def is_same(prediction: str, gold: str) -> bool:
    """Whether two short answers are the same words, or the same number where the gold is one.

    Case, spacing, forms of Unicode, a leading article, and punctuation and quotes around the answer
    do not count; all else does. An empty prediction is wrong whatever the gold is.
    """
    if _PLAIN_NUMBER.fullmatch(gold.strip()):
        return is_correct(prediction, gold)
    said = _bare(prediction)
    return bool(said) and said == _bare(gold)


def stated_answer(messages: Sequence[Message]) -> str:
    """What follows the last "Answer:" of the final answer, on that line; without one, all of it."""
    text = final_answer(messages).rpartition("</think>")[2]
    _, mark, after = text.rpartition("Answer:")
    return after.strip().partition("\n")[0] if mark else text


def final_answer(messages: Sequence[Message]) -> str:
    """The text that ended the episode; "" if it ended otherwise than in an assistant's words."""
    if not messages or messages[-1].role != "assistant" or messages[-1].tool_calls:
        return ""
    return messages[-1].content


def last_box(text: str) -> str | None:
    """The content of the `\\boxed{}` or `\\fbox{}` that closes last."""
    opened: list[int | None] = []
    content = None
    for match in _BOX.finditer(text):
        brace = match.group()
        if brace.startswith("\\") and len(brace) == 2:
            continue  # an escaped brace
        if brace == "{":
            opened.append(None)
        elif brace != "}":
            opened.append(match.end())
        elif opened and (start := opened.pop()) is not None:
            content = (start, match.start())
    return text[content[0] : content[1]] if content else None


def _bare(text: str) -> str:
    words = " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(_AROUND)
    return _ARTICLE.sub("", words, count=1) if _ARTICLE.match(words) else words


def _plain(text: str) -> str:
    text = _THOUSANDS.sub(
        lambda match: "," if match.group() == "{,}" else "", text.translate(_ASCII)
    )
    text = _WORDS.sub(r" \1", _FRACTION.sub(_over, text))
    return _MARKUP.sub(lambda match: match[1] or "", text)


def _over(match: re.Match[str]) -> str:
    numerator, denominator = match[1] or match[3], match[2] or match[4]
    before = match.string[match.start() - 1 : match.start()]
    return f"{' ' if before.isdigit() else ''}{numerator}/{denominator}"


def _read(match: re.Match[str]) -> Answer | None:
    if len(match.group()) > 2 * MAX_CHARS:
        return None
    value = _decimal(match["number"])
    if value is None:
        return None
    exponent = match["exponent"] or match["power"]
    if exponent is not None:
        if len(exponent) > 5 or abs(int(exponent)) > MAX_EXPONENT:
            return None
        value *= Fraction(10) ** int(exponent)
    elif match["over"] is not None:
        over = _decimal(match["over"])
        if not over:
            return None
        value /= over
    elif match["denominator"] is not None:
        if len(match["denominator"]) > MAX_CHARS or int(match["denominator"]) == 0:
            return None
        value += Fraction(int(match["numerator"]), int(match["denominator"]))
    if "-" in (match["sign"], match["sign2"]):
        value = -value
    return Answer(value=value, unit="%" if match["percent"] else match["unit"] or "")


def _decimal(run: str) -> Fraction | None:
    if len(run) > MAX_CHARS or not re.fullmatch(
        r"(?:\d{1,3}(?:,\d{3})+|\d*)(?:\.\d+)?", run, re.ASCII
    ):
        return None
    return Fraction(run.replace(",", ""))


def _as_fraction(answer: Answer) -> Answer:
    return Answer(value=answer.value / 100) if answer.unit == "%" else answer
