"""Credit goes to answers that beat their group, kept or dropped as a whole, and each token of a long answer weighs as
much as one of a short answer.

Length-Unbiased Sequence Policy Optimization: 2026 (LUSPO, arXiv:2602.05261): GSPO, whose mean over a completion's
tokens gives long answers a smaller gradient per token, with each completion's loss multiplied by its length. TRL has
the same loss (`loss_type="luspo"`). Departures are GSPO's; a constant can divide the sum (`loss_denominator`), which is
1 in the paper.
"""

from typing import Literal

from pydantic import Field

from ._surrogate import SummedLoss
from .gspo import GSPO


class LUSPO(SummedLoss, GSPO):
    """GSPO with the loss of each completion times its length (LUSPO)."""

    objective = {"clip": GSPO.objective["clip"]}

    name: Literal["luspo"] = "luspo"
    loss_denominator: float = Field(default=1.0, gt=0, description="divides the sum over a completion's tokens")
