"""Studies of equal arms, from the record to the sentence: the answer claims a difference in at most 5 % of them."""

import pytest
from cohort.reports.prose.answer import answer
from cohort.reports.render import analysed
from error_rates import DESIGNS, SEEDS, claims_a_difference, error_rate
from fake_study import fake_study
from scipy import stats

STUDIES = 40


@pytest.mark.parametrize("design", DESIGNS)
def test_equal_arms_are_called_different_in_at_most_one_study_of_twenty(design: str) -> None:
    # a true rate of 5 % exceeds these counts in 1 of 1000 tests: 7 of 40 studies, 18 of 160
    counts = [round(error_rate(design, num_seeds, STUDIES) * STUDIES) for num_seeds in SEEDS]
    assert max(counts) <= stats.binom.ppf(0.999, STUDIES, 0.05), dict(zip(SEEDS, counts, strict=True))
    assert sum(counts) <= stats.binom.ppf(0.999, STUDIES * len(SEEDS), 0.05), dict(zip(SEEDS, counts, strict=True))


def test_a_difference_that_is_there_is_read_in_the_answer() -> None:
    assert claims_a_difference(answer(analysed(fake_study(seeds=range(5)))))
    with pytest.raises(ValueError, match="must state a p"):
        claims_a_difference("grpo is better.")
