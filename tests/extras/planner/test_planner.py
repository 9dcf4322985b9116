"""The prediction of a study and what a budget buys, by hand from a measurement that is given; the bad questions."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
from cohort.harness.api.study import load_study
from cohort.harness.base.files import write_json
from cohort.harness.cli.app import app
from cohort.harness.extras.planner import planner
from cohort.harness.extras.planner.planner import (
    Calibration,
    Option,
    Pace,
    measured_trial,
    option,
    plan,
    spread_of,
    within,
)
from cohort.harness.record.events import EVENTS, event_line
from cohort.harness.settings.run import parse_run
from cohort.harness.settings.study import StudySpec, parse_study
from typer.testing import CliRunner

# 2 s and 1e9 operations a step; 0.1 s and 1e7 a problem; 10 validation and 20 test problems
PACE = Pace(2.0, 0.1, 1e9, 1e7, 10, 20)


def a_study(**changes: Any) -> StudySpec:
    run = {"task": "arithmetic", "algorithm": {"name": "grpo"}, "steps": 50, "evaluation": {"every": 20}}
    raw = {"name": "s", "question": "?", "run": run, "factors": {"algorithm.kl_beta": [0.0, 0.1]}, "seeds": [0, 1, 2]}
    return parse_study({**raw, **changes}, "test")


def a_measurement(study: StudySpec) -> Calibration:
    return Calibration({arm.label: PACE for arm in study.design_arms()}, first=12.0, further=3.0, end=7.0, workers=2)


def options(study: StudySpec) -> list[Option]:
    return [option(study, a_measurement(study), seeds, 0.02) for seeds in range(2, 20)]


def test_a_study_takes_what_its_busiest_worker_takes():
    study = a_study()
    # Validations at 0, 20, 40 and 50 of 10 problems, and 20 test problems: 60 problems, 6 s. A trial: 100 + 6 = 106 s.
    # Two workers, six trials: 12 + 106, then twice 3 + 106, and 7 at the end: 343 s.
    found = option(study, a_measurement(study), 3, None)
    assert (found.seeds, found.trials, found.detectable) == (3, 6, None)
    assert found.seconds == pytest.approx(12 + 106 + 2 * (3 + 106) + 7)
    assert found.trial_seconds == pytest.approx(6 * 106)
    assert found.flops == pytest.approx(6 * (50 * 1e9 + 60 * 1e7))


def test_operations_that_end_a_run_end_it_in_the_prediction():
    study = a_study(run={**a_study().run, "max_flops": 9.5e9})
    found = option(study, a_measurement(study), 1, None)
    assert found.trial_seconds == pytest.approx(2 * (10 * 2 + (2 * 10 + 20) * 0.1))


def test_a_budget_buys_the_most_seeds_that_fit_and_too_little_buys_none():
    def seeds(hours: float | None, flops: float | None) -> int | None:
        found = within(options(a_study()), hours, flops, None)
        return found and found.seeds

    assert seeds(350 / 3600, None) == 3  # 343 s; a fourth seed takes 452 s
    assert seeds(None, 2.1e11) == 2  # a seed of two arms takes 1.012e11
    assert seeds(200 / 3600, None) is seeds(None, 1e9) is None


def test_a_difference_asks_for_the_fewest_seeds_that_find_it_and_more_arms_for_more():
    found = within(options(a_study()), None, None, 0.02)
    assert found is not None and found.seeds == 10
    # paired t test, two-sided 5 %, power 0.8, effect of one deviation: 10 pairs (G*Power)
    five = a_study(factors={"algorithm.kl_beta": [0.0, 0.1, 0.2, 0.3, 0.4]})
    found = within(options(five), None, None, 0.02)
    assert found is not None and found.seeds > 10


def ended(runs: Path, study: StudySpec, arm: int, seed: int, accuracy: float, state: str = "complete", **changes: Any):
    spec = study.design_arms()[arm].run_spec(seed).model_dump(mode="json") | changes
    folder = runs / "studies/other/trials" / f"{arm}-{seed}-{len(changes)}"
    folder.mkdir(parents=True)
    write_json(folder / "run.json", {"spec": spec})
    write_json(folder / "result.json", {"state": state, "metrics": {"test/accuracy": accuracy}})


def test_the_spread_is_that_of_paired_differences_whatever_the_steps(tmp_path):
    study = a_study()
    for seed, (base, other) in enumerate([(0.5, 0.52), (0.6, 0.66), (0.4, 0.41)]):
        ended(tmp_path, study, 0, seed, base, steps=7)
        ended(tmp_path, study, 1, seed, other, steps=7)
    ended(tmp_path, study, 1, 3, 0.99)  # without its partner
    ended(tmp_path, study, 1, 4, 0.01, state="invalid")
    ended(tmp_path, study, 1, 5, 0.01, rollouts_per_step=8)  # another run
    found = spread_of(study, tmp_path)
    # differences 0.02, 0.06, 0.01: mean 0.03, squares 1e-4, 9e-4, 4e-4; sqrt(14e-4 / 2)
    assert found == pytest.approx(math.sqrt(7e-4))
    assert spread_of(a_study(run={**study.run, "rollouts_per_step": 32}), tmp_path) is None


def test_a_trial_tells_its_pace_by_the_times_of_its_events(tmp_path):
    def at(seconds: float, **event: Any) -> dict[str, Any]:
        return {"time": round(1000 * seconds), **event}

    values = {"validation/num_prompts": 10.0}
    steps = [
        at(100 + 2 * k, type="metrics", step=k, values={"seconds/step": 5.0 if k == 1 else 1.8}) for k in (1, 2, 3)
    ]
    finish = {"state": "complete", "reason": None}
    summary = {"seconds": 12.6, "flops_train": 3e9, "flops_evaluation": 4e8}
    events = [
        at(90, type="start", pid=7), at(95, type="metrics", step=0, values=values), *steps,
        at(108, type="metrics", step=3, values=values | {"test/num_prompts": 20.0}),
        at(110, type="finish", **finish, summary=summary),
    ]  # fmt: skip
    (tmp_path / EVENTS).write_text("".join(map(event_line, events)))
    spec = parse_run({**a_study().run, "steps": 3}, "test")
    pace, worker, end = measured_trial(tmp_path, spec)
    # Steps 2 and 3 end 2 s after the one before. 12.6 - (5 + 1.8 + 1.8) = 4 s for 10 + 10 + 20 problems.
    assert pace == Pace(2.0, pytest.approx(0.1), 1e9, 1e7, 10, 20)
    assert (worker, end) == (7, 110.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quickstart", "--hours", "0"], "--hours must be a number above 0, got 0"),
        (["quickstart", "--flops", "nan"], "--flops must be a number above 0, got nan"),
        (["quickstart", "--hours", "1", "--power", "0.02"], "can be given, got --hours and --power; leave one out"),
        (["quickstart", "--power", "0.02"], "--power needs the spread over seeds"),
        (["search_quickstart", "--hours", "1"], "--hours must be left out for a study that searches"),
    ],
)
@pytest.mark.attack("Bad questions to the planner")
def test_a_bad_question_is_refused_in_one_sentence_and_nothing_is_written(arguments, words, tmp_path):
    result = CliRunner().invoke(app, ["study", "plan", *arguments, "--runs", str(tmp_path / "runs")])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert not (tmp_path / "runs").exists()


def test_nothing_of_a_calibration_is_sent_to_a_server_or_a_mirror(tmp_path, monkeypatch):
    elsewhere = {"COHORT_TRACKING_URI": "http://127.0.0.1:9", "COHORT_MIRROR": "none"}
    for name, value in elsewhere.items():
        monkeypatch.setenv(name, value)
    seen = []

    def run_study(*_: Any, **__: Any) -> Any:
        seen.extend(elsewhere.keys() & os.environ.keys())
        raise KeyboardInterrupt

    for name in ("check_study", "start_policy"):  # the first asks whether the server answers
        monkeypatch.setattr(planner, name, lambda *_: None)
    monkeypatch.setattr(planner, "run_study", run_study)
    with pytest.raises(KeyboardInterrupt):
        plan(load_study("quickstart"), workers=1, runs=tmp_path)
    assert not seen and elsewhere.items() <= os.environ.items()


@pytest.mark.long
def test_a_plan_measures_arms_that_differ_in_their_steps_once_and_leaves_only_cold_starts(tmp_path):
    few = {"evaluation.num_prompts": 16, "evaluation.num_test_prompts": 16, "seeds": [0], "baseline": "short"}
    arms = {"short": {"steps": 12}, "long": {"steps": 24}, "still": {"control": "frozen"}}
    study = load_study("quickstart").with_set(**few, arms=arms, factors={})
    found = plan(study, workers=2, runs=tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"cache"}
    assert {file.name for file in (tmp_path / "cache").iterdir()} == {"cold-start"}
    assert found.proposed is found.as_it_is and found.as_it_is.trials == 3
    assert found.as_it_is.seconds > 0 and found.as_it_is.flops
