"""Fitted curves of accuracy against compute: their numbers, how often they hold, and when they are refused."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cohort.harness.extras.scaling import fits as scaling
from cohort.harness.extras.scaling.fits import Scaling, Scalings, curve, fit_curve, scalings
from cohort.harness.record.study import StudyRecord, TrialRecord
from cohort.reports import statistics
from cohort.reports.render import analysed, write_report
from fake_study import FakeArm, arms_of, fake_study, with_trials
from scaling_curves import IDENTIFIED, UNIDENTIFIED, Design, draw, simulate
from scipy import stats


def test_the_curve_starts_at_r0_is_halfway_at_the_midpoint_and_ends_at_its_ceiling():
    parameters = np.array([0.8, 0.4, math.log(50.0), math.log(2.0)])
    assert curve(parameters, np.array([0.0, 50.0, 100.0, 1e9])) == pytest.approx([0.4, 0.6, 0.4 + 0.4 * 0.8, 0.8])


def test_a_curve_without_noise_is_found_again_whatever_the_unit_of_compute():
    costs = np.stack([np.linspace(0, end, 15) for end in (0.9e6, 1.1e6)])
    truth = np.array([0.7, 0.3, math.log(2e5), math.log(1.5)])
    for unit in (1e-6, 1e9):
        found = fit_curve("a", (0, 1), costs * unit, curve(truth, costs))
        assert isinstance(found, Scaling)
        assert found.ceiling.estimate == pytest.approx(0.7, abs=1e-6)
        assert found.midpoint.estimate == pytest.approx(2e5 * unit, rel=1e-5)
        assert found.exponent.estimate == pytest.approx(1.5, rel=1e-5)
        assert found.reached == pytest.approx(1 / (1 + (2e5 / 1e6) ** 1.5), abs=1e-6)
        assert found.prediction is not None and found.prediction.estimate == pytest.approx(0, abs=1e-4)
        for values in (found.parameters, *found.by_seed.values()):
            assert values == pytest.approx(truth + np.array([0, 0, math.log(unit), 0]), abs=1e-5)


def test_what_a_seed_says_is_what_leaving_it_out_takes_away():
    costs, scores = draw(Design(seeds=3, points=10, spread=0.002, noise=0.001), np.random.default_rng(0))
    found = fit_curve("a", range(3), 1e6 * costs, scores)
    assert isinstance(found, Scaling)
    assert np.mean(list(found.by_seed.values()), axis=0) == pytest.approx(found.parameters, abs=2e-4)
    for seed, value in found.by_seed.items():
        others, _ = scaling._least_squares(np.delete(costs, seed, 0), np.delete(scores, seed, 0))
        # the pseudo-value of the jackknife, 3 times the whole minus 2 times the others, is the same to first order
        pseudo = 3 * found.parameters - 2 * (others + np.array([0, 0, math.log(1e6), 0]))
        assert value == pytest.approx(pseudo, abs=0.01)  # midpoints are 8 % apart


def test_a_midpoint_counts_as_late_by_the_mean_of_what_seeds_have_spent():
    costs = np.linspace(0, 1, 9) * np.array([[2.0], [1.0]])  # the last quarter begins at 0.75 * 1.5 = 1.125
    for middle, is_late in ((1.1, False), (1.15, True)):
        found = fit_curve("a", (0, 1), costs, curve(np.array([0.7, 0.3, math.log(middle), 1.0]), costs))
        assert isinstance(found, str) == is_late and (not is_late or "last quarter of training" in found)


@pytest.mark.slow
def test_ceilings_and_midpoints_of_identified_curves_are_enclosed():
    refused, ceiling, middle = simulate(IDENTIFIED["5 seeds"], 16)
    assert refused == 0
    assert min(ceiling, middle) >= 80  # of 16 studies


@pytest.mark.parametrize(("studies", "least"), [(3, 100), pytest.param(300, 98, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", UNIDENTIFIED)
def test_curves_that_the_data_do_not_identify_are_refused(name, studies, least):
    assert simulate(UNIDENTIFIED[name], studies)[0] >= least


@pytest.mark.long
@pytest.mark.parametrize("name", IDENTIFIED)
def test_ceilings_are_enclosed_in_93_to_97_percent_of_studies(name):
    refused, ceiling, middle = simulate(IDENTIFIED[name], 1500)
    print(name, refused, ceiling, middle)
    assert refused < 1
    assert 93 <= ceiling <= 97
    assert 91.5 <= middle <= 97


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("one seed", "single seed"),
        ("6 evaluations", "too few for four parameters"),
        ("falls", "does not rise"),
        ("straight line", "has not bent"),
        ("late", "last quarter of training"),
    ],
)
def test_a_refusal_names_its_reason(name, reason):
    design = {**UNIDENTIFIED, "late": Design(middle=0.85, spread=0.002, noise=0.001)}[name]
    found = fit_curve("a", range(design.seeds), *draw(design, np.random.default_rng(0)))
    assert isinstance(found, str) and reason in found


def test_shifts_pair_an_arm_with_the_baseline_by_seed(monkeypatch):
    says = {("a", 0): 0.1, ("a", 1): 0.3, ("a", 2): 0.9, ("b", 1): 0.2, ("b", 2): 0.5, ("b", 3): 0.7, ("c", 3): 0.0}
    monkeypatch.setattr(scaling, "fit_curve", lambda arm, seeds, *_: SimpleNamespace(
        arm=arm, by_seed={seed: np.array([says[arm, seed], 0.0, 2 * says[arm, seed], 0.0]) for seed in seeds}
    ))  # fmt: skip
    absent = {(arm, seed): None for arm in "abc" for seed in range(4) if (arm, seed) not in says}
    record = fake_study(arms_of(0.5, 0.5, 0.5), range(4), states=absent, num_steps=10)
    found = scaled(dataclasses.replace(record, baseline="b"))
    assert [one.arm for one in found.fits] == ["a", "b", "c"]
    # seeds 1 and 2: ceilings 0.1 and 0.4 higher, logarithms of midpoints 0.2 and 0.8; c has seed 3 alone
    higher, later = statistics.t_interval([0.1, 0.4]), statistics.t_interval([0.2, 0.8])
    ceiling, midpoint = found.shifts["a"]
    assert dataclasses.astuple(ceiling) == pytest.approx(dataclasses.astuple(higher))
    assert (midpoint.low, midpoint.high) == pytest.approx((math.exp(later.low), math.exp(later.high)))
    assert found.shifts.keys() == {"a", "c"} and found.shifts["c"] == (None, None)


def curved_study(designs: dict[str, Design]) -> StudyRecord:
    """An arm for each design, with 20 tokens a step."""
    record = fake_study(list(map(FakeArm, designs)), range(5), num_steps=100)
    rng = np.random.default_rng(2)
    drawn = {label: draw(design, rng) for label, design in designs.items()}

    def with_curve(trial: TrialRecord) -> dict[str, Any]:
        costs, scores = (values[trial.seed] for values in drawn[trial.arm])
        steps = np.linspace(0, 100, costs.size).round().astype(int).tolist()
        accuracy = {"validation/accuracy": list(zip(steps, scores.tolist(), strict=True))}
        tokens = {"train/generated_tokens": list(zip(steps[1:], (1e6 * costs[1:]).tolist(), strict=True))}
        return {"history": {**trial.history, **accuracy, **tokens}}

    return with_trials(record, with_curve)


def scaled(record: StudyRecord) -> Scalings:
    found = scalings(analysed(record))
    assert found is not None
    return found


DESIGNS = {
    "base": Design(ceiling=0.7, spread=0.005, noise=0.005),
    "higher": Design(ceiling=0.8, spread=0.005, noise=0.005),
    "slower": Design(ceiling=0.7, middle=0.4, spread=0.005, noise=0.005),
    "flat": Design(ceiling=0.4),
}


@pytest.mark.slow
def test_a_higher_ceiling_and_a_slower_rise_are_told_apart_and_a_flat_arm_is_refused(tmp_path):
    record = curved_study(DESIGNS)
    found = scaled(record)
    assert found.shifts["higher"][0].low > 0 and found.shifts["higher"][1].low < 1.1
    assert found.shifts["slower"][1].low > 1.1
    assert found.shifts["slower"][0].low < 0 < found.shifts["slower"][0].high
    assert set(found.refused) == {"flat"}
    page = write_report(record, tmp_path, formats=()).html.read_text()
    for text in ('id="scaling"', "First half predicts", "Arms without a curve", "fitted curves"):
        assert text in page


def test_the_first_half_of_compute_predicts_the_rest_and_a_second_half_that_stays_below_fails_the_check():
    costs, scores = draw(Design(points=41, middle=0.1, spread=0.002, noise=0.002), np.random.default_rng(1))
    held = fit_curve("a", range(5), costs, scores)
    late = np.where(costs > 0.6 * costs[:, -1:], scores - 0.03, scores)
    broken = fit_curve("a", range(5), costs, late)
    assert isinstance(held, Scaling) and held.prediction is not None
    assert held.prediction.low <= 0 <= held.prediction.high
    assert isinstance(broken, Scaling) and broken.prediction is not None and broken.prediction.low > 0.01
    costs, scores = draw(Design(points=25, middle=0.1, noise=0.005), np.random.default_rng(4))
    costs = np.broadcast_to(np.linspace(0, 1, 25), costs.shape)  # the point at one half, 12, belongs to the first half
    whole, early = fit_curve("a", range(5), costs, scores), fit_curve("a", range(5), costs[:, :13], scores[:, :13])
    assert isinstance(whole, Scaling) and whole.prediction is not None and isinstance(early, Scaling)
    misses = curve(early.parameters, costs[:, 13:]) - scores[:, 13:]
    assert whole.prediction.estimate == pytest.approx(misses.mean(), abs=2e-5)
    # to first order a seed's own curve misses by as much
    of_seeds = [float((curve(v, costs[i, 13:]) - scores[i, 13:]).mean()) for i, v in early.by_seed.items()]
    assert whole.prediction.error == pytest.approx(statistics.t_interval(of_seeds).error, rel=0.05)


def test_an_arm_whose_policy_collapsed_has_no_curve():
    record = curved_study({"base": DESIGNS["base"]})
    trial = record.trials[1]
    fallen = [(step, 0.1 if step > 60 else value) for step, value in trial.history["validation/accuracy"]]
    other = dataclasses.replace(trial, history={**trial.history, "validation/accuracy": fallen})
    trials = [record.trials[0], other, record.trials[2]]
    assert "seed 1 collapsed" in scaled(dataclasses.replace(record, trials=trials)).refused["base"]
    del other.history[scaling.COST]  # of one trial
    assert scalings(analysed(dataclasses.replace(record, trials=trials))) is None


def test_the_ceiling_is_tested_with_the_degrees_of_freedom_that_four_parameters_leave():
    best = []
    for seed, design in enumerate(
        (Design(points=9, noise=0.01), Design(points=9, middle=0.6, steepness=3, noise=0.02))
    ):
        costs, scores = (values[:1] for values in draw(design, np.random.default_rng(seed)))
        costs = costs / costs.max()
        rises = [np.log1p(rate * costs[0]) for rate in np.geomspace(0.3, 3000, 80)]
        rises += [costs[0] ** power for power in np.geomspace(0.02, 10, 120)]
        left = [float(np.linalg.lstsq(np.stack([np.ones(9), rise], axis=1), scores[0])[1].sum()) for rise in rises]
        with_ceiling = float(((curve(scaling._least_squares(costs, scores)[0], costs) - scores) ** 2).sum())
        # F of one more parameter than the three of a power law or a logarithm, with 9 - 4 = 5 degrees of freedom
        expected = stats.f.sf((min(left) - with_ceiling) / (with_ceiling / 5), 1, 5)
        assert scaling._p_without_ceiling(costs, scores) == pytest.approx(expected, rel=1e-6)
        assert 1e-4 < expected < 0.5
        best.append("a logarithm" if left.index(min(left)) < 80 else "a power law")
    assert best == ["a logarithm", "a power law"]


def test_a_ceiling_is_stated_where_a_curve_without_one_has_a_p_of_at_most_1_percent_and_is_at_most_1(monkeypatch):
    found = fit_curve("a", range(5), *draw(Design(ceiling=0.99, spread=0.03), np.random.default_rng(0)))
    assert isinstance(found, Scaling) and found.ceiling.high == 1 > found.ceiling.estimate > found.ceiling.low > 0.8
    for p, is_stated in ((0.0099, True), (0.0101, False)):
        monkeypatch.setattr(scaling, "_p_without_ceiling", lambda *_, p=p: p)
        found = fit_curve("a", range(5), *draw(Design(), np.random.default_rng(3)))
        assert isinstance(found, Scaling) == is_stated
        assert is_stated or "has not bent" in str(found)


def test_eight_evaluations_without_noise_are_enough():
    costs = np.stack([np.linspace(0, end, 8) for end in (0.9, 1.1)])
    scores = curve(np.array([0.7, 0.3, math.log(0.2), math.log(1.5)]), costs)
    assert isinstance(fit_curve("a", (0, 1), costs, scores), Scaling)
    assert "7 evaluations" in str(fit_curve("a", (0, 1), costs[:, :7], scores[:, :7]))


def test_points_are_the_evaluations_that_all_seeds_share_at_what_was_spent_by_then():
    nan, metric = math.nan, "validation/accuracy"
    one = {metric: [(0, 0.1), (10, 0.2), (15, 0.3), (20, nan), (30, 0.4)]}
    two = {metric: [(0, 0.2), (10, 0.3), (15, 0.4), (20, 0.4), (30, 0.5)]}
    one[scaling.COST] = [(5, 50.0), (10, 200.0), (30, 600.0)]
    two[scaling.COST] = [(10, 150.0), (20, 300.0), (30, 450.0)]
    histories: list[Any] = [one, two]
    costs, scores = scaling._points([SimpleNamespace(history=one) for one in histories], metric)
    assert costs.tolist() == [[0, 200, 200, 600], [0, 150, 150, 450]]
    assert scores.tolist() == [[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.5]]
