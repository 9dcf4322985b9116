"""Credit for every correct calculation in the text: a verifiable substitute for a process reward model.

DeepSeekMath, Shao et al. 2024 (arXiv:2402.03300, section 4.1.3) scores the steps of a completion and turns the scores
into per-token advantages. Here a step is a calculation such as `48/2=24` or `<<48/2=24>>`, and its score says whether
it holds (`harness.rewards._calculations`).
"""

from collections.abc import Mapping, Sequence
from math import nan

from pydantic import Field

from ..data import GradedGroup
from ..interfaces import StepReward
from ._calculations import calculations


class Process(StepReward):
    """One value for a calculation that holds and another for one that does not, each at its end."""

    right: float = Field(default=1.0, description="value for a correct calculation")
    wrong: float = Field(default=0.0, description="value for a wrong calculation")

    def steps(self, group: GradedGroup) -> list[list[tuple[int, float]]]:
        return [
            [(end, self.right if holds else self.wrong) for end, holds in calculations(text)]
            for text in group.completions
        ]

    def metrics(self, group: GradedGroup, scores: Sequence[float]) -> Mapping[str, float]:
        """Calculations per completion, and the share of them that hold (NaN without any)."""
        checked = [holds for text in group.completions for _, holds in calculations(text)]
        return {
            "process/calculations": len(checked) / len(group.completions),
            "process/right": checked.count(True) / len(checked) if checked else nan,
        }
