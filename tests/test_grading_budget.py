"""One group cannot stall a run: sizes are counted before algebra, overruns are rationed, and the slow is remembered."""

from itertools import combinations
from typing import Any

import pytest
import sympy
from cohort.harness.run import grading
from cohort.harness.run.grading import grade
from cohort.tasks import _algebra
from cohort.tasks._latex import Checker
from test_grading import FractionTask, group

SLOW = r"\prod_{n=1}^{9999999} n"  # small, and long to compute: the limits alone end it


@pytest.fixture
def counted(monkeypatch):
    """The names of the slow functions that algebra has called."""
    called = []

    def count(module, name):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *of, **options: called.append(name) or function(*of, **options))

    for module, name in (
        (_algebra.math_verify, "verify"), (_algebra.sympy, "simplify"),
        (_algebra.grader, "solve"), (_algebra.grader, "sympy_symbolic_eq"),
    ):  # fmt: skip
        count(module, name)
    return called


def verdicts(texts: list[str]) -> set[str]:
    return {_algebra.compare(*pair, lambda text: None) for pair in combinations(texts, 2)}


@pytest.mark.attack("Expressions that read fast and compare slowly")
@pytest.mark.parametrize("total", ["a+b+c+d", r"\sqrt{a}+\sqrt{b}+c+d", r"\sin a+\cos b+\tan c+d"])
def test_sixteen_large_powers_are_told_apart_without_algebra(total, counted):
    powers = [f"({total})^{{{10 + i}}}" for i in range(16)]
    assert verdicts([*powers, "x^2+1"]) == {"different"}
    assert counted == []
    assert verdicts([powers[0], powers[0].replace("^", "^ ")]) == {"equal"}


@pytest.mark.attack("Expressions that read fast and compare slowly")
def test_an_equation_is_solved_once_and_compared_without_simplification(counted):
    _algebra.hasten()  # what it replaces is put back with the counted functions
    assert verdicts([f"y={i}x+{i * i}" for i in range(2, 8)]) == {"different"}
    assert (counted.count("solve"), counted.count("sympy_symbolic_eq")) == (6, 0)
    assert verdicts(["y=2x+4", "2y-4x-8=0"]) == {"equal"}


def test_the_counted_terms_are_at_least_those_of_the_expansion():
    a, b, c, d = sympy.symbols("a b c d")
    values: tuple[Any, ...] = (
        (a + b + c) ** 5, (a + b) * (c + d) * (a + 2), a + b + 7, (a + 1) ** 3 + (b + 1) ** 2, sympy.Integer(5), a * b
    )  # fmt: skip
    for value in values:
        # (a+b+c)^5 has C(7,2) = 21 terms, the most of these.
        assert len(sympy.Add.make_args(sympy.expand(value))) <= _algebra.num_terms(value) <= 21


def test_the_digits_of_a_constant_are_bounded_without_computing_it():
    power, nine = sympy.Pow, sympy.Integer(9)
    tower = power(nine, power(nine, power(nine, nine, evaluate=False), evaluate=False), evaluate=False)
    assert _algebra.num_digits(tower) > _algebra.MAX_DIGITS
    assert _algebra.num_digits(sympy.factorial(10**9, evaluate=False)) > _algebra.MAX_DIGITS
    # 2^2004 has 604 digits.
    assert 603 <= _algebra.num_digits(power(2, 2004, evaluate=False)) <= _algebra.MAX_DIGITS
    assert _algebra.num_digits(sympy.Symbol("x") ** 99999) <= _algebra.MAX_DIGITS


def test_a_point_tells_expressions_apart_only_if_they_differ():
    x = sympy.Symbol("x", real=True)
    assert _algebra.surely_differ((x + 1) ** 99, (x + 1) ** 98)
    assert not _algebra.surely_differ((x + 1) ** 2, x**2 + 2 * x + 1)
    assert not _algebra.surely_differ(sympy.sin(x) ** 2 + sympy.cos(x) ** 2, sympy.Integer(1))
    for value in (sympy.zoo, sympy.Tuple(x), sympy.Matrix([x]).as_immutable()):
        assert not _algebra.surely_differ(value, sympy.Integer(1))  # no value: algebra decides


@pytest.mark.slow
@pytest.mark.attack("Expressions that read fast and compare slowly")
def test_a_text_that_spent_its_processor_time_is_not_tried_again_and_the_other_one_is():
    checker = Checker(cpu_seconds=0.4, wall_seconds=60.0)
    assert _algebra.num_terms(_algebra._parse(SLOW)) < _algebra.MAX_TERMS
    checker.allow_overruns(2)
    assert [checker.compare(SLOW, other) for other in ("1", "2", "3")] == ["unparsable"] * 3
    assert not checker.is_worked_out(SLOW, "1")
    assert checker.compare("x^2+4-2", "2+x^2") == "equal"  # the second child
    assert checker.compare("1", "2") == "different"  # the smaller ones are not to blame
    assert checker.allow_overruns(None) == pytest.approx(1, abs=0.9)
    assert checker.counts == {"unparsable": 3, "equal": 1, "different": 1}


@pytest.mark.slow
@pytest.mark.attack("Expressions that read fast and compare slowly")
def test_a_text_that_the_clock_stopped_is_tried_again():
    checker = Checker(cpu_seconds=60.0, wall_seconds=0.4)
    checker.allow_overruns(9)
    assert [checker.compare(SLOW, other) for other in ("1", "2")] == ["unparsable"] * 2
    assert checker.allow_overruns(None) == 7


class RationedTask(FractionTask):
    """It notes the overruns that it is allowed; answers of 9 or more cost one each."""

    def allow_overruns(self, count):
        left = ration[0]
        ration[:] = [count]
        if count is not None:
            allowed.append(count)
        return left or 0

    def equivalent(self, answer, other):
        if "9" in answer and ration[0]:
            ration[0] -= 1
        return super().equivalent(answer, other)


ration: list[float | None] = [None]
allowed: list[float] = []


def test_groups_share_the_overruns_of_a_step_and_each_keeps_one():
    allowed.clear()
    slow, quick = group("1", "=9", "=99", "=999"), group("1", "=1", "=2")
    grade(RationedTask(), [quick, *[slow] * 5, quick], 8)
    # Two of eight for each group, until none is left; the first takes none.
    assert (grading.GROUP_OVERRUNS, grading.OVERRUNS) == (2, 8)
    assert allowed == [2, 2, 2, 2, 2, 1, 1]
    assert ration == [None]
