"""Every (arm, seed) of a study is run exactly once; what was said of it can be believed. A study is expanded once: no
process validates the run of an arm twice, whatever the design and the seeds."""

import dataclasses
import json
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import fake_trials
import psutil
import pytest
import torch
import yaml
from cohort.harness.base import machine
from cohort.harness.base.files import write_json
from cohort.harness.base.machine import SHARED_GPU
from cohort.harness.base.stop import StopRequest
from cohort.harness.record.status import StudyStatus
from cohort.harness.record.study import read_study
from cohort.harness.settings import run as settings
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.load import load_study, runs_of, shipped_studies
from cohort.harness.settings.raw import with_overrides
from cohort.harness.study import worker, workers
from cohort.harness.study.plan import Plan
from cohort.harness.study.queue import Queue, TrialOutcome, study_status
from cohort.harness.study.runner import dry_run, run_study
from cohort.harness.study.storage.base import StorageUnavailable
from cohort.harness.study.worker import Unfit, worker_main
from cohort.reports.analysis import analysed
from cohort.reports.prose.notes import notes
from factories import slow_but
from fake_study import fake_study, with_trials
from fake_trials import a_study
from queues import METRIC, a_queue, claimed, completions, die, executions, open_queue, run, workers_of

pytestmark = pytest.mark.usefixtures("plugins")


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once_and_leaves_no_worker(runs, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "600")

    def interrupt_twice(status: StudyStatus) -> None:
        if status.counts().get("running") == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(a_study(), runs, interrupt_twice)
    assert not workers_of(psutil.Process())
    status = study_status("sizes", runs)
    assert status.counts() == {"stopped": 2, "waiting": 2}
    assert status.trials[0].reason == "its worker died; starting the study again continues this trial"


@pytest.mark.long
@pytest.mark.attack("Trial that leaves a GPU broken")
def test_a_worker_that_used_a_gpu_ends_after_its_trial_and_another_runs_the_next(runs):
    (runs / "crash").touch()
    study = a_study(factors={}, arms={"crashes": {"optimizer.weight_decay": 0.2}, "good": {}}, seeds=[0])
    status = run(study, runs, workers=1, execute="fake_trials:train_on_gpu")
    assert {trial.arm: trial.state for trial in status.trials} == {"crashes": "failed", "good": "complete"}
    first, second = (runs / "executions.log").read_text().splitlines()
    assert first.split()[1] != second.split()[1]


@pytest.mark.slow
def test_invalid_trials_are_final_and_failed_ones_are_tried_when_the_study_is_started_again(runs):
    (runs / "crash").touch()
    ways = {"good": 0.0, "diverges": 0.1, "crashes": 0.2, "mute": 0.3}  # see fake_trials
    arms = {name: {"optimizer.weight_decay": decay} for name, decay in ways.items()}
    study = a_study(factors={}, arms=arms, seeds=[0])
    status = run(study, runs)
    states = {trial.arm: trial.state for trial in status.trials}
    assert states == {"good": "complete", "diverges": "invalid", "crashes": "failed", "mute": "failed"}
    reasons = {trial.arm: trial.reason for trial in status.trials}
    assert reasons["good"] is None
    assert reasons["diverges"] == "policy/loss is NaN at step 2"
    place = rf"engine 'fake' of package fake-plugins failed \({fake_trials.__file__}, line \d+\)"
    assert re.fullmatch(place + ": RuntimeError: no memory left at step 2", str(reasons["crashes"]))
    assert str(reasons["mute"]).startswith(
        "metric must be a finite number that runs log, 'validation/accuracy' was nothing"
    )
    assert (status.finished, status.all_valid) == (True, False)
    values = {key[0]: tried[-1].value for key, tried in open_queue(study, runs)._read().by_key.items()}
    assert values.pop("good") == pytest.approx(0.0807, abs=1e-9)  # (8 + 0 / 10 + 7 / 100) / 100
    assert values == {"diverges": None, "crashes": None, "mute": None}
    assert {t.arm: (t.state, t.reason) for t in read_study(runs, "sizes").trials} == {
        arm: (states[arm], reasons[arm]) for arm in states
    }
    assert "no memory left" in "".join(file.read_text() for file in (runs / "studies/sizes/logs").glob("*.log"))
    (runs / "crash").unlink()
    status = run(study, runs)
    assert {trial.arm: trial.state for trial in status.trials} == {**states, "crashes": "complete"}
    times = Counter(name.partition("-seed")[0] for name in executions(runs))
    assert times == {"good": 1, "diverges": 1, "crashes": 2, "mute": 2}


@pytest.mark.slow
def test_a_started_study_may_gain_seeds_and_lose_none(runs):
    run(a_study(seeds=[0]), runs, workers=1)
    words = r"seeds of a started study may be added, not removed.*has \[0\], got \[1\]; add"
    with pytest.raises(SpecError, match=words):
        run(a_study(seeds=[1]), runs)
    assert run(a_study(seeds=[0, 1]), runs, workers=1).counts() == {"complete": 4}
    assert len(executions(runs)) == 4  # the two of seed 0 were not run again
    record = read_study(runs, "sizes")
    assert (record.seeds, record.expected, len(record.trials)) == ([0, 1], 4, 4)
    shutil.rmtree(runs / "studies/sizes/logs")
    assert run(a_study(seeds=[0, 1]), runs).counts() == {"complete": 4}
    assert not (runs / "studies/sizes/logs").exists()  # nothing was left to do, so no worker was started


@pytest.mark.slow
def test_a_started_study_may_gain_arms_and_its_record_and_page_say_which_came_later(runs):
    def sizes(*levels: int, **changes):
        return a_study(factors={"algorithm.group_size": list(levels)}, **{"seeds": [0], **changes})

    run(sizes(2, 4), runs, workers=1)
    assert read_study(runs, "sizes").amendments == []
    begun = executions(runs)
    for changed in (sizes(2, 8), sizes(8, 2, 4), sizes(4), sizes(2, 4, 8, run=fake_trials.run_settings(steps=8))):
        with pytest.raises(SpecError, match="a started study cannot change"):  # removed, another baseline, other runs
            run(changed, runs, workers=1)
    assert run(sizes(2, 8, 4), runs, workers=1).counts() == {"complete": 3}
    assert executions(runs)[: len(begun)] == begun
    assert len(executions(runs)) == len(begun) + 1
    assert run(sizes(2, 8, 4, seeds=[0, 1]), runs, workers=1).counts() == {"complete": 6}
    run(sizes(2, 8, 4, seeds=[0, 1]), runs, workers=1)
    record = read_study(runs, "sizes")
    assert record.arms == ["group_size=2", "group_size=8", "group_size=4"]
    assert [(one["arms"], one["seeds"]) for one in record.amendments] == [(["group_size=8"], []), ([], [1])]
    assert not record.strange  # trials of before belong to it still
    assert record.amendments[0]["time"] <= record.amendments[1]["time"] <= 1000 * time.time()
    ((topic, text),) = [note for note in notes(analysed(record)) if "later" in note[0]]
    assert topic == "Some arms or seeds came later"
    assert text.startswith("Added: arm group_size=8 (")
    assert "; seed 1 (" in text


@pytest.mark.slow
def test_a_changed_study_is_refused_with_what_changed_and_the_ways_on(runs):
    run(a_study(seeds=[0]), runs, workers=1)
    factors = {"algorithm.group_size": [2], "steps": [7, 8]}
    changes = {"factors": factors, "run": fake_trials.run_settings(max_flops=1e9)}
    with pytest.raises(SpecError) as raised:
        run(a_study(seeds=[0], **changes), runs)
    first, *lines = str(raised.value).split("\n")
    assert first.endswith("study 'sizes' was started with other settings:")
    assert lines[:3] == [
        "  run.max_flops: then absent, now 1000000000.0",
        "  factors.algorithm.group_size: then [2, 4], now [2]",
        "  factors.steps: then absent, now [7, 8]",
    ]
    assert "cohort study clone sizes ARM --set ..." in lines[3]
    assert "choose another `name`, then compare both: cohort report sizes NAME" in lines[3]


@pytest.mark.slow
def test_identical_arms_of_a_grid_are_named_before_it_runs_and_in_its_record(runs, caplog):
    factors = {"mismatch.bound": [2.0, 3.0], "mismatch.correction": ["none", "truncated"]}
    run(a_study(factors=factors, seeds=[0]), runs, workers=1)
    arms = [f"mismatch.bound={bound}, mismatch.correction=none" for bound in (2, 3)]
    ((labels, reason),) = read_study(runs, "sizes").identical
    assert sorted(labels) == arms
    assert reason == "mismatch.bound has an effect only with a mismatch.correction"
    assert f"arms '{arms[0]}' and '{arms[1]}' are identical by construction: {reason}" in caplog.text


@pytest.mark.attack("A worker of another version that joins a study")
def test_a_worker_whose_version_reads_the_settings_otherwise_takes_no_trial(tmp_path):
    queue = a_queue(a_study(), tmp_path)
    document = queue.storage.read_document()
    assert document is not None
    queue.storage.write_document({**document, "digest": "of another version"})
    with pytest.raises(Unfit, match=r"^study 'sizes' was started by another version of Cohort[^\n]*; install the same"):
        worker_main("sizes", tmp_path, execute=fake_trials.EXECUTE)
    assert open_queue(a_study(), tmp_path).num_claims() == 0


@pytest.mark.attack("A worker of another version that joins a study")
def test_a_report_says_which_versions_of_packages_its_trials_had():
    record = with_trials(fake_study(), lambda trial: {"versions": {"torch": "2.13.0", "numpy": "2.2"}})
    assert "different versions" not in str(notes(analysed(record)))
    other = with_trials(record, lambda trial: {"versions": {"torch": f"2.{12 + trial.seed % 2}.0", "numpy": "2.2"}})
    texts = dict(notes(analysed(dataclasses.replace(other, strange={"x": "'x' must hold its own run"}))))
    assert texts["Trials ran with different versions, or on different processors"] == "torch 2.12.0 or 2.13.0."
    assert texts["Trials whose files were changed or moved are left out"] == "'x' must hold its own run."


@pytest.mark.slow
def test_workers_that_cannot_start_end_the_study_with_their_last_words(runs):
    words = r"workers end before they can start a trial.*\n(.*\n)*.*no attribute 'gone'"
    with pytest.raises(RuntimeError, match=words):
        run(a_study(), runs, workers=1, execute="fake_trials:gone")


@pytest.mark.parametrize(("settings", "workers", "message"), [
    ({"cold_start": {"steps": 5}}, 1, "no worked solutions; set cold_start.steps to 0"),
    ({}, 0, "workers must be at least 1, got 0"),
    ({"model": "./model"}, 1, "has no tokenizer"),
    *([] if torch.cuda.is_available() else [({"device": "cuda"}, 1, "device=cpu")]),
])  # fmt: skip
def test_bad_input_is_refused_before_anything_is_written(tmp_path, monkeypatch, settings, workers, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    study = a_study(run=fake_trials.run_settings(**settings))
    with pytest.raises(ValueError, match=message):
        run(study, tmp_path / "new", workers=workers, execute=worker.EXECUTE)
    assert not (tmp_path / "new").exists()


def test_the_status_of_an_unknown_study_names_the_nearest(runs):
    with pytest.raises(SpecError, match=r"no study 'sizes' was started in .*; start one with: cohort study run"):
        study_status("sizes", runs)
    a_queue(a_study(), runs)
    with pytest.raises(SpecError, match=r"no study 'size' .*did you mean 'sizes'"):
        study_status("size", runs)
    assert study_status("sizes", runs).counts() == {"waiting": 4}


def test_trials_in_progress_come_before_new_ones_and_failed_and_stuck_ones_after(tmp_path):
    queue = a_queue(a_study(factors={"algorithm.group_size": [2, 4, 8]}), tmp_path)
    first, second, third = (claimed(queue) for _ in range(3))
    queue.finish(second, TrialOutcome("stopped"))
    queue.finish(third, TrialOutcome("failed", "no memory"))
    die(first, queue)
    assert [trial.state for trial in queue.status().trials[:3]] == ["stopped", "stopped", "failed"]
    Queue(queue.plan).retry_failed()  # the study is started again
    assert (queue.status().trials[2].state, queue.status().trials[2].reason) == ("waiting", None)
    claims = [claimed(queue) for _ in range(2)]
    assert [claim.key for claim in claims] == [first.key, second.key]
    for claim in claims:
        die(claim, queue)
    # the first has lost two workers at step 0 and waits for the others
    order = [claimed(queue).key for _ in range(6)]
    assert order == [second.key, *queue.plan.keys[3:], third.key, first.key]


def test_a_result_that_was_reached_but_not_recorded_is_recorded_by_the_next_worker(runs):
    queue = a_queue(a_study(factors={"algorithm.group_size": [2]}, seeds=[0]), runs)
    directory = queue.plan.directory(queue.plan.keys[0])
    directory.mkdir(parents=True)
    write_json(
        directory / "result.json",
        {"state": "complete", "reason": None, "summary": {"accuracy_final": 0.5}, "metrics": {METRIC: 0.5}},
    )
    assert worker_main("sizes", runs, execute=fake_trials.EXECUTE) == 0
    assert executions(runs) == []
    assert completions(queue) == {("group_size=2", 0): 1}


def test_half_a_line_of_a_killed_writer_does_not_spoil_the_journal(runs):
    queue = a_queue(a_study(), runs)
    with (queue.plan.folder / "optuna.journal").open("a") as file:
        file.write('{"op_code": 6, "trial_')
    claim = claimed(Queue(queue.plan))
    queue.finish(claim, TrialOutcome("complete", metrics={METRIC: 0.5}))
    assert completions(open_queue(a_study(), runs)) == {claim.key: 1}


def test_workers_share_the_cores_and_get_groups_of_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "usable_cores", lambda: 8)
    monkeypatch.setattr(workers, "usable_gpus", lambda: tuple("01234"))
    monkeypatch.setattr(workers, "allocator", lambda: {"FOUND": "it", "PYTHONPATH": "a user's own wins"})
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "LRU_CACHE_CAPACITY", "CUDA_VISIBLE_DEVICES", SHARED_GPU, "FOUND")
    (tmp_path / "shown.py").write_text(f"import os; print(*(os.environ.get(name) for name in {names}))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in machine.WORKER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(workers, "MODULE", "shown")
    monkeypatch.setattr(machine, "usable_gpus", lambda: tuple("01234"))
    assert machine.default_workers(2) == 2
    pool = workers.WorkerPool({}, 4, tmp_path, devices=2)
    pool.fill(3)
    while pool.collect(0):
        time.sleep(0.05)
    shown = [(tmp_path / f"worker-{slot}.log").read_text().strip() for slot in range(3)]
    # 8 cores // 4 workers, though 3 were wanted
    assert shown == [f"2 PASSIVE 64 {gpus} 1 it" for gpus in ("0,1", "2,3", "0,1")]


@pytest.mark.parametrize("name", sorted(shipped_studies()))
def test_a_shipped_study_is_valid_and_opens_with_its_question(name):
    text = shipped_studies()[name].read_text("utf-8")
    assert text.startswith("# "), "a study file opens with a comment"
    keys = [line.partition(":")[0] for line in text.splitlines() if line and line[0] not in "# "]
    assert keys[0] == "question"
    study = load_study(name)
    assert study.name == name
    assert study.question.endswith("?")
    assert len(study.checked_arms()) * len(study.seeds) >= 6
    assert study.baseline in (None, *[arm.label for arm in study.design_arms()]) or study.references()  # or a level


class NotedWaits(StopRequest):
    """Nobody really waits; the request to stop is made during the last of `allowed` waits."""

    def __init__(self, allowed: int) -> None:
        super().__init__()
        self.allowed, self.seconds = allowed, []

    def wait(self, seconds: float) -> bool:
        self.seconds.append(seconds)
        if len(self.seconds) == self.allowed:
            self.set()
        return self.is_set()


def test_a_worker_waits_for_its_storage_longer_each_time_until_it_is_asked_to_stop():
    away = iter(range(1, 12))

    def answer() -> str:
        for number in away:
            raise StorageUnavailable(f"no answer to question {number}")
        return "here"

    asked, stop = NotedWaits(3), NotedWaits(100)
    for last in (3, 4):  # after the request it is asked once
        with pytest.raises(StorageUnavailable, match=rf"^no answer to question {last}$"):
            worker._patiently(answer, asked)
    assert worker._patiently(answer, stop) == "here"
    assert stop.seconds == [0.5, 1, 2, 4, 8, 15, 15]


RATE = {"low": 1e-5, "high": 1e-3, "log": True}
TUNING = {"space": {"optimizer.learning_rate": RATE}, "trials": 2, "seeds": [7]}
DESIGNS: dict[str, dict[str, Any]] = {
    "grid": {"factors": {"algorithm.group_size": [2, 4]}},
    "tuned": {"design": "compare", "compare": {"algorithms": ["fake", "grpo"], "tasks": ["fake"]}, "search": TUNING},
    "search": {"design": "search", "search": {"space": {"optimizer.learning_rate": RATE}, "trials": 3}},
}


@pytest.fixture
def parsed(monkeypatch) -> Counter[str]:
    """How often this process has parsed the settings of each run, apart from its seed."""
    counts: Counter[str] = Counter()
    parse_run = settings.parse_run

    def counted(raw: Mapping[str, Any], where: str) -> Any:
        counts[json.dumps({key: value for key, value in raw.items() if key != "seed"}, sort_keys=True)] += 1
        return parse_run(raw, where)

    for name, module in list(sys.modules.items()):
        if name.startswith("cohort.") and getattr(module, "parse_run", None) is parse_run:
            monkeypatch.setattr(module, "parse_run", counted)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
def test_each_process_of_a_study_parses_an_arm_once(design, tmp_path, empty_store, parsed, cohort):
    file, runs = tmp_path / "toy.yaml", tmp_path / "runs"
    raw = {"question": "?", "run": fake_trials.run_settings(), "seeds": [0, 1], **DESIGNS[design]}
    file.write_text(yaml.safe_dump(raw))
    most: dict[str, int] = {}

    def note(process: str) -> None:
        most[process] = max(parsed.values())
        parsed.clear()

    assert cohort("study", "show", file, "--runs", runs) == 0
    note("a look at the study")
    runs_of(str(file))
    note("an estimate of its memory")
    dry_run(load_study(str(file)), runs, workers=1, execute=fake_trials.EXECUTE)
    note("a dry run")
    study = load_study(str(file))
    queue = Queue(Plan(study, runs))
    queue.plan.folder.mkdir(parents=True)
    queue.storage.write_document({"digest": study.digest(), "inputs": {}, **study.model_dump(mode="json")})
    queue.retry_failed()
    shutil.copy(empty_store, runs / "mlflow.db")
    parsed.clear()
    assert worker_main("toy", runs, execute=fake_trials.EXECUTE) == 0
    note("a worker")
    # nothing is left to run, so this process starts no worker
    status = run_study(load_study(str(file)), runs, workers=1, command="", execute=fake_trials.EXECUTE)
    note("the study's own process")
    assert status.finished and status.all_valid
    assert len(most) == 5 and set(most.values()) == {1}, most


@pytest.mark.parametrize("name", slow_but(("quickstart", "dapo_parts", "group_size"), shipped_studies()))
def test_the_run_of_an_arm_and_a_seed_is_the_one_that_its_settings_describe(name):
    study = load_study(name)
    for arm in study.checked_arms():
        for seed in study.seeds:
            described = settings.parse_run(with_overrides(study.run, {**arm.overrides, "seed": seed}), "here")
            assert arm.run_spec(seed) == described
            assert arm.run_spec(seed).digest() == described.digest()
