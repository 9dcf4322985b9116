"""Credit goes to answers that beat their group; an answer is kept or dropped as a whole when the policy has moved.

Group Sequence Policy Optimization: Zheng et al. 2025 (arXiv:2507.18071), eq. 5 (clipped surrogate on a ratio of the
sequence, mean over completions), eq. 6 (GRPO's standardised advantage), eq. 7 (the ratio: geometric mean of the token
ratios). It has the paper's GSPO-token form (section 4.3): each token carries the value of its sequence's ratio and the
gradient of its own log-prob. Value, clip and gradient equal those of eq. 5 if all tokens of a row share one advantage,
and process rewards are credited as in GRPO. Departures: the standard deviation has GRPO's G - 1 and floor. No KL by
default, as in eq. 5; one in the loss can be set.
"""

from typing import Literal

from pydantic import Field

from ..harness.data import Batch, PolicyOutput, Tensor
from ._losses import row_log_ratio
from ._surrogate import Clip, GroupStandardised


class GSPO(Clip, GroupStandardised):
    """GRPO whose ratio and clip belong to the whole completion (GSPO)."""

    objective = {
        "clip": "ratio of each row (geometric mean of its tokens'), 1 - clip_epsilon to 1 + clip_epsilon_high, "
        "at most ratio_bound",
    }

    name: Literal["gspo"] = "gspo"
    clip_epsilon: float = Field(default=3e-4, gt=0, lt=1, description="how far a completion's ratio may fall below 1")
    clip_epsilon_high: float | None = Field(default=4e-4, gt=0, description="ratio's rise above 1; null: clip_epsilon")

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        num_tokens_B1 = batch.completion_mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        row_ratio_B1 = (row_log_ratio(batch, policy).detach() / num_tokens_B1).exp()
        ratio_BT = row_ratio_B1 * (policy.logprobs_BT - policy.logprobs_BT.detach()).exp()
        return self.total(batch, policy, *self.clipped(ratio_BT, batch))
