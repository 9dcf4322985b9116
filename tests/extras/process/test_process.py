"""The reward for calculations: which ones it finds and checks, and what they earn."""

import math
import time

import pytest
from cohort.harness.extras.process.rewards.process import MAX_CALCULATIONS, MAX_CHARS, Process, calculations
from fakes import graded_group


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4+4=8;8+5=13#### 13", [(5, True), (12, True)]), ("4+4=9;9+5=14", [(5, False), (12, True)]),
        ("<<48/2=24>>24 clips", [(9, True)]), ("She has 2 x 3 = 6 apples", [(17, True)]),
        ("cost: $5 * 4 = $20.", [(18, True)]), ("2+3=5*2=10", [(5, True), (10, True)]), ("2+3=4+1", [(5, True)]),
        ("(1+2)*3=9", [(9, True)]), ("1,200+300=1,500", [(15, True)]), ("0.2*50=10.0", [(11, True)]),
        ("50*20%=10", [(9, True)]), ("10/50=20%", [(9, True)]), ("10/3=3.33", [(9, True)]),
        ("10/3=3.34", [(9, False)]),
        ("3349/10000=0.33", [(15, True)]),  # off by 0.0049, of at most 0.005
        ("335/1000=0.34", [(13, True)]),  # either way of rounding a half
        ("2/3=66.7%", [(9, True)]), ("2/3=66.8%", [(9, False)]), (f"{'1' * 30}+1={'1' * 29}2", [(63, True)]),
        ("10/3=3", [(6, False)]), ("3-5=-2", [(6, True)]), ("-3+5=2", [(6, True)]), ("2/0=5", []), ("7=7", []),
        ("x=5", []), ("y - 3 + 4 = 10", []), ("2y+3+4=7", []), ("5. 3 + 4 = 7", [(12, True)]),
        ("2 * . 3 + 4 = 7", [(15, True)]), ("- 3 + 4 = 7", [(11, False)]), ("* 3 + 4 = 7", [(11, True)]),
        ("or ,,3+4=7", [(10, True)]), ("(7)=7", []), ("9**9**9=1", []),
        ("6 \u00d7 7 = 42, 8\u00f72=4", [(10, True), (17, True)]), ("1+" * 300 + "1=301", []),
        ("9" * 40 + "+1=2", []), ("(" * 50 + "1+1" + ")" * 50 + "=2", []),
    ],
)  # fmt: skip
def test_a_written_calculation_is_found_and_checked(text, expected):
    assert list(calculations(text)) == expected


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
