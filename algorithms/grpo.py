"""Credit goes to answers that beat the other answers to the same prompt; no critic.

Group Relative Policy Optimization: Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300), eq. 3 (clipped surrogate, mean
over a completion's tokens, then over completions), eq. 4 (k3 KL to the frozen reference, in the loss and not in the
reward), section 4.1.2 (outcome supervision: advantage = reward standardised within its group) and, with rewards of
steps, 4.1.3 (process supervision). Departures: the standard deviation uses G - 1 and a stated floor (the paper gives
neither); other KL estimators, their weight by the ratio (DeepSeek-V3.2), a higher upper clip (DAPO's), a bound on the
ratio of bad answers (dual clip) and the deviation of the whole batch (Lite PPO) can be set.
"""

from typing import Literal

from ._group import GroupRelative


class GRPO(GroupRelative):
    """Group-standardised verifiable rewards, clipped surrogate, KL in the loss (DeepSeekMath)."""

    name: Literal["grpo"] = "grpo"
