"""Minerva's OCW problems (Lewkowycz et al. 2022, arXiv:2206.14858): 272 of undergraduate science, with short answers.

A row has `question` and `answer`, a number or an expression. Training problems are MATH's. Departure: the paper accepts
numbers within a tolerance, and this task accepts equal ones (`tasks._latex`).
"""

from typing import Literal

from .....tasks.math500 import Math500, TestSource


class MinervaMath(Math500):
    """By default the Hub's `math-ai/minervamath`."""

    name: Literal["minerva_math"] = "minerva_math"
    path: TestSource = "math-ai/minervamath"
