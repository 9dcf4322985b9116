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
        return [-repeated_fraction(text, self.ngram) for text in group.completions]


def repeated_fraction(text: str, n: int) -> float:
    """1 - (distinct n-grams) / (n-grams) of the words and symbols of a text; 0 if it has none."""
    words = _WORD.findall(text)
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
