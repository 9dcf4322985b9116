"""Exact rationals from text: signs and depth."""

from fractions import Fraction

import pytest
from cohort.harness.base.rationals import decimal, evaluate


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
