r"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): grade-school word problems with a number as the answer.

A row has `question` and `answer`, the latter a worked rationale that ends in `#### 72`. Answers are compared as exact
rationals, however they are written; see `tasks._numbers`.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from tasks import _numbers
from tasks._data import BadRow, DatasetTask, Problem, Row, text_field

_CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")


class GSM8K(DatasetTask):
    """By default the Hub's `openai/gsm8k`; `path` may be any source of rows in its schema."""

    name: Literal["gsm8k"] = "gsm8k"
    path: str = Field("openai/gsm8k", min_length=1, description="Hub id, or a local file or folder")
    config: str | None = Field("main", description="Hub configuration, or subfolder if there is one of that name")
    template: str = Field(
        "Question: {question}\nReason step by step; end with #### and the number.\nAnswer:\n",
        description="the prompt; {question} stands for the problem",
    )
    keep_calculator_marks: bool = Field(default=False, description="keep <<48/2=24>> in the worked solutions")

    @property
    def max_completion_tokens(self) -> int:
        return 512

    def parse_row(self, row: Row) -> Problem:
        question, answer = text_field(row, "question"), text_field(row, "answer")
        rationale, marker, _ = answer.rpartition("####")
        gold = self.extract(answer) if marker else None
        if gold is None:
            raise BadRow(f"field 'answer' must end in '#### ' and a number, got ...{answer[-40:]!r}")
        if not self.keep_calculator_marks:
            rationale = _CALCULATOR_MARK.sub("", rationale)
        return Problem(question, gold, f"{rationale.rstrip()}\n#### {gold}" if rationale.strip() else None)

    def extract(self, completion: str) -> str | None:
        r"""The number after the last `####`, or else in the last `\boxed{...}`."""
        marked = _numbers.after_marker(completion)
        stated = None if marked is None else _numbers.canonical(marked)
        if stated is None:
            boxed = _numbers.last_boxed(completion)
            stated = None if boxed is None else _numbers.canonical(boxed)
        return stated

    def equivalent(self, answer: str, other: str) -> bool:
        return answer == other or _numbers.equal(answer, other)
