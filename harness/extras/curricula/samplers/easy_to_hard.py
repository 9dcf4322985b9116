"""Draws from the easiest problems first, and from more of them as training goes on.

The competence-based curriculum of Platanios et al. 2019 (arXiv:1903.09848, eq. 7, the root): at time t of T a step
draws uniformly from the easiest share c(t) = sqrt(c_0^2 + (1 - c_0^2) t / T) of the problems, and from all after T.
Problems of equal difficulty have the task's order. Departure: difficulty is a tag of the task, or the length of the
prompt.
"""

import math
import re
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from ....data import Prompt, PromptDraw
from ....interfaces import Sampler
from ....samplers.uniform import shuffled

FIRST_SHARE = 0.1  # easiest share of the problems, for the first step
ALL_AFTER = 0.5  # share of the run's steps that begin with a part


class EasyToHard(Sampler):
    """Uniform over the easiest problems, whose share grows to all."""

    name: Literal["easy_to_hard"] = "easy_to_hard"
    difficulty: str = Field(
        default="length",
        min_length=1,
        description="tag whose number says how hard a problem is, such as level; length: characters of the prompt",
    )

    def check(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            self._difficulty(prompt)

    def order(self, prompts: Sequence[Prompt], draw: PromptDraw) -> Sequence[int]:
        begun = FIRST_SHARE**2
        competence = math.sqrt(begun + (1 - begun) * min(1.0, draw.progress / ALL_AFTER))
        ranked = sorted(range(len(prompts)), key=lambda i: self._difficulty(prompts[i]))
        easy = max(draw.count, math.ceil(competence * len(prompts)))
        return [*(ranked[i] for i in shuffled(prompts, draw) if i < easy), *ranked[easy:]]

    def _difficulty(self, prompt: Prompt) -> float:
        if self.difficulty == "length":
            return float(len(prompt.text))
        if number := re.search(r"\d+(?:\.\d+)?", dict(prompt.tags).get(self.difficulty, "")):
            return float(number[0])
        rule = "sampler.difficulty must be length or a tag that has a number in every training problem"
        raise ValueError(f"{rule}, got '{self.difficulty}' for {prompt.id} with {dict(prompt.tags) or 'no tags'}")
