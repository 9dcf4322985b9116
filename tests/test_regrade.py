"""Stored completions are graded again by every grader, and what they disagree on is told."""

import json

import pytest
from cohort.harness.api.regrade import Case, graders, read_cases, regrade
from cohort.tasks.gsm8k import GSM8K

TASK = GSM8K()


def write(tmp_path, *rows):
    file = tmp_path / "cases.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def test_strict_wants_a_marked_answer_and_lenient_takes_the_last_number():
    cases = [
        Case("18", "so she has #### 18", True),
        Case("18", "so the answer is 18 clips.", True),
        Case("18", "first 18, then 19", False),
        Case("18", "no number", None),
        Case("5", "#### 5", False),
    ]
    result = regrade(TASK, cases, ["strict", "lenient"])
    assert [v.correct["strict"] for v in result.verdicts] == [True, False, False, False, True]
    assert [v.correct["lenient"] for v in result.verdicts] == [True, True, False, False, True]
    assert [v.answers["lenient"] for v in result.verdicts] == ["18", "18", "19", None, "5"]
    assert result.disagreements == [2]
    strict, lenient = result.summaries["strict"], result.summaries["lenient"]
    # of the four labelled rows strict misses one that is right, and one that is right has a wrong label
    assert (strict.agreement, strict.false_negatives, strict.false_positives) == (0.5, 1, 1)
    assert (lenient.agreement, lenient.correct, lenient.answered) == (0.75, 0.6, 0.8)
    assert strict.rows_per_second > 0


def test_a_gold_answer_may_be_a_whole_solution():
    result = regrade(TASK, [Case("2+2=4\n#### 4", "#### 4.0", None)], ["strict"])
    assert result.verdicts[0].correct == {"strict": True}
    assert result.summaries["strict"].agreement is None


def test_several_workers_give_the_same_verdicts_in_order():
    cases = [Case(str(i), f"#### {i if i % 3 else i + 1}", None) for i in range(200)]
    one, four = (regrade(TASK, cases, ["strict"], workers) for workers in (1, 4))
    assert one.verdicts == four.verdicts
    assert [v.row for v in one.verdicts] == list(range(1, 201))


def test_an_unknown_grader_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"--grader must be one of strict, lenient.* or all, got 'loose'"):
        regrade(TASK, [Case("1", "1", None)], ["loose"])
    assert {"strict", "lenient"} <= set(graders(TASK))


def test_labels_are_read_in_every_usual_spelling(tmp_path):
    rows = [{"gold": 5, "completion": "#### 5", "label": label} for label in (True, 1, "true", "True", 0, "false")]
    rows += [{"gold": "5", "completion": "x"}, {"gold": "5", "completion": "x", "correct": False}]
    labels = [case.label for case in read_cases(write(tmp_path, *rows, ""))]
    assert labels == [True, True, True, True, False, False, None, False]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("nonsense", "line 1: not valid JSON"),
        ("[1]", "line 1: must be a JSON object, got list"),
        ({"completion": "x"}, r"line 1: field 'gold' must be text, got None \(fields: completion\)"),
        ({"gold": "1", "completion": ["x"]}, "line 1: field 'completion' must be text"),
        (
            {"gold": "1", "completion": "x", "label": "maybe"},
            "line 1: field 'label' must be true or false, got 'maybe'",
        ),
        ("", "has no rows"),
    ],
)
def test_a_row_that_is_no_case_is_refused_by_line_and_field(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        read_cases(write(tmp_path, row))


def test_math_verify_reads_what_is_latex_or_a_number_and_never_runs_text():
    judge = graders(TASK)["math_verify"]
    assert judge(r"so $\frac{36}{2}$", "18")[1]
    assert judge("so it is 18 clips", "18")[1]
    assert not judge("so it is 19 clips", "18")[1]
    assert judge("nothing", "18") == (None, False)
    # The library alone would evaluate this text as Python.
    assert not judge("the answer is 2*(3+6)", "18")[1]


def test_all_graders_are_asked_and_their_disagreements_are_listed():
    cases = [Case("18", "#### 18", True), Case("18", "thus 18", True), Case("0.5", r"$\frac12$", True)]
    result = regrade(TASK, cases, list(graders(TASK)), workers=2)
    assert set(result.summaries) == {"strict", "lenient", "math_verify"}
    assert result.disagreements == [2, 3]
    assert [v.correct["math_verify"] for v in result.verdicts] == [True, True, True]
