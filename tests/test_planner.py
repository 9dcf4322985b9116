"""The prediction of a study and what a budget buys, by hand from a measurement that is given; the bad questions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from cohort.harness.api.planner import (
    Calibration,
    Pace,
    Spread,
    _cut,
    _measured,
    calibrate,
    option,
    options_within,
    predict,
    proposed,
    spread_of,
)
from cohort.harness.cli.app import app
from cohort.harness.ground.files import write_json
from cohort.harness.record.events import EVENTS, event_line
from cohort.harness.spec.load import load_study
from cohort.harness.spec.run import parse_run
from cohort.harness.spec.study import StudySpec, parse_study
from cohort.reports.statistics import minimum_detectable_difference
from typer.testing import CliRunner

# 2 s and 1e9 operations a step; 0.1 s and 1e7 a problem; 10 validation and 20 test problems
PACE = Pace(2.0, 0.1, 1e9, 1e7, 10, 20)


def a_study(**changes: Any) -> StudySpec:
    run = {"task": "arithmetic", "algorithm": {"name": "grpo"}, "steps": 50, "evaluation": {"every": 20}}
    raw = {"name": "s", "question": "?", "run": run, "factors": {"algorithm.kl_beta": [0.0, 0.1]}, "seeds": [0, 1, 2]}
    return parse_study({**raw, **changes}, "test")


def a_measurement(study: StudySpec, **changes: Any) -> Calibration:
    paces = {arm.label: PACE for arm in study.design_arms()}
    return Calibration(**{"paces": paces, "first": 12.0, "further": 3.0, "end": 7.0, "seconds": 30.0, "workers": 2}
                       | changes)  # fmt: skip


def test_a_study_takes_what_its_busiest_worker_takes():
    study = a_study()
    # Validations at 0, 20, 40 and 50 of 10 problems, and 20 test problems: 60 problems, 6 s. A trial: 100 + 6 = 106 s.
    # Two workers, six trials: 12 + 106, then twice 3 + 106, and 7 at the end: 343 s.
    seconds, taken, flops = predict(study, a_measurement(study), seeds=3)
    assert seconds == pytest.approx(12 + 106 + 2 * (3 + 106) + 7)
    assert taken == pytest.approx(6 * 106)
    assert flops == pytest.approx(6 * (50 * 1e9 + 60 * 1e7))


def test_half_the_steps_take_half_of_the_steps_and_fewer_validations():
    study = a_study()
    # 25 steps: validations at 0, 20 and 25: 30 + 20 problems. 50 + 5 = 55 s
    assert predict(study, a_measurement(study), seeds=1, factor=0.5)[1] == pytest.approx(2 * 55)


def test_operations_that_end_a_run_end_it_in_the_prediction():
    study = a_study(run={**a_study().run, "max_flops": 9.5e9})
    assert predict(study, a_measurement(study), seeds=1)[1] == pytest.approx(2 * (10 * 2 + (2 * 10 + 20) * 0.1))


def test_hours_buy_the_most_seeds_that_fit_and_the_own_steps_if_three_do():
    study, spread = a_study(), Spread(0.02, "as given")
    found = options_within(study, a_measurement(study), spread, hours=350 / 3600)
    own = next(one for one in found if one.factor == 1)
    assert (own.seeds, own.steps, own.trials) == (3, 50, 6)  # 343 s; a fourth seed takes 452 s
    assert proposed(found) is own
    assert own.detectable == pytest.approx(minimum_detectable_difference(0.02 / math.sqrt(3), 2, 0.05))
    assert all(one.seconds <= 350 for one in found)
    less = options_within(study, a_measurement(study), spread, hours=250 / 3600)
    best = proposed(less)  # two seeds of the own steps: 234 s; three of 25 steps: 12 + 55 + 2 * (3 + 55) + 7 = 190 s
    assert best is not None and (best.steps, best.seeds) == (25, 4)


def test_operations_buy_seeds_too_and_too_few_buy_none():
    study = a_study()
    found = options_within(study, a_measurement(study), None, flops=2.1e11)
    assert [one.seeds for one in found if one.factor == 1] == [2]  # a seed of two arms takes 1.012e11
    assert all(one.detectable is None for one in found)
    assert proposed(options_within(study, a_measurement(study), None, flops=1e9)) is None


def test_a_difference_asks_for_the_fewest_seeds_that_find_it():
    study, spread = a_study(), Spread(0.02, "as given")
    (one,) = options_within(study, a_measurement(study), spread, power=0.02)
    fewer = option(study, a_measurement(study), one.seeds - 1, 1.0, spread)
    assert one.detectable is not None and fewer.detectable is not None
    assert one.detectable <= 0.02 < fewer.detectable
    assert one.seeds == 10  # paired t test, two-sided 5 %, power 0.8, effect of one deviation: 10 pairs (G*Power)


def test_more_arms_find_less_with_as_many_seeds():
    two, five = a_study(), a_study(factors={"algorithm.kl_beta": [0.0, 0.1, 0.2, 0.3, 0.4]})
    spread = Spread(0.02, "as given")
    found = [option(study, a_measurement(study), 5, 1.0, spread).detectable or 0.0 for study in (two, five)]
    assert found[1] == pytest.approx(minimum_detectable_difference(0.02 / math.sqrt(5), 4, 0.05 / 4))
    assert found[1] > found[0]


def ended(runs: Path, study: StudySpec, arm: int, seed: int, accuracy: float, state: str = "complete", **changes: Any):
    spec = study.design_arms()[arm].run_spec(seed).model_dump(mode="json") | changes
    folder = runs / "studies/other/trials" / f"{arm}-{seed}-{len(changes)}"
    folder.mkdir(parents=True)
    write_json(folder / "run.json", {"spec": spec})
    write_json(folder / "result.json", {"state": state, "metrics": {"test/accuracy": accuracy}})


def test_the_spread_is_that_of_paired_differences_whatever_the_steps(tmp_path: Path):
    study = a_study()
    for seed, (base, other) in enumerate([(0.5, 0.52), (0.6, 0.66), (0.4, 0.41)]):
        ended(tmp_path, study, 0, seed, base, steps=7)
        ended(tmp_path, study, 1, seed, other, steps=7)
    ended(tmp_path, study, 1, 3, 0.99)  # without its partner
    ended(tmp_path, study, 1, 4, 0.01, state="invalid")
    ended(tmp_path, study, 1, 5, 0.01, rollouts_per_step=8)  # another run
    found = spread_of(study, tmp_path)
    # differences 0.02, 0.06, 0.01: mean 0.03, squares 1e-4, 9e-4, 4e-4; sqrt(14e-4 / 2)
    assert found is not None and found.deviation == pytest.approx(math.sqrt(7e-4))
    assert spread_of(a_study(run={**study.run, "rollouts_per_step": 32}), tmp_path) is None


def test_a_trial_tells_its_pace_by_the_times_of_its_events(tmp_path: Path):
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
    pace, worker, end = _measured(tmp_path, spec)
    # Steps 2 and 3 end 2 s after the one before. 12.6 - (5 + 1.8 + 1.8) = 4 s for 10 + 10 + 20 problems.
    assert pace == Pace(2.0, pytest.approx(0.1), 1e9, 1e7, 10, 20)
    assert (worker, end) == (7, 110.0)


def test_arms_that_differ_in_their_steps_alone_are_measured_once():
    arms = {"short": {"steps": 50}, "long": {"steps": 100}, "still": {"control": "frozen"}}
    study = a_study(factors={}, arms=arms, baseline="short")
    cut, name_of = _cut(study, study.design_arms(), workers=2)
    assert name_of == {"short": "short", "long": "short", "still": "still"}
    assert [arm.spec.steps for arm in cut.design_arms()] == [10, 10]
    assert len(cut.first_seeds) == 2  # four trials for two workers


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
def test_a_bad_question_is_refused_in_one_sentence_and_nothing_is_written(
    arguments: list[str], words: str, tmp_path: Path
):
    result = CliRunner().invoke(app, ["study", "plan", *arguments, "--runs", str(tmp_path / "runs")])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_a_plan_predicts_a_study_and_leaves_only_cold_starts(tmp_path: Path):
    sets = ["steps=12", "seeds=[0]", "evaluation.num_prompts=16", "evaluation.num_test_prompts=16"]
    study = load_study("quickstart", sets)
    written: list[str] = []
    measured = calibrate(study, tmp_path, 2, lambda name, runs: written.append(name))
    assert written == ["plan"]
    assert {file.name for file in tmp_path.iterdir()} == {"cache"}
    assert {file.name for file in (tmp_path / "cache").iterdir()} == {"cold-start"}
    assert all(pace.step > 0 and pace.problem > 0 and pace.flops_step > 0 for pace in measured.paces.values())
    assert len(json.dumps([vars(pace) for pace in measured.paces.values()])) > 0
    assert predict(study, measured, 1)[0] > 0
