"""AIME 2025: 30 competition problems (parts I and II) whose answers are whole numbers from 0 to 999.

A row has `problem` and `answer`. Training problems are MATH's.
"""

from typing import Literal

from .....tasks.math500 import Math500, TestSource


class AIME25(Math500):
    """By default the Hub's `math-ai/aime25`."""

    name: Literal["aime25"] = "aime25"
    path: TestSource = "math-ai/aime25"
