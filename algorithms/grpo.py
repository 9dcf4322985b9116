"""Credit goes to answers that beat the other answers to the same prompt; no critic.

Group Relative Policy Optimization with outcome supervision: Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300),
eq. 3 (clipped surrogate, mean over a completion's tokens, then over completions), eq. 4 (k3 KL to the frozen
reference in the loss), section 4.1.2 (advantage = reward standardised within its group). Departure: the standard
deviation uses G - 1 and a stated floor, where the paper gives neither.
"""

from __future__ import annotations

from typing import Literal

from algorithms._group import GroupRelative
from harness.types import GradedGroup


class GRPO(GroupRelative):
    """Group-standardised verifiable rewards, clipped surrogate, KL in the loss (DeepSeekMath)."""

    name: Literal["grpo"] = "grpo"

    def rewards(self, group: GradedGroup) -> list[float]:
        assert group.correct is not None
        return [float(correct) for correct in group.correct]
