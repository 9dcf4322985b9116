"""Credit goes to tokens that the policy finds likelier once it has read a right answer of the same group.

Self-distillation policy optimization: Huebotter et al. 2026 (SDPO, arXiv:2601.20802): the policy with a success of its
group in its context is its own teacher, whose next tokens it learns without that context. Each completion is scored
after the first success of its group that is not itself; one without gets no credit. A_t = log p(t | success) - log p(t)
is the negative one-sample estimate of the reverse KL of this token, without gradient to the teacher. For weak models
the paper mixes in GRPO's advantage: `outcome_share`.

Departures: the KL is of sampled tokens alone (the paper's main runs: of the teacher's most likely tokens, or a
Jensen-Shannon divergence); the teacher is the policy of this step itself, neither averaged nor held near the start; its
context is the question, the success and the question again, as a worked example, without a word around; no feedback of
an environment; completions without a teacher count in the mean, with 0. PPO's clip bounds updates after the first.
"""

from typing import Literal

from pydantic import Field

from .....algorithms import _functional as F
from ....data import Batch, PolicyOutput, Tensor


class SDPO(F.ClipSettings, F.LossKLSettings):
    """The policy that has read a success of the group teaches the policy that has not (SDPO)."""

    min_group_size = 2
    needs_teacher = needs_old_logprobs = True
    token_mean = True
    objective = {
        "advantage": "(1 - outcome_share) * (log p after another success of the group - log p) of each token, 0 "
        "without one, + outcome_share * (r - mean) / (std + 0.0001) in the group"
    }
    name: Literal["sdpo"] = "sdpo"
    success_reward: float = Field(default=1.0, description="least reward of a completion that is shown to the others")
    outcome_share: float = Field(default=0.0, ge=0, le=1, description="share of GRPO's advantage; 0: SDPO alone")

    def shown(self, batch: Batch) -> Tensor:
        others_GG = 1 - batch.rewards_B.new_ones(batch.group_size).diag()
        successes_PGG = (batch.rewards_PG >= self.success_reward)[:, None] * others_GG
        return successes_PGG.argmax(dim=2).where(successes_PGG.any(dim=2), -1)

    def advantages(self, batch: Batch) -> Batch:
        learnt_BT = (batch.teacher_logprobs_BT - batch.old_logprobs_BT).where(self.shown(batch).view(-1, 1) >= 0, 0.0)
        outcome_BT = F.group_advantages(batch, F.group_standardised)
        return batch.replace(advantages_BT=(1 - self.outcome_share) * learnt_BT + self.outcome_share * outcome_BT)

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        loss_BT, clipped_BT = F.clipped_surrogate(batch, F.token_ratio(batch, policy), *self.clip)
        return F.weighted_loss(batch, policy, loss_BT + F.kl_penalty(batch, policy, *self.kl), clipped_BT)
