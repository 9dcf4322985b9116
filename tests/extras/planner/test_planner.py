"""The prediction of a study and what a budget buys, from runs that are given; the bad questions."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
from cohort.harness.api.study import load_study
from cohort.harness.base.files import write_json
from cohort.harness.extras.planner import planner
from cohort.harness.extras.planner.planner import Option, option, plan, spread_of, within
from cohort.harness.settings.study import StudySpec
from cohort.harness.study.estimates import passes
from factories import make_study

PACE = 1e-4  # seconds of a pass


def a_study(**changes: Any) -> StudySpec:
    few = {"every": 20, "num_prompts": 10, "num_samples": 4, "num_test_prompts": 20}
    run = {"task": "arithmetic", "algorithm": {"name": "grpo"}, "steps": 50, "evaluation": few}
    return make_study(**{"run": run, "seeds": [0, 1, 2], **changes})


def ended(runs: Path, study: StudySpec, arm: int, seed: int, accuracy: float, state: str = "complete", **changes: Any):
    """A run of the folder that took PACE, 1e9 operations for each step and 1e8 for evaluations."""
    spec = study.design_arms()[arm].run_spec(seed).model_copy(update=changes)
    folder = runs / "studies/other/trials" / f"{arm}-{seed}-{len(changes)}"
    folder.mkdir(parents=True)
    summary = {"seconds": PACE * passes(spec), "flops_train": 1e9 * spec.steps, "flops_evaluation": 1e8}
    write_json(folder / "run.json", {"spec": spec.model_dump(mode="json")})
    write_json(folder / "result.json", {"state": state, "metrics": {"test/accuracy": accuracy}, "summary": summary})


def measured(runs: Path, study: StudySpec, seeds: int) -> Option:
    """The cost of a study whose arms were measured for ten steps."""
    for arm in (0, 1) if not (runs / "studies").exists() else ():
        ended(runs, study, arm, 0, 0.5, steps=10, max_flops=None)
    return option(study, seeds, runs, 2, None)


def test_a_study_takes_what_its_runs_took_for_more_steps_and_trials_and_operations_that_end_a_run_end_it_here(tmp_path):
    study = a_study()
    (one, other), found = study.design_arms(), measured(tmp_path, study, 3)
    assert (found.seeds, found.trials, found.detectable) == (3, 6, None)
    assert found.trial_seconds == pytest.approx(3 * PACE * (passes(one.spec) + passes(other.spec)), rel=1e-3)
    assert found.trial_seconds / 2 < found.seconds < found.trial_seconds  # two workers, their start and the report
    # Validations at 0, 20, 40 and 50 and not at 0 and 10, of 10 * 5; the test of 20 * (1 + its samples) as before.
    test = 20 * (1 + one.spec.evaluation.samples_of("test"))
    assert found.flops == pytest.approx(6 * (50e9 + 1e8 * (4 * 50 + test) / (2 * 50 + test)))
    study = a_study(run={**a_study().run, "max_flops": 9.5e9})
    assert 2 * 9.5e9 < measured(tmp_path, study, 1).flops < 2 * 10e9


def a_cost(seeds: int, comparisons: int = 1) -> Option:
    detectable = planner.minimum_detectable_difference(0.02 / math.sqrt(seeds), seeds - 1, 0.05 / comparisons)
    return Option(seeds, 2 * seeds, 100.0 * seeds, 0.0, 1e11 * seeds, detectable)


def test_a_budget_buys_the_most_seeds_that_fit_and_a_difference_asks_for_the_fewest_that_find_it(tmp_path):
    bought = {(350, None): 3, (None, 2.1e11): 2, (199, None): None, (None, 1e9): None, (1e9, None): 200}
    for (seconds, flops), seeds in bought.items():
        found = within(a_cost, seconds and seconds / 3600, flops, None)
        assert (found and found.seeds) == seeds
    # paired t test, two-sided 5 %, power 0.8, effect of one deviation: 10 pairs (G*Power)
    assert within(a_cost, None, None, 0.02).seeds == 10
    assert within(a_cost, None, None, 1e-5) is None
    study = a_study()
    measured(tmp_path, study, 2)
    assert option(study, 10, tmp_path, 2, 0.02).detectable == pytest.approx(a_cost(10).detectable)
    five = a_study(factors={"algorithm.kl_beta": [0.0, 0.1, 0.2, 0.3, 0.4]})
    for arm in (2, 3, 4):
        ended(tmp_path, five, arm, 0, 0.5)
    assert option(five, 10, tmp_path, 2, 0.02).detectable == pytest.approx(a_cost(10, 4).detectable)


def test_the_spread_is_that_of_paired_differences_whatever_the_steps(tmp_path):
    study = a_study()
    for seed, (base, other) in enumerate([(0.5, 0.52), (0.6, 0.66), (0.4, 0.41)]):
        ended(tmp_path, study, 0, seed, base, steps=7)
        ended(tmp_path, study, 1, seed, other, steps=7)
    ended(tmp_path, study, 1, 3, 0.99)  # without its partner
    ended(tmp_path, study, 1, 4, 0.01, state="invalid")
    ended(tmp_path, study, 1, 5, 0.01, rollouts_per_step=8)  # another run
    # differences 0.02, 0.06, 0.01: mean 0.03, squares 1e-4, 9e-4, 4e-4; sqrt(14e-4 / 2)
    assert spread_of(study, tmp_path) == pytest.approx(math.sqrt(7e-4))
    assert spread_of(a_study(run={**study.run, "rollouts_per_step": 32}), tmp_path) is None


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
def test_a_bad_question_is_refused_in_one_sentence_and_nothing_is_written(arguments, words, tmp_path, cohort):
    assert cohort("study", "plan", *arguments, "--runs", tmp_path / "runs") == 2
    assert words in cohort.said
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
