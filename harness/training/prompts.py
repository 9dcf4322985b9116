"""Which prompts a training step samples, and which of their groups it trains on.

The prompts are a function of (seed, step), so that a resumed run draws the same ones, and arms that share a seed do.
Dynamic sampling is DAPO's (arXiv:2503.14476, eq. 11 and section 3.2): a group of equal rewards has no advantages, so
further prompts are sampled until enough groups have unequal rewards. Departures: what must differ is the reward, where
the paper asks for a group that is neither all right nor all wrong, so that it works for rewards without labels; the
number of batches is bounded, and a step whose budget is spent is filled with groups of equal rewards, because the
minibatches have a fixed size. Further prompts are drawn for this step alone: a later step may meet them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from harness.interfaces import Reward
from harness.training.scoring import Scores, score
from harness.types import GradedGroup, Group, Prompt


@dataclass(frozen=True)
class Drawn:
    """All groups that a step has sampled so far, in order, with their grades and rewards."""

    groups: tuple[Group, ...] = ()
    graded: tuple[GradedGroup, ...] = ()
    scores: Scores = field(default_factory=lambda: Scores([], None, None, {}, {}))
    num_batches: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def with_batch(
        self, rewards: Mapping[str, Reward], groups: Sequence[Group], graded: Sequence[GradedGroup]
    ) -> Drawn:
        """These and one more batch of groups, which earns `rewards`."""
        scores, all_graded = score(rewards, graded), (*self.graded, *graded)
        if self.groups:
            scores = self.scores.then(rewards, scores, all_graded)
        return replace(
            self, groups=(*self.groups, *groups), graded=all_graded, scores=scores, num_batches=self.num_batches + 1
        )

    def with_metrics(self, count: int) -> Drawn:
        """With what dynamic sampling did for a step of `count` groups: `sampling/batches` that were sampled,
        `sampling/kept_groups` with unequal rewards, `sampling/filled_groups` that are there for lack of them."""
        kept = min(self.num_kept, count)
        counts = {"batches": self.num_batches, "kept_groups": kept, "filled_groups": count - kept}
        return replace(self, metrics={f"sampling/{name}": float(value) for name, value in counts.items()})

    @property
    def num_kept(self) -> int:
        """Groups whose rewards are not all equal."""
        return sum(not _equal(row) for row in self.scores.totals)

    def trained_on(self, count: int) -> Drawn:
        """The `count` groups of the batch, in order: the first with unequal rewards, then the first others."""
        if len(self.groups) == count:
            return self
        index = sorted(range(len(self.groups)), key=lambda p: (_equal(self.scores.totals[p]), p))[:count]
        index.sort()
        return replace(
            self,
            groups=tuple(self.groups[p] for p in index),
            graded=tuple(self.graded[p] for p in index),
            scores=self.scores.pick(index),
        )


def step_prompts(prompts: Sequence[Prompt], seed: int, step: int, count: int) -> list[Prompt]:
    """The prompts of a training step: consecutive parts of an endless stream that is reshuffled on every pass."""
    result: list[Prompt] = []
    while len(result) < count:
        epoch, offset = divmod(step * count + len(result), len(prompts))
        order = np.random.default_rng([seed, epoch]).permutation(len(prompts))
        result += [prompts[i] for i in order[offset : offset + count - len(result)]]
    return result


def further_prompts(
    prompts: Sequence[Prompt], seed: int, step: int, attempt: int, count: int, drawn: Sequence[str]
) -> list[Prompt]:
    """At most `count` prompts whose ids are not among `drawn`, in an order keyed by (seed, step, attempt >= 1).

    A prompt that was drawn in this step would get the same completions again, whose noise its id decides.
    """
    assert attempt >= 1, "the generator's key would be that of step_prompts"
    order, before = np.random.default_rng([seed, step, attempt]).permutation(len(prompts)), set(drawn)
    return [prompts[i] for i in order if prompts[i].id not in before][:count]


def _equal(rewards: Sequence[float]) -> bool:
    return all(value == rewards[0] for value in rewards)
