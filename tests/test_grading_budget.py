"""One group cannot stall a run: sizes are counted before algebra, overruns are rationed, and the slow is remembered."""

import subprocess
import sys
from typing import Any

import hostile
import pytest
import sympy
from cohort.harness.run import grading
from cohort.harness.run.grading import grade
from cohort.tasks import _questions, _symbolic, _values
from cohort.tasks._symbolic import Checker, Reply
from real_data import ROOT
from test_grading import FractionTask, group

# Every pair of 16 powers and the gold answer, as a group of distinct answers is compared; it prints what algebra did.
COUNTED = r"""
from itertools import combinations
from cohort.tasks import _algebra

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

# Every pair of 16 lines; it prints how many equations were solved and how many differences were simplified.
SOLVED = r"""
from itertools import combinations
from cohort.tasks import _algebra

asked = []
solve, is_zero = _algebra.grader.solve, _algebra.grader.sympy_symbolic_eq
_algebra.grader.solve = lambda *arguments: asked.append("solve") or solve(*arguments)
_algebra.grader.sympy_symbolic_eq = lambda *arguments: asked.append("simplify") or is_zero(*arguments)
_algebra.hasten()
lines = [f"y={i}x+{i * i}" for i in range(2, 18)]
print(*{_algebra.compare(*pair, lambda stage: None) for pair in combinations(lines, 2)})
print(asked.count("solve"), asked.count("simplify"))
print(_algebra.compare("y=2x+4", "2y-4x-8=0", lambda stage: None))
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

    def ask(self, pair: tuple[str, ...]) -> Reply:
        self.num_questions += 1
        asked.append(pair)
        if "9" in pair[1]:
            return Reply(None, _questions.COMPARE_LARGER_SECOND)
        return Reply(None, _questions.COMPARE) if "9" in pair[0] else Reply("equal")

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


class Counted(Checker):
    """It counts the questions that a child is asked, and the children."""

    def __init__(self, **limits: Any):
        super().__init__(**limits)
        self.num_asked = self.num_started = 0

    def _ask(self, pair: tuple[str, ...]) -> _symbolic.Verdict:
        self.num_asked += 1
        return super()._ask(pair)

    def _start_child(self) -> _symbolic._Child:
        self.num_started += 1
        return super()._start_child()


@pytest.mark.attack("Expressions that read fast and compare slowly")
@pytest.mark.parametrize(("limits", "tries"), [((60.0, 0.4), 1), ((0.4, 60.0), 2)], ids=["processor", "clock"])
def test_what_spent_its_processor_time_is_tried_once_and_what_the_clock_ended_twice(limits, tries):
    checker = Counted(wall_seconds=limits[0], cpu_seconds=limits[1])
    assert [checker.compare(hostile.SLOW, other) for other in ("1", "2", "3")] == ["unparsable"] * 3
    assert checker.num_started == tries
    checker.close()


@pytest.mark.attack("Expressions that read fast and compare slowly")
def test_of_sixteen_different_expressions_fifteen_pairs_are_compared_by_algebra():
    checker = Counted()
    texts = [*(rf"{i}\sqrt{{x+{i}}}" for i in range(2, 9)), *(f"x^2+{i}" for i in range(2, 9)), "y", r"\frac{\pi}{2}i"]
    pairs = [(text, first) for place, text in enumerate(texts) for first in texts[:place]]
    assert {checker.compare(*pair) for pair in pairs} == {"different"}
    assert (len(pairs), checker.num_asked) == (120, 15)
    assert checker.compare("x^2+4-2", "2+x^2") == "equal"
    assert checker.compare("2+x^2", "x^2+2") == "equal"  # both have a value by now
    assert checker.num_asked == 17
    checker.close()


def test_what_a_point_may_mistake_or_algebra_compares_in_two_meanings_has_no_value():
    x = sympy.Symbol("x", real=True)
    assert _values.to_complex(x - x + 2 * sympy.I) == 2j
    for value in (sympy.Integer(0), sympy.Integer(10) ** 400, sympy.Rational(1, 10**40), sympy.zoo, sympy.Tuple(x)):
        assert _values.to_complex(value) is None
    done = subprocess.run(
        [sys.executable, "-c", "import sys\nfrom tasks import _algebra\nprint(*map(_algebra.value, sys.argv[1:]))",
         r"\sqrt[3]{1-x}", "y=2x", "(1,2)", r"\{1,2\}", "x>2", r"\begin{pmatrix}1&2\end{pmatrix}", r"\frac{4}{2}"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout.split() == ["None"] * 6 + ["(2+0j)"], done.stderr


@pytest.mark.attack("Expressions that read fast and compare slowly")
def test_an_equation_is_solved_once_and_compared_without_simplification():
    done = subprocess.run([sys.executable, "-c", SOLVED], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines() == ["different", "16 0", "equal"], done.stderr


class Tired(Slow):
    """A child that answers every question, after half of the limit if the second text has a `5`."""

    def ask(self, pair: tuple[str, ...]) -> Reply:
        asked.append(pair)
        return Reply("different", cpu_seconds=1.5 if "5" in pair[1] else 0.2)


class TiredChecker(Checker):
    def _start_child(self):
        return Tired()


@pytest.mark.attack("Expressions that read fast and compare slowly")
def test_slow_answers_use_up_what_overruns_may_cost_and_quick_ones_are_free():
    checker = TiredChecker(cpu_seconds=3.0)
    checker.allow_overruns(2)
    assert [checker.compare("1", f"y^{n}") for n in (1, 2, 3, 4, 6, 7, 8, 9)] == ["different"] * 8
    # Half a limit each: four of them are as two overruns.
    assert [checker.compare("1", f"x^5+{n}") for n in range(16)] == ["different"] * 4 + ["unparsable"] * 12
    assert len(asked) == 8 + 4
    assert checker.allow_overruns(None) == 0
    assert checker.compare("1", "x^5+9") == "different"


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


ration: list[float | None] = [None]
allowed: list[float] = []


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
