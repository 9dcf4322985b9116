"""An order of the problems that each batch of each step has for itself."""

from ..data import PromptDraw
from ..ground.streams import generator


def shuffled(num_prompts: int, draw: PromptDraw) -> list[int]:
    """All places, in an order keyed by (seed, step, batch)."""
    return generator("further prompts", draw.seed, draw.step, draw.batch).permutation(num_prompts).tolist()
