"""The event file and its copy in MLflow say the same, whatever dies in between."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fake_trials
import mlflow
import pandas
import pytest
from cohort.harness.cli import app
from cohort.harness.data import GREY, PALETTE, SampleRow
from cohort.harness.ground.files import file_lock, read_json
from cohort.harness.mirror import store as mlflow_store
from cohort.harness.mirror import writer as mlflow_copy
from cohort.harness.mirror.address import tracking_uri
from cohort.harness.mirror.models import register_policy
from cohort.harness.mirror.page import page
from cohort.harness.mirror.run_log import RunLog, read_progress, read_result, replay
from cohort.harness.mirror.store import check_runs_folder, own_store
from cohort.harness.mirror.studies import close_study, list_studies, log_report, open_study, read_study, study_url
from cohort.harness.mirror.ui import check_port, serve_ui
from cohort.harness.mirror.view import read_view
from cohort.harness.policy.model import save_model
from cohort.harness.policy.tiny import tiny_model, tiny_tokenizer
from cohort.harness.record.events import EVENTS, read_events
from cohort.harness.record.evidence import by_its_files, from_files
from cohort.harness.record.finished import drop_checkpoints
from cohort.harness.spec.run import RunSpec, parse_run
from cohort.harness.study.plan import Plan
from fake_trials import a_study
from mlflow import MlflowClient
from mlflow.entities import Metric, Trace

COLUMN = "validation/accuracy"


pytestmark = pytest.mark.usefixtures("plugins")


@pytest.fixture
def runs(tmp_path: Path, empty_store: Path) -> Path:
    """A runs folder with an empty store (making one takes seconds); its name has a space, as users' folders do."""
    folder = tmp_path / "my runs"
    folder.mkdir()
    shutil.copy(empty_store, folder / "mlflow.db")
    return folder


def a_spec(**changes: object) -> RunSpec:
    return parse_run(fake_trials.run_settings(**changes), "test")


def open_log(runs: Path, directory: str = "train/run", spec: RunSpec | None = None, **settings: object) -> RunLog:
    return RunLog.open(
        runs,
        runs / directory,
        spec or a_spec(),
        **{"experiment": "train", "run_name": "run", "parent_run_id": None, "tags": {}, **settings},  # pyright: ignore
    )


def in_store(runs: Path, run_id: str) -> list[tuple[str, int, float]]:
    """Every metric value that the store holds of a run, the summary apart, repetitions included."""
    client = MlflowClient(tracking_uri(runs))
    return sorted(
        (key, metric.step, metric.value)
        for key in client.get_run(run_id).data.metrics
        for metric in client.get_metric_history(run_id, key)
        if not key.startswith("summary/")
    )


def in_file(directory: Path) -> list[tuple[str, int, float]]:
    """Every metric value that the event file holds, repetitions included."""
    events = [event for event in read_events(directory / "events.jsonl") if event["type"] == "metrics"]
    return sorted((key, event["step"], float(value)) for event in events for key, value in event["values"].items())


def active_runs(runs: Path, experiment: str = "train") -> list[str]:
    client = MlflowClient(tracking_uri(runs))
    found = client.get_experiment_by_name(experiment)
    return [run.info.run_id for run in client.search_runs([found.experiment_id])] if found else []


def log_steps(log: RunLog, first: int, last: int, scale: float = 1.0) -> None:
    for step in range(first, last + 1):
        log.metrics(step, {COLUMN: scale * step / 100, "seconds/step": 0.5 + step})


def child(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python process that has this file's helpers."""
    prelude = "import os, signal, sys, time\nfrom pathlib import Path\nfrom test_tracking import *\n"
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code, *map(str, arguments)], stderr=subprocess.PIPE, text=True
    )


def test_the_store_has_every_metric_of_the_file(runs: Path):
    log = open_log(runs)
    log_steps(log, 0, 45)  # more than one batch of 20 steps
    log.finish("complete", None, {"accuracy_final": 0.45})
    assert in_file(log.directory) == in_store(runs, str(log.run_id))
    assert len(in_file(log.directory)) == 2 * 46
    run = MlflowClient(tracking_uri(runs)).get_run(str(log.run_id))
    assert run.info.status == "FINISHED"
    assert run.data.metrics["summary/accuracy_final"] == 0.45
    assert run.data.params["algorithm.group_size"] == "8"
    assert (run.data.tags["cohort.state"], run.info.run_name) == ("complete", "run")


def test_numbers_that_are_not_finite_are_kept(runs: Path):
    log = open_log(runs)
    log.metrics(1, {"policy/loss": math.nan, "kl/old": math.inf, "kl/reference": -math.inf})
    log.finish("invalid", "policy/loss is NaN", {})
    line = (log.directory / "events.jsonl").read_text().splitlines()[1]
    assert json.loads(line, parse_constant=pytest.fail)["values"] == {  # strict JSON has no NaN
        "policy/loss": "nan", "kl/old": "inf", "kl/reference": "-inf"
    }  # fmt: skip
    values = {key: value for key, _, value in in_store(runs, str(log.run_id))}
    assert math.isnan(values["policy/loss"])
    assert values["kl/old"] == sys.float_info.max == -values["kl/reference"]
    assert {key: value for key, _, value in in_file(log.directory)}["kl/old"] == math.inf


def test_samples_show_as_a_table_and_problems_as_an_artifact(runs: Path):
    log = open_log(runs)
    log.metrics(0, {COLUMN: 0.5})
    log.samples([fake_trials.sample(0, "first"), fake_trials.sample(0, "second")])
    log.samples([])
    log.per_problem({"p1": 0.25})
    log.finish("complete", None, {})
    artifacts = runs / "mlartifacts" / "train" / str(log.run_id) / "artifacts"
    table = pandas.read_json(artifacts / "samples.json", orient="split")  # as MlflowClient.log_table writes it
    assert list(table["completion"]) == ["first", "second"]
    tags = MlflowClient(tracking_uri(runs)).get_run(str(log.run_id)).data.tags
    assert json.loads(tags["mlflow.loggedArtifacts"]) == [{"path": "samples.json", "type": "table"}]
    assert json.loads((artifacts / "per_problem.json").read_text()) == {"p1": 0.25}


@pytest.mark.attack("A kill in the middle of a run")
def test_a_killed_run_continues_as_the_same_run_and_nothing_is_logged_twice(runs: Path):
    code = """
from cohort.harness.mirror import writer as mlflow_copy
mlflow_copy.FLUSH_SECONDS = 0.05
log = open_log(Path(sys.argv[1]))
log.resume(-1)
log_steps(log, 0, 30)
log.samples([fake_trials.sample(15, "kept"), fake_trials.sample(15, "kept too")])
log.samples([fake_trials.sample(30, "dropped")])
time.sleep(1)
while log.run_id is None or len(in_store(Path(sys.argv[1]), log.run_id)) < 62:
    time.sleep(0.05)
print("{\\"half a li", file=log._file, end="", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert child(code, runs).wait(60) == -9
    first = read_json(runs / "train/run/run.json")["run_id"]
    log = open_log(runs)
    log.resume(20)  # the last checkpoint; the store already has steps 21 to 30
    assert log.latest[COLUMN] == 0.2
    log_steps(log, 21, 40)
    log.samples([fake_trials.sample(30, "again")])
    log.finish("complete", None, {})
    assert log.run_id == first
    assert active_runs(runs) == [first]
    expected = {(key, step) for key in (COLUMN, "seconds/step") for step in range(41)}
    assert Counter((key, step) for key, step, _ in in_store(runs, first)) == Counter(expected)
    assert in_store(runs, first) == in_file(log.directory)
    samples = [event for event in read_events(log.directory / EVENTS) if event["type"] == "samples"]
    assert [row["completion"] for event in samples for row in event["rows"]] == ["kept", "kept too", "again"]


@pytest.mark.parametrize(("last", "scale"), [(12, 2.0), (4, 1.0)], ids=["other values", "fewer steps"])
def test_a_repetition_that_differs_replaces_the_run_in_the_store(runs: Path, last: int, scale: float):
    log = open_log(runs)
    log_steps(log, 0, 9)
    log.close()  # copied up to step 9; say that the last checkpoint is of step 3
    again = open_log(runs)
    again.resume(3)
    log_steps(again, 4, last, scale)
    again.samples([fake_trials.sample(4)])
    again.finish("complete", None, {})
    assert again.run_id != log.run_id
    assert active_runs(runs) == [again.run_id]
    assert in_store(runs, str(again.run_id)) == in_file(again.directory)
    assert max(step for _, step, _ in in_store(runs, str(again.run_id))) == last


def test_costs_that_differ_do_not_replace_the_run(runs: Path):
    log = open_log(runs)
    log.metrics(1, {COLUMN: 0.5, "seconds/step": 1.0})
    log.close()
    again = open_log(runs)
    again.resume(0)
    again.metrics(1, {COLUMN: 0.5, "seconds/step": 2.0})
    again.finish("complete", None, {})
    assert again.run_id == log.run_id
    assert in_store(runs, str(log.run_id)) == [("seconds/step", 1, 1.0), (COLUMN, 1, 0.5)]


def test_a_run_that_starts_anew_keeps_nothing_of_the_attempt_before(runs: Path):
    log = open_log(runs)
    log_steps(log, 0, 5)
    log.close()
    again = open_log(runs)
    log_steps(again, 0, 2)  # no resume(): no checkpoint was found
    again.finish("complete", None, {})
    assert (
        {step for _, step, _ in in_file(again.directory)}
        == {0, 1, 2}
        == {s for _, s, _ in in_store(runs, str(again.run_id))}
    )


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere in between"])
def test_a_paused_run_goes_on_with_what_the_process_knows_of_the_store_unless_others_worked_on_it(
    runs: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
):
    connections: list[Path] = []

    def connect(folder: Path) -> MlflowClient:
        connections.append(folder)
        return mlflow_store.connect(folder)

    monkeypatch.setattr(mlflow_copy, "connect", connect)
    log = open_log(runs)
    log_steps(log, 0, 5)
    log.samples([fake_trials.sample(5, "before")])
    log.finish("paused", None, {})
    mlflow_copy._paused[log.directory].join()
    if elsewhere:
        code = """
log = open_log(Path(sys.argv[1]))
log.resume(5)
log_steps(log, 6, 8)
log._copier.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
        assert child(code, runs).wait(60) == -9
    again = open_log(runs)
    again.resume(5)
    log_steps(again, 6, 9)
    again.samples([fake_trials.sample(9, "after")])
    again.finish("complete", None, {"accuracy_final": 0.09})
    assert len(connections) == (2 if elsewhere else 1)
    assert active_runs(runs) == [again.run_id] == [log.run_id]
    stored = {(key, step): value for key, step, value in in_store(runs, str(again.run_id))}
    assert len(in_store(runs, str(again.run_id))) == len(stored) == 2 * 10  # none twice
    assert {key: value for key, value in stored.items() if key[0] == COLUMN} == {
        (COLUMN, n): n / 100 for n in range(10)
    }
    run = MlflowClient(tracking_uri(runs)).get_run(str(again.run_id))
    assert (run.info.status, run.data.tags["cohort.state"]) == ("FINISHED", "complete")
    artifacts = runs / "mlartifacts" / "train" / str(again.run_id) / "artifacts"
    assert list(pandas.read_json(artifacts / "samples.json", orient="split")["completion"]) == ["before", "after"]


@pytest.mark.attack("A lost or locked MLflow store")
def test_a_store_that_cannot_be_written_delays_the_copy_and_loses_nothing(
    runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(RunLog, "drain_seconds", 0.2)
    blocker = sqlite3.connect(runs / "mlflow.db", isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    log = open_log(runs)
    log_steps(log, 0, 25)
    log.samples([fake_trials.sample(25)])
    log.finish("complete", None, {"accuracy_final": 0.25})
    assert "everything is in" in caplog.text
    assert read_result(log.directory)["state"] == "complete"  # pyright: ignore[reportOptionalSubscript]
    blocker.execute("ROLLBACK")
    replay(runs, log.directory, None)
    (run_id,) = active_runs(runs)
    assert in_store(runs, run_id) == in_file(log.directory)
    replay(runs, log.directory, None)
    assert active_runs(runs) == [run_id]


def test_two_processes_may_create_and_fill_the_store_at_once(tmp_path: Path):
    code = """
log = open_log(Path(sys.argv[1]), "train/" + sys.argv[2])
log_steps(log, 0, 299)
log.finish("complete", None, {})
"""
    processes = [child(code, tmp_path / "runs", name) for name in "ab"]
    assert [process.wait(90) for process in processes] == [0, 0], [p.stderr.read() for p in processes if p.stderr]
    for name in "ab":
        directory = tmp_path / "runs" / "train" / name
        assert in_store(tmp_path / "runs", read_json(directory / "run.json")["run_id"]) == in_file(directory)
    assert len(active_runs(tmp_path / "runs")) == 2


def test_a_run_that_does_not_finish_counts_as_stopped(runs: Path):
    with open_log(runs) as log:
        log.metrics(0, {COLUMN: 0.5})
    result = read_result(log.directory)
    assert result is not None
    assert result["state"] == "stopped"


def test_progress_says_what_a_watcher_needs(runs: Path):
    told: list[dict[str, object]] = []
    with open_log(runs, on_progress=lambda progress: told.append(dict(progress))) as log:
        log.metrics(3, {COLUMN: 0.5, "throughput/tokens_per_second": 900.0, "seconds/total": 12.0})
        log.progress("test", 4, 4)
        shown = read_progress(log.directory)
    assert [(progress["phase"], progress["done"], progress["accuracy"]) for progress in told] == [
        ("", 0, 0.5), ("test", 4, 0.5)
    ]  # fmt: skip
    assert {key: shown[key] for key in ("phase", "done", "total", "step", "accuracy")} == {
        "phase": "test", "done": 4, "total": 4, "step": 3, "accuracy": 0.5
    }  # fmt: skip
    assert (shown["tokens_per_second"], shown["seconds"]) == (900.0, 12.0)
    assert read_progress(runs / "nothing") == {}


# Studies ------------------------------------------------------------------------------------------------------------


def log_trial(
    runs: Path, parent: str, arm: str, seed: int, state: str, folder: str = "", rows: Sequence[SampleRow] = ()
) -> RunLog:
    tags = {"cohort.kind": "trial", "cohort.study": "sizes", "cohort.arm": arm, "cohort.seed": str(seed)}
    tags |= {"cohort.factors": json.dumps({"algorithm.group_size": int(arm[-1])}), "cohort.group": arm}
    directory = f"studies/sizes/trials/{arm}-{seed}{folder}"
    log = open_log(
        runs,
        directory,
        a_spec(seed=seed),
        experiment="sizes",
        run_name=f"{arm} | seed {seed}",
        parent_run_id=parent,
        tags=tags,
    )
    log.metrics(0, {COLUMN: 0.25})
    log.metrics(1, {COLUMN: 0.5, "policy/loss": math.nan, "kl/old": math.inf})
    log.samples(rows or [fake_trials.sample(1)])
    log.per_problem({"p1": 0.25}, "start")
    log.per_problem({"p1": 0.75})
    summary = {"accuracy_final": 0.5, "seconds": 1.5} if state == "complete" else {}
    log.finish(state, None if state == "complete" else f"it was {state}", summary)  # pyright: ignore
    return log


def test_a_study_is_read_back_from_the_store_alone(runs: Path):
    parent = open_study(runs, a_study(), "cohort study run sizes")
    log = log_trial(runs, parent, "group_size=4", 0, "complete")
    log_trial(runs, parent, "group_size=2", 1, "invalid")
    close_study(runs, parent, "stopped")
    shutil.rmtree(runs / "studies")
    record = read_study(runs, "sizes")
    assert (record.name, record.question, record.metric) == ("sizes", "Do larger groups help?", COLUMN)
    assert (record.arms, record.baseline) == (["group_size=2", "group_size=4"], "group_size=2")
    assert (record.seeds, record.expected, record.command) == ([0, 1], 4, "cohort study run sizes")
    assert record.spec == a_study().model_dump(mode="json")
    assert {"python", "git_commit", "mlflow", "torch"} <= set(record.versions)
    invalid, complete = record.trials  # in the study's order of arms
    assert (complete.arm, complete.seed, complete.trial) == ("group_size=4", 0, log.directory.name)
    assert complete.spec == a_spec(seed=0).model_dump(mode="json")
    assert complete.factors == {"algorithm.group_size": 4}
    assert complete.history[COLUMN] == [(0, 0.25), (1, 0.5)]
    assert math.isnan(complete.history["policy/loss"][0][1])
    assert complete.history["kl/old"] == [(1, math.inf)]
    assert set(complete.history) == {COLUMN, "policy/loss", "kl/old"}
    assert complete.summary == {"accuracy_final": 0.5, "seconds": 1.5}
    assert (complete.per_problem, complete.start_per_problem) == ({"p1": 0.75}, {"p1": 0.25})
    assert list(complete.samples) == [fake_trials.sample(1)]
    assert (invalid.state, invalid.reason) == ("invalid", "it was invalid")
    assert complete.reason is None
    assert list_studies(runs) == ["sizes"]


def test_of_trials_whose_files_are_here_the_store_is_asked_for_no_metric(runs: Path, monkeypatch: pytest.MonkeyPatch):
    parent = open_study(runs, a_study(), "cohort study run sizes")
    kept = log_trial(runs, parent, "group_size=4", 0, "complete")
    lost = log_trial(runs, parent, "group_size=2", 0, "complete")
    close_study(runs, parent, "complete")
    shutil.rmtree(lost.directory)
    folder = runs / "studies" / "sizes"
    known = from_files(read_study(runs, "sizes"), folder)
    asked: list[str] = []
    found = MlflowClient.get_metric_history

    def counted(client: MlflowClient, run_id: str, key: str) -> list[Metric]:
        asked.append(run_id)
        return found(client, run_id, key)

    monkeypatch.setattr(MlflowClient, "get_metric_history", counted)
    record = read_study(runs, "sizes", partial(by_its_files, folder))
    assert repr(record) == repr(known)  # text: NaN is not equal to itself
    assert set(asked) == {lost.run_id} != {kept.run_id}


def test_of_several_runs_of_an_arm_and_seed_the_newest_complete_one_counts(runs: Path):
    parent = open_study(runs, a_study(), "command")
    log_trial(runs, parent, "group_size=2", 0, "complete", "-old")
    newest = log_trial(runs, parent, "group_size=2", 0, "complete", "-new")
    log_trial(runs, parent, "group_size=2", 0, "failed", "-crashed")
    log_trial(runs, parent, "group_size=4", 0, "invalid", "-old")
    last = log_trial(runs, parent, "group_size=4", 0, "failed", "-new")
    trials = {trial.arm: trial for trial in read_study(runs, "sizes").trials}
    assert len(read_study(runs, "sizes").trials) == 2
    assert trials["group_size=2"].trial == newest.directory.name
    assert trials["group_size=4"].trial == last.directory.name


def test_the_parent_run_stays_while_the_folder_does_and_then_starts_anew(runs: Path):
    parent = open_study(runs, a_study(), "first")
    log_trial(runs, parent, "group_size=2", 0, "complete")
    assert open_study(runs, a_study(seeds=[0, 1, 2]), "second") == parent
    record = read_study(runs, "sizes")
    assert (record.seeds, record.command, len(record.trials)) == ([0, 1, 2], "second", 1)
    shutil.rmtree(runs / "studies")
    assert open_study(runs, a_study(), "third") != parent
    assert read_study(runs, "sizes").trials == []


def test_a_trial_keeps_every_number_of_threads_that_it_had(runs: Path, monkeypatch: pytest.MonkeyPatch):
    parent = open_study(runs, a_study(), "command")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    log_trial(runs, parent, "group_size=2", 0, "stopped")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tags = {"cohort.arm": "group_size=2", "cohort.seed": "0", "cohort.factors": "{}"}
    place, spec = "studies/sizes/trials/group_size=2-0", a_spec(seed=0)
    log = open_log(runs, place, spec, experiment="sizes", parent_run_id=parent, tags=tags)
    log.resume(1)
    log.finish("complete", None, {})
    (trial,) = read_study(runs, "sizes").trials
    assert trial.threads == ["1", "2"]


@pytest.mark.attack("A lost or locked MLflow store")
def test_a_lost_store_is_rebuilt_from_the_trials_folders(runs: Path, empty_store: Path):
    parent = open_study(runs, a_study(), "command")
    log = log_trial(runs, parent, "group_size=2", 0, "complete")
    other = runs.parent / "other runs"
    shutil.copytree(runs / "studies", other / "studies")
    shutil.copy(empty_store, other / "mlflow.db")
    parent = open_study(other, a_study(), "command")
    replay(other, other / "studies/sizes/trials" / log.directory.name, parent)
    (trial,) = read_study(other, "sizes").trials
    assert (trial.state, trial.summary["accuracy_final"], trial.per_problem) == ("complete", 0.5, {"p1": 0.75})


def test_a_moved_runs_folder_can_be_read_but_not_written(runs: Path):
    parent = open_study(runs, a_study(), "command")
    log_trial(runs, parent, "group_size=2", 0, "complete")
    moved = runs.rename(runs.parent / "moved")
    assert read_study(moved, "sizes").trials[0].per_problem == {"p1": 0.75}
    with pytest.raises(ValueError, match="was moved; move it back"):
        check_runs_folder(moved)


@pytest.mark.attack("A copied runs folder")
def test_pages_of_a_copied_folder_lead_to_its_files_when_the_original_is_gone(
    runs: Path, monkeypatch: pytest.MonkeyPatch
):
    parent = open_study(runs, a_study(), "command")
    log = log_trial(runs, parent, "group_size=2", 0, "complete")
    policy = kept_policy(log.directory)
    assert register_policy(runs, log.directory, policy, "sizes") == 1
    copy, scratch = runs.parent / "a copy", runs.parent / "scratch"
    shutil.copytree(runs, copy)
    shutil.rmtree(runs)
    scratch.mkdir()
    client = MlflowClient(own_store(copy, scratch))
    assert "seed: 0" in Path(client.download_artifacts(str(log.run_id), "config.yaml")).read_text()
    assert client.get_metric_history(str(log.run_id), COLUMN)[-1].value == 0.5
    found = client.get_model_version("sizes", "1")
    there = (copy / policy.parent.relative_to(runs)).as_uri()
    assert (found.source, client.get_model_version_download_uri("sizes", "1")) == (there, there)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own_store(copy, scratch))
    pipeline: Any = mlflow.transformers.load_model("models:/sizes/1")
    assert all(
        bool((ours == pipeline.model.state_dict()[name]).all()) for name, ours in tiny_model(3).state_dict().items()
    )
    assert pipeline.tokenizer("1+1=")["input_ids"] == tiny_tokenizer()("1+1=")["input_ids"]
    (said,) = mlflow.pyfunc.load_model("models:/sizes/1").predict(["1+1="])
    assert said.startswith("1+1=")


def kept_policy(directory: Path) -> Path:
    """The built-in model as the policy that a run has kept."""
    policy = directory / "checkpoints" / "step-00000001" / "policy"
    save_model(policy, tiny_model(3), tiny_tokenizer())
    return policy


def test_a_kept_policy_is_registered_once_with_its_arm_and_its_accuracy(
    runs: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    log = log_trial(runs, open_study(runs, a_study(), "command"), "group_size=2", 0, "complete")
    register = ["register", str(log.directory), "--name", "sizes", "--runs", str(runs)]
    with pytest.raises(SystemExit, match="2"):
        app.main(register)
    assert "a trial of a study keeps them with checkpoints.finished=weights" in capsys.readouterr().err
    policy = kept_policy(log.directory)
    for _ in range(2):
        with pytest.raises(SystemExit, match="0"):
            app.main(register)
        assert capsys.readouterr().out == f"sizes, version 1: {policy}\n"
    drop_checkpoints(log.directory, "weights")  # as the next `cohort train` of a run that has ended
    assert {file.name for file in policy.parent.iterdir()} == {"policy", "components", "MLmodel"}
    assert not [record for record in caplog.records if record.name.startswith("cohort")]
    (found,) = MlflowClient(tracking_uri(runs)).search_model_versions("name = 'sizes'")
    tags = {"cohort.study": "sizes", "cohort.arm": "group_size=2", "cohort.seed": "0", "cohort.state": "complete"}
    assert (found.source, found.run_id, found.tags) == (policy.parent.as_uri(), log.run_id, tags | {COLUMN: "0.5"})


def test_an_adapter_is_registered_without_what_mlflow_would_need_its_base_for(runs: Path):
    log = log_trial(runs, open_study(runs, a_study(), "command"), "group_size=2", 0, "complete")
    policy = kept_policy(log.directory)
    (policy / "adapter_config.json").write_text("{}")
    assert register_policy(runs, log.directory, policy, "sizes") == 1
    assert list(policy.parent.iterdir()) == [policy]


def test_a_run_that_goes_on_or_is_of_another_runs_folder_is_not_registered(
    runs: Path, tmp_path: Path, empty_store: Path
):
    with open_log(runs) as log:
        log.metrics(1, {COLUMN: 0.5})
    for directory in (log.directory, tmp_path):  # a stopped run, and none
        with pytest.raises(ValueError, match="only a run that has ended"):
            register_policy(runs, directory, directory, "a")
    ended = log_trial(runs, open_study(runs, a_study(), "command"), "group_size=2", 0, "complete").directory
    (tmp_path / "other").mkdir()
    shutil.copy(empty_store, tmp_path / "other" / "mlflow.db")
    for place in (tmp_path / "other", tmp_path / "none"):
        with pytest.raises(ValueError, match=r"must have the run of .*; name its runs folder with --runs"):
            register_policy(place, ended, ended, "a")
    assert not (tmp_path / "none").exists()


def test_the_report_and_its_answer_are_attached_to_the_study(runs: Path):
    parent = open_study(runs, a_study(), "command")
    (runs / "report").mkdir()
    (runs / "report" / "index.html").write_text("<p>yes")
    log_report(runs, "sizes", runs / "report", "Yes, by 3 points.")
    client = MlflowClient(tracking_uri(runs))
    assert [file.path for file in client.list_artifacts(parent, "report")] == ["report/index.html"]
    assert client.get_run(parent).data.tags["mlflow.note.content"] == "Do larger groups help?\n\nYes, by 3 points."


def test_the_page_of_a_study_lists_its_runs_and_names_no_shared_view(runs: Path):
    open_study(runs, a_study(), "command")
    page = "http://127.0.0.1:5000/#/experiments/1/runs?workflowType=machine_learning"
    assert study_url(runs, "sizes", "http://127.0.0.1:5000") == page


def test_the_view_of_a_study_has_its_columns_its_metric_first_and_its_arms_as_groups(runs: Path):
    open_study(runs, a_study(), "command")
    found = read_view(MlflowClient(tracking_uri(runs)).get_experiment("1").tags)
    assert found is not None
    view, colors = found
    assert {"tags.`cohort.state`", "params.`algorithm.group_size`", "tags.`cohort.seed`"} < set(view["selectedColumns"])
    assert view["columnOrder"] == ["attributes.`Run Name`", *view["selectedColumns"]] == list(view["columnWidths"])
    assert view["columnWidths"]["attributes.`Run Name`"] > 250  # of MLflow's 190 a name gets half
    assert view["orderByKey"] == "metrics.`validation/accuracy`"
    assert view["compareRunCharts"][0]["metricKey"] == "validation/accuracy"
    assert view["groupBy"]["groupByKeys"] == [{"mode": "tag", "groupByData": "cohort.group"}]
    arms = {"tag.cohort.group.group_size=2": PALETTE[0], "tag.cohort.group.group_size=4": PALETTE[1]}
    assert colors == {"tag.cohort.group.study": GREY, **arms}  # of the parent run, and of the trials


def test_the_parent_run_is_in_a_group_of_its_own(runs: Path):
    parent = open_study(runs, a_study(), "command")
    assert MlflowClient(tracking_uri(runs)).get_run(parent).data.tags["cohort.group"] == "study"


def test_a_view_that_someone_changed_by_hand_is_none():
    assert read_view({}) is None
    assert [read_view({"mlflow.sharedViewState.cohort": text}) for text in ("", "[]", '{"state": 3}')] == [None] * 3


@pytest.mark.attack("Hostile text on a page or in a file")
def test_a_label_cannot_leave_the_data_of_the_start_page(record_property: Callable[[str, object], None]):
    tried = ["</script><script>alert(1)</script>", "<!--<script>", "\u2028'"]
    for label in tried:
        text = page("<html><head></head></html>", [{"id": "1", "view": {}, "colors": {label: GREY}}])
        assert text.count("<") == 8  # of html, head, style and the script: each opened and closed
        assert "\u2028" not in text
    record_property("tried", len(tried))


def test_long_labels_become_short_run_names_that_differ(tmp_path: Path):
    factors = {"algorithm.group_size": [2, 4], "algorithm.kl_beta": [0.0, 0.04]}
    plan = Plan(a_study(factors=factors), tmp_path)
    names = [plan.run_name(key) for key in plan.keys[:4]]
    assert names == ["2, 0 | seed 0", "2, 0.04 | seed 0", "4, 0 | seed 0", "4, 0.04 | seed 0"]
    tags = [plan.tags(key) for key in plan.keys[:4]]
    assert [tag["cohort.group"] for tag in tags] == ["2, 0", "2, 0.04", "4, 0", "4, 0.04"]
    assert [tag["mlflow.runColor"] for tag in tags] == list(PALETTE[:4])
    assert Plan(a_study(), tmp_path).run_name(("group_size=2", 1)) == "group_size=2 | seed 1"


def test_of_more_arms_than_colours_the_baseline_alone_has_one():
    many = a_study(factors={"algorithm.kl_beta": [n / 100 for n in range(8)]}, baseline="kl_beta=0.02").arm_colors()
    assert {label for label, color in many.items() if color != GREY} == {"kl_beta=0.02"}


def test_a_run_names_its_datasets_without_their_rows(runs: Path):
    run = MlflowClient(tracking_uri(runs)).get_run(
        str(log_trial(runs, open_study(runs, a_study(), "command"), "group_size=2", 0, "complete").run_id)
    )
    found = {one.tags[0].value: one.dataset for one in run.inputs.dataset_inputs}
    assert set(found) == {"train", "validation", "test"}
    assert {one.name for one in found.values()} == {a_spec(seed=0).task.name}
    assert len({one.digest for one in found.values()}) == 3


def test_a_parent_run_has_the_design_as_parameters_and_the_reports_means_as_a_table(runs: Path):
    parent = open_study(runs, a_study(), "command")
    log = log_trial(runs, parent, "group_size=2", 0, "complete")
    open_study(runs, a_study(seeds=[0, 1, 2]), "command")  # what stands is not logged again
    (runs / "report").mkdir()
    means = [{"arm": "group_size=2", "metric": "test/accuracy", "seeds": 2, "mean": 0.5, "low": 0.25, "high": 0.75}]
    log_report(runs, "sizes", runs / "report", "Yes.", means, {"group_size=2": PALETTE[4]})
    client = MlflowClient(tracking_uri(runs))
    run = client.get_run(parent)
    assert run.data.params["factors.algorithm.group_size"] == "[2, 4]"
    assert (run.data.params["design"], run.data.tags["cohort.seeds"]) == ("grid", "[0, 1, 2]")
    assert "| group_size=2 | 0.5 [0.25, 0.75] |" in run.data.tags["mlflow.note.content"]
    table = json.loads(Path(client.download_artifacts(parent, "arms.json")).read_text())
    assert table["data"] == [list(means[0].values())]
    assert client.get_run(str(log.run_id)).data.tags["mlflow.runColor"] == PALETTE[4]


@pytest.mark.parametrize(("kept", "where"), [("weights", "run/checkpoints/step-00000002/policy"), (None, "not kept")])
def test_a_trial_names_its_final_policy_from_the_runs_folder(runs: Path, kept: str | None, where: str):
    parent = open_study(runs, a_study(), "command")
    spec = a_spec(checkpoints={"finished": kept})
    with open_log(runs, "run", spec, experiment="sizes", parent_run_id=parent) as log:
        log.metrics(2, {COLUMN: 0.5})
        (log.directory / "checkpoints" / "step-00000002" / "policy").mkdir(parents=True)
        log.finish("complete", None, {})
    tag = MlflowClient(tracking_uri(runs)).get_run(str(log.run_id)).data.tags["cohort.policy"]
    assert tag == where if kept else tag.startswith(where)


def test_an_unknown_study_is_named_with_its_nearest(runs: Path):
    open_study(runs, a_study(), "command")
    with pytest.raises(ValueError, match="has no study 'size'; did you mean 'sizes'"):
        read_study(runs, "size")
    assert list_studies(runs / "nothing here") == []
    assert not (runs / "nothing here").exists()


# Traces -------------------------------------------------------------------------------------------------------------


def traces_of(runs: Path, run_id: str) -> list[Trace]:
    client = MlflowClient(tracking_uri(runs))
    wanted = f"metadata.`mlflow.sourceRun` = '{run_id}'"
    return list(client.search_traces(locations=[client.get_run(run_id).info.experiment_id], filter_string=wanted))


def test_the_first_rollouts_of_a_step_become_traces_with_their_rewards_as_assessments(runs: Path):
    log = open_log(runs, tags={"cohort.arm": "a", "cohort.seed": "3"})
    row = dataclasses.replace(
        fake_trials.sample(5, "nul \x00 and surrogate \ud800"), correct=False, reward=-0.5, answer=None,
        rewards={"accuracy": 0.0, "format": -1.0, "broken": math.nan},
    )  # fmt: skip
    log.samples([row] + [fake_trials.sample(5, str(i)) for i in range(9)])
    log.finish("complete", None, {})
    found = {trace.info.response_preview: trace for trace in traces_of(runs, str(log.run_id))}
    assert set(found) == {"nul \ufffd and surrogate ?", "0", "1", "2"}  # the first 4 of 10
    trace = found["nul \ufffd and surrogate ?"]
    assert {a.name: a.value for a in trace.info.assessments} == {
        "correct": False, "reward": -0.5, "reward_accuracy": 0.0, "reward_format": -1.0, "expected_answer": "2"
    }  # fmt: skip
    (span,) = trace.data.spans
    assert (span.inputs, span.outputs) == ({"prompt": "1+1="}, {"completion": "nul \ufffd and surrogate ?"})
    tags = {"arm": "a", "seed": "3", "step": "5", "split": "validation", "num_tokens": "7", "finish_reason": "stop"}
    assert tags.items() <= trace.info.tags.items()


def test_a_resumed_run_has_every_trace_once_and_a_replaced_one_takes_its_traces_along(runs: Path):
    log = open_log(runs)
    for step in (1, 2):
        log.metrics(step, {COLUMN: step / 100})
        log.samples([fake_trials.sample(step, f"first {step}")])
    log.close()
    again = open_log(runs)
    again.resume(2)
    again.samples([fake_trials.sample(3, "first 3")])
    again.close()
    assert again.run_id == log.run_id
    texts = sorted(str(trace.info.response_preview) for trace in traces_of(runs, str(log.run_id)))
    assert texts == ["first 1", "first 2", "first 3"]
    other = open_log(runs)
    other.resume(1)
    other.metrics(2, {COLUMN: 0.9})  # not what the store has
    other.samples([fake_trials.sample(2, "second 2")])
    other.finish("complete", None, {})
    assert other.run_id != log.run_id
    assert traces_of(runs, str(log.run_id)) == []
    texts = sorted(str(trace.info.response_preview) for trace in traces_of(runs, str(other.run_id)))
    assert texts == ["first 1", "second 2"]


def test_the_number_of_traces_can_be_set_and_a_wrong_one_is_refused(runs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COHORT_TRACES", "0")
    log = open_log(runs)
    log.samples([fake_trials.sample(1)])
    log.finish("complete", None, {})
    assert traces_of(runs, str(log.run_id)) == []
    monkeypatch.setenv("COHORT_TRACES", "-1")
    with pytest.raises(ValueError, match=r"COHORT_TRACES must be a whole number .* got '-1'"):
        check_runs_folder(runs)


def test_system_metrics_are_sampled_beside_a_run_and_kept_out_of_its_results(
    runs: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mlflow_copy, "SYSTEM_SECONDS", 0.0)
    monkeypatch.setattr(mlflow_copy, "FLUSH_SECONDS", 0.02)
    log = open_log(runs)
    log.metrics(0, {COLUMN: 0.0})
    for step in range(1, 200):
        time.sleep(0.05)
        log.metrics(step, {COLUMN: 0.0})
        if any(key == "system/memory_bytes" for key, *_ in in_file(log.directory)):
            break
    log.finish("complete", None, {})
    values = {key: value for key, _, value in in_store(runs, str(log.run_id))}
    assert values["system/memory_bytes"] > 1e7  # a Python process has more than 10 MB
    assert 0 <= values["system/machine_cpu_percent"] <= 100
    assert in_store(runs, str(log.run_id)) == in_file(log.directory)
    assert set(log.latest) == {COLUMN}


# Bad runs folders ---------------------------------------------------------------------------------------------------


def test_a_usable_runs_folder_passes_and_nothing_is_written(tmp_path: Path):
    check_runs_folder(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


def test_a_file_in_place_of_the_runs_folder_is_refused(tmp_path: Path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(ValueError, match="must be a folder"):
        check_runs_folder(tmp_path / "runs" / "deeper")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that even root cannot write to")
def test_a_folder_that_cannot_be_written_is_refused():
    with pytest.raises(ValueError, match="must be writable, but writing to '/proc' fails"):
        check_runs_folder(Path("/proc/runs"))


def test_a_full_disk_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"needs 1000000000000 MB of free disk"):
        check_runs_folder(tmp_path, min_free_bytes=10**18)


def test_a_study_of_another_format_is_refused(runs: Path):
    (runs / "studies" / "s").mkdir(parents=True)
    (runs / "studies" / "s" / "study.json").write_text('{"format": 2, "name": "s"}')
    with pytest.raises(ValueError, match=r"study.json must have format 1, got 2.*another version"):
        check_runs_folder(runs)
    (runs / "studies" / "s" / "study.json").write_text('{"format": 1')
    with pytest.raises(ValueError, match="not valid JSON"):
        check_runs_folder(runs)


def test_a_store_of_another_version_is_refused(runs: Path):
    check_runs_folder(runs)
    with sqlite3.connect(runs / "mlflow.db") as database:
        database.execute("UPDATE alembic_version SET version_num = 'abc'")
    with pytest.raises(ValueError, match=r"must have schema \w+ of MLflow [\d.]+, got abc; .* 'mlflow db upgrade"):
        check_runs_folder(runs)
    (runs / "mlflow.db").write_text("this is no database, " * 100)
    with pytest.raises(ValueError, match="is not an MLflow store"):
        check_runs_folder(runs)


# The UI and the imports -----------------------------------------------------------------------------------------------


def test_the_ui_serves_an_empty_store_and_leaves_the_port_free(runs: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with serve_ui(runs, port) as server:
        with urllib.request.urlopen(server.url) as page:
            assert b"MLflow" in page.read()
        with pytest.raises(ValueError, match=rf"port {port} on 127.0.0.1 cannot be used \(Address already in use\)"):
            serve_ui(runs, port)
    check_port(port)


def test_a_report_can_be_read_without_loading_mlflow_or_torch_first():
    code = (
        "import sys, cohort.harness.mirror.run_log; print({'mlflow', 'torch', 'pandas', 'optuna'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.attack("A kill in the middle of a run")
def test_a_lock_is_free_again_when_its_holder_was_killed(tmp_path: Path):
    code = "import os, cohort.harness.ground.files as f\nwith f.file_lock(f.Path('lock')):\n    os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == -9
    with file_lock(tmp_path / "lock").acquire(timeout=1):
        pass
