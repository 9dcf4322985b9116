"""Replay of verified completions: right answers of earlier steps are learnt again, beside the algorithm's own loss.

Re:Dr (on Dr. GRPO) and Re:Max (on MaxRL): d'Aliberti et al., package `remax-rl` 0.1.1. A bank keeps distinct right
completions of each problem. Each update adds replay_coefficient * (G - 1) / G^2 times minus their log-prob: the mean
over a completion's tokens, then over those of a problem, then over problems, so that all that were found weigh alike,
however rarely they are sampled now. The banks take turns, one for each problem of a step (the package: one for the one
problem of its step).

Departures: completions are distinct if their tokens are, where the package asks its benchmark for the way of solving; a
bank is full at `replay_capacity`, by default 4 (16), because checkpoints carry it; turns are counted by the step,
without a cursor; MaxRL is the one of this project.
"""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from ....algorithms._functional import SumSettings
from ...data import Rollout
from ...interfaces import Algorithm


class Replay(Algorithm):
    """The settings of a bank, for an algorithm that divides the sum over tokens by a constant."""

    objective: ClassVar = {
        "aggregation": f"{SumSettings.objective['aggregation']}; of kept completions besides, replay_coefficient * "
        "(G - 1) / G^2 * mean -log p"
    }

    success_reward: float = Field(default=1.0, description="least reward of a completion that is kept and replayed")
    replay_coefficient: float = Field(default=0.1, ge=0, description="weight of the replay as an advantage; 0: none")
    replay_capacity: int = Field(default=4, ge=1, le=64, description="distinct completions kept of a problem")

    @property
    def replay_weight(self) -> float:
        return self.replay_coefficient * (self.group_size - 1) / self.group_size**2

    def kept(self, known: list[list[int]], rollouts: Sequence[Rollout], rewards: Sequence[float]) -> list[list[int]]:
        won = [r for r, reward in zip(rollouts, rewards, strict=True) if reward >= self.success_reward]
        every = [*known, *(list(r.token_ids) for r in won if r.finish_reason == "stop")]
        return [ids for i, ids in enumerate(every) if ids not in every[:i]][: self.replay_capacity]
