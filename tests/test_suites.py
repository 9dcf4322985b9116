"""`evaluation.tests`: a run is scored on other tests too, and a study has a table of arms by tests."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cohort.harness.checks.preflight import check_runs
from cohort.harness.record.events import EVENTS, read_history
from cohort.harness.record.run import RunLog
from cohort.harness.record.study import StudyRecord, TrialRecord
from cohort.harness.run.loop import train
from cohort.harness.run.standalone import evaluate_once
from cohort.reports.analysis import analysed
from cohort.reports.statistics import holm
from cohort.reports.suites import suite, suite_table
from factories import FEW, make_spec
from fake_study import fake_study, with_trials

FIXTURES = Path(__file__).parent / "fixtures"
LONGER = {"name": "arithmetic", "min_operands": 3, "max_operands": 3}
MATH = {"name": "math500", "path": str(FIXTURES / "math500")}


def test_a_run_scores_its_other_tests_at_the_end_and_on_request_at_the_start(runs):
    spec = make_spec(**{**FEW, "steps": 1, "evaluation.tests": [LONGER, MATH], "evaluation.test_at_start": True})
    folder = runs / "one"
    with RunLog(runs, folder, spec, experiment="train", run_name="one") as log:
        ended = train(spec, folder, log, cache=runs / "cache")
        log.finish(ended.state, ended.reason, ended.summary)
    history = read_history(folder / EVENTS)
    areas = {"test", "start", "test_arithmetic", "start_arithmetic", "test_math500", "start_math500"}
    assert history.scores.keys() == areas
    for area in areas:
        (step,) = history.history[f"{area}/accuracy"]
        assert step == (0 if area.startswith("start") else 1)
        rows = (folder / f"completions/{area}-{step:06d}.jsonl").read_text().splitlines()
        assert {json.loads(row)["id"] for row in rows} == history.scores[area].keys()
    # those of the test's own task, and never one of the run's
    asked = {prompt.id for prompt in spec.tests["math500"].task.prompts("test")}
    assert history.scores["test_math500"].keys() == asked
    assert not asked & history.scores["test"].keys()
    assert ended.summary["test_accuracy"] == pytest.approx(sum(history.scores["test"].values()) / 4)


def test_a_test_keeps_the_limit_and_the_sampling_of_its_run_and_one_without_data_is_refused(runs, tmp_path):
    spec = make_spec(**{**FEW, "sampling": {"stop": ["x"]}, "evaluation.tests": [MATH]})
    other = spec.tests["math500"]
    assert (other.max_tokens, other.sampling.stop) == (spec.max_tokens, ("x",))
    assert other.task.max_completion_tokens > spec.max_tokens
    spec = make_spec(**{**FEW, "evaluation.tests": [{"name": "math500", "path": str(tmp_path / "nowhere")}]})
    with pytest.raises(ValueError, match="nowhere: no such file or folder"):
        check_runs([spec], runs)


def test_training_problems_among_those_of_a_test_are_counted(runs, tmp_path, caplog):
    rows = [{"problem": f"Write ${n}$.", "answer": str(n)} for n in range(4)]
    for name, some in (("train", rows), ("test", [{"problem": "Write $9$.", "answer": "9"}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    (tmp_path / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows[:2], *rows[:1]]))
    task = {"name": "math", "path": str(tmp_path), "validation_fraction": 0.5}
    spec = make_spec(task=task, **{"evaluation.tests": [{"name": "math500", "path": str(tmp_path / "math.jsonl")}]})
    known = {prompt.id for prompt in spec.task.prompts("train")}
    shared = sum(prompt.id in known for prompt in spec.tests["math500"].task.prompts("test"))
    with caplog.at_level(logging.WARNING):
        check_runs([spec], runs, models=False)
    assert f"{shared} of the 2 problems of the test 'math500' are training problems of 'math'" in caplog.text


@pytest.mark.slow
def test_an_evaluation_measures_other_tests_with_one_engine_and_continues(runs):
    spec = make_spec(**{**FEW, "evaluation.tests": [MATH]})
    first = evaluate_once(spec, "test", runs, "both")
    assert list(first) == ["test", "test_math500"]
    assert first["test_math500"].correct_counts.keys() == {p.id for p in spec.tests["math500"].task.prompts("test")}
    kept = runs / "evaluate/both/test_math500.jsonl"
    lines = kept.read_text().splitlines(keepends=True)
    kept.write_text("".join(lines[:2]))
    again = evaluate_once(spec, "test", runs, "both")
    assert kept.read_text().splitlines(keepends=True) == lines
    assert again["test_math500"].metrics == first["test_math500"].metrics
    assert list(evaluate_once(spec, "validation", runs, "held")) == ["validation"]


def with_tests(record: StudyRecord, tests: Mapping[str, StudyRecord]) -> StudyRecord:
    """The record, whose trials have as their other tests the test problems of other records."""
    found = {name: {(t.arm, t.seed): t for t in one.trials} for name, one in tests.items()}

    def change(trial: TrialRecord) -> dict[str, Any]:
        others = {name: one[trial.arm, trial.seed] for name, one in found.items()}
        evaluation = {**trial.spec["evaluation"], "tests": [{"name": name} for name in tests]}
        logged = {f"test_{name}/accuracy": one.history["test/accuracy"] for name, one in others.items()}
        return {
            "spec": {**trial.spec, "evaluation": evaluation},
            "history": {**trial.history, **logged},
            "tests": {f"test_{name}": one.per_problem for name, one in others.items()},
        }

    return with_trials(record, change)


def test_each_test_has_the_numbers_of_a_study_of_it_alone_and_all_differences_are_one_family():
    alone = {name: fake_study(rng_seed=seed, num_problems=size) for name, seed, size in (("x", 1, 64), ("y", 2, 30))}
    record = with_tests(fake_study(), alone)
    found, analysis = suite(analysed(record)), analysed(record)
    assert found is not None and list(found.tests) == ["x", "y"]
    compared = []
    for name, one in alone.items():
        for arm in analysed(one).arms:
            ours = found.tests[name].arm(arm.label)
            assert (ours.mean, ours.interval) == (arm.mean, arm.interval)
        compared += [(c.arm, name, c.p) for c in analysed(one).comparisons]
    adjusted = holm([p for *_, p in compared])
    assert found.adjusted == {(arm, name): p for (arm, name, _), p in zip(compared, adjusted, strict=True)}
    assert len(adjusted) == 4
    # the comparison of the study itself stays what it is without other tests
    assert [c.p_adjusted for c in analysis.comparisons] == [c.p_adjusted for c in analysed(fake_study()).comparisons]
    shown = suite_table(found, analysis)
    assert [column.name for column in shown["table"].columns] == ["Arm", "x (64 problems)", "y (30 problems)"]
    assert [[len(cell.parts) for cell in cells] for _, *cells in shown["table"].rows] == [[1, 1], [2, 2], [2, 2]]
    differences = [cell.parts[1] for _, *cells in shown["table"].rows[1:] for cell in cells]
    assert all(text[0] in "+-" and limits[1] in "+-" for text, limits in differences)
    assert shown["reading"].startswith("Mean over seeds, scored once at the end; ")
    assert "all 4 differences of this table are one Holm family" in shown["reading"]


def test_a_table_of_tests_is_of_their_accuracy_whatever_the_metric_from_one_trial_on():
    record = replace(with_tests(fake_study(), {"x": fake_study(rng_seed=1)}), metric="reward/mean")
    for trials in (record.trials, record.trials[:1]):
        found = suite(analysed(replace(record, trials=trials)))
        assert found is not None and found.tests["x"].outcome.name == "test/accuracy"
        assert {name for trial in found.tests["x"].usable.values() for name in trial.history} == {"test/accuracy"}
    assert suite(analysed(replace(record, trials=[]))) is None


def test_a_test_that_some_trial_lacks_or_has_with_other_settings_is_no_column():
    record = with_tests(fake_study(), {"x": fake_study(rng_seed=1), "y": fake_study(rng_seed=2)})
    first, *rest = record.trials
    for other in (
        replace(first, tests={"test_y": first.tests["test_y"]}),
        replace(
            first, spec={**first.spec, "evaluation": {"tests": [{"name": "x", "path": "elsewhere"}, {"name": "y"}]}}
        ),
    ):
        found = suite(analysed(replace(record, trials=[other, *rest])))
        assert found is not None and list(found.tests) == ["y"]
    assert suite(analysed(fake_study())) is None
