"""Exact rationals from text: the one parser that rewards and tasks share."""

from fractions import Fraction

import pytest
from cohort.harness.ground.rationals import decimal, evaluate


def tokens(text: str) -> list[Fraction | str]:
    return [decimal(part) if part[0].isdigit() else part for part in text.split()]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("-1,800.50", Fraction(-3601, 2)),
        ("1 800", 1800),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("0.10", Fraction(1, 10)),
    ],
)
def test_a_decimal_is_read_exactly(text, value):
    assert decimal(text) == value


def test_operations_come_in_the_order_of_evaluation():
    # the bracket, then 3 * 3, then 9 / 6, then 2 + 3/2
    evaluated = evaluate(tokens("2 + 3 * ( 4 - 1 ) / 6"), max_depth=1, signed=False)
    steps = [(4, "-", 1, 3), (3, "*", 3, 9), (9, "/", 6, Fraction(3, 2)), (2, "+", Fraction(3, 2), Fraction(7, 2))]
    assert evaluated == (Fraction(7, 2), steps)


@pytest.mark.parametrize(
    "text", ["", "+", "1 +", "1 2", "( 1", "1 )", "( )", "1 / ( 2 - 2 )", "1 * / 2", "2 ( 3 )", "x"]
)
def test_what_is_no_calculation_or_divides_by_zero_has_no_value(text):
    assert evaluate(tokens(text), max_depth=9, signed=True) is None


def test_a_sign_counts_only_where_it_is_allowed():
    assert evaluate(tokens("3 * - 2"), max_depth=9, signed=True) == (-6, [(3, "*", -2, -6)])
    assert evaluate(tokens("3 * - 2"), max_depth=9, signed=False) is None


@pytest.mark.parametrize(("opening", "closing"), [("( ", " )"), ("- ", "")])
def test_brackets_and_signs_nest_to_the_given_depth(opening, closing):
    for depth, has_value in ((3, True), (4, False), (10**5, False)):
        evaluated = evaluate(tokens(opening * depth + "1" + closing * depth), max_depth=3, signed=True)
        assert (evaluated is not None) == has_value
