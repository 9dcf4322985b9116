"""SVAMP: rows, and worked solutions from equations. The data sets of competitions, whose rows are read as MATH's."""

from fractions import Fraction
from pathlib import Path

import pytest
from cohort.harness import plugins
from cohort.harness.extras.benchmarks.tasks.svamp import SVAMP, _worked
from cohort.tasks._data import BadRow

FIXTURES = Path(__file__).parent / "fixtures"
ROW = {
    "ID": "made-1", "Body": "Ann had 8 figs and ate 2 of them.", "Question": "How many are left?",
    "Equation": "( 8.0 - 2.0 )", "Answer": "6.0", "Type": "Subtraction",
}  # fmt: skip


def problem(changes: dict[str, object] | None = None, **fields):
    return SVAMP(**fields).parse_row({**ROW, **(changes or {})})


def test_a_row_is_its_body_and_question_with_the_answer_as_a_plain_number_and_its_type_as_a_tag():
    assert problem().question == "Ann had 8 figs and ate 2 of them. How many are left?"
    assert problem().answer == problem({"Answer": 6.0}).answer == problem({"Answer": 6}).answer == "6"
    assert problem({"Answer": "145.0"}).answer == "145"
    assert problem({"Body": None, "question_concat": "Ann had 8?"}).question == "Ann had 8?"
    assert problem().tags == (("type", "subtraction"),)
    assert problem({"Type": "Common-Division"}).tags == (("type", "common-division"),)
    assert problem({"Type": None}).tags == problem({"Type": " "}).tags == ()


@pytest.mark.parametrize("equation", ["( 8.0 - 3.0 )", "( 8.0 - ", "x - 2", "6.0", "", None, "8.0 / 0.0"])
def test_an_equation_that_is_none_or_disagrees_with_the_answer_demonstrates_nothing(equation):
    assert problem({"Equation": equation}).solution is None


@pytest.mark.parametrize(
    ("equation", "steps", "value"),
    [
        ("( 8.0 - 2.0 )", ["8 - 2 = 6"], 6),
        ("( ( 8.0 + 2.5 ) * 3.0 )", ["8 + 2.5 = 10.5", "10.5 * 3 = 31.5"], Fraction(63, 2)),
        ("2+3*4", ["3 * 4 = 12", "2 + 12 = 14"], 14), ("9-2-3", ["9 - 2 = 7", "7 - 3 = 4"], 4),
        ("9-(2-3)", ["2 - 3 = -1", "9 - -1 = 10"], 10), ("( 8.0 / 3.0 ) * 3.0", ["8 / 3 = 8/3", "8/3 * 3 = 8"], 8),
        ("0.1+0.2", ["0.1 + 0.2 = 0.3"], Fraction(3, 10)), ("((5))", [], 5),
    ],
)  # fmt: skip
def test_an_equation_is_worked_out_exactly_one_operation_at_a_time(equation, steps, value):
    assert _worked(equation) == (steps, value)


@pytest.mark.parametrize(
    "equation",
    ["", "(", ")", "()", "1+", "+1", "-1", "1 2", "(1", "1)", "1)(2", "(1)(2)", "2(3)", "1//2", "2**3", "1,000+1",
     "__import__('os')", "1e5", "x=3", "1/0", "1/(2-2)", "(" * 10**6, "1+" * 10**6 + "1", "9" * 10**6, "\ud800"],
)  # fmt: skip
def test_what_is_no_equation_has_no_value(equation):
    assert _worked(equation) == ([], None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"Body": None}, "field 'Body' or 'question_concat' is missing"),
        ({"Answer": "six"}, "field 'Answer' must be a number, got 'six'"),
        ({"Answer": "nan"}, "field 'Answer' must be a number, got 'nan'"),
    ],
)
def test_a_bad_row_names_its_field(changes, message):
    with pytest.raises(BadRow, match=message):
        problem(changes)


def test_every_fixture_row_has_a_worked_solution():
    task = SVAMP(path=str(FIXTURES / "svamp"), validation_fraction=0.25)
    assert len(task.demonstrations()) == len(task.prompts("train"))
    assert {p.gold for p in task.prompts("test")} == {"7", "39", "145"}


@pytest.mark.parametrize(
    ("name", "golds"),
    [
        ("aime24", {"861", "16", "68", "60"}), ("aime25", {"56", "71", "170", "3"}),
        ("amc23", {"45", "8", "3", "54"}), ("olympiadbench", {"3, -3", "42", "2", "2^{n-1}"}),
    ],
)  # fmt: skip
def test_a_suite_reads_the_rows_of_its_data_set(name, golds):
    task = plugins.load("task", name)(path=str(FIXTURES / name))
    found = [prompt.gold for prompt in task.prompts("test")]
    assert len(found) == len(golds)
    assert all(any(task.equivalent(gold, one) for one in found) for gold in golds)


def test_several_answers_of_olympiadbench_are_one_in_any_order():
    task = plugins.load("task", "olympiadbench")(path=str(FIXTURES / "olympiadbench"))
    (gold,) = [prompt.gold for prompt in task.prompts("test") if "," in prompt.gold]
    assert task.equivalent(task.extract(r"\boxed{-3, 3}"), gold)
    assert not task.equivalent(task.extract(r"\boxed{3}"), gold)
