"""Decides which trials of a record count, and which metric compares them.

Only complete trials count. A metric of the validation split guides tuning; the test split is scored once, at the end,
so it decides if it is known.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..harness.record.study import StudyRecord, TrialRecord
from .join import JoinedStudy
from .prose import wording

Trials = Mapping[tuple[str, int], TrialRecord]  # (arm, seed) -> its trial


@dataclass(frozen=True)
class Outcome:
    """The number that the arms are compared by: the name of a metric, and whether each problem's score is known."""

    name: str
    per_problem: bool

    @property
    def is_fraction(self) -> bool:
        return wording.is_fraction(self.name)

    @property
    def label(self) -> str:
        return wording.spoken(self.name)


def choose_outcome(record: StudyRecord) -> Outcome:
    """The study's metric on the test split if every complete trial has it, otherwise the metric itself."""
    complete = [trial for trial in record.trials if trial.state == "complete"]
    area, _, quantity = record.metric.partition("/")
    test = f"test/{quantity}"
    if area == "validation" and complete and all(score(trial, test) is not None for trial in complete):
        problems = {frozenset(trial.per_problem) for trial in complete}
        return Outcome(test, quantity == "accuracy" and len(problems) == 1 and len(problems.pop()) > 1)
    return Outcome(record.metric, False)


def usable_trials(record: StudyRecord, outcome: Outcome) -> dict[tuple[str, int], TrialRecord]:
    """(arm, seed) -> its complete trial with a finite outcome. ValueError if two trials claim one pair."""
    found: dict[tuple[str, int], TrialRecord] = {}
    for trial in record.trials:
        if trial.state != "complete" or score(trial, outcome.name) is None:
            continue
        key = (trial.arm, trial.seed)
        if key in found:
            raise ValueError(
                f"study '{record.name}': each (arm, seed) must be complete once, got trials {found[key].trial} and "
                f"{trial.trial} for arm '{trial.arm}', seed {trial.seed}; delete one of the two runs"
            )
        found[key] = trial
    return found


def num_first(record: StudyRecord, seeds: Collection[int]) -> int | None:
    """The number of these seeds (ascending) that decided the number of seeds; None if the study lists its seeds."""
    return None if record.two_stage is None else sum(seed < record.two_stage["first"] for seed in seeds)


def controls_of(record: StudyRecord) -> dict[str, str]:
    """Arm -> its control, for the arms that replace the reward or freeze the policy, as far as they have begun."""
    return {arm: spec["control"] for arm, spec in arm_specs(record.trials).items() if spec.get("control")}


def with_arms(record: StudyRecord, arms: Collection[str]) -> StudyRecord:
    """The record restricted to these arms."""
    kept = replace(
        record,
        arms=[arm for arm in record.arms if arm in arms],
        trials=[trial for trial in record.trials if trial.arm in arms],
    )
    return replace(kept, expected=record.expected - len(wanted_pairs(record)) + len(wanted_pairs(kept)))


def search_of(record: StudyRecord) -> Mapping[str, Any] | None:
    """The findings of a study's own search; None for other designs."""
    return record.search if record.search is not None and "tuning" not in record.search else None


def tuning_of(record: StudyRecord) -> Mapping[str, Mapping[str, Any]]:
    """Arm -> what the search that tuned it found; empty for a study that tuned nothing."""
    return (record.search or {}).get("tuning", {})


def wanted_pairs(record: StudyRecord) -> list[tuple[str, int]]:
    """The (arm, seed) pairs that a study asks for, in its order."""
    seeds = record.arm_seeds if isinstance(record, JoinedStudy) else dict.fromkeys(record.arms, record.seeds)
    return [(arm, seed) for arm in record.arms for seed in seeds[arm]]


def score(trial: TrialRecord, metric: str) -> float | None:
    """The last value of a metric in a trial; None if there is none or it is not finite."""
    series = trial.history.get(metric)
    summary = {"test/accuracy": "test_accuracy", "validation/accuracy": "accuracy_final"}.get(metric, "")
    value = trial.summary.get(summary, series[-1][1] if series else None)
    return float(value) if value is not None and math.isfinite(value) else None


def gain(trial: TrialRecord, metric: str) -> float | None:
    """The change of a metric from before a trial's first step to its end; None if unknown."""
    series, last = trial.history.get(metric, ()), score(trial, metric)
    known = len(series) > 1 and series[0][0] == 0 and math.isfinite(series[0][1])
    return last - float(series[0][1]) if known and last is not None else None


def arm_specs(trials: Iterable[TrialRecord]) -> dict[str, Mapping[str, Any]]:
    """Arm -> the settings of one of its runs, for the arms that recorded any."""
    return {trial.arm: trial.spec for trial in trials if trial.spec}


def setting(trial_spec: Mapping[str, Any], dotted: str, default: Any = None) -> Any:
    """The value at a dotted path of a run's spec, or `default`."""
    value: Any = trial_spec
    for key in dotted.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value
