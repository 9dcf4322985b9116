"""The claim of a study file: a prediction about its arms that is fixed before the first trial runs."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ..base.words import quoted
from ..data import Section
from .errors import did_you_mean

Weights = dict[str, float]  # arm label -> its weight in a sum
Listed = BeforeValidator(lambda raw: [raw] if isinstance(raw, Mapping) else raw)  # one may stand without brackets
Predicts = Literal["above", "below", "equivalent", "not_below", "not_above", "ordered"]


class Claim(Section):
    """A source's statement about a contrast of arms, as the region in which the contrast must lie.

    above: over the margin; below: under minus the margin; equivalent: between the two; not_below: over minus the
    margin (non-inferiority); not_above: under the margin; ordered: each arm of `order` over the one before.
    """

    sentence: str = Field(min_length=1, description="the claim, in your words")
    source: str = Field(min_length=1, description="paper, with its table or figure")
    predicts: Predicts = Field(description="the region of the contrast: see docs/studies.md")
    contrast: Annotated[list[Weights], Listed] = Field(
        default_factory=list, description="arm label -> weight, with sum 0; a list: each of them must be as predicted"
    )
    order: list[str] = Field(default_factory=list, description="arm labels in rising order, for predicts: ordered")
    metric: str = Field(default="", description="metric of a run; by default the study's metric")
    value: Literal["last", "mean", "gain", "fall"] = Field(
        default="last", description="of the metric: last, mean over training, last minus first, best minus last"
    )
    ratio: bool = Field(default=False, description="compare by ratios: the margin is a factor such as 1.7")
    margin: float = Field(default=0.0, ge=0, description="smallest difference that matters, in the metric's unit")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if sum(map(bool, (self.contrast, self.order))) != 1:
            raise ValueError("a claim must have one of contrast and order")
        if bool(self.order) != (self.predicts == "ordered") or len(self.order) == 1:
            raise ValueError("predicts: ordered must have 'order', a list of two arms or more, and no other has it")
        changes = self.value in ("gain", "fall")  # of a single arm may be claimed, too
        for weights in self.contrast:
            if (abs(sum(weights.values())) > 1e-9 and not changes) or not any(weights.values()):
                raise ValueError(f"weights of a contrast must have sum 0 and not all be 0, got {weights}")
        if self.ratio and self.margin < 1:
            raise ValueError(f"the margin of a ratio must be a factor of at least 1, got {self.margin:g}")
        if self.predicts == "equivalent" and self.region == (0, 0):
            raise ValueError("equivalent must have a margin, the difference that matters; nothing is exactly equal")
        return self

    @property
    def region(self) -> tuple[float, float]:
        """The ends between which each contrast must lie, on its scale, which is logarithmic for ratios."""
        bound = math.log(self.margin) if self.ratio else self.margin
        below = 0.0 - bound
        return {
            "above": (bound, math.inf), "ordered": (bound, math.inf), "below": (-math.inf, below),
            "equivalent": (below, bound), "not_below": (below, math.inf), "not_above": (-math.inf, bound),
        }[self.predicts]  # fmt: skip

    def contrasts(self, levels: Mapping[str, Mapping[str, Any]]) -> list[Weights]:
        """The weights of each contrast, from arm label -> factor -> level; ValueError for what these arms lack."""
        for label in [*self.order, *(label for weights in self.contrast for label in weights)]:
            if label not in levels:
                fix = f"{did_you_mean(label, list(levels))}arms: {quoted(list(levels))}"
                raise ValueError(f"a claim must name arms of the study, got '{label}' (claim=[] has none); {fix}")
        if self.order:
            return [{after: 1.0, before: -1.0} for after, before in zip(self.order[1:], self.order, strict=False)]
        return self.contrast
