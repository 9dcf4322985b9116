"""Rewards low entropy of the policy's next tokens, as a mean over a completion, without the gold answer.

RENT, Prabhudesai et al. 2025 (arXiv:2505.22660, section 3): minus the entropy of the policy's next-token distribution,
its mean over the tokens of a completion. It is the entropy of the whole distribution, not minus the log-probs of the
tokens that were sampled. Departures: the distribution has the sampling temperature, as all log-probs here; the
end-of-sequence token counts.
"""

from ..data import GradedGroup
from ..interfaces import Reward


class TokenEntropy(Reward):
    """Minus the mean entropy of the next token over a completion, in nats (RENT)."""

    distribution = "entropy"

    def score(self, group: GradedGroup) -> list[float]:
        return [-entropy for entropy in group.token_means["entropy"]]
