"""A soft penalty for completions that come close to the token limit: 0 up to a buffer, then linear down to -1.

DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13, with L_max = the run's token limit and L_cache = a fraction of it (the
paper has 4,096 of 20,480). A completion cannot exceed the limit here; one that was cut gets -1. Its default weight is
0.5, because a right answer is worth 1 more than a wrong one here (1 / 0) and 2 more in the paper (1 / -1).
"""

from pydantic import Field

from ..data import GradedGroup
from ..interfaces import Reward


class Overlong(Reward):
    """0 for a short completion, then down to -1 over the last part of the token limit (DAPO)."""

    weight: float = Field(
        default=0.5, description="factor in the sum of all rewards; 0.5 with 1 / 0 equals the paper's 1 with 1 / -1"
    )
    buffer_fraction: float = Field(default=0.2, gt=0, le=1, description="share of the limit over which it grows")

    def score(self, group: GradedGroup) -> list[float]:
        buffer = self.buffer_fraction * group.max_tokens
        ends = zip(group.num_tokens, group.truncated, strict=True)
        return [-1.0 if cut else min(0.0, (group.max_tokens - buffer - tokens) / buffer) for tokens, cut in ends]
