"""Fits the critic's linear head to the returns of the first step, so that its values mean something from the second on.

Ridge regression (Hoerl and Kennard 1970) of each completion token's return on the state in which it was chosen. Tokens
of a completion share its outcome, so the penalty is the one that predicts prompts best which it was not fitted on.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

PENALTIES = tuple(10.0**power for power in range(2, -7, -1))  # times the mean variance of a state's numbers


class Moments(NamedTuple):
    """Sums over N tokens of products of x, a state with a 1 after it, and y, its return. float64."""

    xx_DD: Tensor
    xy_D: Tensor
    yy: Tensor

    @classmethod
    def of(cls, states_ND: Tensor, returns_N: Tensor) -> Self:
        x, y = torch.nn.functional.pad(states_ND.double(), (0, 1), value=1.0), returns_N.double()
        return cls(x.T @ x, x.T @ y, y @ y)

    def plus(self, other: Self) -> Self:
        return type(self)(*(mine + its for mine, its in zip(self, other, strict=True)))

    def fit(self, penalty: float) -> Tensor:
        """[D]: the weights of a state, then the bias, which is not penalised; zeros without tokens."""
        if not (count := self.xx_DD[-1, -1]) > 0:
            return torch.zeros_like(self.xy_D)
        mean_D, middle = self.xx_DD[-1, :-1] / count, self.xy_D[-1] / count
        covariance_DD = self.xx_DD[:-1, :-1] / count - mean_D[:, None] * mean_D
        ridge_DD = penalty * covariance_DD.diagonal().mean().clamp(min=1e-12) * torch.eye(len(mean_D)).to(covariance_DD)
        weights_D = torch.linalg.solve(covariance_DD + ridge_DD, self.xy_D[:-1] / count - mean_D * middle)
        return torch.cat([weights_D, (middle - mean_D @ weights_D)[None]])

    def error(self, fit_D: Tensor) -> Tensor:
        """The sum of squared errors of a fit on these tokens."""
        return self.yy - 2 * fit_D @ self.xy_D + fit_D @ self.xx_DD @ fit_D


def fitted_head(one: Moments, other: Moments) -> tuple[Tensor, float]:
    """The head [D] on the tokens of two sets of prompts, and the share of the returns' variance that heads fitted on
    either set explain in the other; 0 where returns do not vary. Of equal errors the largest penalty counts."""

    def held_out(penalty: float) -> float:
        return float(other.error(one.fit(penalty)) + one.error(other.fit(penalty)))

    both, best = one.plus(other), min(PENALTIES, key=held_out)
    spread = both.yy - both.xy_D[-1] ** 2 / both.xx_DD[-1, -1]  # squared differences of the returns from their mean
    return both.fit(best), 1 - held_out(best) / float(spread) if spread > 1e-12 * both.yy else 0.0
