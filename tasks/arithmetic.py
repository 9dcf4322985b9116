"""Generates chains of additions and subtractions: a task without data and downloads.

A prompt is `4+4+5+5-6=`, its worked solution `4+4=8;8+5=13;13+5=18;18-6=12#### 12` (or, by `answer_format`, with the
answer in a box or in tags); the running total is never negative. No problem occurs twice. All numbers of operands are
equally frequent as long as they have unused problems; few short chains exist, so their share is smaller. The hash of a
problem decides its split.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Literal, Self

from pydantic import Field, model_validator

from ..harness.data import Demonstration, Prompt, Split
from . import _data, _formats
from ._answers import AnswerTask
from ._formats import AnswerFormat

MAX_OPERAND = 9
CAPS = {"demonstrations": 20_000, "validation": 512, "test": 1024}  # problems of a part, at most
# Cumulative shares of the distinct problems, by hash; `demonstrations` are the cold start's.
_SHARES = (("demonstrations", 0.60), ("train", 0.85), ("validation", 0.90), ("test", 1.0))
_Problem = tuple[str, tuple[int, ...]]  # its text and its operands, which are signed
_TRIES = 200  # draws of one length; if none is new, hardly any problem is left
_SLACK = 4  # tokens beyond the longest correct solution


class Arithmetic(AnswerTask):
    """Difficulty is the number of operands, which are from 1 to 9."""

    name: Literal["arithmetic"] = "arithmetic"
    min_operands: int = Field(default=3, ge=2, le=16, description="operands in the shortest chain")
    max_operands: int = Field(default=5, ge=2, le=16, description="operands in the longest chain")
    num_train: int = Field(default=8192, ge=1, le=100_000, description="problems for reinforcement learning, at most")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_operands > self.max_operands:
            raise ValueError(
                f"min_operands must not exceed max_operands ({self.max_operands}), got {self.min_operands}; "
                f"set max_operands to {self.min_operands} or more"
            )
        return self

    @property
    def max_completion_tokens(self) -> int:
        """Characters of the longest correct solution, one for the end of the sequence, and a little slack."""
        return len(_solution([MAX_OPERAND] * self.max_operands, self.answer_format)) + 1 + _SLACK

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return _prompts(self, split)  # pyright: ignore[reportArgumentType]

    def demonstrations(self) -> Sequence[Demonstration]:
        problems = _build(self)["demonstrations"]  # pyright: ignore[reportArgumentType]
        return [Demonstration(text, _solution(operands, self.answer_format)) for text, operands in problems]


@lru_cache(maxsize=16)  # a worker asks again for every run and turn
def _prompts(task: Arithmetic, split: Split) -> tuple[Prompt, ...]:
    return tuple(
        Prompt(_data.stable_id(text), text, str(sum(operands)), (("operands", str(len(operands))),))
        for text, operands in _build(task)[split]
    )


@lru_cache(maxsize=4)
def _build(task: Arithmetic) -> dict[str, tuple[_Problem, ...]]:
    """Every split of the task; the same on every machine and in every process."""
    caps = {**CAPS, "train": task.num_train}
    parts: dict[str, list[_Problem]] = {part: [] for part in caps}
    for problem in _distinct(task):
        position = _data.stable_fraction(problem[0])
        part = next(part for part, end in _SHARES if position < end)
        if len(parts[part]) < caps[part]:
            parts[part].append(problem)
            if all(len(parts[part]) == cap for part, cap in caps.items()):
                break
    return {part: tuple(problems) for part, problems in parts.items()}


def _distinct(task: Arithmetic) -> Iterator[_Problem]:
    """Distinct problems; a length with hardly any unused ones drops out, until no length is left.

    The only randomness is `Random.random`, whose sequence is the same in every version of Python.
    """
    uniform = random.Random(0).random
    lengths = list(range(task.min_operands, task.max_operands + 1))
    seen: set[tuple[int, ...]] = set()
    while lengths:
        length = lengths[int(uniform() * len(lengths))]
        for _ in range(_TRIES):
            operands = _draw(length, uniform)
            if operands not in seen:
                seen.add(operands)
                yield ("%+d" * length % operands).removeprefix("+") + "=", operands
                break
        else:
            lengths.remove(length)


def _draw(length: int, uniform: Callable[[], float]) -> tuple[int, ...]:
    """Signed operands whose running total is never negative."""
    operands: list[int] = []
    total = 0
    for position in range(length):
        operand = 1 + int(uniform() * MAX_OPERAND)
        if position and total >= operand and uniform() < 0.5:
            operand = -operand
        total += operand
        operands.append(operand)
    return tuple(operands)


def _solution(operands: Sequence[int], answer_format: AnswerFormat) -> str:
    totals = list(accumulate(operands))
    steps = [f"{totals[i - 1]}{operands[i]:+d}={totals[i]}" for i in range(1, len(operands))]
    return _formats.write(answer_format, ";".join(steps), str(totals[-1]), separator="")
