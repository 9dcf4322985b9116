"""Draws the graphs of quantities with exact values behind `word_problems`, and decides when two are equal.

The only randomness is a function that returns uniform numbers in [0, 1).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple

Kind = Literal["fact", "packs", "more", "less", "times", "part", "both", "gap"]
OPERATORS: Mapping[Kind, str] = {
    "packs": "*", "more": "+", "less": "-", "times": "*", "part": "/", "both": "+", "gap": "-"
}  # fmt: skip
Value = int | Fraction  # whole numbers are int
Uniform = Callable[[], float]

_MAX_FACTOR = 5
_MAX_DENOMINATOR = 60


class Quantity(NamedTuple):
    """A fact, or an operation whose operands are earlier quantities (`sources`) and then `numbers`."""

    kind: Kind
    sources: tuple[int, ...]
    numbers: tuple[int, ...]
    value: Value


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a problem's numbers and of every value in it; values are positive."""

    min_number: int
    max_number: int
    max_value: int
    fractions: bool


def draw(depth: int, limits: Limits, uniform: Uniform) -> list[Quantity] | None:
    """A graph of `depth` operations, all of which its last quantity needs; None if the draw left the limits.

    A quantity that nothing uses yet is loose. An operation joins at most two, so when the operations left equal the
    loose quantities minus one, each has to join two.
    """
    graph: list[Quantity] = []
    loose: list[int] = []
    for left in range(depth, 0, -1):
        move = choose(_moves(left, len(loose), any_used=len(graph) > len(loose)), uniform)
        used = [i for i in range(len(graph)) if i not in loose] if move in ("branch", "share") else []
        if move in ("extend fact", "join fact"):
            graph.append(_fact(limits, uniform))
            loose.append(len(graph) - 1)
        if move == "packs":
            factor, number = between(2, _MAX_FACTOR, uniform), between(limits.min_number, limits.max_number, uniform)
            made = Quantity("packs", (), (factor, number), factor * number)
        elif move in ("extend", "extend fact", "branch"):
            made = _relate(choose(used if move == "branch" else loose, uniform), graph, limits, uniform)
        else:
            first = loose[-1] if move == "join fact" else choose(loose, uniform)
            others = used if move == "share" else [i for i in loose if i != first]
            made = _combine(first, choose(others, uniform), graph, uniform)
        if made is None or not _is_within(made.value, limits):
            return None
        loose = [i for i in loose if i not in made.sources] + [len(graph)]
        graph.append(made)
    return graph


def _moves(left: int, num_loose: int, any_used: bool) -> list[str]:
    """The moves that the next of `left` operations may make; likelier ones occur several times."""
    if num_loose - 1 == left:
        return ["join"]
    moves = ["extend", "extend", "extend", "join fact"] if num_loose else ["extend fact"] * 3
    if num_loose > 1:
        moves += ["join", "join"]
    if num_loose and any_used:
        moves += ["share"]
    if num_loose < left:
        moves += ["packs", "branch"] if any_used else ["packs"]
    return moves


def add(graph: Sequence[Quantity], limits: Limits, uniform: Uniform) -> Quantity:
    """One more quantity: a fact, or one that depends on a quantity of the graph."""
    related = _relate(int(uniform() * len(graph)), graph, limits, uniform) if graph and uniform() < 0.5 else None
    return related or _fact(limits, uniform)


def calculation(graph: Sequence[Quantity]) -> str:
    """A hash of the last quantity's calculation with its numbers, equal for equal calculations.

    The operands of sums and products have no order.
    """
    names: list[str] = []
    for quantity in graph:
        operands = [*(names[i] for i in quantity.sources), *map(str, quantity.numbers)]
        symbol = OPERATORS.get(quantity.kind, "")
        if symbol:
            parts = sorted(operands) if symbol in "+*" else operands
            names.append(hashlib.sha256(symbol.join(parts).encode()).hexdigest())
        else:
            names.append(operands[0])
    return names[-1]


def between(least: int, most: int, uniform: Uniform) -> int:
    """A number from `least` to `most`."""
    return least + int(uniform() * (most - least + 1))


def choose(items: Sequence[Any], uniform: Uniform) -> Any:
    """One of the items."""
    return items[int(uniform() * len(items))]


def _fact(limits: Limits, uniform: Uniform) -> Quantity:
    number = between(limits.min_number, limits.max_number, uniform)
    return Quantity("fact", (), (number,), number)


def _relate(source: int, graph: Sequence[Quantity], limits: Limits, uniform: Uniform) -> Quantity | None:
    """A quantity that depends on another and a number; each kind that stays within the limits is equally likely."""
    value = graph[source].value
    number, factor = between(limits.min_number, limits.max_number, uniform), between(2, _MAX_FACTOR, uniform)
    made: list[tuple[Kind, int, Value]] = [
        ("more", number, value + number),
        ("less", number, value - number),
        ("times", factor, value * factor),
    ]
    if value % factor == 0:
        made.append(("part", factor, value // factor))
    elif limits.fractions:  # making one is slow
        made.append(("part", factor, Fraction(value, factor)))
    within = [one for one in made if _is_within(one[2], limits)]
    if not within:
        return None
    kind, number, value = choose(within, uniform)
    return Quantity(kind, (source,), (number,), _whole(value))


def _combine(first: int, second: int, graph: Sequence[Quantity], uniform: Uniform) -> Quantity:
    """The sum of two quantities, or the larger one less the other."""
    if uniform() < 0.5:
        return Quantity("both", (first, second), (), _whole(graph[first].value + graph[second].value))
    if graph[first].value < graph[second].value:
        first, second = second, first
    return Quantity("gap", (first, second), (), _whole(graph[first].value - graph[second].value))


def _is_within(value: Value, limits: Limits) -> bool:
    return 0 < value <= limits.max_value and value.denominator <= (_MAX_DENOMINATOR if limits.fractions else 1)


def _whole(value: Value) -> Value:
    return value.numerator if value.denominator == 1 else value
