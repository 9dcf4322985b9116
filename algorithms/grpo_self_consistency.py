"""Credit goes to answers that agree with the group's majority; the gold answer is never seen.

GRPO's objective on majority-vote rewards: test-time reinforcement learning, Zuo et al. 2025 (TTRL, arXiv:2504.16084),
after self-consistency decoding, Wang et al. 2022 (arXiv:2203.11171). `harness.rewards.majority_vote` is the reward, and
states its rules and departures. Standardisation within a group makes any two reward values equivalent up to the std
floor, so 1.0 / -0.1 and 1 / 0 train alike.
"""

from typing import Literal

from .grpo import GRPO


class GRPOSelfConsistency(GRPO):
    """GRPO on majority-vote rewards, without gold answers (TTRL)."""

    sees_gold = False
    default_rewards = {"majority_vote": 1.0}
    name: Literal["grpo_self_consistency"] = "grpo_self_consistency"
