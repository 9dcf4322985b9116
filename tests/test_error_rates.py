"""Studies of equal arms, from the record to the sentence: the answer claims a difference in at most 5 % of them."""

import dataclasses

import numpy as np
import pandas
import pytest
from cohort.reports.join import join
from cohort.reports.prose.answer import answer
from cohort.reports.prose.notes import notes
from cohort.reports.render import analysed
from error_rates import DESIGNS, READINGS, SEEDS, claims_a_difference, error_rate, reading_rates
from factories import slow_but
from fake_study import fake_study
from power import by_pairing
from scipy import stats

STUDIES = 24


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
def test_equal_arms_are_called_different_in_at_most_one_study_of_twenty(design):
    # a true rate of 5 % exceeds these counts in 1 of 1000 tests: 5 of 24 studies, 13 of 96
    counts = [round(error_rate(design, num_seeds, STUDIES) * STUDIES) for num_seeds in SEEDS]
    assert max(counts) <= stats.binom.ppf(0.999, STUDIES, 0.05), dict(zip(SEEDS, counts, strict=True))
    assert sum(counts) <= stats.binom.ppf(0.999, STUDIES * len(SEEDS), 0.05), dict(zip(SEEDS, counts, strict=True))


@pytest.mark.parametrize(
    "design",
    slow_but(
        ("seeds added at 3, 5, 7, usual",),
        (name for name in READINGS if name.endswith(("7, usual", "planned, usual", "3 evaluations"))),
    ),
)
def test_studies_that_choose_their_number_of_seeds_or_are_read_before_the_end_do_so_too(design):
    numbers = READINGS[design][0]
    rates = [reading_rates(design, number, STUDIES) for number in numbers]
    count, most = STUDIES * len(rates), stats.binom.ppf(0.999, STUDIES * len(rates), 0.05)
    assert sum(round(claimed * STUDIES) for claimed, _ in rates) <= most, dict(zip(numbers, rates, strict=True))
    # the three intervals of a study share a baseline: as if there was one interval a study
    assert sum(held for _, held in rates) * STUDIES >= stats.binom.ppf(0.001, count, 0.95)


def test_a_difference_that_is_there_is_read_in_the_answer():
    assert claims_a_difference(answer(analysed(fake_study(seeds=range(5)))))
    with pytest.raises(ValueError, match="must state a p"):
        claims_a_difference("grpo is better.")


def test_a_study_without_pairs_compares_independent_runs_and_one_with_pairs_sees_through_their_common_luck():
    record = fake_study(seeds=range(4))
    apart = dataclasses.replace(record, spec={**record.spec, "pairing": "none"})
    one, seeds = (analysis := analysed(apart)).comparisons[0], [[*arm.scores.values()] for arm in analysis.arms[1::-1]]
    assert one.student is not None and not one.is_paired and not analysis.gaps
    assert one.student.df == pytest.approx(stats.ttest_ind(*seeds, equal_var=False).df)
    assert "(`pairing: none`)" in str(notes(analysis)) and "No pairs" not in str(notes(analysed(record)))
    assert not analysed(join([apart, dataclasses.replace(apart, name="b")])).comparisons[0].is_paired
    rng = np.random.default_rng(0)
    found = pandas.DataFrame(by_pairing(rng, 4, correlation=0.99, shift=0.3) for _ in range(8)).sum()
    assert found["pairing: seeds"] > found["pairing: none"]
