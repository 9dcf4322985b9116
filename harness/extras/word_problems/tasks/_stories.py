"""Draws the graphs of quantities behind `word_problems` and tells them as stories.

A graph has exact values, and decides when two problems are equal; a story writes sentences for its facts and relations,
for asides and for the question, and computes nothing. The only randomness is a function that returns uniform numbers in
[0, 1).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from .....tasks._numbers import spell

Kind = Literal["fact", "packs", "more", "less", "times", "part", "both", "gap"]
OPERATORS: Mapping[Kind, str] = {
    "packs": "*", "more": "+", "less": "-", "times": "*", "part": "/", "both": "+", "gap": "-"
}  # fmt: skip
Uniform = Callable[[], float]

MIN_NUMBER = 2  # of a fact or a difference
_MAX_FACTOR = 5
_MAX_DENOMINATOR = 60


class Quantity(NamedTuple):
    """A fact, or an operation whose operands are earlier quantities (`sources`) and then `numbers`."""

    kind: Kind
    sources: tuple[int, ...]
    numbers: tuple[int, ...]
    value: Fraction


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a problem's numbers and of every value in it; values are positive."""

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
            factor, number = between(2, _MAX_FACTOR, uniform), between(MIN_NUMBER, limits.max_number, uniform)
            made = Quantity("packs", (), (factor, number), Fraction(factor * number))
        elif move in ("extend", "extend fact", "branch"):
            made = _relate(choose(used if move == "branch" else loose, uniform), graph, limits, uniform)
        else:
            first = loose[-1] if move == "join fact" else choose(loose, uniform)
            second = choose(used if move == "share" else [i for i in loose if i != first], uniform)
            one, other = graph[first].value, graph[second].value
            if uniform() < 0.5:
                made = Quantity("both", (first, second), (), one + other)
            else:  # the larger one less the other
                made = Quantity("gap", (second, first) if one < other else (first, second), (), abs(one - other))
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
    number = between(MIN_NUMBER, limits.max_number, uniform)
    return Quantity("fact", (), (number,), Fraction(number))


def _relate(source: int, graph: Sequence[Quantity], limits: Limits, uniform: Uniform) -> Quantity | None:
    """A quantity that depends on another and a number; each kind that stays within the limits is equally likely."""
    value = graph[source].value
    number, factor = between(MIN_NUMBER, limits.max_number, uniform), between(2, _MAX_FACTOR, uniform)
    made: list[Quantity] = [
        Quantity("more", (source,), (number,), value + number),
        Quantity("less", (source,), (number,), value - number),
        Quantity("times", (source,), (factor,), value * factor),
        Quantity("part", (source,), (factor,), value / factor),
    ]
    within = [one for one in made if _is_within(one.value, limits)]
    return choose(within, uniform) if within else None


def _is_within(value: Fraction, limits: Limits) -> bool:
    return 0 < value <= limits.max_value and value.denominator <= (_MAX_DENOMINATOR if limits.fractions else 1)


FamilyName = Literal["things", "prices", "animals", "cooking", "trips"]


@dataclass(frozen=True, slots=True)
class Family:
    """The words of a family of stories, as `stories.yaml` explains them."""

    names: Sequence[str]
    things: Sequence[str]
    divisible: bool
    told: Mapping[Kind, str]
    asked: Mapping[str, str]
    asides: Sequence[str]


FAMILIES: Mapping[FamilyName, Family] = {
    name: Family(**{**words, "names": words["names"].split()})
    for name, words in yaml.safe_load(Path(__file__).with_name("stories.yaml").read_text("utf-8")).items()
}
_PARTS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}


def tell(
    family: Family, graph: Sequence[Quantity], distractors: int, limits: Limits, shuffled: bool, uniform: Uniform
) -> tuple[str, list[str]]:
    """The text of a problem, which asks for the last quantity of the graph, and the lines of its worked solution.

    A distractor is an irrelevant quantity, or an aside with a number.
    """
    asks_operation = graph[-1].kind in ("both", "gap") and uniform() < 0.5  # and so the last quantity has no name
    told = list(graph[:-1] if asks_operation else graph)
    num_asides = min(sum(uniform() < 0.5 for _ in range(distractors)), len(family.asides) * len(told))
    unused = [add(graph[:-1], limits, uniform) for _ in range(distractors - num_asides)]
    names = _shuffled(family.names[: None if len(told) + len(unused) > 26 else 26], uniform)
    things = choose(family.things, uniform)

    every = [_fill(family.told[q.kind], things, names, q, names[i]) for i, q in enumerate([*told, *unused])]
    sentences, extras = every[: len(told)], every[len(told) :]
    if shuffled:
        sentences = _shuffled(sentences, uniform)
    asides = [(aside, name) for aside in family.asides for name in names[: len(told)]]
    for _ in range(num_asides):
        aside, name = asides.pop(int(uniform() * len(asides)))  # none is told twice, with another number
        extras.append(aside.format(x=name, n=between(MIN_NUMBER, limits.max_number, uniform)))
    for extra in extras:
        sentences.insert(int(uniform() * (len(sentences) + 1)), extra)

    question = graph[-1].kind if asks_operation else "one"
    sentences.append(_fill(family.asked[question], things, names, graph[-1], names[len(told) - 1]))
    labels = [*names[: len(told)], "Answer"]
    steps: list[str] = []
    for label, (kind, sources, own, value) in zip(labels, graph, strict=False):
        if kind != "fact":  # the quantity, its formula in names and in numbers, its value: `Ben: Ana+3=4+3=7`
            formula = [*(labels[source] for source in sources), *map(str, own)]
            figures = [*(spell(graph[source].value) for source in sources), *map(str, own)]
            sides = OPERATORS[kind].join(formula), OPERATORS[kind].join(figures), spell(value)
            steps.append(f"{label}: {'='.join(dict.fromkeys(sides))}")  # 7/3 stands once
    return " ".join(sentences), steps


def _fill(template: str, things: str, names: Sequence[str], quantity: Quantity, name: str) -> str:
    y, z = [*(names[source] for source in quantity.sources), "", ""][:2]
    m, n = [0, 0, *quantity.numbers][-2:]
    times, part = "twice" if n == 2 else f"{n} times", _PARTS.get(n, "")
    return template.format(x=name, y=y, z=z, n=n, m=m, times=times, part=part, things=things)


def _shuffled(items: Sequence[str], uniform: Uniform) -> list[str]:
    return sorted(items, key=lambda _: uniform())
