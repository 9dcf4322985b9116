r"""MATH (Hendrycks et al. 2021, arXiv:2103.03874) and MATH-500 (Lightman et al. 2023, arXiv:2305.20050): competition
problems with a LaTeX answer.

A row has `problem` and either `solution`, a worked one with the answer in `\boxed{...}`, or `answer`, or both. A source
with a test split alone, such as MATH-500, serves evaluation; so does `test_path` beside another `path`. Equality is
that of mathematics; see `tasks._latex`.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Annotated, Literal

from pydantic import Field, field_validator

from tasks import _latex, _numbers
from tasks._data import BadRow, DatasetTask, Problem, Row, text_field

SUBJECTS = (
    "algebra",
    "counting and probability",
    "geometry",
    "intermediate algebra",
    "number theory",
    "prealgebra",
    "precalculus",
)


class Math(DatasetTask):
    """By default the Hub's `EleutherAI/hendrycks_math`; `path` may be any source of rows in one of the schemas."""

    name: Literal["math"] = "math"
    path: str = Field("EleutherAI/hendrycks_math", min_length=1, description="Hub id, or a local file or folder")
    template: str = Field(
        "Problem: {question}\nReason step by step; end with the answer in \\boxed{}.\nSolution:\n",
        description="the prompt; {question} stands for the problem",
    )
    levels: tuple[Annotated[int, Field(ge=1, le=5)], ...] = Field((), description="difficulties kept; all if empty")
    subjects: tuple[str, ...] = Field((), description="subjects kept; all if empty")

    @field_validator("subjects")
    @classmethod
    def _known(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        names = tuple(_subject(value) for value in values)
        for name in names:
            if name not in SUBJECTS:
                near = get_close_matches(name, SUBJECTS, n=1)
                hint = f"did you mean '{near[0]}'? " if near else ""
                raise ValueError(f"unknown subject '{name}'; {hint}subjects: {', '.join(SUBJECTS)}")
        return names

    @property
    def max_completion_tokens(self) -> int:
        return 1024

    def parse_row(self, row: Row) -> Problem | None:
        if self.levels and _level(row) not in self.levels:
            return None
        if self.subjects and _subject(text_field(row, "subject", "type")) not in self.subjects:
            return None
        question = text_field(row, "problem", "question")
        solution = None if row.get("solution") is None else text_field(row, "solution")
        stated = None if solution is None else self.extract(solution)
        if row.get("answer") is not None or solution is None:
            gold = _latex.canonical(text_field(row, "answer", "solution"))
        elif stated is not None:
            gold = stated
        else:
            raise BadRow(r"field 'solution' has no \boxed{...} answer with balanced braces, and there is no 'answer'")
        if len(gold) > _latex.MAX_CHARS:
            raise BadRow(f"the answer must have at most {_latex.MAX_CHARS} characters, got {len(gold)}")
        if solution is not None and stated is None:
            solution = f"{solution}\n\\boxed{{{gold}}}"
        return Problem(question, gold, solution)

    def extract(self, completion: str) -> str | None:
        r"""What the last `\boxed{...}` holds, or else the rest of the line after the last `####`."""
        stated = _numbers.last_boxed(completion)
        if stated is None:
            stated = _numbers.after_marker(completion)
        if not stated or len(stated) > _latex.MAX_CHARS:
            return None
        return _latex.canonical(stated) or None

    def equivalent(self, answer: str, other: str) -> bool:
        return _latex.equivalent(answer, other)


def _subject(text: str) -> str:
    return " ".join(text.lower().replace("_", " ").replace("&", " and ").split())


def _level(row: Row) -> int:
    """The difficulty in a row's `level`, a number or `Level 3`; 0 for `Level ?`, which MATH has."""
    text = text_field(row, "level")
    match = re.fullmatch(r"(?:level\s*)?(\d|\?)", text, re.I)
    if match is None:
        raise BadRow(f"field 'level' must be a number or 'Level' and a number, got {text!r}")
    return 0 if match[1] == "?" else int(match[1])
