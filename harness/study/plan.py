"""Lists the trials of a study: every (arm, seed), its validated run and its folder."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..base.arms import GREY, PALETTE
from ..base.inputs import NO_INPUTS, Inputs
from ..settings.run import RunSpec
from ..settings.study import Arm, StudySpec

Key = tuple[str, int]  # arm label, seed


@dataclass(frozen=True)
class Clone:
    """An arm that a user made from another while the study ran: its parent, its changes, and its seeds.

    `steps` has for each seed the training step at which it leaves its parent; 0 if it starts from the beginning.
    """

    label: str
    parent: str
    changes: Mapping[str, Any]
    seeds: Sequence[int]
    steps: Sequence[int]

    def left_at(self, seed: int) -> int:
        return self.steps[list(self.seeds).index(seed)]


class Plan:
    """The trials of a study in the order in which they run: all arms with the first seed, then all with the next, so
    that an unfinished study is balanced. Arms of a search are added later, one by one, each with all its seeds."""

    def __init__(self, study: StudySpec, runs: Path, inputs: Inputs = NO_INPUTS) -> None:
        self.study, self.runs = study, runs
        self.inputs = inputs  # the inputs that its trials must find, as far as they are recorded
        self.folder = runs / "studies" / study.name
        self.arms: dict[str, Arm] = {arm.label: arm for arm in study.design_arms()}
        self.clones: dict[str, Clone] = {}
        self.sizes: dict[str, Mapping[str, float]] = {}  # of arms' runs, as far as a process has read them
        self.dropped: Collection[str] = ()  # labels of arms that were taken back
        self._keys: dict[Key, None] = dict.fromkeys((label, seed) for seed in study.seeds for label in self.arms)

    @property
    def keys(self) -> list[Key]:
        """The trials, without the trials of arms that were taken back."""
        return [key for key in self._keys if key[0] not in self.dropped]

    @cached_property
    def _digest(self) -> str:
        return self.study.digest()

    def add(self, searched: Sequence[tuple[Arm, Sequence[int]]]) -> None:
        """Add the arms that searches have found, with the seeds that they may run."""
        for arm, seeds in searched:
            self.arms[arm.label] = arm
            self._keys |= dict.fromkeys((arm.label, seed) for seed in seeds)

    def add_clones(self, clones: Sequence[Clone]) -> None:
        """Add the exploratory arms that were cloned from others while the study ran."""
        for clone in clones:
            if clone.label not in self.clones:
                arm = self.study.changed(self.arms[clone.parent], clone.label, clone.changes)
                self.clones[clone.label] = clone
                self.add([(replace(arm, phase="exploratory"), clone.seeds)])

    def spec(self, key: Key) -> RunSpec:
        return self.arms[key[0]].run_spec(key[1])

    def directory(self, key: Key) -> Path:
        slug = re.sub(r"[^A-Za-z0-9._=-]+", "-", key[0])[:60].strip("-.")
        return self.folder / "trials" / f"{slug}-seed{key[1]}-{self.spec(key).digest()[:8]}"

    def run_name(self, key: Key) -> str:
        """The name of a trial's MLflow run."""
        return f"{key[0]} | seed {key[1]}"

    def tags(self, key: Key) -> dict[str, str]:
        """The tags of a trial's MLflow run."""
        arm, clone = self.arms[key[0]], self.clones.get(key[0])
        origin = {} if clone is None else {
            "cohort.parent": clone.parent, "cohort.changes": json.dumps(clone.changes),
            "cohort.left_at": str(clone.left_at(key[1])),
        }  # fmt: skip
        colors = self.study.arm_colors()
        if clone is not None:
            colors[key[0]] = PALETTE[(len(colors) + list(self.clones).index(key[0])) % len(PALETTE)]
        return {
            **origin,
            "cohort.kind": "trial", "cohort.study": self.study.name, "cohort.arm": key[0], "cohort.seed": str(key[1]),
            "cohort.factors": json.dumps(arm.levels), "cohort.phase": arm.phase,
            "cohort.trial": self.directory(key).name, "cohort.design": self._digest,
            "mlflow.runColor": colors.get(key[0], GREY),
        }  # fmt: skip
