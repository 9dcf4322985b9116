"""Rewards next-token distributions far from uniform, as a mean over a completion, without the gold answer.

Intuitor, Zhao et al. 2025 (arXiv:2505.19590, eq. 3): the mean over the tokens of a completion of KL(uniform || policy),
over the whole vocabulary, under the policy that is trained. Departures: the distribution has the sampling
temperature, as all log-probs here; the end-of-sequence token counts; ln V, which the authors' code leaves out, is in.
"""

from ....data import GradedGroup
from ....interfaces import Reward


class SelfCertainty(Reward):
    """The mean of KL(uniform || policy) over a completion's tokens, in nats (Intuitor)."""

    distribution = "uniform_kl"

    def score(self, group: GradedGroup) -> list[float]:
        return list(group.token_means["uniform_kl"])
