"""Draws every problem once in each pass over the training problems, in an order that is new in every pass."""

from collections.abc import Sequence
from typing import Literal

from ..base.streams import generator
from ..data import Prompt, PromptDraw
from ..interfaces import Sampler


def shuffled(prompts: Sequence[Prompt], draw: PromptDraw) -> list[int]:
    """All places, in an order keyed by (seed, step, batch)."""
    return generator("further prompts", draw.seed, draw.step, draw.batch).permutation(len(prompts)).tolist()


class Uniform(Sampler):
    """Consecutive parts of an endless stream that is reshuffled on every pass; further batches of a step at random."""

    name: Literal["uniform"] = "uniform"

    def order(self, prompts: Sequence[Prompt], draw: PromptDraw) -> Sequence[int]:
        if draw.batch:
            return shuffled(prompts, draw)
        found: list[int] = []
        while len(found) < draw.count:
            epoch, offset = divmod(draw.step * draw.count + len(found), len(prompts))
            order = generator("prompts", draw.seed, epoch).permutation(len(prompts))
            found += order[offset : offset + draw.count - len(found)].tolist()
        return found
