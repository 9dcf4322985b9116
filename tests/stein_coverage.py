"""How often the intervals of a study hold whose first seeds decide how many it takes: simulated studies.

`python tests/stein_coverage.py --studies 2000` prints, for several spreads of the seeds, how many percent of the stated
intervals of a difference enclose the truth, the share of studies with a false detection, and the seeds used beside the
fixed number of seeds whose interval would on average be as narrow; `test_two_stage.py` runs fewer of the same.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from cohort.harness.record.study import StudyRecord
from cohort.harness.settings.study import StudySpec
from cohort.harness.study.two_stage import decide
from cohort.reports import statistics
from cohort.reports.render import analysed
from factories import make_study
from fake_study import FakeArm, fake_study, random_scores, wanted_studies
from scipy import special, stats

HALF_WIDTH, AT_MOST, FIRST = 0.02, 16, 4
WITH_PROBLEMS = 0.06  # the half width where single problems are scored, of which there are few
SPREADS = (0.005, 0.01, 0.015, 0.02, 0.05)  # of a difference between two arms over seeds
PROBLEMS = 64
METRICS = ("validation/accuracy", "test/accuracy")


@dataclass
class Tally:
    """Counts over the comparisons of simulated studies; seeds and wrong studies count once a study.

    covered   stated intervals that enclose the true difference
    pooled    Student's intervals over all seeds that do, as if their number had been fixed
    narrow    intervals over seeds that are no wider than asked for
    wrong     studies that detect a difference where there is none
    """

    studies: int = 0
    comparisons: int = 0
    covered: int = 0
    pooled: int = 0
    narrow: int = 0
    wrong: int = 0
    seeds: int = 0
    at_most: int = 0


def simulate(spread: float, studies: int, *, first: int = FIRST, arms: int = 2, problems: bool = False) -> Tally:
    """Studies whose arms do not differ, with a first stage of `first` seeds; equal calls draw equal studies.

    The seeds' scores are normal, and two arms share half of their variance (equal seeds share prompts and noise). With
    `problems` single problems are scored as in `random_scores`, and the truth is that on new problems; `spread` then
    says by how much arms differ on single problems (a deviation of logits).
    """
    rng = np.random.default_rng([round(1e6 * spread), first, arms, problems])
    factors = {"optimizer.learning_rate": [1e-5 * (1 + number) for number in range(arms)]}
    width = WITH_PROBLEMS if problems else HALF_WIDTH
    study = make_study(factors=factors, seeds={"first": first, "half_width": width, "at_most": AT_MOST})
    fakes = [FakeArm(label, "grpo", 0.5, {}, {}) for label in study.arm_labels()]
    record, found = fake_study(fakes, range(AT_MOST), num_problems=2, num_steps=10), Tally()
    for _ in range(studies):
        cells = random_scores(rng, arms, AT_MOST, PROBLEMS, arm_by_problem=spread) if problems else None
        if cells is not None:
            scores = cells.mean(axis=2)
        else:  # a difference of two arms has the deviation `spread`
            own, shared = rng.normal(0, spread / math.sqrt(2), (arms, AT_MOST)), rng.normal(0, spread, AT_MOST)
            scores = 0.6 + own + shared
        _count(found, study, record, scores, cells)
    return found


def fixed_seeds(spread: float) -> int:
    """The number of seeds, known beforehand, whose Student's interval is as narrow on average."""

    def half_width(count: int) -> float:
        shrunk = math.sqrt(2 / (count - 1)) * math.exp(special.gammaln(count / 2) - special.gammaln((count - 1) / 2))
        return float(stats.t.ppf(0.975, count - 1)) * shrunk * spread / math.sqrt(count)

    return next(count for count in range(2, 10_000) if half_width(count) <= HALF_WIDTH)


def _count(found: Tally, study: StudySpec, record: StudyRecord, scores: np.ndarray, cells: np.ndarray | None) -> None:
    labels = list(record.arms)
    first, width = study.first_seeds, study.model_dump()["seeds"]["half_width"]
    values = {(arm, seed): dict.fromkeys(METRICS, scores[i, seed]) for i, arm in enumerate(labels) for seed in first}
    decided = decide(study, values)
    names = [f"problem-{number}" for number in range(PROBLEMS)]
    trials = [
        dataclasses.replace(
            trial,
            per_problem={} if cells is None else dict(zip(names, cells[arm, trial.seed].tolist(), strict=True)),
            summary={"test_accuracy": float(scores[arm, trial.seed])},
        )
        for trial in record.trials
        if (arm := labels.index(trial.arm)) >= 0 and trial.seed in decided["seeds"]
    ]
    stage = {**study.model_dump()["seeds"], **decided}
    record = dataclasses.replace(record, seeds=decided["seeds"], trials=trials, two_stage=stage)
    analysis = analysed(record)
    found.studies += 1
    found.seeds += len(decided["seeds"])
    found.at_most += decided["asked"] > AT_MOST
    found.wrong += any(one.is_detected for one in analysis.comparisons)
    for one in analysis.comparisons:
        pooled = statistics.t_interval(list(one.differences.values()))
        found.comparisons += 1
        found.covered += one.interval.low <= 0 <= one.interval.high
        found.pooled += pooled.low <= 0 <= pooled.high
        found.narrow += one.over_seeds.high - one.over_seeds.low <= 2 * width * (1 + 1e-9)


if __name__ == "__main__":
    studies = wanted_studies(__doc__, 2000)
    header = ("first seeds", "comparisons", "spread", "stated covers %", "pooled covers %",
              "false detection %", "as narrow as asked %", "at most reached %", "seeds", "fixed seeds")  # fmt: skip
    print(f"| {' | '.join(header)} |\n|{' --: |' * len(header)}")
    designs = [(first, arms, spread, False) for first, arms in ((4, 2), (4, 4), (8, 2)) for spread in SPREADS]
    for first, arms, spread, problems in [*designs, *((4, 4, spread, True) for spread in (0.0, 0.6))]:
        found = simulate(spread, studies, first=first, arms=arms, problems=problems)
        shares = [100 * count / found.comparisons for count in (found.covered, found.pooled)]
        shares += [100 * found.wrong / found.studies, 100 * found.narrow / found.comparisons]
        shares += [100 * found.at_most / found.studies]
        name = f"problems, {spread:g}" if problems else f"{100 * spread:g} points"
        fixed = "n/a" if problems else str(fixed_seeds(spread))
        numbers = [f"{share:.1f}" for share in [*shares, found.seeds / found.studies]]
        if problems:  # it speaks of the very problems, on which arms do differ
            numbers[1] = "n/a"
        print(f"| {first} | {arms - 1} | {name} | {' | '.join(numbers)} | {fixed} |", flush=True)
