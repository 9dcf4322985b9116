"""One group cannot stall a run: sizes are counted before algebra, overruns are rationed, and the slow is remembered."""

import subprocess
import sys
from typing import Any

import hostile
import pytest
import sympy
from real_data import ROOT
from test_grading import FractionTask, group

from harness.training import grading
from harness.training.grading import grade
from tasks import _questions, _symbolic, _values
from tasks._symbolic import Checker

# Every pair of 16 powers and the gold answer, as a group of distinct answers is compared; it prints what algebra did.
COUNTED = r"""
from itertools import combinations
from tasks import _algebra

asked = []

def counted(name, function):
    def count(*arguments, **options):
        asked.append(name)
        return function(*arguments, **options)
    return count

_algebra.math_verify.verify = counted("verify", _algebra.math_verify.verify)
_algebra.sympy.simplify = counted("simplify", _algebra.sympy.simplify)
verdicts = set()
powers = [r"({sum_})^" + f"{{{10 + i}}}" for i in range(16)]
for first, second in combinations([*powers, "x^2+1"], 2):
    verdicts.add(_algebra.compare(first, second, lambda stage: None))
print(len(asked), *verdicts)
print(_algebra.compare(powers[0], powers[0].replace("^", "^ "), lambda stage: None))
"""


@pytest.mark.attack("Expressions that read fast and compare slowly")
@pytest.mark.parametrize("total", ["a+b+c+d", r"\sqrt{a}+\sqrt{b}+c+d", r"\sin a+\cos b+\tan c+d"])
def test_sixteen_large_powers_are_told_apart_without_algebra(total):
    done = subprocess.run(
        [sys.executable, "-c", COUNTED.replace("{sum_}", total)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.splitlines() == ["0 different", "equal"], done.stderr


@pytest.mark.parametrize("text", ["(a+b+c)**5", "(a+b)*(c+d)*(a+2)", "a+b+7", "(a+1)**3+(b+1)**2", "5", "a*b"])
def test_the_counted_terms_are_at_least_those_of_the_expansion(text):
    a, b, c, d = sympy.symbols("a b c d")
    values: dict[str, Any] = {
        "(a+b+c)**5": (a + b + c) ** 5,
        "(a+b)*(c+d)*(a+2)": (a + b) * (c + d) * (a + 2),
        "a+b+7": a + b + 7,
        "(a+1)**3+(b+1)**2": (a + 1) ** 3 + (b + 1) ** 2,
        "5": sympy.Integer(5),
        "a*b": a * b,
    }
    expanded = sympy.expand(values[text])
    assert len(sympy.Add.make_args(expanded)) <= _values.num_terms(values[text]) <= 21
    # (a+b+c)^5 has C(7,2) = 21 terms, the most of these.


def test_the_digits_of_a_constant_are_bounded_without_computing_it():
    power, nine = sympy.Pow, sympy.Integer(9)
    tower = power(nine, power(nine, power(nine, nine, evaluate=False), evaluate=False), evaluate=False)
    assert _values.num_digits(tower) > _values.MAX_DIGITS
    assert _values.num_digits(sympy.factorial(10**9, evaluate=False)) > _values.MAX_DIGITS
    # 2^2004 has 604 digits.
    assert 603 <= _values.num_digits(power(2, 2004, evaluate=False)) <= _values.MAX_DIGITS
    assert _values.num_digits(sympy.Symbol("x") ** 99999) <= _values.MAX_DIGITS


def test_a_point_tells_expressions_apart_only_if_they_differ():
    x = sympy.Symbol("x", real=True)
    assert _values.surely_differ((x + 1) ** 99, (x + 1) ** 98)
    assert not _values.surely_differ((x + 1) ** 2, x**2 + 2 * x + 1)
    assert not _values.surely_differ(sympy.sin(x) ** 2 + sympy.cos(x) ** 2, sympy.Integer(1))
    assert not _values.surely_differ(sympy.zoo, sympy.Integer(1))  # no value: algebra decides


class Slow(_symbolic._Child):
    """A child that overruns its limits with every text that has a `9`, which is the larger one of its question."""

    def __init__(self):
        self.num_questions = 0

    def ask(self, pair: tuple[str, ...]) -> tuple[_symbolic.Verdict | None, bytes]:
        self.num_questions += 1
        asked.append(pair)
        if "9" in pair[1]:
            return None, _questions.COMPARE_LARGER_SECOND
        return (None, _questions.COMPARE) if "9" in pair[0] else ("equal", b"")

    def kill(self) -> None: ...
    def end(self) -> None: ...


class SlowChecker(Checker):
    def _start_child(self):
        return Slow()


asked: list[tuple[str, ...]] = []


@pytest.fixture(autouse=True)
def _nothing_asked():
    asked.clear()


def test_an_expression_that_was_slow_to_compare_is_not_compared_again():
    checker = SlowChecker()
    verdicts = [checker.compare("9x", other) for other in ("1", "y", "2", "z", "x")]
    assert verdicts == ["unparsable"] * 5
    assert asked == [("1", "9x"), ("9x", "y")]  # once may be a busy machine
    assert checker.compare("1", "y") == "equal"  # the smaller ones are not to blame


@pytest.mark.attack("Expressions that read fast and compare slowly")
def test_after_the_overruns_that_are_allowed_nothing_new_is_compared():
    checker = SlowChecker()
    checker.compare("1", "2")
    checker.allow_overruns(2)
    assert [checker.compare("x", f"9^{n}") for n in range(16)] == ["unparsable"] * 16
    assert len(asked) == 1 + 2
    assert checker.compare("1", "3") == "unparsable"
    assert checker.compare("1", "2") == "equal"  # known
    assert checker.allow_overruns(None) == 0
    assert checker.compare("1", "4") == "equal"


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


ration: list[int | None] = [None]
allowed: list[int] = []


def test_groups_share_the_overruns_of_a_step_and_each_keeps_one():
    allowed.clear()
    slow, quick = group("1", "=9", "=99", "=999"), group("1", "=1", "=2")
    grade(RationedTask(), [slow] * 5 + [quick], 8)
    # Two of eight for each group, until none is left.
    assert (grading.GROUP_OVERRUNS, grading.OVERRUNS) == (2, 8)
    assert allowed == [2, 2, 2, 2, 1, 1]
    assert ration == [None]


def test_the_slow_expression_of_the_tests_is_small_by_its_size():
    done = subprocess.run(
        [sys.executable, "-c", "import sys\nfrom tasks import _algebra, _values\n"
         "print(_values.num_terms(_algebra._parse(sys.argv[1])))", hostile.SLOW],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert int(done.stdout) < _values.MAX_TERMS, done.stderr
