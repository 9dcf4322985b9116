"""1 for a completion whose final answer equals the gold answer under the task's own equality, else 0.

With `partial`, a completion earns the score of the task's verifier, from 0 to 1. Everywhere else, correct still means a
score of exactly 1. With `false_positive` or `false_negative` the verifier errs at random, as real ones do
(arXiv:2601.04411): evaluations and `train/accuracy` do not. With `corrected` its reward r counts as (r - FPR) / (1 -
FPR - FNR), whose expectation is a perfect verifier's (arXiv:2510.18924; backward correction of arXiv:2510.00915), for
any algorithm. Standardised in its group (GRPO) that changes nothing, less the mean (Dr. GRPO) it is a factor; those
papers' other corrections, of GRPO's deviation and with FNR alone, are left out.
"""

from collections.abc import Mapping, Sequence
from math import nan
from typing import Self

from pydantic import Field, model_validator

from ..base.streams import generator
from ..data import GradedGroup
from ..interfaces import Reward


class Accuracy(Reward):
    """1 for a correct final answer, else 0, or partial credit."""

    sees_gold = True

    partial: bool = Field(default=False, description="pay the score of the verifier, 0 to 1 (with partial credit)")
    false_positive: float = Field(default=0.0, ge=0, le=1, description="chance that a wrong completion is paid")
    false_negative: float = Field(default=0.0, ge=0, le=1, description="chance that a correct completion is not paid")

    corrected: bool = Field(default=False, description="pay 0 for a wrong and 1 for a correct completion on average")

    @model_validator(mode="after")
    def _errs_on_whole_answers(self) -> Self:
        if self.partial and self._errs:
            raise ValueError("false_positive and false_negative must be 0 with partial: they need right/wrong grading")
        if self.corrected and self._informs <= 0:
            rule = "false_positive + false_negative must be below 1 with corrected, or the verifier says nothing"
            raise ValueError(f"{rule}; got {1 - self._informs:g}; lower one or leave corrected out")
        return self

    @property
    def needs_partial_credit(self) -> bool:
        return self.partial

    @property
    def _errs(self) -> bool:
        return self.false_positive > 0 or self.false_negative > 0

    @property
    def _informs(self) -> float:
        return 1 - self.false_positive - self.false_negative

    def score(self, group: GradedGroup) -> list[float]:
        """The errors are drawn anew for each completion, keyed by the group: arms with equal completions err alike."""
        if self.partial:
            assert group.scores is not None
            return list(group.scores)
        assert group.correct is not None
        if not self._errs:
            return [1.0 if correct else 0.0 for correct in group.correct]
        drawn = generator("verifier", group.prompt_id, *group.completions).random(len(group.completions))
        chances = [1 - self.false_negative if correct else self.false_positive for correct in group.correct]
        scores = [float(one < chance) for one, chance in zip(drawn.tolist(), chances, strict=True)]
        return [(s - self.false_positive) / self._informs for s in scores] if self.corrected else scores

    def metrics(self, group: GradedGroup, scores: Sequence[float]) -> Mapping[str, float]:
        """Of a verifier that errs, the shares of the correct and of the wrong completions that are paid."""
        if not self._errs:
            return {}
        assert group.correct is not None
        names = {True: "verifier/true_positive_rate", False: "verifier/false_positive_rate"}
        both = [*zip(scores, group.correct, strict=True)]
        paid = {name: [score > 0 for score, is_right in both if is_right == kind] for kind, name in names.items()}
        return {name: sum(of) / len(of) if of else nan for name, of in paid.items()}
