"""The parser of numeric answers: what states which number, and what states none; exact rationals from text."""

from fractions import Fraction

import pytest
from cohort.harness.base.rationals import decimal, evaluate
from cohort.tasks import _numbers
from cohort.tasks._numbers import canonical, last_boxed, number
from real_data import golden

CASES = golden("numbers")
PROSE, BARE, NOT_BARE = CASES["prose"], CASES["bare"], CASES["not_bare"]
NO_NUMBER = [*CASES["no_number"], "9" * 101, "1." + "3" * 101, "1" * 401, "5" + " " * 400]


@pytest.mark.parametrize(("prose", "text"), [*((True, text) for text in PROSE), *((False, text) for text in BARE)])
def test_prose_states_the_number_and_a_plain_one_is_read_without(prose, text):
    assert canonical(text, prose=prose) == (PROSE if prose else BARE)[text]


@pytest.mark.parametrize(("prose", "text"), [*((True, t) for t in NO_NUMBER), *((False, t) for t in NOT_BARE)])
def test_no_number_several_or_one_beyond_the_bounds_state_none_nor_mathematics_without_prose(prose, text):
    assert number(text, prose=prose) is None


@pytest.mark.parametrize(
    ("value", "spelling"),
    # 1/8 = 0.125; 10^-12 is the shortest decimal step that is written as one, 10^-13 is a fraction.
    [
        (Fraction(1, 8), "0.125"), (Fraction(-5, 2), "-2.5"), (Fraction(-1, 3), "-1/3"),
        (Fraction(1, 10**12), "0.000000000001"), (Fraction(1, 10**13), "1/10000000000000"), (Fraction(-7), "-7"),
    ],
)  # fmt: skip
def test_a_value_has_one_spelling_and_it_reads_back(value, spelling):
    assert _numbers.spell(value) == spelling
    assert number(spelling) == value


@pytest.mark.parametrize(("completion", "content"), CASES["boxes"])
def test_the_last_balanced_box_counts_and_boxes_that_stand_together_are_one_list(completion, content):
    assert last_boxed(completion) == content


@pytest.mark.parametrize(("text", "value"), CASES["decimals"])
def test_a_long_decimal_is_the_fraction_whose_digits_it_writes_out(text, value):
    assert number(text) == number(text, prose=False) == Fraction(value)


def tokens(text: str) -> list[Fraction | str]:
    return [decimal(part) if part[0].isdigit() else part for part in text.split()]


def test_a_sign_counts_only_where_it_is_allowed():
    assert evaluate(tokens("3 * - 2"), max_depth=9, signed=True) == (-6, [(3, "*", -2, -6)])
    assert evaluate(tokens("3 * - 2"), max_depth=9, signed=False) is None


@pytest.mark.parametrize(("opening", "closing"), [("( ", " )"), ("- ", "")])
def test_brackets_and_signs_nest_to_the_given_depth(opening, closing):
    for depth, has_value in ((3, True), (4, False), (10**5, False)):
        evaluated = evaluate(tokens(opening * depth + "1" + closing * depth), max_depth=3, signed=True)
        assert (evaluated is not None) == has_value
