"""Decides which trials of a record count and which metric compares them, and summarises each arm's.

Only complete trials count. A metric of the validation split guides tuning; the test split is scored at the end alone,
so it decides if it is known.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.random import Generator

from ..harness.data import FINAL
from ..harness.record.study import StudyRecord, TrialRecord
from . import statistics
from .join import JoinedStudy
from .prose import wording
from .statistics import Floats, Interval

Trials = Mapping[tuple[str, int], TrialRecord]  # (arm, seed) -> its trial


@dataclass(frozen=True)
class Outcome:
    """The number that the arms are compared by: the name of a metric, and whether each problem's score is known.

    families  test problem -> its family, of the problems that have one
    blocks    places of the sorted problems in blocks of whole families (`statistics.blocks`)
    """

    name: str
    per_problem: bool
    families: Mapping[str, str] = field(default_factory=dict, compare=False)
    blocks: Sequence[Sequence[int]] = field(default=(), compare=False)

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
    if area in ("validation", "test") and complete and all(score(trial, test) is not None for trial in complete):
        tested = {frozenset(trial.per_problem) for trial in complete}
        if quantity != "accuracy" or len(tested) > 1:
            return Outcome(test, False)
        problems, known = sorted(tested.pop()), families_of(record.trials)
        blocks = blocks_of(problems, known)
        return Outcome(test, len(blocks) > 1, {one: known[one] for one in problems if one in known}, blocks)
    return Outcome(record.metric, False)


def families_of(trials: Iterable[TrialRecord]) -> dict[str, str]:
    """Test problem -> its family, where a trial names one."""
    return {problem: family for trial in trials for problem, family in trial.families.items()}


def blocks_of(problems: Sequence[str], families: Mapping[str, str]) -> list[list[int]]:
    """The places of these problems in blocks of whole families; one that names none is a family by itself."""
    return statistics.blocks([(problem in families, families.get(problem, problem)) for problem in problems])


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


def awaits_seeds(record: StudyRecord, seeds: Collection[int]) -> bool:
    """Whether more planned seeds are still to come, so that the results of these may stop them: no test yet."""
    if record.any_time or search_of(record) is not None:
        return False
    states = {(trial.arm, trial.seed): trial.state for trial in record.trials}
    return any(seed not in seeds and states.get((arm, seed)) not in FINAL for arm, seed in wanted_pairs(record))


def share_of_alpha(record: StudyRecord, seeds: Collection[int]) -> float:
    """The part of ALPHA that a statement over these seeds may spend: all of it over the seeds that were planned.

    The part of `any_time_share` if their number may follow from results: the study says so, some of them were added
    after a report was written, or others are still to come. A search, which tests nothing, spends all.
    """
    is_open = record.any_time or not set(record.added).isdisjoint(seeds) or awaits_seeds(record, seeds)
    return statistics.any_time_share(len(seeds)) if is_open and search_of(record) is None else 1.0


def share_at(share: float) -> Callable[[int], float]:
    """Number of seeds -> the part of ALPHA that they may spend in a study that gives this part to those it has."""
    return statistics.any_time_share if share < 1 else lambda _: 1.0


def with_arms(record: StudyRecord, arms: Collection[str]) -> StudyRecord:
    """The record restricted to these arms."""
    trials = [trial for trial in record.trials if trial.arm in arms]
    kept = replace(record, arms=[arm for arm in record.arms if arm in arms], trials=trials)
    return replace(kept, expected=record.expected - len(wanted_pairs(record)) + len(wanted_pairs(kept)))


def is_imported(record: StudyRecord) -> bool:
    """Whether something else measured its scores, so that the record has nothing but them."""
    return record.spec.get("design") == "imported"


def is_paired(record: StudyRecord) -> bool:
    """Whether equal seeds make a pair; not where the study says so, nor in an import whose arms share none."""
    specs = record.spec.values() if isinstance(record, JoinedStudy) else [record.spec]
    return any(spec.get("pairing") != "none" for spec in specs)


def search_of(record: StudyRecord) -> Mapping[str, Any] | None:
    """The findings of a study's own search; None for other designs."""
    return record.search if record.search is not None and "tuning" not in record.search else None


def tuning_of(record: StudyRecord) -> Mapping[str, Mapping[str, Any]]:
    """Arm -> the findings of the search that tuned it; empty for a study that tuned nothing."""
    return (record.search or {}).get("tuning", {})


def wanted_pairs(record: StudyRecord) -> list[tuple[str, int]]:
    """The (arm, seed) pairs that a study asks for, in its order."""
    if is_imported(record) and not is_paired(record):
        return [(trial.arm, trial.seed) for trial in record.trials]
    seeds = record.arm_seeds if isinstance(record, JoinedStudy) else dict.fromkeys(record.arms, record.seeds)
    return [(arm, seed) for arm in record.arms for seed in seeds[arm]]


def score(trial: TrialRecord, metric: str) -> float | None:
    """The last value of a metric in a trial; None if there is none or it is not finite.

    Of a metric on test problems, the mean of the last `evaluation.test_last` values.
    """
    series = trial.history.get(metric, ())[-test_last(trial.spec) if metric.startswith("test/") else -1 :]
    summary = {"test/accuracy": "test_accuracy", "validation/accuracy": "accuracy_final"}.get(metric, "")
    value = trial.summary.get(summary, float(np.mean([v for _, v in series])) if series else None)
    return float(value) if value is not None and math.isfinite(value) else None


def test_last(spec: Mapping[str, Any]) -> int:
    """The number of a run's last evaluations whose mean on the test problems counts."""
    return int(setting(spec, "evaluation.test_last", 1))


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


@dataclass(frozen=True)
class ArmSummary:
    """One arm over its complete trials.

    scores    seed -> outcome; empty without a complete trial
    cells     fraction right, seeds (in the order of `scores`) by problems or by blocks of them, or None
    num_problems  problems behind each score; 0 if they were not counted
    interval  the one that reports state; None with fewer than 2 seeds
    gain      of the study's metric from before the first step to the last, with Student's interval over seeds; `gain_p`
              is the p of no gain; None and NaN if they are not known
    costs     mean over seeds of the numbers of `TrialRecord.summary`; peak_memory_bytes is the largest
    """

    label: str
    is_baseline: bool
    factors: Mapping[str, Any]
    scores: Mapping[int, float]
    cells: Floats | None
    num_problems: int
    interval: Interval | None
    student: Interval | None
    gain: Interval | None
    gain_p: float
    rng_seed: int
    costs: Mapping[str, float]

    @property
    def values(self) -> list[float]:
        return list(self.scores.values())

    @property
    def mean(self) -> float:
        return float(np.mean(self.values)) if self.scores else math.nan

    @property
    def bootstrap(self) -> Interval | None:
        return statistics.bootstrap_interval(self.values, self.rng_seed)

    def cells_of(self, seeds: Iterable[int]) -> Floats | None:
        """The rows of `cells` that belong to these seeds."""
        order = list(self.scores)
        return None if self.cells is None else self.cells[[order.index(seed) for seed in seeds]]


def summarise(label: str, record: StudyRecord, outcome: Outcome, usable: Trials, rng: Generator) -> ArmSummary:
    mine = sorted((trial for (arm, _), trial in usable.items() if arm == label), key=lambda trial: trial.seed)
    scores = {trial.seed: value for trial in mine if (value := score(trial, outcome.name)) is not None}
    cells = None
    if outcome.per_problem and mine:
        problems = sorted(mine[0].per_problem)
        cells = np.array([[trial.per_problem[problem] for problem in problems] for trial in mine], dtype=float)
        cells = statistics.in_blocks(cells, outcome.blocks)
    values, count = list(scores.values()), num_problems(mine, outcome)
    share = share_of_alpha(record, scores)
    student = statistics.t_interval(values, share)
    over_all = student if cells is None else statistics.cautious_interval(cells, share)
    gains = []
    for trial in mine:
        series, last = trial.history.get(record.metric, ()), score(trial, record.metric)
        if last is not None and len(series) > 1 and series[0][0] == 0 and math.isfinite(series[0][1]):
            gains.append(last - float(series[0][1]))
    gained = statistics.t_interval(gains, share) if len(gains) == len(mine) else None
    judged = num_problems(mine, Outcome(record.metric, per_problem=False))
    keys = dict.fromkeys(key for trial in mine for key in trial.summary)
    spent = {key: [t.summary[key] for t in mine if math.isfinite(t.summary.get(key, math.nan))] for key in keys}
    return ArmSummary(
        label=label,
        is_baseline=search_of(record) is None
        and (label not in record.references if record.references else label == record.baseline),
        factors=next((trial.factors for trial in record.trials if trial.arm == label), {}),
        scores=scores,
        cells=cells,
        num_problems=count,
        interval=bounded(over_all, outcome, num_problems=count if cells is None else cells.shape[1]),
        student=bounded(student, outcome, num_problems=count),
        gain=bounded(gained, outcome, least=-1.0),
        gain_p=math.nan if gained is None else statistics.t_test(gained, 1 / judged if judged else 0.0),
        rng_seed=int(rng.integers(2**32)),
        costs={key: float(max(v) if key == "peak_memory_bytes" else np.mean(v)) for key, v in spent.items() if v},
    )


def bounded(
    interval: Interval | None, outcome: Outcome, least: float = 0.0, most: float = 1.0, num_problems: int = 0
) -> Interval | None:
    """The same interval without values that a fraction cannot have, or a sum of fractions from `least` to `most`.

    With `num_problems`, one of a fraction of them: see `statistics.at_edges`.
    """
    if interval is None or not outcome.is_fraction:
        return interval
    if num_problems:
        interval = statistics.at_edges(interval, num_problems)
    return replace(interval, low=max(interval.low, least), high=min(interval.high, most))


def num_problems(trials: Sequence[TrialRecord], outcome: Outcome) -> int:
    """Problems behind each score; 0 if the outcome is no fraction, or they were not counted."""
    if not trials or not outcome.is_fraction:
        return 0
    counted = trials[0].history.get(f"{outcome.name.partition('/')[0]}/num_prompts")
    return len(trials[0].per_problem) if outcome.per_problem else int(counted[-1][1]) if counted else 0
