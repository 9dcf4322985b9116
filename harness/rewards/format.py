"""Rewards a completion that follows the answer format of its prompt, by the task's format score.

With `answer_format: think_answer` each of the two tag pairs is worth a half (DeepSeek-R1, arXiv:2501.12948, section
2.2.2, names a format reward without figures); with `hash` and `boxed` the score is 1 with the marker, else 0.
"""

from pydantic import Field

from ..data import GradedGroup
from ..interfaces import Reward


class Format(Reward):
    """1 for a completion that keeps the answer format, 0.5 for one of its two tag pairs."""

    weight: float = Field(default=0.1, description="factor in the sum of all rewards; 0: measured, never rewarded")

    def score(self, group: GradedGroup) -> list[float]:
        return list(group.format_scores)
