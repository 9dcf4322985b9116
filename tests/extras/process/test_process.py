"""The reward for calculations: which ones it finds and checks, and what they earn."""

import math
import time

import pytest
from cohort.harness.extras.process.rewards.process import MAX_CALCULATIONS, MAX_CHARS, Process, calculations
from fakes import graded_group
from real_data import golden


@pytest.mark.parametrize(("text", "expected"), golden("calculations"))
def test_a_written_calculation_is_found_and_checked(text, expected):
    assert [list(one) for one in calculations(text)] == expected


@pytest.mark.attack("Hostile text in a completion")
def test_checking_calculations_is_bounded_on_hostile_text():
    assert len(calculations("1+1=2;" * 10**5)) == MAX_CALCULATIONS
    for text in (
        "(" * 10**6,
        "1+" * 10**6 + "=",
        "1=" * 10**6,
        "$" * 10**6 + "1+1=2",
        "1 " * (MAX_CHARS // 2 - 9) + "+1=2",
    ):
        start = time.process_time()
        calculations(text)
        assert time.process_time() - start < 2.0


def test_process_rewards_sit_at_the_end_of_their_calculation_and_the_share_that_holds_is_of_those_written():
    group = graded_group([0, 0], completions=("4+4=8;8+5=14;1+1=2", "no step"))
    assert Process().metrics(group, []) == {"process/calculations": 1.5, "process/right": pytest.approx(2 / 3)}
    assert math.isnan(Process().metrics(graded_group([0], completions=("no step",)), [])["process/right"])
    group = graded_group([0, 0], completions=("4+4=8;8+5=14", "no step"))
    assert Process().steps(group) == [[(5, 1.0), (12, 0.0)], []]
    assert Process().score(group) == [0.5, 0.0]
    assert Process().metrics(group, []) == {"process/calculations": 1.0, "process/right": 0.5}
