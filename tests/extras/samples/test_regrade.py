"""Stored completions are graded again by every grader, and what they disagree on is told."""

import json
import time

import pytest
from cohort.harness.extras.samples.grade import grade, graders, read_cases
from cohort.harness.extras.samples.readers import TAIL_CHARS, lenient, unmarked_latex, unmarked_number
from cohort.tasks import _numbers
from cohort.tasks._answers import first_readable
from cohort.tasks.gsm8k import GSM8K
from cohort.tasks.math import Math

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
    assert [v.correct["lenient"] for v in result.verdicts] == [True, True, False, False, True, False]
    assert [v.answers["lenient"] for v in result.verdicts[:5]] == ["18", "18", "19", None, "5"]
    assert [v.correct["math_verify"] for v in result.verdicts] == [True, True, False, False, True, True]
    assert result.disagreements == [2, 6]
    strict, lenient = result.summaries["strict"], result.summaries["lenient"]
    # of the four labelled rows strict misses one that is right, and one that is right has a wrong label
    assert (strict.agreement, strict.false_negatives, strict.false_positives) == (0.5, 1, 1)
    assert (lenient.agreement, lenient.correct, lenient.answered) == (0.75, 3 / 6, 5 / 6)
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


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("The answer is 18.", "18"), ("3 + 4 = 7, so the ANSWER IS **$1,800** in 2 years", "1800"),
        ("Answer: 18\nI checked it 3 times.", "18"), ("**Final answer:** 18", "18"),
        ("The answer is 1. Wait, the answer is 2. Check 1+1 = 3", "2"),
        ("The answer is that each of them pays 18 dollars and 5 stay", "18"), ("The answer is 3 million", "3000000"),
        (r"the answer is $\frac{1}{2}$", "0.5"), ("The answer is:\n-5", "-5"),
        ("The answer is plain. 20 - 2 = 18 clips", "18"), ("So 4 bags = 18 clips, 2 of them torn", "18"),
        ("It is 5 or 6", "6"), ("10-3", "3"), ("it fell to -3", "-3"), ("costs $1,200.50.", "1200.5"),
        ("about 3/4 of it", "0.75"), ("\u7b54\u6848\u662f18\u5143", "18"), ("\u7b54\uff1a\u5341\u516b\u4e2a", "18"),
        ("none", None), ("5" + " " * TAIL_CHARS, None),
    ],
)  # fmt: skip
def test_an_unmarked_number_is_the_one_after_the_phrase_or_else_the_last(completion, number):
    assert first_readable(unmarked_number(completion), _numbers.canonical) == number


@pytest.mark.parametrize(
    ("completion", "texts"),
    [
        (r"So the answer is $\frac{1}{2}$, as $x=3$.", [r"\frac{1}{2}", "x=3", "3"]),
        (r"The answer is (2, 3). Done.", ["(2, 3)", "3"]), ("The answer is:\n$$x+1$$", ["x+1", "x+1", "1"]),
        ("The answer is 3.5.", ["3.5", "3.5"]), (r"Hence $x = \sqrt{5}$ is all", [r"x = \sqrt{5}", "5"]),
        ("It costs $5 and then $6", ["6"]), ("nothing", []),
    ],
)  # fmt: skip
def test_unmarked_mathematics_is_the_rest_of_the_sentence_the_last_formula_or_the_last_number(completion, texts):
    found = [text.removeprefix("$") for text in unmarked_latex(completion)]
    assert found == texts


@pytest.mark.parametrize("text", ["the answer is ", "= ", "$", "$x", "1,", "1/", "-", "answer" + " " * 99 + "is "])
def test_no_flood_of_text_takes_long_to_read_or_raises(text):
    start = time.process_time()
    flood = text * (10**5 // len(text))
    assert all(isinstance(found, str) and found for found in [*unmarked_number(flood), *unmarked_latex(flood)])
    assert time.process_time() - start < 2.0


def test_a_last_sentence_without_a_marker_is_read_by_the_lenient_grader_alone():
    for task, gold in ((TASK, "18"), (Math(), r"\frac{x}{2}")):
        completion = f"Let us see. The answer is ${gold}$."
        assert task.extract(completion) is None
        assert task.equivalent(lenient(task, completion), gold)
