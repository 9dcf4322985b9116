"""A penalty for repetition: minus the share of a completion's n-grams that occurred in it before.

This is the measure of Yeo et al. 2025 (arXiv:2502.03373, section 5.1) on words and symbols, over the whole completion
and not token by token. A completion shorter than one n-gram repeats nothing.
"""

import re

from pydantic import Field

from ..data import GradedGroup
from ..interfaces import Reward

_WORD = re.compile(r"\w+|[^\w\s]")


class Repetition(Reward):
    """0 without a repeated n-gram, down to almost -1 if all are the same."""

    ngram: int = Field(default=8, ge=1, description="n: words and symbols per n-gram")

    def score(self, group: GradedGroup) -> list[float]:
        scores = []
        for text in group.completions:
            words = _WORD.findall(text)
            grams = [tuple(words[i : i + self.ngram]) for i in range(len(words) - self.ngram + 1)]
            scores.append(-(1 - len(set(grams)) / len(grams) if grams else 0.0))
        return scores
