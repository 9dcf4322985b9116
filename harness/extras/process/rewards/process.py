"""Credit for every correct calculation in the text: a verifiable substitute for a process reward model.

DeepSeekMath, Shao et al. 2024 (arXiv:2402.03300, section 4.1.3) scores the steps of a completion and turns the scores
into per-token advantages. Here a step is a calculation such as `48/2=24` or `<<48/2=24>>`, and its score says whether
it holds.

A calculation is an expression with at least one operator, `=`, and a number: `(1+2) x 3 = 9`, `$5 * 4 = $20`. In a
chain `2+3=5*2=10` each `=` closes a calculation, which begins after the `=` before it. Numbers may have thousands
separators and decimals, a currency sign before and a percent sign (one hundredth) behind. A result holds if it is
exact, or if it has decimals and is the exact value rounded to them. Time is linear in the text: one pass cuts it into
runs of such characters and skips a long one, and brackets nest to a bounded depth.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import nan

from ....base.rationals import Token, decimal, evaluate
from ....data import GradedGroup
from ....interfaces import StepReward

MAX_CHARS = 400  # of one run of calculations
MAX_DIGITS = 30  # of one number
MAX_DEPTH = 10  # of nested brackets
MAX_CALCULATIONS = 200  # per completion; later ones are not checked

_OPERATORS = {"+": "+", "-": "-", "*": "*", "/": "/", "x": "*", "X": "*", "\u00d7": "*", "\u00f7": "/", "\u2212": "-",
              "\u00b7": "*"}  # fmt: skip
_RUN = re.compile(r"[-+*/xX=()$%.,\d \u00d7\u00f7\u2212\u00b7\u20ac\u00a3]+")
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_QUANTITY = rf"[$\u20ac\u00a3]?(?P<number>{_NUMBER})(?P<percent>\s?%)?"
_TOKEN = re.compile(rf"\s*(?:{_QUANTITY}|(?P<symbol>[-+*/xX()\u00d7\u00f7\u2212\u00b7]))")
_RESULT = re.compile(rf"\s*(?P<sign>[-\u2212]?)\s*{_QUANTITY}")


class Process(StepReward):
    """1 for a calculation that holds and 0 for one that does not, each at its end."""

    def steps(self, group: GradedGroup) -> list[list[tuple[int, float]]]:
        return [[(end, float(holds)) for end, holds in calculations(t)] for t in group.completions]

    def metrics(self, group: GradedGroup, scores: Sequence[float]) -> Mapping[str, float]:
        """Calculations per completion, and the share of them that hold (NaN without any)."""
        checked = [holds for text in group.completions for _, holds in calculations(text)]
        return {
            "process/calculations": len(checked) / len(group.completions),
            "process/right": checked.count(True) / len(checked) if checked else nan,
        }


@lru_cache(maxsize=1024)
def calculations(text: str) -> tuple[tuple[int, bool], ...]:
    """(position just after it, whether it holds) for each calculation in the text, in order."""
    found: list[tuple[int, bool]] = []
    for run in _RUN.finditer(text):
        if "=" not in run[0] or run.end() - run.start() > MAX_CHARS:
            continue
        continues = run.start() > 0 and _continues(text[run.start() - 1], run[0])
        found += [(run.start() + end, holds) for end, holds in _in_run(run[0], continues)]
        if len(found) >= MAX_CALCULATIONS:
            break
    return tuple(found[:MAX_CALCULATIONS])


def _continues(before: str, run: str) -> bool:
    """Whether the run is the rest of something that is no number, such as `y + 3 + 4 = 9` after its `y`."""
    return (before.isalnum() or before in "_)]}'") and (run[0] != " " or run.lstrip()[:1] in _OPERATORS)


def _in_run(run: str, continues: bool) -> Iterator[tuple[int, bool]]:
    sides = run.split("=")
    start = 0
    for place, (left, right) in enumerate(itertools.pairwise(sides)):
        start += len(left) + 1
        result = _RESULT.match(right)
        value = None if continues and place == 0 else _value(left)
        if result is not None and value is not None:
            yield start + result.end(), _holds(value, result) or value == _value(right)


def _holds(value: Fraction, result: re.Match[str]) -> bool:
    stated = -_quantity(result) if result["sign"] else _quantity(result)
    if value == stated:
        return True
    places = len(result["number"].partition(".")[2]) + (2 if result["percent"] else 0)
    return "." in result["number"] and abs(value - stated) <= Fraction(1, 2 * 10**places)


def _value(side: str) -> Fraction | None:
    """The value of the longest expression with an operator that ends the text, None without one.

    `costs 5. 3 + 4` ends in `3 + 4`: the front that cannot be part of it is cut off.
    """
    tokens: list[Token] = []
    position = 0
    while position < len(side):
        match = _TOKEN.match(side, position)
        if match is None:  # a stray point, comma, space or currency sign: the expression begins after it
            tokens = [] if side[position:].strip() else tokens
            position += 1
            continue
        if match["symbol"]:
            tokens.append(_OPERATORS.get(match["symbol"], match["symbol"]))
        elif len(match["number"]) > MAX_DIGITS:
            return None
        else:
            if tokens and isinstance(tokens[-1], Fraction):  # two numbers in a row: a list before the calculation
                tokens = []
            tokens.append(_quantity(match))
        position = match.end()
    while tokens and tokens[0] in ("*", "/", ")", "+"):
        tokens = tokens[1:]  # a bullet, or the end of something else
    has_operator = any(token in ("+", "-", "*", "/") for token in tokens[1:])
    evaluated = evaluate(tokens, max_depth=MAX_DEPTH, signed=True) if has_operator else None
    return None if evaluated is None else evaluated[0]


def _quantity(match: re.Match[str]) -> Fraction:
    return decimal(match["number"]) / (100 if match["percent"] else 1)
