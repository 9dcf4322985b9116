"""MATH-500 (Lightman et al. 2023, arXiv:2305.20050): 500 test problems of MATH, with MATH's training problems.

The test split is `path` (or `test_path`), which needs no other split. Training, validation and worked examples come
from `train_path`; an evaluation without them never touches it. Departure: the paper also trains on the 4,500 other test
problems of MATH, and this task does not.
"""

from typing import Annotated, Literal

from pydantic import Field

from ._data import SourceSplit
from .math import Math

TestSource = Annotated[str, Field(min_length=1, description="test: Hub id, or a local file or folder")]


class Math500(Math):
    """By default the Hub's `HuggingFaceH4/MATH-500` and `EleutherAI/hendrycks_math`."""

    name: Literal["math500"] = "math500"
    path: TestSource = "HuggingFaceH4/MATH-500"
    train_path: str = Field(
        default="EleutherAI/hendrycks_math",
        min_length=1,
        description="train and validation: Hub id, local file or folder",
    )

    def source(self, split: SourceSplit) -> tuple[str, str | None]:
        return (self.train_path, None) if split == "train" else super().source(split)
