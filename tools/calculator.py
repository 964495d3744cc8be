"""A calculator for expressions as people write them, exact and bounded in time and size."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from agentrl.tool import tool

Number = int | Fraction

MAX_CHARS = 200
MAX_BITS = 512  # of a numerator or a denominator

_OPERATORS: dict[type, Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_AS_TYPED = str.maketrans(
    {
        "×": "*",
        "·": "*",
        "⋅": "*",
        "÷": "/",
        "−": "-",
        "–": "-",
        "^": "**",
        "$": "",
        "€": "",
        "£": "",
    }
    | {"√": "sqrt", "\u00a0": " ", "\n": " "}
)
_FOREIGN = re.compile(r"[^\w\s.,+\-*/%()]|_")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d,])")
_PERCENT = re.compile(r"(\d+\.?\d*|\.\d+)\s*(?:percent|%(?=\s*(?:of\b|[-+*/),]|$)))(\s*of\b)?")
_TIMES = re.compile(r"(?<=[\d.)])\s*[xX]\s*(?=[\d.(]|sqrt|abs|round|m)")
_IMPLICIT_TIMES = re.compile(r"(?<=[\d)])\s*(?=\()")
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")


@tool(inline=True)
def calc(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Such as 23*47 or (3+4)/2.
    """
    return to_decimal(evaluate(expression))


def evaluate(expression: str) -> Number:
    """The exact value (of roots and fractional powers: to double precision).

    Takes + - * / // % **, parentheses, sqrt, abs, round, min and max; x × ÷ ^, thousands commas,
    currency signs and percentages ("15% of 80"); what follows "=" is left out.

    Raises:
        ValueError: what cannot be read or is too large, in words that help to write it right.
        ZeroDivisionError: a division by zero.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression is longer than {MAX_CHARS} characters")
    text = _rewrite(expression)
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(
            f"cannot read {expression.strip()!r}; write plain arithmetic such as (3+4)*2"
        ) from None
    try:
        return _value(tree.body)
    except ZeroDivisionError:
        raise ZeroDivisionError("division by zero") from None


def to_decimal(value: Number) -> str:
    """An exact decimal where ten places are enough, else rounded to them.

    Example:
        to_decimal(Fraction(3, 10)) -> "0.3"
        to_decimal(Fraction(2, 3)) -> "0.6666666667"
    """
    if isinstance(value, int):
        return str(value)
    scaled = round(abs(value) * 10**10)
    if scaled < 10**6 and Fraction(scaled, 10**10) != abs(
        value
    ):  # ten places would keep few digits, or none
        return f"{float(value):.10g}"
    whole, places = divmod(scaled, 10**10)
    digits = f"{whole}.{places:010d}".rstrip("0").rstrip(".")
    return f"-{digits}" if value < 0 else digits


def _rewrite(expression: str) -> str:
    text = expression.translate(_AS_TYPED).strip(" ?.;:")
    if "=" in text:
        left, _, right = text.partition("=")
        text = left if left.strip() else right.lstrip("=")
    text = text.strip()
    if not text:
        raise ValueError("the expression is empty; write arithmetic such as 23*47")
    if foreign := _FOREIGN.search(text):
        raise ValueError(
            f"{foreign.group()!r} is not arithmetic; use numbers, + - * / ** % and parentheses"
        )
    if not any(name in text for name in ("round", "min", "max")):  # there, commas part arguments
        text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
    text = _PERCENT.sub(lambda match: f"({match[1]}/100)" + ("*" if match[2] else ""), text)
    text = _TIMES.sub("*", text)
    text = _IMPLICIT_TIMES.sub("*", text)
    return _LEADING_ZEROS.sub("", text).strip()


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int(value)):
            return _checked(value)
        case ast.Constant(value=float(value)) if math.isfinite(value):
            return _checked(Fraction(repr(value)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _checked(Fraction(_value(left)) / _value(right))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _checked(_OPERATORS[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            values = [_value(arg) for arg in args]
            try:
                return _checked(_FUNCTIONS[name](*values))
            except TypeError:
                raise ValueError(f"{name} does not take {len(values)} numbers") from None
        case ast.Call(func=ast.Name(id=name)) | ast.Name(id=name):
            functions = ", ".join(_FUNCTIONS)
            raise ValueError(f"{name!r} is unknown; use numbers and {functions}")
        case ast.Tuple():
            raise ValueError("write one expression, and thousands as 1,234 or 1234")
    raise ValueError("only numbers, + - * / // % **, parentheses and functions are allowed")


def _checked(value: Number) -> Number:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("the number is too large")
    return value.numerator if value.denominator == 1 else value


def _power(base: Number, exponent: Number) -> Number:
    if exponent.denominator != 1:
        if base < 0:
            raise ValueError("a fractional power of a negative number")
        if exponent == Fraction(1, 2):
            return _sqrt(base)
        try:
            return _checked(Fraction(repr(float(base) ** float(exponent))))
        except OverflowError:
            raise ValueError("the number is too large") from None
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) not in (0, 1) and bits * abs(exponent) > MAX_BITS:
        raise ValueError("the power is too large")
    if base in (0, 1, -1):  # whatever the size of the exponent
        if base == 0 and exponent < 0:
            raise ZeroDivisionError
        return base if exponent % 2 or (base == 0 and exponent) else 1
    return _checked(Fraction(base) ** int(exponent))


def _sqrt(value: Number) -> Number:
    if value < 0:
        raise ValueError("the square root of a negative number")
    numerator, denominator = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if numerator**2 == value.numerator and denominator**2 == value.denominator:
        return Fraction(numerator, denominator)
    return Fraction(repr(math.sqrt(value)))


def _round(value: Number, places: Number = 0) -> Number:
    """Half away from zero, as taught at school."""
    if places.denominator != 1 or abs(places) > 20:
        raise ValueError("round takes a whole number of places up to 20")
    scale = Fraction(10) ** int(places)
    rounded = math.floor(abs(value) * scale + Fraction(1, 2)) / scale
    return -rounded if value < 0 else rounded


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sqrt": _sqrt,
    "abs": abs,
    "round": _round,
    "min": lambda *values: min(values),
    "max": lambda *values: max(values),
}
