"""Generates grade-school problems in plain English, with irrelevant facts and worked steps.

A problem is a graph of quantities, told as a story (`_stories.py`). Each is a fact or one operation on earlier
quantities, and several later ones may use it; `depth` counts the operations, and the answer needs every one. A story
also tells some irrelevant facts, and asks for the last quantity. A worked solution has one line for each operation,
such as `Ben: Ana+3=4+3=7`. All values are exact.

Two problems are the same if they have the same calculation with the same numbers: words, irrelevant facts and the order
of summands or factors do not count. None occurs twice in a split, and its hash decides the split. So no two splits
share a problem, for any number of problems and any depths of the test split.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from .....tasks._answers import QuestionTask, write
from .....tasks._data import Problem, stable_fraction, stable_id
from .....tasks._numbers import spell
from ....data import Demonstration, Prompt, Split
from . import _stories
from ._stories import FAMILIES, MIN_NUMBER, FamilyName, Limits

NUM_VALIDATION = 512  # problems, at most
NUM_TEST = 1024
_SHARES: Mapping[Split, tuple[float, float]] = {"train": (0.0, 0.7), "validation": (0.7, 0.8), "test": (0.8, 1.0)}
_TRIES = 400  # draws of one depth; if none is new, hardly any problem of it is left
_SLACK = 4  # tokens beyond the longest correct solution


class WordProblems(QuestionTask):
    """Difficulty is depth, the size of the numbers and the irrelevant facts; `test_` settings change the test split.

    Every problem of the training split is a worked solution of the cold start.
    """

    name: Literal["word_problems"] = "word_problems"
    min_depth: int = Field(default=2, ge=1, le=20, description="operations of the shortest problems")
    max_depth: int = Field(default=8, ge=1, le=20, description="operations of the longest problems")
    test_min_depth: int | None = Field(
        default=None, ge=1, le=20, description="min_depth of the test split; default: same"
    )
    test_max_depth: int | None = Field(
        default=None, ge=1, le=20, description="max_depth of the test split; default: same"
    )
    families: tuple[FamilyName, ...] = Field(
        default=get_args(FamilyName), min_length=1, description="what the stories are about"
    )
    max_number: int = Field(default=20, ge=2, le=999, description="largest number of a fact or a difference")
    max_value: int = Field(default=1000, ge=2, le=100_000, description="largest value on the way to an answer")
    max_distractors: int = Field(default=2, ge=0, le=8, description="irrelevant facts in a problem, at most")
    fractions: bool = Field(default=False, description="values may be fractions where the family's things divide")
    shuffled: bool = Field(default=False, description="tell the quantities in any order, not as they are worked out")
    num_train: int = Field(default=8192, ge=1, le=100_000, description="training problems, at most")

    @model_validator(mode="after")
    def _no_range_is_empty(self) -> Self:
        ranges = {
            ("min_depth", "max_depth"): (self.min_depth, self.max_depth),
            ("test_min_depth", "test_max_depth"): self.depths("test"),
            ("max_number", "max_value"): (self.max_number, self.max_value),
        }
        for (low, high), (least, most) in ranges.items():
            if least > most:
                raise ValueError(f"{low} must not exceed {high} ({most}), got {least}; set {high} to {least} or more")
        return self

    @property
    def max_completion_tokens(self) -> int:
        """A bound on the characters of a correct solution, one for the end of the sequence, and a little slack."""
        name = max(len(name) for family in self.families for name in FAMILIES[family].names)
        value = len(str(self.max_value)) + (5 if self.fractions else 0)  # 59999/60
        lines = max(self.max_depth, self.depths("test")[1]) * (3 * name + 3 * value + len(": +=+=\n"))
        return lines + len(write(self.answer_format, "", "9" * value)) + 1 + _SLACK

    def depths(self, split: Split) -> tuple[int, int]:
        """The fewest and the most operations of a problem of the split."""
        if split != "test":
            return self.min_depth, self.max_depth
        return self.test_min_depth or self.min_depth, self.test_max_depth or self.max_depth

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [
            Prompt(stable_id(p.question), self.fill(p.question), p.answer, p.tags, p.family)
            for p in self._problems(split)
        ]

    def demonstrations(self) -> Sequence[Demonstration]:
        return [
            Demonstration(self.fill(p.question), write(self.answer_format, p.solution or "", p.answer))
            for p in self._problems("train")
        ]

    def _problems(self, split: Split) -> Sequence[Problem]:
        plain = self.model_copy(update={"answer_format": "hash", "template": ""})  # formats share their problems
        problems = _drawn(plain, split)  # pyright: ignore[reportArgumentType] (frozen models are hashable)
        if not problems:
            least, most = self.depths(split)
            raise ValueError(
                f"word_problems: depth {least} to {most} with numbers from {MIN_NUMBER} to {self.max_number} and "
                f"values up to {self.max_value} makes too few distinct problems for a {split} split; raise "
                "task.max_number or task.max_value"
            )
        return problems


@lru_cache(maxsize=6)
def _drawn(task: WordProblems, split: Split) -> tuple[Problem, ...]:
    count = {"train": task.num_train, "validation": NUM_VALIDATION, "test": NUM_TEST}[split]
    return tuple(islice(draw(task, split), count))


def draw(task: WordProblems, split: Split) -> Iterator[Problem]:
    """Problems of a split until no depth has a new one, the same on every machine; their solutions are only the steps.

    The only randomness is `Random.random`, whose sequence is the same in every version of Python.
    """
    uniform = random.Random(f"{split} 0").random
    least, most = task.depths(split)
    depths, seen = list(range(least, most + 1)), set[str]()
    start, end = _SHARES[split]
    while depths:
        depth = depths[int(uniform() * len(depths))]
        for _ in range(_TRIES):
            family = task.families[int(uniform() * len(task.families))]
            limits = Limits(task.max_number, task.max_value, task.fractions and FAMILIES[family].divisible)
            graph = _stories.draw(depth, limits, uniform)
            if graph is None or len(graph) + task.max_distractors > len(FAMILIES[family].names):
                continue
            key = _stories.calculation(graph)
            if key in seen or not start <= stable_fraction(key) < end:
                continue
            seen.add(key)
            distractors = int(uniform() * (task.max_distractors + 1))
            question, steps = _stories.tell(FAMILIES[family], graph, distractors, limits, task.shuffled, uniform)
            tags = ("depth", str(depth)), ("family", family), ("distractors", str(distractors))
            yield Problem(question, spell(graph[-1].value), "\n".join(steps), tags, family)
            break
        else:
            depths.remove(depth)
