"""Draws problems again that were not solved, the more likely the less often they are; the rest as `uniform` does.

The prioritised sampling of Kimi k1.5 (arXiv:2501.12599, section 2.3.3): of problems that were drawn before, in
proportion to 1 - pass rate. Departure: it fills only a share of each step, so that new problems still come.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from ....base.streams import generator
from ....data import Prompt, PromptDraw
from ....interfaces import Sampler
from ....samplers.uniform import Uniform, shuffled


class Replay(Sampler):
    """A share of each step in proportion to 1 - running pass rate, the rest uniform."""

    sees_gold = True

    name: Literal["replay"] = "replay"
    share: float = Field(default=0.5, ge=0, le=1, description="share of a step's problems that were drawn before")

    def order(self, prompts: Sequence[Prompt], draw: PromptDraw) -> Sequence[int]:
        unsolved = {i: 1 - draw.pass_rates.get(prompt.id, 1.0) for i, prompt in enumerate(prompts)}
        known = [i for i, rate in unsolved.items() if rate > 0]
        total, count = sum(unsolved.values()), min(len(known), round(self.share * draw.count))
        random = generator("replayed prompts", draw.seed, draw.step, draw.batch)
        again = random.choice(known, count, replace=False, p=[unsolved[i] / total for i in known]) if count else []
        return list(dict.fromkeys([*map(int, again), *Uniform().order(prompts, draw), *shuffled(prompts, draw)]))
