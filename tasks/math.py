r"""MATH (Hendrycks et al. 2021, arXiv:2103.03874): competition problems with a LaTeX answer.

`tasks._math` describes the rows. A source with a test split alone serves evaluation; so does `test_path` beside another
`path`. `math500` is this task with MATH-500 as its test split.
"""

from typing import Literal

from pydantic import Field

from tasks._math import MathTask


class Math(MathTask):
    """By default the Hub's `EleutherAI/hendrycks_math`; `path` may be any source of rows in one of the schemas."""

    name: Literal["math"] = "math"
    path: str = Field("EleutherAI/hendrycks_math", min_length=1, description="Hub id, or a local file or folder")
