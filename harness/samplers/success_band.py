"""Draws problems whose running pass rate lies in a band: those that the policy neither always nor never solves.

Groups of equal rewards have no advantages, and the variance of a reward is largest at a pass rate of a half (Bae et al.
2025, arXiv:2504.03380, who filter by it after sampling; here it is known from earlier draws, so nothing is sampled in
vain). A problem that was never drawn counts as within. Some are drawn from all, so that rates do not grow stale.
"""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from ..data import Prompt, PromptDraw
from ..interfaces import Sampler
from .uniform import shuffled

FROM_ALL = 0.25  # share of a step's problems of any rate


class SuccessBand(Sampler):
    """Uniform over the problems whose running pass rate lies in the band, or is not known."""

    sees_gold = True

    name: Literal["success_band"] = "success_band"
    lowest: float = Field(default=0.2, ge=0, le=1, description="lowest running pass rate of the band")
    highest: float = Field(default=0.8, ge=0, le=1, description="highest running pass rate of the band")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.lowest > self.highest:
            rule = f"sampler.lowest must be at most sampler.highest ({self.highest:g})"
            raise ValueError(f"{rule}, got {self.lowest:g}; lower it")
        return self

    def order(self, prompts: Sequence[Prompt], draw: PromptDraw) -> Sequence[int]:
        places = shuffled(prompts, draw)
        rates = [draw.pass_rates.get(prompt.id) for prompt in prompts]
        within = [i for i in places if (rate := rates[i]) is None or self.lowest <= rate <= self.highest]
        return list(dict.fromkeys([*places[: round(FROM_ALL * draw.count)], *within, *places]))
