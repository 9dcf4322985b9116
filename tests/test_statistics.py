"""The statistics against hand arithmetic, scipy and simulated studies whose truth is known."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas
import pytest
from cohort.reports import statistics as ours
from cohort.reports.anova import Effect, anova
from fake_study import random_scores, random_scores_truth
from scipy import stats
from statsmodels.stats.anova import AnovaRM
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.nonparametric import rank_compare_2indep
from statsmodels.stats.power import TTestPower


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-6, abs=1e-9)


def test_the_student_interval_and_test_agree_with_scipy():
    # standard deviation 1, error 1 / sqrt(3), t(2, 0.975) = 4.302653: half width 2.484138
    interval = ours.t_interval([1.0, 2.0, 3.0])
    assert (interval.low, interval.estimate, interval.high) == (close(-0.4841377), close(2.0), close(4.4841377))
    rng = np.random.default_rng(0)
    arm, baseline = rng.normal(0.5, 1, 7), rng.normal(0, 1, 7)
    low, high = stats.t.interval(0.95, 6, (arm - baseline).mean(), stats.sem(arm - baseline))
    interval = ours.t_interval(arm - baseline)
    assert (interval.low, interval.high) == (close(low), close(high))
    assert ours.t_test(interval) == close(stats.ttest_rel(arm, baseline).pvalue)
    assert ours.t_interval([0.5]) is ours.bootstrap_interval([0.5], rng) is None  # one seed has no interval
    assert ours.cautious_interval([[0.5, 0.25, 1.0]]) is None


def crossed_interval(scores: Any) -> ours.Interval:
    return ours.cautious_intervals(scores)[1]


def test_groups_of_runs_without_common_seeds_have_welchs_interval_and_the_problems_that_they_share():
    rng = np.random.default_rng(1)
    arm, baseline = rng.normal(0.5, 1, 4), rng.normal(0, 3, 6)
    (interval,) = ours.cautious_intervals(arm[:, None], -baseline[:, None])
    theirs = stats.ttest_ind(arm, baseline, equal_var=False)
    assert (interval.df, ours.t_test(interval)) == (close(theirs.df), close(theirs.pvalue))
    assert (interval.low, interval.high) == tuple(map(close, theirs.confidence_interval()))
    assert ours.cautious_intervals(arm[:, None], -baseline[:1, None]) == []  # one seed has no spread
    (flat,) = ours.cautious_intervals([[0.75]] * 2, [[-0.25]] * 3)  # nor have these, of 1 and 2 degrees of freedom
    assert (flat.estimate, flat.error, flat.df) == (0.5, 0.0, 1)
    # two copies of the two by two table below: each has the variance 1/4 / 4 over seeds and 1/4 / 4 that is rest; the
    # sum of the columns, 2 and 0, has 2 / 2 over problems: 1/16 + 1/16 + 1 - 2/16 = 1; df = 1 / (2/16^2 + 1 + 2/16^2)
    table = [[1.0, 0.5], [1.0, -0.5]]
    student, both, problems = ours.cautious_intervals(table, table)
    assert (student.estimate, student.error**2, student.df) == (close(1.0), close(2 / 16), close(2.0))
    assert (both.estimate, both.error, both.df) == (close(1.0), close(1.0), 1.0)
    assert (problems.error, problems.df) == (close(1.0), 1)
    # 1/4 / 2 of each over seeds; of problems the variance 2, of which 2 * 1/4 / 2 are rest; 1/4 of each is rest
    assert ours.crossed_variance(table, table) == ours.CrossedVariance(0.0, 1.75, 0.5)
    scores = random_scores(rng, 2, 5, 64)
    of_mean = ours.crossed_variance(*scores).of_mean(5, 64)
    assert of_mean == close(ours.cautious_intervals(*scores)[1].error ** 2)


def test_the_two_way_interval_of_a_two_by_two_table_follows_by_hand_and_a_negative_component_counts_as_zero():
    # seed means 0.75, 0.25 and problem means 1, 0 around 0.5; every residual is 0.25 or -0.25.
    # MS_seed = 2 (0.0625 + 0.0625) = 0.25, MS_problem = 2 (0.25 + 0.25) = 1, MS_rest = 4 * 0.0625 = 0.25
    # variance (0.25 + 1 - 0.25) / 4 = 0.25; df = 1^2 / (0.25^2 + 1^2 + 0.25^2) = 0.889, at least 1
    interval = crossed_interval([[1.0, 0.5], [1.0, -0.5]])
    assert (interval.estimate, interval.error, interval.df) == (close(0.5), close(0.5), close(1.0))
    assert interval.high == close(0.5 + 0.5 * stats.t.ppf(0.975, 1))
    # the mean of three 0.1 is not 0.1: what rounding leaves is no spread
    flat = crossed_interval([[0.1] * 3] * 2)
    assert flat is not None and (flat.low, flat.estimate, flat.error, flat.df) == (flat.high, close(0.1), 0.0, 1)
    assert ours.crossed_variance([[0.1] * 3] * 2).rest == 0.0
    # seed means are equal, so MS_seed = 0 < MS_rest; it is raised to MS_rest: error^2 = max(MS_problem, MS_rest) / 4
    # problem means are equal too: MS_rest = 4 * 0.25 / 1 = 1, so error^2 = 1 / 4
    scores = [[1.0, 0.0], [0.0, 1.0]]
    interval = crossed_interval(scores)
    assert interval.error == close(0.5)
    assert ours.crossed_variance(scores) == ours.CrossedVariance(0.0, 0.0, 1.0)
    random = random_scores(np.random.default_rng(3), 1, 5, 64)[0]
    interval = crossed_interval(random)
    assert ours.crossed_variance(random).of_mean(5, 64) == close(interval.error**2)


@pytest.mark.parametrize(
    ("families", "expected"),
    [
        ("abcd", [[0], [1], [2], [3]]),
        ("aabb", [[0, 1], [2, 3]]),  # half is not more than half
        ("aabbcc", [[0, 1], [2, 3], [4, 5]]),
        ("abcbca", [[0, 5], [1, 3], [2, 4]]),
        ("aaabbcd", [[0, 1, 2], [3, 4, 5], [6]]),  # b and c fill a block of 3, and d is left
        ("aaabbcc", [[0, 1, 2], [3, 4], [5, 6]]),  # b and c are 4 together, more than a
        ("aabc", [[0, 1], [2, 3]]),
        ("aaab", [[0, 1, 2, 3]]),  # a has more than half
        ("", []),
    ],
)
def test_blocks_hold_whole_families_and_none_is_larger_than_the_largest(families, expected):
    assert ours.blocks(families) == expected


def test_scores_in_blocks_keep_the_means_of_seeds_and_have_the_error_of_a_ratio_of_totals():
    # means 0.5 and 0.25 over 4 problems; blocks of 3 and 1 problems with means 2/3, 0 and 0, 1
    # 0.5 + 2 * 3/4 (2/3 - 0.5) = 0.75, 0.5 + 2 * 1/4 (0 - 0.5) = 0.25; 0.25 + 1.5 (0 - 0.25) = -0.125, 0.625
    scores = np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    found = ours.in_blocks(scores, [[0, 1, 2], [3]])
    assert found == close(np.array([[0.75, 0.25], [-0.125, 0.625]]))
    assert found.mean(axis=1) == close(scores.mean(axis=1))
    assert ours.in_blocks(scores, [[0, 2], [1, 3]]) == close(np.array([[0.5, 0.5], [0.0, 0.5]]))  # means of equal ones
    assert ours.in_blocks(scores, [[0], [1], [2], [3]]) is scores
    random = random_scores(np.random.default_rng(4), 1, 4, 64)[0]
    assert ours.in_blocks(random, ours.blocks(sorted(range(64), key=lambda i: i % 7))).mean(axis=1) == close(
        random.mean(axis=1)
    )
    # Cochran's: B / (B - 1) sum of (n_b / N)^2 (mean of b - mean)^2, with 5 blocks of 2 to 6 problems
    sizes = np.array([2, 3, 4, 5, 6])
    members = [list(range(end - size, end)) for size, end in zip(sizes, np.cumsum(sizes), strict=True)]
    row = np.random.default_rng(5).random(20)
    found = ours.t_interval(ours.in_blocks(row[None], members)[0])
    means = np.array([row[one].mean() for one in members])
    assert found.error**2 == close(5 / 4 * ((sizes / 20) ** 2 * (means - row.mean()) ** 2).sum())


def test_with_few_blocks_of_problems_their_own_interval_may_be_the_widest():
    # 10 seeds without any spread, 2 blocks: the two-way interval has the df of both, Student's over the blocks has 1
    rng = np.random.default_rng(6)
    cells = np.array([0.4, 0.6]) + rng.normal(0, 0.08, (10, 1)) + rng.normal(0, 0.01, (10, 2))
    student, crossed, blocks = ours.cautious_intervals(cells)
    assert blocks == ours.t_interval(cells.mean(axis=0))
    assert ours.cautious_interval(cells) == max(student, crossed, blocks, key=lambda one: one.high - one.low) == blocks
    assert ours.cautious_interval(cells.mean(axis=1, keepdims=True)) == student  # a single block: these problems only
    effect, *_ = anova(np.stack([cells.mean(axis=1), np.zeros(10)]), ["a"], np.stack([cells, 0 * cells]), 1e-9)
    assert effect.p == close(ours.t_test(blocks))
    cells = np.array([0.3, 0.4, 0.5]) + rng.normal(0, 0.1, (10, 1)) + rng.normal(0, 0.01, (10, 3))  # 3 blocks have 2 df
    effect, *_ = anova(np.stack([cells.mean(axis=1), np.zeros(10)]), ["a"], np.stack([cells, 0 * cells]), 1e-9)
    assert effect.p == close(stats.ttest_1samp(cells.mean(axis=0), 0).pvalue)


@pytest.mark.parametrize("problems", [1, 2, 7, 20, 30, 100, 1319])
def test_at_the_edges_the_interval_is_at_least_wilsons_and_no_limit_falls_as_more_are_right(problems):
    found = []
    for right in range(0, problems + 1, max(1, problems // 300)):
        given = ours._t_interval(right / problems, 1e-4, 3, 1.0)
        interval, theirs = (
            ours.at_edges(given, problems),
            stats.binomtest(right, problems).proportion_ci(0.95, "wilson"),
        )
        if min(right, problems - right) < min(5, problems / 4):
            assert (interval.low, interval.high) == (
                close(min(given.low, theirs.low)), close(max(given.high, theirs.high))
            )  # fmt: skip
        elif problems <= 20:
            assert interval == given
        elif right <= problems - 5:  # the lower limit is not above the one of 5 wrong, the upper not below 5 right's
            wrong, few = (stats.binomtest(n, problems).proportion_ci(0.95, "wilson") for n in (problems - 5, 5))
            assert (interval.low, interval.high) == (
                close(min(given.low, wrong.low)), close(max(given.high, few.high))
            )  # fmt: skip
        found.append(interval)
    if problems > 20:
        assert all(one.low <= two.low and one.high <= two.high for one, two in itertools.pairwise(found))
    for share in (1.0, 0.4):
        flat = ours.at_edges(ours._t_interval(0.5, 0.0, 3, share), 50)
        theirs = stats.binomtest(25, 50).proportion_ci(1 - 0.05 * share, "wilson")
        assert (flat.low, flat.high) == tuple(map(close, theirs))


def test_arms_that_score_alike_on_all_but_few_problems_may_differ_on_z_squared_more():
    z_squared = stats.norm.ppf(0.975) ** 2  # 3.841459
    for problems, df in ((1, 1), (2, 1), (3, 2), (100, 99)):
        found = ours.sparse_interval(0.25, problems, 2, share=0.4, scale=1.5)
        error = 1.5 * math.sqrt(2 + z_squared) / (problems + z_squared)
        assert (found.estimate, found.error, found.df) == (0.25, close(error), df)
        assert found.high == close(0.25 + stats.t.ppf(1 - 0.4 * 0.025, df) * error)


def test_the_bootstrap_agrees_with_scipy_and_is_equal_with_an_equal_seed():
    # all three draws are the lowest seed in 1 of 27 resamples, 3.7 %, more than the 2.5 % cut off
    two = ours.bootstrap_interval([0.2, 0.5], 0)
    assert two is not None and (two.low, two.estimate, two.high) == (close(0.2), close(0.35), close(0.5))
    three = ours.bootstrap_interval([0.2, 0.5, 0.9], np.random.default_rng(0))
    assert three is not None and (three.low, three.high) == (close(0.2), close(0.9))
    values = np.random.default_rng(0).normal(size=20)
    other = stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(2)
    ).confidence_interval
    interval = ours.bootstrap_interval(values, 1, resamples=20_000)
    assert interval is not None and interval == ours.bootstrap_interval(values, 1, resamples=20_000)
    assert (interval.low, interval.high) == (pytest.approx(other.low, abs=0.02), pytest.approx(other.high, abs=0.02))


def test_a_difference_without_spread_is_tested_against_the_rounding_of_its_scores_or_not_at_all():
    assert ours.t_test(ours.Interval(0.0, 0.0, 0.0, 0.0, 2)) == 1.0
    assert math.isnan(ours.t_test(ours.Interval(0.1, 0.0, 0.2)))
    flat = ours.Interval(0.1, 0.1, 0.1, 0.0, 1)
    assert math.isnan(ours.t_test(flat))
    almost = ours.t_interval([0.72 - 0.71, 0.02 - 0.01, 0.32 - 0.31])  # 0.01 three times, up to floating point
    assert almost is not None and almost.error > 0 and math.isnan(ours.t_test(almost))
    # two seeds on 50 problems: error 0.02 / sqrt(6 * 2) = 0.005774, t = 17.32 with 1 degree of freedom
    assert ours.t_test(flat, resolution=1 / 50) == pytest.approx(2 * math.atan(1 / 17.3205) / math.pi, rel=1e-4)
    spread = ours.Interval(0.1, 0.0, 0.2, 0.05, 1)  # an error above that of rounding stays as it is
    assert ours.t_test(spread, resolution=1 / 50) == ours.t_test(spread)
    assert ours.t_test(ours.Interval(1e-13, 0.0, 2e-13, 5e-14, 1)) == close(ours.t_test(spread))  # in another unit
    assert ours.t_test(replace(spread, share=0.1)) == 1.0  # t = 2, p = 0.295, ten times that with a tenth of alpha


def test_power_agrees_with_r_and_grows_with_the_difference_for_every_design():
    # power.t.test(n = 20, delta = 1, sd = 1) of R: 0.8689528, which is t with 38 degrees of freedom around sqrt(10)
    assert ours._power(math.sqrt(10), float(stats.t.isf(0.025, 38)), 38) == pytest.approx(0.8689528, abs=1e-6)
    for df in (1, 1.3, 2, 4, 9, 50, 1000):
        for alpha in (0.05, 0.05 / 9, 0.05 / 45):
            critical = float(stats.t.isf(alpha / 2, df))
            powers = [ours._power(shift, critical, df) for shift in np.linspace(0, 4 * critical, 60)]
            assert powers[0] == pytest.approx(alpha / 2, rel=1e-6)
            assert np.all(np.diff(powers) > -1e-12)
            assert powers[-1] > 0.95
    assert ours._power(50, 2.4469118511449786, 6) == ours._power(math.inf, 2, 6) == 1  # scipy has NaN there


def test_holm_agrees_with_statsmodels_and_leaves_out_what_has_no_p():
    # sorted 0.01, 0.03, 0.04 times 3, 2, 1 = 0.03, 0.06, 0.04, made monotone: 0.03, 0.06, 0.06
    assert ours.holm([0.01, 0.04, 0.03]) == [close(0.03), close(0.06), close(0.06)]
    assert ours.holm([0.9, 0.6]) == [1.0, 1.0]
    unknown, *adjusted = ours.holm([math.nan, 0.02, 0.03])
    assert math.isnan(unknown) and adjusted == [close(0.04), close(0.04)]
    p_values = np.random.default_rng(0).random(9) ** 3
    assert ours.holm(list(p_values)) == [close(p) for p in multipletests(p_values, method="holm")[1]]


def test_probability_of_improvement_is_the_mann_whitney_statistic_over_all_pairs():
    arm, baseline = [0.3, 0.5, 0.5, 0.9], [0.1, 0.5, 0.6]
    expected = stats.mannwhitneyu(arm, baseline).statistic / 12
    assert ours.probability_of_improvement(arm, baseline) == close(expected)
    assert ours.probability_of_improvement(arm, baseline) == close(rank_compare_2indep(arm, baseline).prob1)
    assert ours.probability_of_improvement([1.0], [1.0]) == 0.5


def test_a_limit_of_newcombes_interval_is_z_standard_errors_of_the_limit_away():
    # Hanley and McNeil's variance with Q1 = x / (2 - x), Q2 = 2 x^2 / (1 + x) and 5 runs on both sides:
    # (x (1 - x) + 4 (Q1 - x^2) + 4 (Q2 - x^2)) / 25
    interval = ours.improvement_interval(0.8, 5, 5)
    for x in (interval.low, interval.high):
        first, second = x / (2 - x), 2 * x**2 / (1 + x)
        variance = (x * (1 - x) + 4 * (first - x**2) + 4 * (second - x**2)) / 25
        assert (x - 0.8) ** 2 == pytest.approx(stats.norm.ppf(0.975) ** 2 * variance, rel=1e-6)
    assert 0 < interval.low < 0.8 < interval.high < 1
    # arms that do not overlap are not certain to differ: a bootstrap would be the point 1
    higher, lower = ours.improvement_interval(1.0, 3, 3), ours.improvement_interval(0.0, 3, 3)
    assert (higher.high, lower.low) == (1.0, 0.0)
    assert higher.low == close(1 - lower.high)
    assert 0.4 < higher.low < 0.6


def test_detectable_difference_and_seeds_needed_from_2_to_200_agree_with_statsmodels_and_textbooks():
    for seeds, alpha in ((4, 0.05), (10, 0.05 / 3)):
        effect = TTestPower().solve_power(nobs=seeds, alpha=alpha, power=0.8)
        error = 0.02 / math.sqrt(seeds)  # an effect of 1 is the deviation of one pair, 0.02
        found = ours.minimum_detectable_difference(error, seeds - 1, alpha)
        assert found == pytest.approx(effect * 0.02, rel=1e-4)
        # that very difference needs that very number of pairs, a slightly smaller one needs one more
        seeds_only = ours.CrossedVariance(0.02**2, 0.0, 0.0)
        assert ours.seeds_needed(1.0001 * found, seeds_only, 1, alpha) == seeds
        assert ours.seeds_needed(0.999 * found, seeds_only, 1, alpha) == seeds + 1
    # normal quantiles 1.959964 + 0.841621
    for error in (0.0, 0.01, 1.0):
        assert ours.minimum_detectable_difference(error, df=1e6) == pytest.approx(error * 2.801585, rel=1e-4)
    # the textbook sizes of a two-sided paired t test with power 0.8: 10 pairs for d = 1, 34 for d = 0.5
    assert [ours.seeds_needed(d, ours.CrossedVariance(1.0, 0.0, 0.0), 1) for d in (1.0, -0.5)] == [10, 34]
    # 100 problems with variance 1 leave an error of at least 0.1, which seeds do not average out
    assert ours.seeds_needed(0.05, ours.CrossedVariance(0.01, 1.0, 0.1), 100) is None
    most, unit = TTestPower().solve_power(nobs=200, alpha=0.05, power=0.8), ours.CrossedVariance(1.0, 0.0, 0.0)
    assert [ours.seeds_needed(d, unit, 1) for d in (100.0, 1.0001 * most, 0.9999 * most)] == [2, 200, None]
    assert ours.seeds_needed(0.1, ours.CrossedVariance(0.0, 0.0, 0.0), 1) == 2


def test_anova_agrees_with_statsmodels():
    scores = np.random.default_rng(1).normal(size=(2, 3, 4))
    a, b, seed = (axis.ravel() for axis in np.indices(scores.shape))
    frame = pandas.DataFrame({"y": scores.ravel(), "a": a, "b": b, "seed": seed})
    table = AnovaRM(frame, "y", "seed", within=["a", "b"]).fit().anova_table
    for effect in anova(scores, ["a", "b"]):
        row = table.loc[":".join(effect.factors)]
        assert (effect.f, effect.df) == (close(row["F Value"]), row["Num DF"])
        assert effect.df > 1 or effect.p == close(row["Pr > F"])  # with more, epsilon changes it
        # partial omega squared: df (F - 1) / (df (F - 1) + 24), at least 0
        gain = effect.df * (effect.f - 1)
        assert effect.partial_omega_squared == close(max(gain / (gain + 24), 0.0))
    found = [Effect(("beta",), 1, 4.0, p, 0.1, p) for p in (0.049, 0.05, math.nan)]
    assert [one.is_detected for one in found] == [True, False, False]  # at 5 % not


def test_epsilon_of_greenhouse_and_geisser_shrinks_both_degrees_of_freedom():
    # covariance of the levels 0 and 1 against each other, and of both against level 2, over 6 seeds
    scores = np.random.default_rng(2).normal(size=(3, 6)) * np.array([[0.1], [1.0], [3.0]])
    (effect,) = anova(scores, ["beta"])
    contrasts = np.array([[1, -1, 0], [1, 1, -2]]) / np.sqrt([[2], [6]])
    covariance = np.cov(contrasts @ scores)
    epsilon = np.trace(covariance) ** 2 / (2 * (covariance**2).sum())
    assert 0.5 < epsilon < 0.9
    assert effect.p == close(stats.f.sf(effect.f, 2 * epsilon, 2 * epsilon * 5))


def test_an_effect_of_two_levels_has_the_p_of_the_cautious_difference_between_them():
    rng = np.random.default_rng(3)
    tests = (lambda cells: ours.t_interval(cells.mean(axis=1)), crossed_interval)
    largest = set()
    for seed_deviation in (0.1, 1.0, 3.0):
        cells = random_scores(rng, 4, 3, 32, seed_deviations=[seed_deviation]).reshape(2, 2, 3, 32)
        effects = anova(cells.mean(axis=-1), ["a", "b"], cells, 1e-9)
        first, second = (cells[0] - cells[1]).mean(axis=0), (cells[:, 0] - cells[:, 1]).mean(axis=0)
        both = (cells[0, 0] - cells[0, 1] - cells[1, 0] + cells[1, 1]) / 2
        for effect, difference in zip(effects, (first, second, both), strict=True):
            found = [ours.t_test(interval) for test in tests if (interval := test(difference)) is not None]
            assert effect.p == close(max(found))
            largest.add(found.index(max(found)))
    assert largest == {0, 1}


def test_an_effect_without_spread_is_tested_against_rounding_or_not_at_all():
    flat = np.array([[0.5, 0.75, 0.25], [0.625, 0.875, 0.375]])  # 0.125 apart in each of 3 seeds
    (effect,) = anova(flat, ["beta"])
    assert math.isnan(effect.p)
    (effect,) = anova(flat, ["beta"], resolution=1 / 8)
    # rounding two scores to 1/8: error (1/8) sqrt(1/6 / 3), t = 0.125 / 0.029463 = sqrt(18), 2 degrees of freedom
    assert effect.p == close(2 * stats.t.sf(math.sqrt(18), 2))
    cells = np.repeat(flat[..., None], 4, axis=2)
    assert math.isnan(anova(flat, ["beta"], cells)[0].p)
    (same,) = anova(np.array([[0.1, 0.7, 0.3]] * 3), ["beta"])
    assert (same.f, same.p, same.partial_omega_squared) == (0.0, 1.0, 0.0)
    for scale in (1e-30, 1.0, 1e30):  # what rounding leaves is no spread, whatever the unit
        (effect,) = anova(scale * np.array([[0.0, 0.7, 0.3], [0.1, 0.8, 0.4]]), ["beta"])
        assert math.isnan(effect.p) and (effect.f, effect.partial_omega_squared) == (math.inf, 1.0)
    spread = np.array([[0.5, 0.75, 0.25], [0.625, 0.5, 0.5]])  # over seeds, but not over problems
    assert anova(spread, ["beta"])[0].p > 0.5
    assert math.isnan(anova(spread, ["beta"], np.repeat(spread[..., None], 4, axis=2))[0].p)


@pytest.mark.parametrize(
    ("num_seeds", "studies"), [(3, 100), (5, 100), *(pytest.param(n, 400, marks=pytest.mark.long) for n in (3, 5, 10))]
)
def test_simulated_coverage_is_what_the_report_says(num_seeds, studies):
    truth = random_scores_truth()
    rng = np.random.default_rng(num_seeds)
    hits = dict.fromkeys(ours.SIMULATED_COVERAGE, 0)
    for study in range(studies):
        cells, other = random_scores(rng, 2, num_seeds)
        scores = cells.mean(axis=1)
        apart = study % 3
        arm, baseline = rng.normal(apart, 1, num_seeds), rng.normal(0, 1, num_seeds)
        higher = float(stats.norm.cdf(apart / math.sqrt(2)))  # of a difference with variance 2
        probability = ours.probability_of_improvement(arm, baseline)
        intervals = (
            (ours.cautious_interval(cells), truth), (crossed_interval(cells), truth),
            (ours.t_interval(scores), truth), (ours.bootstrap_interval(scores, rng, resamples=1000), truth),
            (ours.cautious_interval(other - cells), 0.0),
            (ours.improvement_interval(probability, num_seeds, num_seeds), higher),
        )  # fmt: skip
        for name, (interval, value) in zip(hits, intervals, strict=True):
            hits[name] += interval.low <= value <= interval.high
    for name, shares in ours.SIMULATED_COVERAGE.items():
        assert shares.keys() == {3, 5, 10} and max(shares.values()) < 100
        share = shares[num_seeds] / 100
        deviation = math.sqrt(share * (1 - share) / studies)
        assert hits[name] / studies == pytest.approx(share, abs=3.5 * deviation), name


def test_an_interval_trusts_more_than_the_number_of_problems_only_where_five_are_wrong():
    # A tenth is wrong, and seeds and problems differ by 0.001, as many more problems would: 5.5 of 55, 4.5 of 45.
    for count, is_wide in ((55, False), (45, True)):
        scores = 0.9 + 0.001 * np.random.default_rng(0).standard_normal((4, count))
        found = ours.fraction_interval(scores)
        assert found is not None and (found.high - found.low > 0.1) == is_wide
        assert ours.paired_interval(scores) == ours.cautious_interval(scores) != ours.paired_interval(scores[:1])
        assert ours.paired_interval(scores[:1]) == ours.t_interval(scores[0])


def test_seeds_lie_in_two_clusters_where_one_gap_is_large_and_twice_the_rest():
    assert ours.in_clusters([0.6, 0.1, 0.62]) and ours.in_clusters([0.4, 0.2, 0.4, 0.2])  # gaps 0.5, 0.02; 0.2, 0, 0
    assert ours.in_clusters([0.0, 0.25, 0.375])  # 0.25 is twice 0.125
    assert ours.in_clusters([0.0, 0.11, 0.12]) and not ours.in_clusters([0.0, 0.09, 0.095])
    assert not ours.in_clusters([0.0, 0.25, 0.376]) and not ours.in_clusters([0.6, 0.61, 0.69])
    assert not ours.in_clusters([0.1, 0.9]) and not ours.in_clusters([0.5])  # two seeds show no clusters
