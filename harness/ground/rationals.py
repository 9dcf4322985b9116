"""Exact rationals from text: decimals, and calculations with `+ - * /` and brackets. No `eval`, nothing is rounded.

Each caller cuts its text into tokens by its own rules, and so decides how strict it is.
"""

import operator
from collections.abc import Callable, Sequence
from fractions import Fraction

Token = Fraction | str  # a number; an operator or a bracket
Step = tuple[Fraction, str, Fraction, Fraction]  # left, operator, right, result

_END = ""
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def decimal(text: str) -> Fraction:
    """The value of a decimal such as `-1,800.50`, `.5` or `5.`; commas and spaces between its digits do not count."""
    whole, _, places = text.replace(",", "").replace(" ", "").partition(".")
    return Fraction(int(f"{whole}{places}"), 10 ** len(places))


def evaluate(tokens: Sequence[Token], *, max_depth: int, signed: bool) -> tuple[Fraction, list[Step]] | None:
    """The value of a calculation and its operations in the order of evaluation; None if the tokens have no value.

    Brackets and signs nest to `max_depth` at most. Only with `signed` may a number or a bracket have a minus sign.
    """
    parser = _Parser(tokens, max_depth, signed)
    try:
        value = parser.sum(0)
    except ArithmeticError:  # that of the parser, or a division by zero
        return None
    return (value, parser.steps) if parser.position == len(tokens) else None


class _Parser:
    """sum = product (+|- product)*; product = factor (*|/ factor)*; factor = number | (sum) | -factor."""

    def __init__(self, tokens: Sequence[Token], max_depth: int, signed: bool):
        self.tokens = [*tokens, _END]
        self.max_depth = max_depth
        self.signed = signed
        self.position = 0
        self.steps: list[Step] = []

    def sum(self, depth: int) -> Fraction:
        return self.chain(depth, self.product, "+", "-")

    def product(self, depth: int) -> Fraction:
        return self.chain(depth, self.factor, "*", "/")

    def chain(self, depth: int, part: Callable[[int], Fraction], *symbols: str) -> Fraction:
        left = part(depth)
        while symbol := self.take(*symbols):
            right = part(depth)
            result = _OPERATIONS[symbol](left, right)
            self.steps.append((left, symbol, right, result))
            left = result
        return left

    def factor(self, depth: int) -> Fraction:
        token = self.tokens[self.position]
        if isinstance(token, Fraction):
            self.position += 1
            return token
        if depth >= self.max_depth:
            raise ArithmeticError
        if self.signed and self.take("-"):
            return -self.factor(depth + 1)
        if self.take("("):
            value = self.sum(depth + 1)
            if self.take(")"):
                return value
        raise ArithmeticError

    def take(self, *symbols: str) -> str | None:
        """The next token, which is then read, if it is one of the symbols."""
        token = self.tokens[self.position]
        if isinstance(token, Fraction) or token not in symbols:
            return None
        self.position += 1
        return token
