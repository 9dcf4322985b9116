"""Generates chains of additions and subtractions: a task without data and downloads.

A prompt is `4+4+5+5-6=`, its worked solution `4+4=8;8+5=13;13+5=18;18-6=12#### 12` (or, by `answer_format`, with the
answer in a box or in tags); the running total is never negative. No problem occurs twice. All numbers of operands are
equally frequent as long as they have unused problems; few short chains exist, so their share is smaller. The hash of a
problem decides its split.
"""

import random
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ..harness.data import Demonstration, Prompt, Split
from ._answers import AnswerTask, write
from ._data import stable_fraction, stable_id

MAX_OPERAND = 9
CAPS = {"demonstrations": 20_000, "validation": 512, "test": 1024}  # problems of a part, at most
# Cumulative shares of the distinct problems, by hash; `demonstrations` are the cold start's.
_SHARES = (("demonstrations", 0.60), ("train", 0.85), ("validation", 0.90), ("test", 1.0))
REQUESTS = {  # of a chat model
    "hash": "End with #### and the number.",
    "boxed": "End with the number in \\boxed{}.",
    "think_answer": "Reason in <think>...</think>; then give the number in <answer>...</answer>.",
}
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
        return len(self._solution([MAX_OPERAND] * self.max_operands)) + 1 + _SLACK

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return _build(self)[split]  # pyright: ignore[reportArgumentType]

    def in_words(self, text: str) -> str:
        is_own = re.fullmatch(r"\d[-+\d]*=", text)
        return f"Compute {text.removesuffix('=')}. {REQUESTS[self.answer_format]}" if is_own else text

    def demonstrations(self) -> Sequence[Demonstration]:
        known = _build(self)["demonstrations"]  # pyright: ignore[reportArgumentType]
        return [Demonstration(p.text, self._solution(list(map(int, re.findall(r"[-+]?\d+", p.text))))) for p in known]

    def _solution(self, operands: Sequence[int]) -> str:
        totals = list(accumulate(operands))
        steps = [f"{totals[i - 1]}{operands[i]:+d}={totals[i]}" for i in range(1, len(operands))]
        return write(self.answer_format, ";".join(steps), str(totals[-1]), separator="")


@lru_cache(maxsize=4)  # a worker asks again for every run and turn
def _build(task: Any) -> dict[str, tuple[Prompt, ...]]:
    """Every part of an Arithmetic task; the same on every machine and in every process."""
    caps = {**CAPS, "train": task.num_train}
    parts: dict[str, list[Prompt]] = {part: [] for part in caps}
    for operands in _distinct(task):
        text = ("%+d" * len(operands) % operands).removeprefix("+") + "="
        position = stable_fraction(text)
        part = next(part for part, end in _SHARES if position < end)
        if len(parts[part]) < caps[part]:
            tags = (("operands", str(len(operands))),)
            parts[part].append(Prompt(stable_id(text), text, str(sum(operands)), tags))
            if all(len(parts[part]) == cap for part, cap in caps.items()):
                break
    return {part: tuple(prompts) for part, prompts in parts.items()}


def _distinct(task: Arithmetic) -> Iterator[tuple[int, ...]]:
    """Signed operands of distinct problems; a length with hardly any unused ones drops out, until no length is left.
    All is drawn by `Random.random`, whose sequence is the same in every version of Python."""
    uniform = random.Random(0).random
    lengths = list(range(task.min_operands, task.max_operands + 1))
    seen: set[tuple[int, ...]] = set()
    while lengths:
        length = lengths[int(uniform() * len(lengths))]
        for _ in range(_TRIES):
            operands: tuple[int, ...] = ()
            for position in range(length):
                operand, total = 1 + int(uniform() * MAX_OPERAND), sum(operands)
                is_taken_off = position and total >= operand and uniform() < 0.5  # the total is never negative
                operands += (-operand if is_taken_off else operand,)
            if operands not in seen:
                seen.add(operands)
                yield operands
                break
        else:
            lengths.remove(length)
