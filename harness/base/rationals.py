"""Exact rationals from text: decimals, and calculations with `+ - * /` and brackets. No `eval`, nothing is rounded.

Each caller cuts its text into tokens by its own rules, and so decides how strict it is.
"""

import operator
from collections.abc import Callable, Sequence
from fractions import Fraction

Token = Fraction | str  # a number; an operator or a bracket
Step = tuple[Fraction, str, Fraction, Fraction]  # left, operator, right, result

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def decimal(text: str) -> Fraction:
    """The value of a decimal such as `-1,800.50`, `.5` or `5.`; commas and spaces between its digits do not count."""
    whole, _, places = text.replace(",", "").replace(" ", "").partition(".")
    return Fraction(int(f"{whole}{places}"), 10 ** len(places))


def evaluate(tokens: Sequence[Token], *, max_depth: int, signed: bool) -> tuple[Fraction, list[Step]] | None:
    """The value of a calculation and its operations in the order of evaluation; None if the tokens have no value.

    Brackets and signs nest to `max_depth` at most. Only with `signed` may a number or a bracket have a minus sign.
    The grammar: sum = product (+|- product)*; product = factor (*|/ factor)*; factor = number | (sum) | -factor.
    """
    waiting = list(reversed(tokens))
    steps: list[Step] = []

    def take(*symbols: str) -> str | None:
        """The next token, which is then read, if it is one of the symbols."""
        token = waiting[-1] if waiting else None
        return str(waiting.pop()) if isinstance(token, str) and token in symbols else None

    def chain(depth: int, part: Callable[[int], Fraction], *symbols: str) -> Fraction:
        left = part(depth)
        while symbol := take(*symbols):
            right = part(depth)
            result = _OPERATIONS[symbol](left, right)
            steps.append((left, symbol, right, result))
            left = result
        return left

    def factor(depth: int) -> Fraction:
        if waiting and isinstance(waiting[-1], Fraction):
            return Fraction(waiting.pop())
        if depth < max_depth and signed and take("-"):
            return -factor(depth + 1)
        if depth < max_depth and take("("):
            value = total(depth + 1)
            if take(")"):
                return value
        raise ArithmeticError

    def total(depth: int) -> Fraction:
        return chain(depth, lambda inner: chain(inner, factor, "*", "/"), "+", "-")

    try:
        value = total(0)
    except ArithmeticError:  # or a division by zero
        return None
    return None if waiting else (value, steps)
