"""OlympiadBench (He et al. 2024, arXiv:2402.14008): its English mathematics problems with an open answer and no image.

A row has `question` and `final_answer`, a list; several answers are one, with commas between. Training problems are
MATH's. Departure: the paper accepts numbers within a tolerance, and this task accepts equal ones (`tasks._latex`).
"""

from typing import Literal

from .....tasks._data import BadRow, Problem, Row
from .....tasks.math500 import Math500, TestSource


class OlympiadBench(Math500):
    """By default the Hub's `math-ai/olympiadbench`."""

    name: Literal["olympiadbench"] = "olympiadbench"
    path: TestSource = "math-ai/olympiadbench"

    def parse_row(self, row: Row) -> Problem | None:
        if "final_answer" not in row:
            return super().parse_row(row)
        answers = row["final_answer"]
        if not isinstance(answers, list) or not answers:
            raise BadRow(f"field 'final_answer' must be a list of answers, got {answers!r:.40}")
        whole = ", ".join(str(answer).strip().strip("$") for answer in answers)
        return super().parse_row({**row, "answer": whole, "solution": None})
