"""Cost, time left and budget of a study, by hand; a dry run checks what a run checks and writes nothing."""

import math
import os
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import datasets
import fake_trials
import pytest
from cohort.harness.base.files import write_json
from cohort.harness.checks.memory import run_sizes
from cohort.harness.checks.preflight import check_runs
from cohort.harness.console import progress
from cohort.harness.data import Prompt
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.load import load_study
from cohort.harness.settings.run import RunSpec
from cohort.harness.settings.study import Arm, StudySpec
from cohort.harness.study import estimates
from cohort.harness.study.estimates import TrialTimes, _stamped, budget, cost, passes, with_time_left
from cohort.harness.study.plan import Plan
from cohort.harness.study.queue import Queue, TrialOutcome, study_status
from cohort.harness.study.runner import dry_run, run_study
from cohort.tasks.arithmetic import Arithmetic
from factories import make_spec, status, trial
from fake_trials import a_study

pytestmark = pytest.mark.usefixtures("plugins")


def test_cost_is_summed_over_all_trials_and_gpu_time_over_those_that_had_one():
    found = status(
        trial("a", "complete", seconds=100.0, generated_tokens=1000.0, on_gpu=True),
        trial("a", "invalid", seconds=20.0, generated_tokens=50.0),
        trial("b", "running", seconds=5.0, on_gpu=True),
        trial("b", "waiting"),
    )
    assert cost(found) == {"trial_seconds": 125.0, "gpu_seconds": 105.0, "generated_tokens": 1050.0}


METRIC = "validation/accuracy"


def budgeted(study: StudySpec, runs: Path, workers: int = 3) -> dict[str, Any]:
    queue = Queue(Plan(study, runs))
    return budget(queue.plan, queue.status(workers), queue.coming())


def past_run(runs: Path, spec: RunSpec, seconds: float, besides: float) -> None:
    """The record of a complete run that took so many seconds, and others besides."""
    folder = runs / "studies" / "earlier" / "trials" / f"{seconds}-{besides}"
    folder.mkdir(parents=True)
    write_json(folder / "run.json", {"spec": spec.model_dump(mode="json")})
    write_json(folder / "result.json", {"state": "complete", "summary": {"seconds": seconds}})
    for file, time in (("run.json", 1e9), ("result.json", 1e9 + seconds + besides)):
        os.utime(folder / file, (time, time))


def test_passes_of_tokens_are_counted_by_hand():
    few = {"evaluation": {"every": 5, "num_prompts": 10, "num_samples": 4, "num_test_prompts": 20}}
    spec = make_spec(**few, steps=12, rollouts_per_step=8, **{"sampling.max_tokens": 6, "algorithm.kl_beta": 0.0})
    # A step: 8 rows of 6 tokens, sampled 1, learnt from 3: 192; 6 steps of decoding of 40 more, an update of 240: 672.
    # A validation: 10 problems x 5 samples x 6, decoded twice: 300 + 2 x 240 = 780, the test 600 + 480 = 1080.
    # Validations at 0, 5, 10 and 12: 12 x 672 + 4 x 780 + 1080; until step 10 those at 0 and 5.
    assert (passes(spec), passes(spec, 10)) == (12264, 10 * 672 + 2 * 780)
    ppo = make_spec("ppo", **few, steps=1, rollouts_per_step=8, **{"sampling.max_tokens": 6, "algorithm.kl_beta": 0.1})
    # sampled 1, read by critic and reference 2, learnt from by policy and critic 6, which both move
    assert passes(ppo) == 8 * 6 * 9 + 240 + 2 * 240 + 2 * 780 + 1080
    off = {"algorithm.kl_beta": 0.0, "optimizer.num_inner_epochs": 2, "evaluation.test_at_start": True}
    off["dynamic_sampling"] = 3
    again = make_spec(**few, steps=1, rollouts_per_step=8, **{"sampling.max_tokens": 6, **off})
    # sampled (1 + 3) / 2 times, read once for the old log-probs, learnt from 2 x 3; two tests
    assert passes(again) == 2 * (8 * 6 + 240) + 8 * 6 * 7 + 2 * 240 + 2 * 780 + 2 * 1080


def test_prompts_count_as_often_as_they_are_read():
    few = {"evaluation": {"num_prompts": 10, "num_samples": 4, "num_test_prompts": 10}}
    two = {"sampling.max_tokens": 6, "algorithm.kl_beta": 0.0, "algorithm.group_size": 4}
    spec = make_spec(**few, steps=1, rollouts_per_step=8, **two)
    sizes = {"prompt_tokens": 10.0, "own_tokens": 7.0, "shares_prompts": 1.0}
    # 2 prompts sampled from (7) once and learnt from (10 x 3) once; 10 of a validation sampled from twice
    assert passes(spec, 1, sizes) - passes(spec, 1) == 2 * 7 + 2 * 10 * 3 + 10 * 7 * 2
    # a model that cannot share them learns from one beside each of 8 rows
    assert passes(spec, 1, {**sizes, "shares_prompts": 0.0}) - passes(spec, 1) == 2 * 7 + 8 * 10 * 3 + 10 * 7 * 2
    # and so do 4 minibatches, which are read once more for the old log-probs
    parts = spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"num_minibatches": 4})})
    assert passes(parts, 1, sizes) - passes(parts, 1) == 2 * 7 + 8 * 10 * (1 + 3) + 10 * 7 * 2


def test_a_run_notes_the_sizes_with_which_its_time_is_estimated(tmp_path):
    spec = a_study().design_arms()[0].spec
    study, noted = a_study(), {"prompt_tokens": 1000.0, "shares_prompts": 1.0}
    directory = Queue(Plan(study, tmp_path)).plan.directory(("group_size=2", 0))
    directory.mkdir(parents=True)
    write_json(directory / "run.json", {"sizes": noted})
    ended = status(replace(trial("group_size=2", "complete", seconds=1.0, seed=0), directory=directory),
                   trial("group_size=4", "waiting", seed=0))  # fmt: skip
    left = with_time_left(ended, Plan(study, tmp_path), (), 1).trials[1].left
    other = study.design_arms()[1].spec
    assert left == pytest.approx(1.0 + passes(other, None, noted) / passes(spec, None, noted), rel=1e-9)
    real = make_spec()
    texts = [len(prompt.text) for prompt in real.task.prompts("train")[-64:]]  # a token a character, and none besides
    mean = sum(texts) / 64
    assert run_sizes(real) == {"prompt_tokens": mean, "own_tokens": mean, "shares_prompts": 1.0}


def test_dry_run_status_watch_and_run_say_the_same_time_of_one_record(tmp_path, capsys, cohort):
    study = a_study()
    fake_trials.begin_study(tmp_path, study)
    queue = Queue(Plan(study, tmp_path))
    first = queue.claim()
    assert first is not None and first.key == ("group_size=2", 0)
    queue.finish(first, TrialOutcome("complete", None, {"seconds": 0.69456}, {METRIC: 0.5}))
    running = queue.claim()
    assert running is not None and running.key == ("group_size=4", 0)
    folder = queue.plan.directory(running.key)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "progress.json", {"phase": "test", "done": 1, "total": 512, "step": 3, "seconds": 0.41248})
    # Of 8 tokens: a step 64 rows x 4 x 8 and 8 x 40 + 240 = 2608, a validation 256 x 5 x 8 and 4 parts x 2 x 8 x 40:
    # 12,800, the test 25,600. A trial of 7 steps has 7 x 2608 + 2 x 12,800 + 25,600 = 69,456 passes, 20,624 of them
    # until step 3: so 10 and 20 us a pass. Left: 48,832 x 20 us = 0.97664 s; and, each with a second to load,
    # 0.69456 + 1 and 1.38912 + 1. One worker: 5.06032 s;
    # the report: 500,000 passes of 20 us = 10 s.
    left = 15.06032
    status = study_status(study.name, tmp_path)
    assert (status.left, status.workers, status.measured) == (pytest.approx(left), 1, 2)
    assert [trial.left for trial in status.trials[1:]] == pytest.approx([0.97664, 1.69456, 2.38912])
    dry = dry_run(study, tmp_path, workers=1, execute=fake_trials.EXECUTE)
    assert (dry["seconds"], dry["measured"], dry["trials"], dry["ended"]) == (pytest.approx(left), 2, 4, 1)
    # Two workers: one runs 0.97664 + 2.38912 s, the other 1.69456 s.
    two = dry_run(study, tmp_path, workers=2, execute=fake_trials.EXECUTE)
    assert two["seconds"] == pytest.approx(0.97664 + 2.38912 + 10)
    command = ("study", "status", study.name, "--runs", tmp_path)
    cohort(*command, "--json")
    assert cohort.json()["remaining_seconds"] == pytest.approx(left)
    cohort(*command)
    assert "Time left: about 15 s to the report with 1 worker, from 2 trials" in " ".join(cohort.out.split())
    progress.show_live(lambda: study_status(study.name, tmp_path))
    assert "1/4 trials have ended, 15 s left" in capsys.readouterr().out
    ticks = count(step=31)
    progress.LineView(lambda: next(ticks)).update(status)
    assert "1/4 trials done, 15 s left" in capsys.readouterr().err


def test_each_past_run_counts_once_and_only_where_the_study_has_measured_nothing(tmp_path):
    (there := tmp_path / "there").touch()
    assert [file for _, file in _stamped([tmp_path / "removed", there])] == [there]  # removed since it was listed
    study = a_study()
    spec = study.design_arms()[0].spec
    for seconds, besides in ((0.69456, 3.0), (1.38912, 2.0), (2.08368, 5.0)):
        past_run(tmp_path, spec, seconds, besides)
    past_run(tmp_path, spec.model_copy(update={"dtype": "bfloat16"}), 900.0, 0.0)
    found = budgeted(study, tmp_path, workers=2)
    # Three runs of 69,456 passes took 4.16736 s: 20 us a pass. A trial: 1.38912 s and 2 to load, two on each worker;
    # the start 900,000 and the report 500,000 passes: 18 and 10 s.
    assert (found["measured"], [arm["seconds"] for arm in found["arms"]]) == (3, pytest.approx([3.38912, 3.38912]))
    assert (found["trial_seconds"], found["seconds"]) == pytest.approx((13.55648, 2 * 3.38912 + 28))
    ended = status(*(trial(f"group_size={size}", "complete", seconds=0.69456, seed=0) for size in (2, 4)),
                   trial("group_size=2", "waiting", seed=1))  # fmt: skip
    here = with_time_left(ended, Plan(study, tmp_path), (), 1)
    assert (here.measured, here.left) == (2, pytest.approx(0.69456 + 2 + 9 + 6))  # 10 us: 5 s of passes, but at least 6


def test_a_run_of_its_own_takes_what_past_runs_took_and_then_what_its_own_steps_take(tmp_path, monkeypatch):
    spec = make_spec(steps=8)
    whole, half, arm = passes(spec), passes(spec, 4), Arm("own", {}, {}, spec)
    monkeypatch.setattr(estimates, "_by_arithmetic", lambda *a: 2.0)

    def told(step: int, seconds: float | None = None) -> tuple[float, int]:
        now = status(trial("own", "running", step=step, seconds=seconds))
        times = TrialTimes(tmp_path, {"own": arm}, now, workers=1)
        return times.left(arm, step), sum(times.used.values())

    assert told(0) == (pytest.approx(2.0 * (whole + estimates.LOAD[0])), 0)
    past_run(tmp_path, spec, seconds=3.0 * whole, besides=7.0)
    assert told(0) == (pytest.approx(3.0 * whole + 7.0), 1)
    assert told(4) == (pytest.approx(3.0 * (whole - half)), 1)  # resumed
    assert told(4, 5.0 * half) == (pytest.approx(5.0 * (whole - half)), 1)


def test_a_cold_start_counts_once_until_it_is_there(tmp_path):
    study = a_study(run=fake_trials.run_settings(cold_start={"steps": 100}))
    spec = study.design_arms()[0].spec
    past_run(tmp_path, a_study().design_arms()[0].spec, 0.69456, 0.0)
    # 2 trials on each of 2 workers, start and report, and 100 steps of 3 x 8 tokens x 32 rows and 240, of 10 us
    assert budgeted(study, tmp_path, workers=2)["seconds"] == pytest.approx(2 * 0.69456 + 15 + 1.008)
    past_run(tmp_path, spec, 0.69456, 0.1)  # another run has begun from it
    assert budgeted(study, tmp_path, workers=2)["seconds"] == pytest.approx(2 * 0.69456 + 15)


@pytest.mark.parametrize(
    ("pace", "trial_seconds", "load", "besides"),
    # 69,456 passes; a load of 2,700 of them, at least a second; start and report 9 and 6 s, or at most 20 and 12
    [(1e-5, 0.69456, 1.0, 15), (2e-2, 1389.12, 54.0, 32)],
)
def test_where_nothing_was_measured_a_time_follows_from_arithmetic_or_is_unknown(
    tmp_path, monkeypatch, pace, trial_seconds, load, besides
):
    model = tiny_model(0)
    each = 2 * model.num_parameters() * (1 + estimates.NARROW / model.config.hidden_size)
    monkeypatch.setattr(estimates, "_by_arithmetic", estimates._by_arithmetic.__wrapped__)
    monkeypatch.setattr(estimates, "_operation_seconds", lambda *_: pace / each)
    found = budgeted(a_study(), tmp_path, workers=2)
    assert found["measured"] == 0
    assert found["seconds"] == pytest.approx(2 * (trial_seconds + load) + besides)  # two trials on each worker
    unknown = budgeted(a_study(run=fake_trials.run_settings(model="nobody/none")), tmp_path)
    assert math.isnan(unknown["seconds"]) and math.isnan(unknown["arms"][0]["seconds"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_speed_of_this_machine_is_a_positive_number(dtype):
    assert 0 < estimates._operation_seconds(32, "cpu", dtype, 1) < math.inf


RATE = {"optimizer.learning_rate": {"low": 1e-5, "high": 1e-3, "log": True}}
GREEDY = fake_trials.run_settings(algorithm={"name": "remax", "group_size": 8})


@pytest.mark.parametrize(
    ("changes", "trials", "rollouts"),
    [  # two seeds, and 7 steps of 64 rollouts of at most 8 tokens
        ({}, 2 * 2, 64),
        ({"run": GREEDY, "factors": {}}, 1 * 2, 64 + 8),  # a greedy answer of each prompt
        ({"design": "search", "factors": {}, "search": {"space": RATE, "trials": 5}}, 5 * 2, 64),  # all it may run
    ],
)
def test_a_budget_counts_trials_steps_rollouts_and_tokens(changes, trials, rollouts, tmp_path):
    found = budgeted(a_study(**changes), tmp_path)
    assert (found["trials"], found["steps"], found["rollouts"]) == (trials, 7 * trials, 7 * trials * rollouts)
    assert found["generated_tokens_bound"] == 8 * found["rollouts"]
    assert ("search" in changes) == ([arm["arm"] for arm in found["arms"]] == ["search of 5 arms"])


def test_a_dry_run_writes_nothing_and_refuses_what_a_run_refuses(tmp_path):
    found = dry_run(a_study(), tmp_path / "new", workers=2, execute=fake_trials.EXECUTE)
    assert (found["trials"], found["not_checked"], found["workers"]) == (4, [], 2)
    assert not (tmp_path / "new").exists()
    fake_trials.begin_study(tmp_path, a_study())
    Queue(Plan(a_study(), tmp_path)).drop("group_size=4")
    found = dry_run(a_study(), tmp_path, workers=2, execute=fake_trials.EXECUTE)
    assert ([arm["arm"] for arm in found["arms"]], found["trials"], found["steps"]) == (["group_size=2"], 2, 14)
    empty = a_study(run=fake_trials.run_settings(task={"name": "fake", "empty_split": "test"}))
    with pytest.raises(SpecError, match="in its test split"):
        dry_run(empty, tmp_path / "new", workers=1, execute=fake_trials.EXECUTE)
    for metric in ("validation/acuracy", "accuracy"):  # a study may look at the validation split alone
        with pytest.raises(SpecError, match="did you mean 'validation/accuracy'"):
            dry_run(load_study("quickstart", [f"metric={metric}"]), tmp_path / "new", workers=1)


def test_a_dry_run_says_what_this_machine_cannot_check(tmp_path, monkeypatch):
    def refuse(*arguments, **keywords):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    study = load_study("quickstart", ["model=nobody/no-such-model-1B", "task.path=nobody/g8k", "task.name=gsm8k"])
    words = "\n".join(dry_run(study, tmp_path / "new", workers=1)["not_checked"])
    assert "model 'nobody/no-such-model-1B': not on this machine" in words
    assert "data of task 'gsm8k'" in words


@pytest.mark.parametrize("model", ["tiny", "nobody/no-such-model-1B"])
@pytest.mark.parametrize(("there", "path", "message"), [
    ([], "nowhere", r"nowhere: no such file or folder; give an existing .*; '.*' has notes\.txt$"),
    (["train.jsonl"], "", r"there is no test split \(no .* called test; '.*' has notes\.txt, train\.jsonl\)"),
    (["test.jsonl"], "", r"there is no train split \(no .* called train; '.*' has notes\.txt, test\.jsonl\)"),
])  # fmt: skip
def test_a_dry_run_and_a_start_refuse_missing_data_and_say_what_is_there(tmp_path, model, there, path, message):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("notes.txt", *there):
        (folder / name).write_text("".join(f'{{"question": "{i}?", "answer": "#### {i}"}}\n' for i in range(40)))
    study = load_study("quickstart", [f"task.path={folder / path}", "task.name=gsm8k", f"model={model}"])
    with pytest.raises(ValueError, match=message):
        dry_run(study, tmp_path / "new", workers=1)
    if model == "tiny":
        with pytest.raises(ValueError, match=message):
            run_study(study, tmp_path / "new", workers=1, command="")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_the_command_line_shows_a_dry_run(tmp_path, cohort):
    assert cohort("study", "run", "quickstart", "--runs", tmp_path / "new", "--dry-run", "--json") == 0
    document = cohort.json()
    assert (document["trials"], document["steps"]) == (12, 720)
    assert all(arm["peak_bytes"] > 0 for arm in document["memory"].values())
    assert not (tmp_path / "new").exists()


def test_splits_that_share_a_problem_are_refused_by_its_id(tmp_path):
    class Overlapping(Arithmetic):
        def prompts(self, split):
            return [*super().prompts(split), *([Prompt("twice", "1+1=", "2")] if split != "train" else [])]

    spec = load_study("quickstart").design_arms()[0].spec.model_copy(update={"task": Overlapping()})
    with pytest.raises(SpecError, match=r"share no problem.*id 'twice' in validation and in test; correct Overlapping"):
        check_runs([spec], tmp_path / "new")


def test_an_engine_without_a_bound_on_its_rows_decodes_a_step_at_once():
    bound = {"name": "transformers", "max_batch_rows": 8}
    some, bounded = passes(make_spec(rollouts_per_step=16)), passes(make_spec(rollouts_per_step=16, engine=bound))
    assert passes(make_spec(rollouts_per_step=16, engine="vllm")) == some < bounded
