"""Several studies in one report: only where they measure the same thing, with every other difference said."""

import csv
import dataclasses
from typing import Any

import pytest
from cohort.harness.record.study import StudyRecord
from cohort.reports.join import join
from cohort.reports.prose.notes import notes
from cohort.reports.render import analysed, results_csv, write_report
from fake_study import FakeArm, fake_study, with_claims, with_trials


def study(name: str, seeds: range = range(3), **settings: Any) -> StudyRecord:
    arms = [
        FakeArm(label, "grpo", accuracy, settings, {"algorithm.kl_beta": beta})
        for label, accuracy, beta in (("low", 0.5, 0.0), ("high", 0.8, 0.1))
    ]
    return fake_study(arms, seeds=seeds, name=name, num_steps=10)


def respecified(record: StudyRecord, section: str, **values: Any) -> StudyRecord:
    """The study with other settings in a section of all its runs."""
    return with_trials(record, lambda t: {"spec": {**t.spec, section: {**t.spec[section], **values}}})


def test_arms_are_named_after_their_study_and_compared_with_the_first_studys_baseline():
    asked = join([study("a", range(2)), study("b", range(3))])  # each study for its own seeds only
    assert not analysed(asked).gaps
    joined = join([study("a"), study("b")])
    assert joined.arms == ["a: low", "a: high", "b: low", "b: high"]
    assert (joined.name, joined.baseline, joined.expected) == ("a + b", "a: low", 12)
    analysis = analysed(joined)
    assert [comparison.arm for comparison in analysis.comparisons] == ["a: high", "b: low", "b: high"]
    # both studies draw their numbers from one generator seed, so equal arms have equal runs
    assert analysis.comparisons[1].estimate == 0.0
    assert analysis.grid is None


OTHER_PROBLEMS = with_trials(study("b"), lambda t: {"per_problem": {f"new-{k}": v for k, v in t.per_problem.items()}})


@pytest.mark.parametrize(("others", "message"), [
    ([respecified(study("b"), "task", name="gsm8k")], r"task\.name is arithmetic in 'a', gsm8k in 'b'"),
    ([respecified(study("b"), "evaluation", num_test_prompts=64)],
     r"evaluation\.num_test_prompts is 512 in 'a', 64 in 'b'"),
    ([dataclasses.replace(study("b"), metric="kl/reference")], "'a' has validation/accuracy, 'b' kl/reference"),
    ([OTHER_PROBLEMS], "'a' has 128, 'b' 128, 0 of them in both"),
    ([study("a")], "at least two different studies, got a, a"),
    ([], "got a"),
])  # fmt: skip
def test_studies_that_measure_something_else_are_refused_with_the_difference(others, message):
    with pytest.raises(ValueError, match=message):
        join([study("a"), *others])


def test_differences_between_base_runs_are_warned_about_but_not_what_a_study_varies():
    other = study("b", steps=50, **{"rollouts_per_step": 64, "algorithm.kl_beta": 0.3})
    joined = join([study("a"), dataclasses.replace(other, versions={**other.versions, "torch": "2.0"})])
    assert joined.warnings == {
        "rollouts_per_step": {"a": "128", "b": "64"},
        "steps": {"a": "10", "b": "50"},
        "version of torch": {"a": "2.13.0", "b": "2.0"},
    }
    differing = dict(notes(analysed(joined)))
    assert "steps (a: 10, b: 50)" in differing["Base runs differ between the studies"]
    same = dict(notes(analysed(join([study("a"), study("b")]))))
    assert "Studies that differ only in their arms" in same and "Claims" not in str(same)
    claiming = with_claims(study("b"), {"contrast": {"high": 1, "low": -1}})
    assert "Claims are judged in the report of their study: b." in str(notes(analysed(join([study("a"), claiming]))))


@pytest.mark.slow
def test_the_joined_report_keeps_the_study_of_every_trial(tmp_path):
    joined = join([study("a"), study("b")])
    rows = list(csv.DictReader(results_csv(joined).splitlines()))
    assert [row["study"] for row in rows] == ["a"] * 6 + ["b"] * 6
    files = write_report(joined, tmp_path, formats=())
    page = files.html.read_text(encoding="utf-8")
    assert "cohort report a b" in page
    assert "b: high" in page
    assert files.answer.startswith("Only 'a: high' and 'b: high' end detectably above the start; ")
    assert files.answer.partition("; ")[2].startswith(("a: high reaches ", "b: high reaches "))
