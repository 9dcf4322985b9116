"""Computes a step's rewards: the weighted sum of the run's rewards, each at the token that earned it.

A reward that does not see gold gets a group without correctness, so that label leakage fails loudly. The last token of
a completion earns outcome rewards; the token that ends a step earns those of a `StepReward`.
"""

from __future__ import annotations

import bisect
import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..data import GradedGroup, Group, Rollout
from ..interfaces import Reward, StepReward


@dataclass(frozen=True)
class Scores:
    """Rewards of P groups of G completions.

    totals    [P][G] sum of all weighted rewards, those of steps included
    outcomes  [P][G] the part that the whole completion earned; None if no outcome is rewarded
    steps     [P][G] (character, weighted value) of each rewarded step; None if no steps are rewarded
    parts     reward name -> [P][G] values before the weight
    metrics   `reward/<name>` (mean before the weight) and the rewards' own metrics
    """

    totals: list[list[float]]
    outcomes: list[list[float]] | None
    steps: list[list[list[tuple[int, float]]]] | None
    parts: dict[str, list[list[float]]]
    metrics: dict[str, float]

    def pick(self, index: Sequence[int]) -> Scores:
        """The rewards of the groups at `index`; the metrics stay those of all groups."""
        outcomes, steps = self.outcomes, self.steps
        return Scores(
            [self.totals[p] for p in index],
            None if outcomes is None else [outcomes[p] for p in index],
            None if steps is None else [steps[p] for p in index],
            {name: [values[p] for p in index] for name, values in self.parts.items()},
            self.metrics,
        )

    def then(self, rewards: Mapping[str, Reward], other: Scores, graded: Sequence[GradedGroup]) -> Scores:
        """These followed by `other`, both paid by `rewards`; `graded` holds the groups of both."""
        parts = {name: [*values, *other.parts[name]] for name, values in self.parts.items()}
        return Scores(
            [*self.totals, *other.totals],
            None if self.outcomes is None else [*self.outcomes, *(other.outcomes or ())],
            None if self.steps is None else [*self.steps, *(other.steps or ())],
            parts,
            _metrics(rewards, graded, parts),
        )


def score(
    rewards: Mapping[str, Reward], graded: Sequence[GradedGroup], instead: Sequence[list[float]] | None = None
) -> Scores:
    """The rewards of each completion; `graded` carries correctness.

    In a control arm the completions earn `instead` [P][G], and the rewards are only measured.
    """
    seen = {True: graded, False: [group.blind() for group in graded]}
    parts = {n: [_scored(n, reward, group) for group in seen[reward.sees_gold]] for n, reward in rewards.items()}
    if instead is not None:
        return Scores(list(instead), list(instead), None, parts, _metrics(rewards, graded, parts))
    outcome = {n: r.weight for n, r in rewards.items() if r.weight and not isinstance(r, StepReward)}
    dense = [r for r in rewards.values() if r.weight and isinstance(r, StepReward)]
    outcomes = [
        [sum(weight * parts[name][p][i] for name, weight in outcome.items()) for i in range(len(group.completions))]
        for p, group in enumerate(graded)
    ]
    steps = _all_steps(dense, seen) if dense else None
    totals = outcomes
    if steps is not None:
        totals = [
            [total + sum(value for _, value in row) for total, row in zip(*pair, strict=True)]
            for pair in zip(outcomes, steps, strict=True)
        ]
    return Scores(totals, outcomes if outcome else None, steps, parts, _metrics(rewards, graded, parts))


def events(
    groups: Sequence[Group], scores: Scores, tokenizer: PreTrainedTokenizerBase
) -> list[dict[int, float]] | None:
    """For each of the P * G rows {completion token: reward earned there}; None if only outcomes are rewarded."""
    if scores.steps is None:
        return None
    rows: list[dict[int, float]] = []
    for p, group in enumerate(groups):
        for i, rollout in enumerate(group.rollouts):
            earned: dict[int, float] = defaultdict(float)
            for character, value in scores.steps[p][i]:
                earned[token_at(rollout, character, tokenizer)] += value
            if scores.outcomes is not None:
                earned[len(rollout.token_ids) - 1] += scores.outcomes[p][i]
            rows.append(dict(earned))
    return rows


def token_at(rollout: Rollout, character: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """The first completion token at which the text has at least `character` characters."""
    ids = list(rollout.token_ids)
    return bisect.bisect_left(
        range(1, len(ids)), character, key=lambda n: len(tokenizer.decode(ids[:n], skip_special_tokens=True))
    )


def _scored(name: str, reward: Reward, group: GradedGroup) -> list[float]:
    """A reward's values for a group; ValueError, which names the reward, unless there is one for each completion."""
    values, count = reward.score(group), len(group.completions)
    if len(values) != count or any(value is None for value in values):
        place, got = inspect.getfile(type(reward)), f"{len(values)}" if len(values) != count else "None among them"
        raise ValueError(
            f"reward '{name}' must return a number for each of the {count} completions, got {got}; "
            f"correct {type(reward).__name__}.score in {place}"
        )
    return values


def _all_steps(
    rewards: Sequence[StepReward], seen: Mapping[bool, Sequence[GradedGroup]]
) -> list[list[list[tuple[int, float]]]]:
    result: list[list[list[tuple[int, float]]]] = [[[] for _ in group.completions] for group in seen[True]]
    for reward in rewards:
        for p, group in enumerate(seen[reward.sees_gold]):
            for i, row in enumerate(reward.steps(group)):
                result[p][i] += [(character, reward.weight * value) for character, value in row]
    return result


def _metrics(
    rewards: Mapping[str, Reward], graded: Sequence[GradedGroup], parts: Mapping[str, list[list[float]]]
) -> dict[str, float]:
    metrics = {f"reward/{name}": float(np.mean([v for row in values for v in row])) for name, values in parts.items()}
    collected: dict[str, list[float]] = defaultdict(list)
    for name, reward in rewards.items():
        for group, values in zip(graded, parts[name], strict=True):
            for key, value in reward.metrics(group, values).items():
                collected[key].append(value)
    known = {key: [v for v in values if not np.isnan(v)] for key, values in collected.items()}
    return metrics | {key: float(np.mean(values)) if values else float("nan") for key, values in known.items()}
