r"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): grade-school word problems with a number as the answer.

A row has `question` and `answer`, a number or a worked rationale that ends in `#### 72`; its calculator marks
(`<<48/2=24>>`) are left out. Answers are compared as exact rationals, however they are written (`tasks._numbers`).
"""

import re
from typing import Literal

from pydantic import Field

from ._answers import first_readable, stated, write
from ._data import BadRow, DatasetTask, DataSource, Problem, Row, text_field
from ._numbers import canonical

_CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")


class GSM8K(DatasetTask):
    """By default the Hub's `openai/gsm8k`; `path` may be any source of rows in its schema."""

    name: Literal["gsm8k"] = "gsm8k"
    path: DataSource = "openai/gsm8k"
    config: str | None = Field(default="main", description="Hub configuration, or subfolder where one has that name")

    def parse_row(self, row: Row) -> Problem:
        question, answer = text_field(row, "question"), text_field(row, "answer")
        rationale, marker, _ = answer.rpartition("####")
        marked, whole = first_readable(stated(answer, "hash"), self.read), canonical(answer, prose=False)
        gold = marked if marker else whole
        if gold is None:
            raise BadRow(f"field 'answer' must be a number, or end in '#### ' and a number, got ...{answer[-40:]!r}")
        rationale = _CALCULATOR_MARK.sub("", rationale).rstrip()
        return Problem(question, gold, write(self.answer_format, rationale, gold) if rationale else None)
