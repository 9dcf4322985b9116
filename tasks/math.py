r"""MATH (Hendrycks et al. 2021, arXiv:2103.03874): competition problems with a LaTeX answer.

A row has `problem` and either `solution`, a worked one with the answer in `\boxed{...}`, or `answer`, or both.
`tasks._latex` decides equality. A source with only a test split serves for evaluation; so does `test_path` beside
another `path`. `math500` is this task with MATH-500 as its test split.
"""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from . import _latex
from ._answers import AnswerFormat, stated, write
from ._data import BadRow, DatasetTask, DataSource, Problem, Row, text_field


class Math(DatasetTask):
    """By default the Hub's `EleutherAI/hendrycks_math`; `path` may be any source of rows in one of the schemas."""

    templates: ClassVar[Mapping[AnswerFormat, str]] = {
        "hash": "Problem: {question}\nReason step by step; end with #### and the answer.\nSolution:\n",
        "boxed": "Problem: {question}\nReason step by step; end with the answer in \\boxed{}.\nSolution:\n",
        "think_answer": "Problem: {question}\nReason step by step in <think>...</think>; then give the answer in "
        "<answer>...</answer>.\nSolution:\n",
    }

    name: Literal["math"] = "math"
    path: DataSource = "EleutherAI/hendrycks_math"
    answer_format: AnswerFormat = Field(default="boxed", description="how prompts ask for and solutions state answers")
    levels: tuple[Annotated[int, Field(ge=1, le=5)], ...] = Field(default=(), description="levels kept; all if empty")

    @property
    def max_completion_tokens(self) -> int:
        return 1024

    def parse_row(self, row: Row) -> Problem | None:
        level = _LEVEL.fullmatch(str(row.get("level")).strip())
        if self.levels:
            text = text_field(row, "level")
            if level is None:
                raise BadRow(f"field 'level' must be a number or 'Level' and a number, got {text!r}")
            if level[1] not in map(str, self.levels):
                return None
        question = text_field(row, "problem", "question")
        solution = None if row.get("solution") is None else text_field(row, "solution")
        boxed = next((text for text in stated(solution or "", "boxed") if self.read(text)), None)
        if row.get("answer") is not None or solution is None:
            answer = text_field(row, "answer", "solution")
        elif boxed is not None:
            answer = boxed
        else:
            raise BadRow(r"field 'solution' has no \boxed{...} answer with balanced braces, and there is no 'answer'")
        gold = _latex.canonical(answer)
        if len(gold) > _latex.MAX_CHARS:
            raise BadRow(f"the answer must have at most {_latex.MAX_CHARS} characters, got {len(gold)}")
        subject = str(row.get("subject") or row.get("type") or "").lower().replace("_", " ").replace("&", " and ")
        tags = [("subject", " ".join(subject.split()))]
        if level and level[1] != "?":  # MATH has a few problems of `Level ?`
            tags.insert(0, ("level", level[1]))
        worked = solution
        if solution and self.answer_format != "boxed":
            worked = write(self.answer_format, solution, " ".join(answer.split()))  # so that 3/4 stays a fraction
        elif solution and boxed is None:
            worked = write("boxed", solution, gold)
        return Problem(question, gold, worked, tuple((name, value) for name, value in tags if value))

    def read(self, text: str) -> str | None:
        return (_latex.canonical(text) or None) if len(text) <= _latex.MAX_CHARS else None

    def num_unparsable(self) -> int:
        return _latex.checker().counts["unparsable"]

    def allow_overruns(self, count: float | None) -> float:
        return _latex.checker().allow_overruns(count)

    def equivalent(self, answer: str, other: str) -> bool:
        return _latex.equivalent(answer, other)

    def is_answered(self, answer: str, question: str, gold: str | None) -> bool:
        return _latex.is_answered(answer, question, gold)


_LEVEL = re.compile(r"(?:level\s*)?(\d|\?)", re.I)
