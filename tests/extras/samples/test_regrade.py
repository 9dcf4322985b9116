"""Stored completions are graded again by every grader, and what they disagree on is told."""

import json

import pytest
from cohort.harness.extras.samples.grade import grade, graders, read_cases
from cohort.tasks.gsm8k import GSM8K

TASK = GSM8K()


def write(tmp_path, *rows):
    file = tmp_path / "cases.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def labelled(tmp_path, cases):
    return write(tmp_path, *(dict(zip(("gold", "completion", "label"), case, strict=True)) for case in cases))


@pytest.mark.slow
def test_strict_wants_a_marked_answer_lenient_takes_the_last_number_and_disagreements_are_listed(tmp_path, cohort):
    cases = [
        ("18", "so she has #### 18", True),
        ("18", "so the answer is 18 clips.", True),
        ("18", "first 18, then 19", False),
        ("18", "no number", None),
        ("5", "#### 5", False),
        ("0.5", r"$\frac12$", None),
    ]
    file = labelled(tmp_path, cases)
    result = grade("gsm8k", file, grader="all", workers=2)
    assert [v.correct["strict"] for v in result.verdicts] == [True, False, False, False, True, False]
    assert [v.correct["lenient"] for v in result.verdicts] == [True, True, False, False, True, True]
    assert [v.answers["lenient"] for v in result.verdicts[:5]] == ["18", "18", "19", None, "5"]
    assert [v.correct["math_verify"] for v in result.verdicts] == [True, True, False, False, True, True]
    assert result.disagreements == [2, 6]
    strict, lenient = result.summaries["strict"], result.summaries["lenient"]
    # of the four labelled rows strict misses one that is right, and one that is right has a wrong label
    assert (strict.agreement, strict.false_negatives, strict.false_positives) == (0.5, 1, 1)
    assert (lenient.agreement, lenient.correct, lenient.answered) == (0.75, 4 / 6, 5 / 6)
    assert strict.rows_per_second > 0
    grading = ["samples", file, "--task", "gsm8k", "--grader", "all"]
    assert cohort(*grading, "--json") == 0
    found = cohort.json()
    assert [v["correct"]["strict"] for v in found["verdicts"]] == [v.correct["strict"] for v in result.verdicts]
    assert (found["summaries"]["lenient"]["agreement"], found["disagreements"]) == (0.75, [2, 6])
    assert cohort(*grading, "--show", "1") == 0
    assert "Graders disagree on" in cohort.out and "5 more rows" in cohort.out
    assert cohort("samples", tmp_path / "case.jsonl", "--task", "gsm8k") == 2
    assert "case.jsonl'; did you mean 'cases.jsonl'? give" in cohort.said


@pytest.mark.slow
def test_an_echo_is_wrong_where_the_row_has_its_question_as_in_training(tmp_path):
    echo, asked = {"gold": r"10\sqrt{11}", "completion": r"\boxed{\sqrt{1100}}"}, r"Simplify $\sqrt{1100}$."
    rows = [echo, {**echo, "question": asked}, {**echo, "prompt": f"Problem: {asked}"}, {**echo, "question": "Why?"}]
    verdicts = grade("math", write(tmp_path, *rows), grader="all").verdicts
    assert [(v.correct["strict"], v.correct["lenient"]) for v in verdicts] == [
        (right, right) for right in (True, False, False, True)
    ]


def test_several_workers_give_the_same_verdicts_in_order_of_answers_and_whole_solutions(tmp_path):
    cases = [(f"2+2=4\n#### {i}" if i % 2 else str(i), f"#### {i if i % 3 else i + 1}", None) for i in range(200)]
    one, four = (grade("gsm8k", labelled(tmp_path, cases), workers=workers) for workers in (1, 4))
    assert [v.correct["strict"] for v in one.verdicts] == [i % 3 > 0 for i in range(200)]
    assert one.summaries["strict"].agreement is None
    assert one.verdicts == four.verdicts
    assert [v.row for v in one.verdicts] == list(range(1, 201))


def test_labels_are_read_in_every_usual_spelling(tmp_path):
    rows = [{"gold": 5, "completion": "#### 5", "label": label} for label in (True, 1, "true", "True", 0, "false")]
    rows += [{"gold": "5", "completion": "x"}, {"gold": "5", "completion": "x", "correct": False, "step": 1}]
    labels = [case.label for case in read_cases(write(tmp_path, *rows, ""))]
    assert labels == [True, True, True, True, False, False, None, False]


@pytest.mark.parametrize(
    ("row", "grader", "message"),
    [
        ("nonsense", "strict", "line 1: not valid JSON"),
        ("[" * 100_000 + "]" * 100_000, "strict", "line 1: not valid JSON: maximum recursion"),
        ("[1]", "strict", r"line 1: Input should be .*, got \[1\]"),
        ({"completion": "x"}, "strict", "line 1: gold: is required"),
        ({"gold": "1", "completion": ["x"]}, "strict", r"line 1: completion: .* valid string.*, got \['x'\]"),
        ({"gold": "1", "completion": "x", "label": "maybe"}, "strict", "line 1: label: .* boolean.*, got 'maybe'"),
        ("", "strict", "has no rows"),
        ("", "loose", r"`grader` must be one of strict, lenient.* or all, got 'loose'"),
    ],
)
def test_what_cannot_be_graded_is_refused_by_line_and_field(tmp_path, row, grader, message):
    with pytest.raises(ValueError, match=message):
        grade("gsm8k", write(tmp_path, row), grader=grader)


def test_math_verify_reads_what_is_latex_or_a_number_and_never_runs_text():
    judge = graders(TASK)["math_verify"]
    assert judge(r"so $\frac{36}{2}$", "18", "")[1]
    assert judge("so it is 18 clips", "18", "")[1]
    assert not judge("so it is 19 clips", "18", "")[1]
    assert judge("nothing", "18", "") == (None, False)
    # The library alone would evaluate this text as Python.
    assert not judge("the answer is 2*(3+6)", "18", "")[1]
