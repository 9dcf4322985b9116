"""AIME 2024: 30 competition problems (parts I and II) whose answers are whole numbers from 0 to 999.

A row has `problem` and either `solution` with the boxed answer, or `answer`. Training problems are MATH's.
"""

from typing import Literal

from .....tasks.math500 import Math500, TestSource


class AIME24(Math500):
    """By default the Hub's `math-ai/aime24`."""

    name: Literal["aime24"] = "aime24"
    path: TestSource = "math-ai/aime24"
