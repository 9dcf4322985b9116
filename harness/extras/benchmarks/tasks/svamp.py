"""SVAMP (Patel et al. 2021, arXiv:2103.07191): short word problems that are variations, with a number as the answer.

A row has `Body` and `Question` (or `question_concat`), `Answer`, `Equation` such as `( 8.0 - 2.0 )`, and `Type`. The
worked solution is the equation, one operation a line (`8 - 2 = 6`), if it can be read and gives the answer.
"""

import re
from fractions import Fraction
from typing import Literal

from .....tasks._answers import write
from .....tasks._data import BadRow, DatasetTask, DataSource, Problem, Row, text_field
from .....tasks._numbers import spell
from ....base import rationals

MAX_EQUATION_CHARS = 200


class SVAMP(DatasetTask):
    """By default the Hub's `ChilleD/SVAMP`; `path` may be any source of rows in its schema."""

    name: Literal["svamp"] = "svamp"
    path: DataSource = "ChilleD/SVAMP"

    def parse_row(self, row: Row) -> Problem:
        if row.get("Body") is None and row.get("question_concat") is not None:
            question = text_field(row, "question_concat")
        else:
            question = f"{text_field(row, 'Body', 'question_concat')} {text_field(row, 'Question')}"
        answer = text_field(row, "Answer")
        gold = self.read(answer)
        if gold is None:
            raise BadRow(f"field 'Answer' must be a number, got {answer[:40]!r}")
        steps, value = _worked(str(row.get("Equation") or ""))
        is_right = value is not None and spell(value) == gold
        solution = write(self.answer_format, "\n".join(steps), gold) if steps and is_right else None
        kind = " ".join(str(row.get("Type") or "").lower().split())
        return Problem(question, gold, solution, (("type", kind),) if kind else ())


def _worked(equation: str) -> tuple[list[str], Fraction | None]:
    """The operations of an equation in the order of their evaluation, and its value; None for an invalid equation."""
    tokens = _TOKEN.findall(equation)
    if len(equation) > MAX_EQUATION_CHARS or "".join(tokens) != "".join(equation.split()):
        return [], None
    numbers = [rationals.decimal(token) if token[0].isdigit() else token for token in tokens]
    evaluated = rationals.evaluate(numbers, max_depth=MAX_EQUATION_CHARS, signed=False)
    if evaluated is None:
        return [], None
    value, steps = evaluated
    return [f"{spell(left)} {symbol} {spell(right)} = {spell(result)}" for left, symbol, right, result in steps], value


_TOKEN = re.compile(r"\d+(?:\.\d+)?|[-+*/()]")
