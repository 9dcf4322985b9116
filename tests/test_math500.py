"""MATH-500: its test split is one source, its training problems another."""

import json
from pathlib import Path

import pytest
from cohort.tasks.math import Math
from cohort.tasks.math500 import Math500
from real_data import real_data

FIXTURES = Path(__file__).parent / "fixtures"


def task(**fields) -> Math500:
    paths = {"path": str(FIXTURES / "math500"), "train_path": str(FIXTURES / "math")}
    return Math500(**{**paths, "validation_fraction": 0.25, **fields})


def test_train_comes_from_the_training_path_without_the_questions_of_the_test():
    assert {p.gold for p in task().prompts("test")} == {"0.75", "101_4", r"\sqrt{11}", "(x-5)(x+4)"}
    train = [*task().prompts("train"), *task().prompts("validation")]
    # 12 training rows, and one of them is a test question.
    assert len(train) == 11
    assert not any("Factor $x^2-x-20$" in p.text for p in train)


def test_an_evaluation_never_touches_the_training_path(tmp_path):
    alone = task(train_path=str(tmp_path / "nowhere"))
    assert len(alone.prompts("test")) == 4
    with pytest.raises(ValueError, match="nowhere: no such file or folder"):
        alone.prompts("train")
    with pytest.raises(ValueError, match="nowhere: no such file or folder"):
        task(train_path=str(tmp_path / "nowhere"), shots=2).prompts("test")


def test_a_train_split_beside_the_test_is_left_alone(tmp_path):
    row = {"problem": "What is $1$?", "answer": "1"}
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**row, "problem": f"{name}: what is $1$?"}) + "\n")
    both = task(path=str(tmp_path))
    assert len(both.prompts("test")) == 1
    assert len(both.prompts("train")) + len(both.prompts("validation")) == 12


def test_worked_examples_are_those_of_the_training_path():
    prompt = task(shots=3).prompts("test")[0]
    assert prompt.text.count("\nSolution:\n") == 4
    assert prompt.text.count(r"\boxed{") == 3 + 4  # the instruction names the empty box


def test_tags_are_level_and_subject_in_both_schemas():
    assert {p.tags for p in task().prompts("test")} == {
        (("level", "1"), ("subject", "prealgebra")),
        (("level", "2"), ("subject", "number theory")),
        (("level", "3"), ("subject", "algebra")),
    }
    tags = {dict(p.tags)["subject"] for p in task(validation_fraction=0.01).prompts("train")}
    assert "counting and probability" in tags
    assert Math500().parse_row({"problem": "Why?", "answer": "4"}).tags == ()
    assert Math500().parse_row({"problem": "Why?", "answer": "4", "level": "Level ?"}).tags == ()
    assert Math500().parse_row({"problem": "Why?", "answer": "4", "type": "Algebra"}).tags == (("subject", "algebra"),)


def test_levels_and_subjects_filter_the_test_too():
    assert {p.gold for p in task(levels=[3], subjects=["Algebra"]).prompts("test")} == {r"\sqrt{11}", "(x-5)(x+4)"}


SOLVED = {"problem": "Add $1/2$ and $1/4$.", "solution": r"It is $\boxed{\frac{3}{4}}$."}


@pytest.mark.parametrize(
    ("answer_format", "row", "solution"),
    [
        ("boxed", SOLVED, r"It is $\boxed{\frac{3}{4}}$."),
        ("hash", SOLVED, "It is $\\boxed{\\frac{3}{4}}$.\n#### \\frac{3}{4}"),
        (
            "think_answer",
            SOLVED,
            "<think>\nIt is $\\boxed{\\frac{3}{4}}$.\n</think>\n<answer>\\frac{3}{4}</answer>",
        ),
        ("boxed", {**SOLVED, "solution": "Add.", "answer": "3/4"}, "Add.\n\\boxed{0.75}"),
        ("hash", {**SOLVED, "solution": "Add.", "answer": "3/4"}, "Add.\n#### 3/4"),
    ],
)
def test_a_worked_solution_states_the_answer_as_written_where_the_format_wants_it(answer_format, row, solution):
    problem = Math(answer_format=answer_format).parse_row(row)
    assert problem.solution == solution
    assert problem.answer == "0.75"


def test_both_mathematics_tasks_judge_alike():
    assert issubclass(Math500, Math)
    assert Math500().answer_format == Math().answer_format == "boxed"
    assert Math500().template == Math().template
    assert Math500().equivalent(r"\frac{1}{2}", "0.5")


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so the answer is $\frac{5}{7}$.", r"5/7"),
        ("So the answer is 2500. It took 3 steps.", "2500"),
        (r"Therefore $x = \sqrt{5}$ is all.", r"x = \sqrt{5}"),
        (r"The answer is 3 but \boxed{4}", "4"),
        ("we get 17", "17"),
        ("nothing", None),
    ],
)
def test_lenient_extraction_reads_the_last_sentence_or_formula(completion, answer):
    assert Math500().extract_lenient(completion) == answer


def test_every_gold_of_real_math500_equals_itself_in_every_format():
    path = str(real_data("math500"))
    golds = [prompt.gold for prompt in Math500(path=path).prompts("test")]
    assert len(golds) == 500
    for answer_format, write in (
        ("hash", "so\n#### {}"),
        ("boxed", "so \\boxed{{{}}}"),
        ("think_answer", "<think>so</think><answer>{}</answer>"),
    ):
        math500 = Math500(path=path, answer_format=answer_format)
        completions = [write.format(gold) for gold in golds]
        read = [math500.extract(completion) for completion in completions]
        assert [g for g, r in zip(golds, read, strict=True) if r is None or not math500.equivalent(r, g)] == []
        assert all(math500.format_score(completion) == 1.0 for completion in completions)
        assert [math500.extract_lenient(completion) for completion in completions] == read
