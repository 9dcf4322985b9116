"""The data sets of competitions, whose rows are read as MATH's."""

from pathlib import Path

import pytest
from cohort.harness import plugins

FIXTURES = Path(__file__).parent / "fixtures"


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
