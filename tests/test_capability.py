"""Curves of pass@k and Cover@tau: their estimates by hand, how often their intervals hold, and what the page says."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false

import csv
import dataclasses
import html
from fractions import Fraction
from math import comb
from typing import Any

import numpy as np
import pytest
from cohort.harness.record.study import StudyRecord, TrialRecord
from cohort.reports import capability
from cohort.reports.capability import Capabilities, Capability, crossover, curves_of_counts
from cohort.reports.render import analysed, write_report
from cohort.reports.statistics import fraction_interval
from fake_study import FakeArm, fake_study, with_trials
from scipy import special


def sharpened(chances_N: np.ndarray, lost_N: np.ndarray) -> np.ndarray:
    """What training makes of problems: some are lost, all others are solved as often as by one of four tries before."""
    return np.where(lost_N, 0.002 * chances_N, 1 - (1 - chances_N) ** 4)


def capability_study(num_problems: int, num_samples: int, with_start: bool = True) -> StudyRecord:
    """Arm `sharp` is `sharpened`, arm `mild` as often right as by one of two tries; one start for both."""
    rng = np.random.default_rng(5)
    chances, lost = rng.beta(0.4, 1.2, num_problems), rng.random(num_problems) < 0.25
    after = {"sharp": sharpened(chances, lost), "mild": 1 - (1 - chances) ** 2}
    record = fake_study(list(map(FakeArm, after)), num_problems=2, num_steps=20)

    def fractions(chances_N: np.ndarray) -> dict[str, float]:
        return {f"problem-{i}": n / num_samples for i, n in enumerate(rng.binomial(num_samples, chances_N).tolist())}

    starts = [fractions(chances) if with_start else {} for _ in range(3)]

    def sampled(trial: TrialRecord) -> dict[str, Any]:
        right = fractions(after[trial.arm])
        mean = float(np.mean(list(right.values())))
        numbers = {"test/accuracy": mean, "test/num_samples": num_samples, "test/pass_at_2": 0.5}
        history = {**trial.history, **{name: [(20, float(number))] for name, number in numbers.items()}}
        history |= {"start/num_samples": [(0, float(num_samples))]}
        summary = {**trial.summary, "test_accuracy": mean}
        return {"history": history, "summary": summary, "per_problem": right, "start_per_problem": starts[trial.seed]}

    return with_trials(record, sampled)


def found_in(record: StudyRecord) -> Capabilities | None:
    return capability.capabilities(analysed(record))


def test_pass_at_k_of_1024_samples_agrees_with_exact_fractions():
    table = capability.pass_table(1024)
    assert table.shape == (1025, 1024)
    for right, k in ((0, 1024), (1, 1), (1, 512), (3, 700), (40, 20), (500, 7), (1023, 1), (1024, 1024)):
        exact = 1 - Fraction(comb(1024 - right, k), comb(1024, k))
        assert table[right, k - 1] == pytest.approx(float(exact), abs=1e-12)
    assert (np.diff(table, axis=1) >= 0).all() and (np.diff(table, axis=0) >= 0).all()
    assert table.min() == 0 and table.max() == 1
    one = Capability("a", (0,), np.array([[0, 1, 5, 10, 10]]), 10)  # problems whose samples are right often enough
    assert [one.covers(tau).mean() for tau in (0.1, 0.5, 0.51, 1.0)] == [0.8, 0.6, 0.4, 0.4]


def test_an_interval_of_fractions_stays_between_0_and_1_and_never_ends_at_a_certainty():
    # all 50 problems solved: Wilson with 50 problems and t(49) = 2.0096: 50 / (50 + t^2) = 0.9253
    assert fraction_interval(np.ones((1, 50))).low == pytest.approx(0.92526, abs=1e-4)
    assert fraction_interval(np.zeros((3, 50))).high > 0
    assert fraction_interval(np.ones((1, 37))).high == 1  # 1 + 2e-16 by the formula
    rng = np.random.default_rng(0)
    for mean in (0.001, 0.5, 0.999):
        interval = fraction_interval(np.clip(rng.normal(mean, 0.01, (3, 40)), 0, 1))
        assert 0 <= interval.low < interval.estimate < interval.high <= 1
    assert fraction_interval(np.ones((1, 1))) is None


def test_problems_count_as_more_than_there_are_only_where_five_are_wrong_and_five_right():
    # 40 problems that are all but alike: error sqrt(s^2 / 40) with s^2 = 0.01^2 * 40 / 39, so 0.2 * 0.8 / error^2 would
    # be 62,400 problems; half width t(39) * 0.0016 = 0.0032
    for mean, is_narrow in ((0.2, True), (0.125, True), (0.12, False), (0.875, True), (0.88, False)):
        interval = fraction_interval(np.resize([mean - 0.01, mean + 0.01], (1, 40)))
        width = interval.high - interval.low
        assert width == pytest.approx(2 * 2.0227 * 0.01 / np.sqrt(39), rel=0.01) if is_narrow else width > 0.1


@pytest.mark.parametrize(("right", "low"), [(40, 2), (41, None)])
def test_a_lead_of_five_problems_is_shown_and_one_of_fewer_is_not(right, low):
    ahead, many = np.zeros(128, int), np.zeros(128, int)
    # with 40 of 64 samples 16 to 10 + 1 problems at one sample, 16 to 13.8 + 2 at two; with 41 16 to 10.25 + 1 at one
    ahead[:16], many[:16], many[16:80] = 64, right, 1
    found = crossover(Capability("one", (0,), ahead[None], 64), Capability("many", (0,), many[None], 64))
    assert (found.leader, found.low) == ("one", low)


def test_a_crossing_and_its_limits_are_those_of_the_shared_seeds():
    half, rare = np.repeat([32, 0], 10), np.full(20, 4)  # of 32 samples: pass@k 0.5, and 1 - C(28, k) / C(32, k)
    one = Capability("half", (0, 1, 2), np.stack([0 * half, half, half]), 32)
    found = crossover(one, Capability("rare", (1, 2, 3), np.stack([rare, rare, 0 * rare]), 32))
    assert (found.leader, found.k) == ("half", 5)  # 0.43 at 4, 0.51 at 5
    # over 20 problems with a deviation of 0.513, a difference of 0.240 is shown: 0.262 at 2 and 0.160 at 3
    assert (found.low, found.high) == (3, 9)  # -0.205 at 8, -0.254 at 9
    same = crossover(dataclasses.replace(one, label="a"), dataclasses.replace(one, label="b"))
    assert (same.leader, same.other, same.k) == ("a", "b", None)
    assert crossover(one, Capability("rare", (1,), rare[None] // 2, 16)).most == 16


def test_curves_count_blocks_of_families_for_problems():
    # 32 pairs of equal problems are 32 blocks: their curves are those of the 32 problems seen once
    counts, pairs = np.random.default_rng(0).binomial(16, 0.4, (3, 32)), [[2 * i, 2 * i + 1] for i in range(32)]
    once = Capability("a", (0, 1, 2), counts, 16)
    twice = Capability("a", (0, 1, 2), np.repeat(counts, 2, axis=1), 16, blocks=pairs)
    for one, two in ((once.pass_at(1), twice.pass_at(1)), (once.cover_at(0.5), twice.cover_at(0.5))):
        assert (two.low, two.high) == (pytest.approx(one.low), pytest.approx(one.high))
    pair = crossing_counts(np.random.default_rng(1), num_problems=64, num_samples=64)
    blocks = [[2 * i, 2 * i + 1] for i in range(64)]
    both = [dataclasses.replace(one, counts_SN=np.repeat(one.counts_SN, 2, axis=1), blocks=blocks) for one in pair]
    unaware = [dataclasses.replace(one, blocks=()) for one in both]
    assert crossover(*both) == crossover(*pair) != crossover(*unaware)


# Beta's a and b, seeds, deviation of seeds in logits, problems, samples
DESIGNS = [
    (0.5, 1.0, 1, 0.0, 500, 1024), (0.5, 1.0, 3, 0.0, 500, 1024), (0.5, 1.0, 3, 0.15, 256, 256),
    (0.5, 1.0, 5, 0.15, 500, 1024), (0.2, 2.0, 1, 0.0, 256, 256), (0.2, 2.0, 3, 0.15, 500, 1024),
    (0.2, 2.0, 5, 0.0, 256, 256),
]  # fmt: skip
SIZES, TAUS = (1, 4, 16, 64, 256), (0.1, 0.25, 0.5)


def covered(design: tuple, studies: int) -> dict[str, float]:
    """Percent of the intervals that hold the truth on new problems and seeds; problems have Beta-distributed chances,
    and a seed moves the logits of them all."""
    a, b, num_seeds, deviation, num_problems, num_samples = design
    rng = np.random.default_rng([int(100 * a), num_seeds, int(100 * deviation), num_problems])

    def chances(seeds: int, problems: int) -> np.ndarray:
        logits = special.logit(np.clip(rng.beta(a, b, problems), 1e-12, 1 - 1e-12))
        return special.expit(logits + rng.normal(0, 1, (seeds, 1)) * deviation)

    many = np.concatenate([chances(1, 4000)[0] for _ in range(250)])
    truth = {f"pass@{k}": np.mean(1 - (1 - many) ** k) for k in SIZES}
    truth |= {f"cover@{tau}": np.mean(many >= tau) for tau in TAUS}
    held = dict.fromkeys(truth, 0)
    for _ in range(studies):
        counts = rng.binomial(num_samples, chances(num_seeds, num_problems))
        one = Capability("a", tuple(range(num_seeds)), counts, num_samples)
        intervals = {f"pass@{k}": one.pass_at(k) for k in SIZES} | {f"cover@{tau}": one.cover_at(tau) for tau in TAUS}
        for name, interval in intervals.items():
            held[name] += interval.low <= truth[name] <= interval.high
    return {name: 100 * count / studies for name, count in held.items()}


@pytest.mark.parametrize("design", DESIGNS[4:5])
def test_intervals_of_pass_at_k_and_cover_hold_in_95_percent_of_beta_binomial_studies(design):
    shares = covered(design, 150)
    assert 93 <= np.mean(list(shares.values())) <= 97.5  # the error of a single share is 1.8, of their mean about 1
    assert min(shares.values()) > 89


@pytest.mark.long
@pytest.mark.parametrize("design", DESIGNS)
def test_every_interval_of_pass_at_k_and_cover_holds_in_93_to_97_percent_of_studies(design):
    shares = covered(design, 4000)
    print(design, shares)
    assert all(93 <= share <= 97 for share in shares.values()), shares
    assert 93 <= np.mean(list(shares.values())) <= 97


def crossing_counts(rng: np.random.Generator, num_problems: int = 256, num_samples: int = 128) -> list[Capability]:
    chances, lost = rng.beta(0.4, 1.2, num_problems), rng.random(num_problems) < 0.2
    pair = {"trained": sharpened(chances, lost), "start": chances}
    return [Capability(name, (0,), rng.binomial(num_samples, p)[None], num_samples) for name, p in pair.items()]


def test_the_crossing_of_two_curves_lies_within_its_limits_in_95_percent_of_studies():
    # By the moments of the Beta distribution the means are 0.6 points apart at k = 9, and -0.1 at k = 10.
    found = [crossover(*crossing_counts(np.random.default_rng(seed))) for seed in range(120)]
    assert all(one is not None and one.k is not None and one.leader == "trained" for one in found)
    assert np.mean([(one.low or 1) <= 10 <= (one.high or 128) for one in found]) >= 0.91  # of 120, error 2 points
    assert np.mean([one.low is not None and one.high is not None for one in found]) > 0.8


def test_curves_that_do_not_cross_or_are_of_other_problems_have_no_crossing_and_luck_shows_no_lead():
    low, high = (Capability(name, (0,), np.full((1, 30), right), 64) for name, right in (("low", 10), ("high", 30)))
    one = crossover(low, high)
    assert (one.leader, one.other, one.k, crossover(low, low).k) == ("high", "low", None, None)
    # one of two problems has all 16 samples right, 0.5 at every k; or both have 7: 7 / 16, then 1 - 9 / 16 * 8 / 15
    found = crossover(*(Capability(str(some), (0,), np.array([some]), 16) for some in ([16, 0], [7, 7])))
    assert (found.leader, found.other, found.k) == ("[16, 0]", "[7, 7]", 2)
    # two problems of 30 are gained, one is lost: a lead at k = 1 that turns, and neither side is shown
    a, b = np.full(30, 20), np.full(30, 20)
    a[0], a[3], b[1], b[2] = 64, 0, 0, 30
    found = crossover(Capability("a", (0,), a[None], 64), Capability("b", (0,), b[None], 64))
    assert found.low is None and found.high is None
    # curves of other problems or other seeds are not compared
    one = Capability("a", (0, 1), np.ones((2, 5), int), 32)
    assert crossover(one, Capability("b", (0, 1), np.ones((2, 6), int), 32)) is None
    assert crossover(one, Capability("b", (2,), np.ones((1, 5), int), 32)) is None


@pytest.mark.slow
def test_a_study_with_many_samples_shows_curves_before_and_after_training(tmp_path):
    record = capability_study(num_problems=120, num_samples=64)
    files = write_report(record, tmp_path, formats=())
    page, rows = html.unescape(files.html.read_text()), list(csv.DictReader((tmp_path / "capability.csv").open()))
    wanted = ("pass@64 (%)", "Cover@0.25 (%)", "before training: 'sharp' and 'mild'", "start of sharp")
    assert all(text in page for text in ('id="capability"', *wanted))
    assert len(rows) == 3 * 64
    found = found_in(record)
    last = next(row for row in rows if (row["policy"], row["k"]) == ("mild", "64"))
    assert float(last["pass_at_k"]) == pytest.approx(found.after["mild"].passes(64).mean(), abs=1e-5)
    for one in record.trials:
        counts = found.after[one.arm].counts_SN[one.seed]
        assert counts.tolist() == [round(64 * one.per_problem[key]) for key in sorted(one.per_problem)]
    assert ("sharp", "start of sharp") in [(one.leader, one.other) for one in found.crossovers]
    assert '<th scope="col">pass@2</th>' not in page  # in the curves, not in the table of accuracies


def test_the_curves_of_one_policy_have_every_k_with_its_interval():
    found = curves_of_counts([0, 3, 20, 32], 32)
    assert list(found["pass_at_k"]) == [str(k) for k in range(1, 33)]
    estimate, low, high = found["pass_at_k"]["32"]
    assert estimate == 0.75 and 0 < low < 0.75 < high <= 1
    assert found["cover_at_tau"]["0.5"][0] == 0.5 and [*found["cover_at_tau"]] == ["0.1", "0.25", "0.5", "0.75", "0.9"]
    fewest = [bool(curves_of_counts(counts, n)) for counts, n in (([1, 2], 16), ([1, 2], 15), ([1], 16))]
    assert fewest == [True, False, False]
    sizes = [[1, 4, 16], [1, 4, 16, 20], [4**n for n in range(7)]]
    assert [capability.table_sizes(n) for n in (16, 20, 4096)] == sizes


@pytest.mark.slow
def test_few_samples_or_unequal_ones_make_no_curves(tmp_path):
    assert found_in(fake_study()) is None
    record = capability_study(num_problems=30, num_samples=32, with_start=False)
    assert found_in(record).before == []
    named = with_trials(record, lambda trial: {"families": dict.fromkeys(trial.per_problem, "all")})
    assert {len(one.blocks) for one in found_in(named).after.values()} == {1}
    write_report(named, tmp_path / "named", formats=())  # a single seed of a single family has no interval
    trial = record.trials[0]
    other = dataclasses.replace(trial, history={**trial.history, "test/num_samples": [(20, 16.0)]})
    found = found_in(dataclasses.replace(record, trials=[other, *record.trials[1:]]))
    assert set(found.after) == {"mild"}
    write_report(record, tmp_path, formats=())
    write_report(fake_study(num_steps=20), tmp_path, formats=())
    assert not (tmp_path / "capability.csv").exists()


def test_an_arm_whose_seeds_had_other_problems_has_no_curve():
    record = capability_study(num_problems=30, num_samples=32, with_start=False)
    more = {"sharp": {"problem-30": 0.5}, "mild": {}}
    other = with_trials(record, lambda t: {"per_problem": t.per_problem | more[t.arm] if t.seed else t.per_problem})
    found = found_in(other)
    assert found is not None and list(found.after) == ["mild"]


def test_two_problems_sixteen_samples_and_a_single_seed_are_enough_for_the_curves_of_a_study():
    record = capability_study(num_problems=2, num_samples=16)
    found, (trial, *others) = found_in(record), record.trials
    assert list(found.after) == ["sharp", "mild"] and [one.label for one in found.before] == ["'sharp' and 'mild'"]
    pairs = [("sharp", "start of sharp"), ("mild", "start of mild"), ("mild", "sharp")]
    assert [{one.leader, one.other} for one in found.crossovers] == [set(pair) for pair in pairs]
    alone = found_in(dataclasses.replace(record, trials=[trial]))
    assert alone.after["sharp"].seeds == (0,) and [one.label for one in alone.before] == ["'sharp'"]
    means = {**trial.history, "test/num_samples": [(10, 16.0), (20, 16.0)]}  # over two evaluations
    mixed = [dataclasses.replace(trial, history=means), *others]
    assert list(found_in(dataclasses.replace(record, trials=mixed)).after) == ["mild"]
