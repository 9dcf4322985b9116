"""How often a report calls arms different that do not differ: simulated studies, from the record to the sentence.

`python tests/error_rates.py --studies 2000` prints the share of studies with a false detection, in percent, for every
design and number of seeds; `test_error_rates.py` runs fewer of the same, without those of `MORE`. Families that are not
named are the exception: nobody can know of them.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import fake_study as studies_of
import numpy as np
from cohort.harness.record.study import StudyRecord, TrialRecord
from cohort.reports.analysis import Analysis
from cohort.reports.claims import check_claims
from cohort.reports.join import join
from cohort.reports.prose.answer import answer
from cohort.reports.render import analysed
from fake_study import FakeArm, fake_study, random_scores, with_claims, with_trials
from numpy.random import Generator

SEEDS = (2, 3, 5, 10)
LOOKS = (3, 5, 7, 10)  # numbers of complete seeds at which the reports of one study are written
LUCK = ("usual", "heavy tails", "collapses")
PROBLEMS = 64
UNEVEN = (20, 12, 8, 6, 4, 4, 3, 2, 2, 1, 1, 1)  # problems of a family
MARGIN = 0.08  # of a claim on scores of single problems
UNEQUAL = (0.05, 0.16, 0.6)  # logits: a stable, a usual and an unstable arm
GRID = {"algorithm.group_size": [2, 4, 8], "algorithm.kl_beta": [0.0, 0.1]}
_ON_THE_ENDS: Sequence[Mapping[str, Any]] = (
    {"contrast": {"ppo": 1, "grpo 8 0.04": -1}, "metric": "peak_memory_bytes", "ratio": True, "margin": 1.7},
    {"contrast": {"ppo": 1, "grpo 8 0.04": -1}, "metric": "seconds/step", "value": "mean", "ratio": True,
     "margin": 1 / 0.65},
    {"contrast": {"grpo 8 0.04": 1, "ppo": -1}},
    {"contrast": {"grpo 8 0.04": 1, "grpo 16 0.04": 1, "grpo 4 0.04": -2}, "metric": "validation/accuracy",
     "value": "fall", "predicts": "below"},
    {"contrast": [{"grpo 8 0.04": 1, f"grpo 8 {beta}": -1} for beta in (0.0, 0.1)]},
    {"contrast": {"grpo 16 0.04": 1, "grpo 4 0.04": -1}, "predicts": "not_above"},
    {"predicts": "ordered", "order": ["grpo 4 0.04", "grpo 8 0.04", "grpo 16 0.04"]},
)  # fmt: skip
Build = Callable[[int], list[FakeArm]]  # of a study's arms, by their number
SHOWN = ("supported",)
EQUIVALENT: Mapping[str, Any] = {"predicts": "equivalent", "wrong": SHOWN}
_P = re.compile(r"p (?:= |< )(\d\.\d+)")


def claims_a_difference(text: str) -> bool:
    """Whether an answer states a p below 0.05. ValueError if it states none: then this reads the wrong sentence."""
    found = [float(p) for p in _P.findall(text)]
    if not found and "no test possible" not in text:
        raise ValueError(f"an answer over several seeds must state a p, got: {text}")
    return any(p < 0.05 for p in found)


def crossed(rng: Generator, num_seeds: int, build: Build, **spread: Any) -> bool:
    """Six arms, five of them against a baseline or three by two levels, with the scores of single problems."""
    return _answered(_equal(rng, build, 6, num_seeds, **spread))


def related(
    rng: Generator, num_seeds: int, sizes: Sequence[int], build: Build | None = None,
    arm_by_family: float = 0.6, unnamed: int = 0, named: bool = True,
) -> bool:  # fmt: skip
    """The same with problems in families of these sizes; an arm gains on one family what it loses on another.

    The last `unnamed` families, which must be of one problem, have no name; none has if they are not `named`.
    """
    members = np.repeat(np.arange(len(sizes)), sizes)
    scores = random_scores(rng, 6, num_seeds, len(members), families=members.tolist(), arm_by_family=arm_by_family)
    known = {_problem(i): f"story {one}" for i, one in enumerate(members) if named and one < len(sizes) - unnamed}
    record = _scored(_record(build or _arms, 6, num_seeds), scores)
    return _answered(with_trials(record, lambda _: {"families": known}))


def unpaired(rng: Generator, num_seeds: int, **spread: Any) -> bool:
    """Six arms of which no two runs share a seed, as imports have them."""
    record = _equal(rng, _arms, 6, num_seeds, **spread)
    moved = with_trials(record, lambda one: {"seed": one.seed + num_seeds * record.arms.index(one.arm)})
    spec = {**record.spec, "pairing": "none", "design": "imported"}
    return _answered(dataclasses.replace(moved, seeds=list(range(6 * num_seeds)), spec=spec))


def greedy(rng: Generator, num_seeds: int, build: Build) -> bool:
    """Counts of problems that are all equally hard and whose single scores are not recorded; seeds add a point."""
    right = 1 / (1 + np.exp(-rng.normal(0.85, 0.05, (6, num_seeds))))
    shares = rng.binomial(PROBLEMS, right) / PROBLEMS
    return _answered(_counted(_record(build, 6, num_seeds), "greedy_accuracy", shares))


def pass_at_k(rng: Generator, num_seeds: int) -> bool:
    """Five arms against a baseline by pass@2 of 4 samples, 1 - C(wrong, 2) / C(4, 2), on these very problems."""
    wrong = 4 * (1 - random_scores(rng, 6, num_seeds, PROBLEMS))
    return _answered(_counted(_record(_arms, 6, num_seeds), "pass_at_2", (1 - wrong * (wrong - 1) / 12).mean(axis=2)))


def search(rng: Generator, num_seeds: int) -> bool:
    """Twelve arms of a search, whose answer names the best: any p and any distance to another arm is false."""
    record = _equal(rng, _arms, 12, num_seeds, arm_by_problem=0.6)
    values = {
        arm: float(np.mean([trial.summary["test_accuracy"] for trial in record.trials if trial.arm == arm]))
        for arm in record.arms
    }
    listed = [
        {"label": arm, "parameters": {"algorithm.kl_beta": 0.1}, "state": "complete", "values": {record.metric: value}}
        for arm, value in values.items()
    ]
    best = max(values, key=values.__getitem__)
    importances = {"method": "fANOVA", "values": {}, "reason": "one setting"}
    found = {"arms": listed, "best": best, "importances": importances}
    text = answer(analysed(dataclasses.replace(record, search=found)))
    return bool(_P.search(text) or re.search("above|below|differ", text))


def claims(rng: Generator, num_seeds: int) -> bool:
    """Six arms that lie exactly on the ends of what seven claims predict: any verdict but undecided is false."""
    record = _equal(rng, _claimed, 6, num_seeds, arm_by_problem=0.6)

    def measured(trial: TrialRecord) -> dict[str, Any]:
        is_ppo = trial.arm == "ppo"
        seconds, peak = np.exp(rng.normal(0, 0.03, 2)) * ((1 / 0.65, 1.7) if is_ppo else (1, 1))
        history = {
            "validation/accuracy": list(enumerate(rng.binomial(256, 0.7, 4) / 256)),
            "seconds/step": [(1, 9.0), (2, float(seconds)), (3, float(seconds))],
        }
        return {"history": history, "summary": {**trial.summary, "peak_memory_bytes": float(peak)}}

    found = check_claims(analysed(with_claims(with_trials(record, measured), *_ON_THE_ENDS)))
    if sum(claim.verdict == "not tested" for claim in found) > 1:  # counts may be equal in few seeds, by chance
        raise ValueError(f"claims must be tested, got {[claim.measured for claim in found]}")
    return any(claim.verdict in ("supported", "contradicted") for claim in found)


def margins(
    rng: Generator, num_seeds: int, predicts: str, difference: float, wrong: Sequence[str], by_problem: bool = True
) -> bool:
    """Whether the verdict is one of `wrong` on an arm that is `difference` (a fraction, at most 0) above another, held
    against a margin of MARGIN. With `by_problem` each right sample is wrong with the chance that makes this exact."""
    record = _record(_arms, 2, num_seeds)
    if by_problem:
        scores = random_scores(rng, 2, num_seeds, PROBLEMS, arm_by_problem=0.6)
        scores[1] = rng.binomial((4 * scores[1]).astype(int), 1 + difference / studies_of.random_scores_truth()) / 4
        record = _scored(record, scores)
    else:
        record = _curved(record, _luck(rng, "usual", 2, num_seeds) + np.array([[0.0], [difference]]))
    claim = {"contrast": {"arm 1": 1, "arm 0": -1}, "predicts": predicts, "margin": MARGIN if by_problem else 0.02}
    return check_claims(analysed(with_claims(record, claim)))[0].verdict in wrong


def components(rng: Generator, num_seeds: int) -> bool:
    """Four components, each left out of all: any p below 0.05, and any interval, in the sentence that ranks them."""
    text = answer(analysed(_equal(rng, _components, 5, num_seeds)))
    return claims_a_difference(text) or "[" in text.partition("ranked by contribution")[2]


def stepwise(rng: Generator, num_seeds: int, build: Build) -> bool:
    """Arms that are compared with the one before, or with the one that has another level and is alike otherwise."""
    record = _record(build, 6, num_seeds)
    pairs = zip(record.arms[1:], record.arms, strict=False)
    references = {arm: before for arm, before in pairs if build is _ladder or arm.endswith("=0.1")}
    scores = random_scores(rng, len(record.arms), num_seeds, PROBLEMS, arm_by_problem=0.6)
    return _answered(dataclasses.replace(_scored(record, scores), references=references))


def missing_problems(rng: Generator, num_seeds: int) -> bool:
    """Each trial has lost the scores of about a tenth of the problems, of other ones than the others."""
    record = _equal(rng, _arms, 6, num_seeds)

    def some(trial: TrialRecord) -> dict[str, Any]:
        kept = {name: value for name, value in trial.per_problem.items() if rng.random() > 0.1}
        return {"per_problem": kept, "summary": {**trial.summary, "test_accuracy": float(np.mean([*kept.values()]))}}

    return _answered(with_trials(record, some))


def joined(rng: Generator, num_seeds: int) -> bool:
    """Two studies that share their seeds, and with them a part of their luck; the second has more of them."""
    counts = (num_seeds, num_seeds + 3)
    scores = _luck(rng, "usual", 6, counts[1]) + rng.normal(0, 0.01, counts[1])
    studies = [
        dataclasses.replace(_curved(_record(_arms, 3, count), scores[3 * i : 3 * i + 3, :count]), name=f"study {i}")
        for i, count in enumerate(counts)
    ]
    return _answered(join(studies))


def extended(rng: Generator, num_seeds: int, luck: str, any_time: bool = False) -> Iterator[Analysis]:
    """Three seeds, to which more are added until something shows; a page at each of LOOKS up to that number."""
    scores = _luck(rng, luck, 4, num_seeds)
    return _looks(num_seeds, any_time, lambda count: _curved(_record(_arms, 4, count), scores))


def extended_families(
    rng: Generator, num_seeds: int, sizes: Sequence[int], any_time: bool = False
) -> Iterator[Analysis]:
    """The same of six arms with problems in families of these sizes."""
    members = np.repeat(np.arange(len(sizes)), sizes)
    scores = random_scores(rng, 6, num_seeds, len(members), families=members.tolist(), arm_by_family=0.6)
    known = {"families": {_problem(i): f"story {one}" for i, one in enumerate(members)}}
    record = lambda count: _scored(_record(_arms, 6, count), scores[:, :count])  # noqa: E731
    return _looks(num_seeds, any_time, lambda count: with_trials(record(count), lambda _: known))


def _looks(num_seeds: int, any_time: bool, record: Callable[[int], StudyRecord]) -> Iterator[Analysis]:
    for count in (look for look in LOOKS if look <= num_seeds):
        added = list(range(LOOKS[0], count))
        yield analysed(dataclasses.replace(record(count), any_time=any_time, added=added, looks=[3] if added else []))


def averaged(rng: Generator, num_seeds: int, last: int = 3) -> Iterator[Analysis]:
    """Five arms and a baseline whose runs are measured at their last evaluations (`evaluation.test_last`): in half of
    the runs each has luck of its own, in the others all have the same; arms differ in spread."""
    scores = random_scores(rng, 6 * last, num_seeds, PROBLEMS, seed_deviations=np.repeat(UNEQUAL, last).tolist())
    scores = scores.reshape(6, last, num_seeds, PROBLEMS)
    stays = rng.random((6, 1, num_seeds, 1)) < 0.5
    scores = np.where(stays, scores[:, :1], scores)
    record = _scored(_record(_arms, 6, num_seeds), scores.mean(axis=1))

    def measured(trial: TrialRecord) -> dict[str, Any]:
        curve = scores[record.arms.index(trial.arm), :, trial.seed].mean(axis=1)
        series = [(0, 0.1), *((10 * step, float(value)) for step, value in enumerate(curve, 8))]
        spec = {**trial.spec, "evaluation": {"test_last": last}}
        return {"history": {**trial.history, "test/accuracy": series}, "summary": {}, "spec": spec}

    yield analysed(with_trials(record, measured))


def interim(rng: Generator, num_seeds: int, luck: str) -> Iterator[Analysis]:
    """As many seeds as planned, unless a page before the last one shows something."""
    whole = _curved(_record(_arms, 4, num_seeds), _luck(rng, luck, 4, num_seeds))
    for count in (look for look in LOOKS if look <= num_seeds):
        yield analysed(dataclasses.replace(whole, trials=[one for one in whole.trials if one.seed < count]))


def read_until(pages: Iterator[Analysis]) -> tuple[bool, Analysis]:
    """Whether a page claims a difference, and the page at which a reader stops: that one, or else the last."""
    page = None
    for page in pages:
        if claims_a_difference(answer(page)):
            return True, page
    assert page is not None
    return False, page


def _answered(record: StudyRecord) -> bool:
    return claims_a_difference(answer(analysed(record)))


def _equal(rng: Generator, build: Build, num_arms: int, num_seeds: int, **spread: Any) -> StudyRecord:
    return _scored(_record(build, num_arms, num_seeds), random_scores(rng, num_arms, num_seeds, PROBLEMS, **spread))


def _arms(count: int) -> list[FakeArm]:
    return [FakeArm(f"arm {number}") for number in range(count)]


def _components(count: int) -> list[FakeArm]:
    labels = ("all", *(f"without part {number}" for number in range(1, count)))
    return [FakeArm(label, factors={"arm": label}) for label in labels]


def _ladder(_: int) -> list[FakeArm]:
    return [FakeArm(label, factors={"arm": label}) for label in ("none", "+a", "+b", "+c", "+d")]


def _grid(_: int) -> list[FakeArm]:
    return studies_of.factor_grid(GRID)


def _claimed(_: int) -> list[FakeArm]:
    """PPO and GRPO; GRPO also with other group sizes and other weights of the KL term."""
    common = {"model": "other", "autocast": True}
    found = [FakeArm("ppo", "ppo", settings=common)]
    for size, beta in ((8, 0.04), (4, 0.04), (16, 0.04), (8, 0.0), (8, 0.1)):
        own = {"algorithm.group_size": size, "algorithm.kl_beta": beta}
        found.append(FakeArm(f"grpo {size} {beta}", settings={**common, **own}))
    return found


@cache
def _record(build: Build, num_arms: int, num_seeds: int) -> StudyRecord:
    record = fake_study(build(num_arms), seeds=range(num_seeds), num_problems=2, num_steps=10)
    if build is not _components:
        return record
    parts = {label.removeprefix("without "): {} for label in record.arms[1:]}
    return dataclasses.replace(record, spec={**record.spec, "design": "leave_one_out", "components": parts})


def _luck(rng: Generator, kind: str, num_arms: int, num_seeds: int) -> np.ndarray:
    """Scores [arm, seed] of equal arms: normal, with 2 degrees of freedom, or 12.7 points lower in a tenth of them."""
    shape = num_arms, num_seeds
    noise = rng.standard_t(2, shape) if kind == "heavy tails" else rng.normal(0, 1, shape)
    return 0.6 + 0.01 * noise - (0.127 * (rng.random(shape) < 0.1) if kind == "collapses" else 0)


def _curved(record: StudyRecord, scores: np.ndarray) -> StudyRecord:
    """The record with these scores [arm, seed], which stand on no grid of problems."""

    def scored(trial: TrialRecord) -> dict[str, Any]:
        last = [(10, float(scores[record.arms.index(trial.arm), trial.seed]))]
        return {"history": {"validation/accuracy": last}, "summary": {}, "per_problem": {}}

    return with_trials(record, scored)


def _scored(record: StudyRecord, scores: np.ndarray) -> StudyRecord:
    """The record with these scores of single problems: arms, seeds, problems."""
    rows = iter(scores.reshape(len(record.trials), -1))

    def scored(trial: TrialRecord) -> dict[str, Any]:
        row = next(rows)
        cells = {_problem(number): value for number, value in enumerate(row.tolist())}
        return {"per_problem": cells, "summary": {**trial.summary, "test_accuracy": float(row.mean())}}

    return with_trials(record, scored)


def _problem(number: int) -> str:
    return f"problem-{number:04d}"


def _counted(record: StudyRecord, quantity: str, values: np.ndarray) -> StudyRecord:
    """The record with another metric, arms by seeds, of which the problems are only counted."""
    each = iter(values.ravel().tolist())

    def counted(_: TrialRecord) -> dict[str, Any]:
        last, count = [(10, next(each))], [(10, float(PROBLEMS))]
        return {"history": {f"validation/{quantity}": last, f"test/{quantity}": last, "test/num_prompts": count}}

    return dataclasses.replace(with_trials(record, counted), metric=f"validation/{quantity}")


DESIGNS: Mapping[str, Callable[[Generator, int], bool]] = {
    "5 arms": partial(crossed, build=_arms),
    "5 arms, seeds differ by arm": partial(crossed, build=_arms, arm_by_problem=0.6, seed_deviations=UNEQUAL),
    "grid": partial(crossed, build=_grid),
    "grid, problems differ much by arm": partial(crossed, build=_grid, arm_by_problem=1.2),
    "grid, seeds differ by arm": partial(crossed, build=_grid, arm_by_problem=0.6, seed_deviations=UNEQUAL),
    "grid, greedy accuracy": partial(greedy, build=_grid),
    "5 arms, greedy accuracy": partial(greedy, build=_arms),
    "5 arms, pass@k": pass_at_k,
    "families of 8": partial(related, sizes=(8,) * 8),
    "grid, families of 8": partial(related, sizes=(8,) * 8, build=_grid),
    "half of the problems named": partial(related, sizes=(*(8,) * 8, *(1,) * 64), unnamed=64),
    "search of 12 arms": search,
    "7 claims": claims,
    "ladder of 4 parts": partial(stepwise, build=_ladder),
    "equivalent, difference of the margin": partial(margins, difference=-MARGIN, **EQUIVALENT),
    "4 components": components,
    "5 arms, missing problems": missing_problems,
    "2 studies, shared seeds, unequal numbers": joined,
}
# Studies that are read more than once, or choose their number of seeds: also how often intervals hold where one stops.
READINGS: Mapping[str, tuple[Sequence[int], Callable[[Generator, int], Iterator[Analysis]]]] = {
    **{f"seeds added at 3, 5, 7, {luck}": ((10,), partial(extended, luck=luck)) for luck in LUCK},
    **{f"read at 3, 5, 7 of 10 planned, {luck}": ((10,), partial(interim, luck=luck)) for luck in LUCK},
    **{f"any_time, read at 3, 5, 7, {luck}": ((10,), partial(extended, luck=luck, any_time=True)) for luck in LUCK},
    "families of 8, seeds added at 3, 5, 7": ((10,), partial(extended_families, sizes=(8,) * 8)),
    "families of 1 to 20, seeds added at 3, 5, 7": ((10,), partial(extended_families, sizes=UNEVEN)),
    "families of 8, any_time": ((10,), partial(extended_families, sizes=(8,) * 8, any_time=True)),
    "mean of 3 evaluations": ((3, 4, 6), averaged),
}
MORE: Mapping[str, Callable[[Generator, int], bool]] = {
    "32 families of 16": partial(related, sizes=(16,) * 32, arm_by_family=0.3),
    "30 families of 8, as gsm_symbolic tests": partial(related, sizes=(8,) * 30),
    "the same, not named": partial(related, sizes=(8,) * 30, named=False),
    "families of 1 to 20": partial(related, sizes=UNEVEN),
    "a family of half, others of 2": partial(related, sizes=(64, *(2,) * 32)),
    "5 families of 24": partial(related, sizes=(24,) * 5),
    "families of one": partial(related, sizes=(1,) * 64),
    "not below, difference of the margin": partial(margins, predicts="not_below", difference=-MARGIN, wrong=SHOWN),
    "2 levels within 3": partial(stepwise, build=_grid),
    "equivalent, difference of the margin, seeds alone": partial(
        margins, predicts="equivalent", difference=-0.02, wrong=SHOWN, by_problem=False
    ),
    "equivalent, no difference, called different": partial(
        margins, predicts="equivalent", difference=0.0, wrong=("contradicted",)
    ),
    "5 arms at the floor": partial(crossed, build=_arms, logit=-6.0),
    "families of 8, not named": partial(related, sizes=(8,) * 8, named=False),
    "5 arms, no shared seeds": unpaired,
    "5 arms, no shared seeds, spread differs by arm": partial(unpaired, arm_by_problem=0.6, seed_deviations=UNEQUAL),
}


def error_rate(design: str, num_seeds: int, studies: int) -> float:
    """The share of studies in which a difference is claimed; equal calls draw equal studies."""
    designs = {**DESIGNS, **MORE}
    rng = np.random.default_rng([num_seeds, list(designs).index(design)])
    return sum(designs[design](rng, num_seeds) for _ in range(studies)) / studies


def reading_rates(design: str, num_seeds: int, studies: int) -> tuple[float, float]:
    """The share of studies in which a page claims a difference, and of the last page's intervals that hold 0."""
    rng = np.random.default_rng([num_seeds, list(READINGS).index(design), 1])
    read = [read_until(READINGS[design][1](rng, num_seeds)) for _ in range(studies)]
    intervals = [one.interval for _, page in read for one in page.comparisons if one.interval is not None]
    held = [interval.low <= 0 <= interval.high for interval in intervals]
    return float(np.mean([claimed for claimed, _ in read])), float(np.mean(held))


if __name__ == "__main__":
    studies = studies_of.wanted_studies(__doc__, 2000)
    print(f"| design | {' | '.join(f'{number} seeds' for number in SEEDS)} |\n| --- |{' --: |' * len(SEEDS)}")
    for design in (*DESIGNS, *MORE):
        rates = [f"{100 * error_rate(design, number, studies):.1f}" for number in SEEDS]
        print(f"| {design} | {' | '.join(rates)} |", flush=True)
    print("\n| first, or last, seeds: claimed, intervals that hold | | | | |\n| --- | --: | --: | --: | --: |")
    for design, (numbers, _) in READINGS.items():
        found = [(number, *reading_rates(design, number, studies)) for number in numbers]
        cells = [f"{number}: {100 * wrong:.1f}, {100 * held:.1f}" for number, wrong, held in found]
        print(f"| {design} | {' | '.join(cells)} |", flush=True)
