"""A small reward for longer reasoning, paid only where the answer format holds: min(characters / 1000, 1).

Length is counted in characters of the reasoning, without the answer, so that it means the same for every tokenizer. A
policy can collect it by padding; the `repetition` penalty is its counterweight.
"""

from pydantic import Field

from ..data import GradedGroup
from ..interfaces import Reward

SATURATION_CHARS = 1000


class ReasoningLength(Reward):
    """min(characters of reasoning / 1000, 1) if the answer format holds, else 0."""

    weight: float = Field(default=0.01, description="factor in the sum of all rewards; 0: measured, never rewarded")

    def score(self, group: GradedGroup) -> list[float]:
        return [
            min(chars / SATURATION_CHARS, 1.0) if kept == 1.0 else 0.0
            for chars, kept in zip(group.reasoning_chars, group.format_scores, strict=True)
        ]
