r"""MATH and MATH-500: equality of LaTeX answers on corpora written for these tests, rows, sources and filters."""

import json
from pathlib import Path
from typing import get_args

import pytest
from cohort.tasks import _answers, _latex
from cohort.tasks._answers import AnswerFormat
from cohort.tasks._data import BadRow
from cohort.tasks.math import Math
from cohort.tasks.math500 import Math500
from factories import slow_but
from real_data import golden, real_data

FIXTURES = Path(__file__).parent / "fixtures"
GOLDEN = golden("math_equivalence")


def boxed(answer: str) -> str:
    stated = Math().extract(rf"Hence it is $\boxed{{{answer}}}$.")
    assert stated is not None, answer
    return stated


def judged(answer: str, others: list[str]) -> dict[str, tuple[bool, bool]]:
    """Whether each of the others equals the answer, both ways."""
    gold = boxed(answer)
    return {o: (Math().equivalent(boxed(o), gold), Math().equivalent(gold, boxed(o))) for o in others}


FIRST = list({case["kind"]: case for case in reversed(GOLDEN)}.values())  # of each kind


@pytest.mark.parametrize("case", slow_but(FIRST, GOLDEN), ids=lambda case: case["gold"])
def test_other_spellings_are_equal_and_near_misses_different_both_ways(case):
    assert judged(case["gold"], case["equal"]) == dict.fromkeys(case["equal"], (True, True))
    assert judged(case["gold"], case["different"]) == dict.fromkeys(case["different"], (False, False))


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"$\boxed{1}$ and $\boxed{\frac{a}{b}}$", r"1, \frac{a}{b}"),
        (r"\boxed{ x  +  1 }", "x + 1"),
        ("so\n#### x+1\nand more", "x+1"),
        (r"\boxed{3} #### 4", "3"),
        ("x = 5", None),
        (r"\boxed{" + "1+" * 300 + "1}", None),
    ],
)
def test_the_last_box_states_the_answer_or_else_the_line_after_the_marker(completion, answer):
    assert Math().extract(completion) == answer


@pytest.mark.parametrize(("gold", "completion", "is_right"), golden("boxes"))
@pytest.mark.attack("Hedges, lists and abused units for an answer")
def test_boxes_of_one_statement_are_a_list_that_no_candidate_equals(gold, completion, is_right):
    stated = Math().extract(completion)
    assert stated is not None
    assert Math().equivalent(stated, gold) is Math().equivalent(gold, stated) is is_right


def test_comparisons_without_a_verdict_are_counted():
    task = Math()
    before = task.num_unparsable()
    assert not task.equivalent(r"\frac{1}{", r"x+\notacommand{2")  # broken braces are told apart before the checker
    assert task.num_unparsable() == before
    assert not task.equivalent("9^{9^{9^9}}", "x+1")
    assert task.num_unparsable() == before + 1


def task(path: Path = FIXTURES / "math", **fields) -> Math:
    return Math(path=str(path), **{"validation_fraction": 0.25, **fields})


def task500(**fields) -> Math500:
    paths = {"path": str(FIXTURES / "math500"), "train_path": str(FIXTURES / "math")}
    return Math500(**{**paths, "validation_fraction": 0.25, **fields})


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_source_with_a_test_split_alone_serves_evaluation_and_levels_filter_every_split():
    answers = task(FIXTURES / "math_answers")
    assert len(answers.prompts("test")) == 3
    for call in (lambda: answers.prompts("train"), lambda: answers.prompts("validation"), answers.demonstrations):
        with pytest.raises(ValueError, match=r"math_answers: there is no train split .*evaluation"):
            call()
    assert {p.gold for p in task(levels=[1]).prompts("test")} == {"12"}
    assert {p.gold for p in task(levels=[2, 3]).prompts("test")} == {r"\sqrt{5}", "5", "42"}
    with pytest.raises(ValueError, match="the test split has no usable problem among 4 rows; loosen its filters"):
        task(levels=[4]).prompts("test")


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        ({"problem": "Why?"}, {}, "field 'answer' or 'solution' is missing"),
        ({"answer": "4"}, {}, "field 'problem' or 'question' is missing"),
        ({"problem": "Why?", "solution": "It is 4."}, {}, r"field 'solution' has no \\boxed"),
        ({"problem": "Why?", "solution": r"\boxed{\frac{1}{2}"}, {}, r"field 'solution' has no \\boxed"),
        ({"problem": "Why?", "answer": " "}, {}, "field 'answer' is empty"),
        ({"problem": "Why?", "answer": "1+" * 300}, {}, "the answer must have at most 500 characters, got 600"),
        ({"problem": "Why?", "answer": "4"}, {"levels": [1]}, "field 'level' is missing"),
        ({"problem": "Why?", "answer": "4", "level": "hard"}, {"levels": [1]}, "field 'level' must be a number"),
    ],
)
def test_a_bad_row_names_its_field(row, fields, message):
    with pytest.raises(BadRow, match=message):
        Math(**fields).parse_row(row)


def test_tags_are_level_and_subject_in_both_schemas_and_an_unknown_level_is_no_bad_row(tmp_path):
    row = {"problem": "Why?", "answer": "4", "level": "Level ?"}
    file = write(tmp_path / "test.jsonl", row, {**row, "problem": "How?", "level": "Level 3"})
    assert len(task(file).prompts("test")) == 2
    assert len(task(file, levels=[3]).prompts("test")) == 1
    assert {p.tags for p in task500().prompts("test")} == {
        (("level", "1"), ("subject", "prealgebra")),
        (("level", "2"), ("subject", "number theory")),
        (("level", "3"), ("subject", "algebra")),
    }
    row = {"problem": "Why?", "answer": "4"}
    assert Math500().parse_row(row).tags == Math500().parse_row({**row, "level": "Level ?"}).tags == ()
    assert Math500().parse_row({**row, "type": "Algebra"}).tags == (("subject", "algebra"),)


def test_train_comes_from_the_training_path_alone_which_an_evaluation_never_touches(tmp_path):
    assert {p.gold for p in task500().prompts("test")} == {"0.75", "101_4", r"\sqrt{11}", "(x-5)(x+4)"}
    train = [*task500().prompts("train"), *task500().prompts("validation")]
    # 12 training rows, and one of them is a test question.
    assert len(train) == 11
    assert not any("Factor $x^2-x-20$" in p.text for p in train)
    for name in ("train", "test"):  # a train split beside the test is left alone
        write(tmp_path / f"{name}.jsonl", {"problem": f"{name}: what is $1$?", "answer": "1"})
    both = task500(path=str(tmp_path))
    assert len(both.prompts("test")) == 1
    assert len(both.prompts("train")) + len(both.prompts("validation")) == 12
    alone = task500(train_path=str(tmp_path / "nowhere"))
    assert len(alone.prompts("test")) == 4
    with pytest.raises(ValueError, match="nowhere: no such file or folder"):
        alone.prompts("train")
    with pytest.raises(ValueError, match="nowhere: no such file or folder"):
        task500(train_path=str(tmp_path / "nowhere"), shots=2).prompts("test")


SOLVED = {"problem": "Add $1/2$ and $1/4$.", "solution": r"It is $\boxed{\frac{3}{4}}$."}


@pytest.mark.parametrize(
    ("answer_format", "row", "solution"),
    [
        ("boxed", SOLVED, r"It is $\boxed{\frac{3}{4}}$."),
        ("hash", SOLVED, "It is $\\boxed{\\frac{3}{4}}$.\n#### \\frac{3}{4}"),
        ("think_answer", SOLVED, "<think>\nIt is $\\boxed{\\frac{3}{4}}$.\n</think>\n<answer>\\frac{3}{4}</answer>"),
        ("boxed", {"problem": "What is half of $3/2$?", "answer": r"\frac{3}{4}", "level": 1}, None),
        ("boxed", {**SOLVED, "solution": "Add.", "answer": "3/4"}, "Add.\n\\boxed{0.75}"),
        ("hash", {**SOLVED, "solution": "Add.", "answer": "3/4"}, "Add.\n#### 3/4"),
    ],
)
def test_a_worked_solution_states_the_answer_as_written_where_the_format_wants_it(answer_format, row, solution):
    problem = Math(answer_format=answer_format).parse_row(row)
    assert problem.solution == solution
    assert problem.answer == "0.75"


@pytest.mark.slow
def test_every_gold_of_real_math500_equals_itself_in_every_format_and_through_the_checker():
    path = real_data("math500")
    written = [json.loads(line)["answer"] for line in (path / "test.jsonl").read_text("utf-8").splitlines()]
    golds = list(map(_latex.canonical, written))
    assert len(golds) == 500
    assert sorted(prompt.gold for prompt in Math500(path=str(path)).prompts("test")) == sorted(golds)
    for answer_format in get_args(AnswerFormat):
        math500 = Math500(answer_format=answer_format)
        completions = [_answers.write(answer_format, "so", gold) for gold in written]
        read = map(math500.extract, completions)
        assert [g for g, r in zip(golds, read, strict=True) if r is None or not math500.equivalent(r, g)] == []
        assert all(math500.format_score(completion) == 1.0 for completion in completions)
    # And as the checker itself judges what the cheap rules would have decided.
    texts = [_latex._exact(_latex._tidy(gold)) for gold in written if not _latex._is_literal(_latex._tidy(gold))]
    assert [text for text in texts if _latex.checker().compare(text, f"{text} ") != "equal"] == []
