"""When a row of `make parity` counts as equal, explained, or wrong; the libraries themselves are not needed."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "parity"))
from _cases import Numbers, cases
from _table import Row, evaluate


def one_number(value, slope=0.0):
    return lambda case: Numbers(torch.tensor(value).double(), torch.tensor([slope]).double())


def verdict(ours, theirs, predicted=None):
    def first():
        return [next(cases())]

    return evaluate(Row("objective", "function", first, ours, theirs, "reason", predicted)).verdict


@pytest.mark.parametrize(
    ("theirs", "predicted", "expected"),
    [
        (one_number(2.0 + 1.9e-6), None, "equal"),  # 1e-6 of 2
        (one_number(2.0 + 2.1e-6), None, "DIFFERENT"),
        (one_number(2.0, slope=1.1e-6), None, "DIFFERENT"),  # the gradient counts as well
        (one_number(3.0), one_number(3.0), "explained"),
        (one_number(3.0), one_number(3.1), "DIFFERENT"),
        (one_number(3.0), one_number(3.0, slope=0.1), "DIFFERENT"),
        (one_number(2.0), one_number(2.0), "NOT NEEDED"),
    ],
)
def test_a_difference_needs_an_explanation_and_an_explanation_a_difference(theirs, predicted, expected):
    assert verdict(one_number(2.0), theirs, predicted) == expected
    with pytest.raises(AssertionError, match="not finite"):
        verdict(one_number(2.0), one_number(float("nan")))
