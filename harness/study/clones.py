"""Describes clones: arms that a user makes from others while a study runs. They are exploratory; reports show them
separately."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Clone:
    """A clone in the queue's record: its parent arm, its changes, and its seeds.

    `steps` has for each seed the training step at which it leaves its parent; 0 if it starts from the beginning.
    """

    label: str
    parent: str
    changes: Mapping[str, Any]
    seeds: Sequence[int]
    steps: Sequence[int]

    def left_at(self, seed: int) -> int:
        return self.steps[list(self.seeds).index(seed)]
