r"""CMATH (Wei et al. 2023, arXiv:2306.16636): word problems of Chinese elementary schools, grades 1 to 6.

A row has `question`, `golden` (the number) and `grade`. There is no training split: the development part
(`validation` on the Hub, also `dev` in a folder) is the training source, and validation is carved from it as elsewhere.
Rows have no worked solutions, so there are neither demonstrations nor worked examples.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from .....tasks._answers import AnswerFormat
from .....tasks._data import BadRow, DatasetTask, DataSource, Problem, Row, text_field

# "Problem: ... Solution:", with an instruction in between.
_FRAME = "\u95ee\u9898\uff1a{{question}}\n{}\n\u89e3\u7b54\uff1a\n"


class CMATH(DatasetTask):
    """By default the Hub's `weitianwen/cmath`; `path` may be any source of rows in its schema."""

    templates: ClassVar[Mapping[AnswerFormat, str]] = {
        # "Please reason step by step, and end with #### and the number of the answer."
        "hash": _FRAME.format(
            "\u8bf7\u4e00\u6b65\u4e00\u6b65\u5730\u63a8\u7406\uff0c\u6700\u540e\u5199\u51fa####\u548c\u7b54\u6848\u7684\u6570\u5b57\u3002"
        ),
        # "Please reason step by step, and end with the number of the answer in \boxed{}."
        "boxed": _FRAME.format(
            "\u8bf7\u4e00\u6b65\u4e00\u6b65\u5730\u63a8\u7406\uff0c\u6700\u540e\u628a\u7b54\u6848\u7684\u6570\u5b57\u5199\u5728\\boxed{}\u4e2d\u3002"
        ),
        # "Please reason step by step in <think>...</think>, then write the answer's number in <answer>...</answer>."
        "think_answer": _FRAME.format(
            "\u8bf7\u5728<think>...</think>\u4e2d\u4e00\u6b65\u4e00\u6b65\u5730\u63a8\u7406\uff0c"
            "\u7136\u540e\u628a\u7b54\u6848\u7684\u6570\u5b57\u5199\u5728<answer>...</answer>\u4e2d\u3002"
        ),
    }
    train_words: ClassVar[tuple[str, ...]] = ("train", "dev", "validation")

    name: Literal["cmath"] = "cmath"
    path: DataSource = "weitianwen/cmath"

    def parse_row(self, row: Row) -> Problem:
        question, stated = text_field(row, "question"), text_field(row, "golden")
        gold = self.read(stated)
        if gold is None:
            raise BadRow(f"field 'golden' must be a number, got {stated[:40]!r}")
        grade = str(row.get("grade") or "").strip()
        return Problem(question, gold, None, (("grade", grade),) if grade else ())
