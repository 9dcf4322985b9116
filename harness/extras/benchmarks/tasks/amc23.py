"""AMC 2023: 40 competition problems (12A and 12B) whose answers are numbers.

A row has `question` and `answer`, such as 27.0. Training problems are MATH's.
"""

from typing import Literal

from .....tasks.math500 import Math500, TestSource


class AMC23(Math500):
    """By default the Hub's `math-ai/amc23`."""

    name: Literal["amc23"] = "amc23"
    path: TestSource = "math-ai/amc23"
