"""The record of a run and its copy in MLflow say the same, whatever dies in between."""

import dataclasses
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fake_trials
import pytest
from cohort.harness.base.arms import GREY, PALETTE
from cohort.harness.base.files import file_lock, write_json
from cohort.harness.data import SampleRow
from cohort.harness.mirror import follow
from cohort.harness.mirror.address import tracking_uri
from cohort.harness.mirror.follow import RecordMirror, catch_up, mirrored
from cohort.harness.mirror.page import page
from cohort.harness.mirror.store import check_runs_folder
from cohort.harness.mirror.ui import study_pages
from cohort.harness.mirror.view import read_view
from cohort.harness.mirror.writer import MirrorState
from cohort.harness.record import run as record_run
from cohort.harness.record.events import EVENTS, Tail, is_as_written, read_events
from cohort.harness.record.evidence import write_evidence
from cohort.harness.record.run import RunLog, read_progress, read_result
from cohort.harness.record.study import STATUS, read_folder, read_study
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.run import RunSpec
from cohort.harness.settings.study import parse_study
from cohort.harness.study.plan import Plan
from fake_trials import a_spec, a_study, begin_study, in_mlflow, open_study
from mlflow import MlflowClient
from mlflow.entities import Trace
from queues import python, wait_for

COLUMN = "validation/accuracy"
# What a database refuses: NUL and lone surrogates, which are shown replaced.
HOSTILE = "boom \0 and \ud800, then "
SHOWN = "boom \N{REPLACEMENT CHARACTER} and ?, then "

pytestmark = pytest.mark.usefixtures("plugins")


@pytest.fixture
def runs(tmp_path, new_runs) -> Path:
    """A runs folder with an empty store; its name has a space, as users' folders do."""
    return new_runs(tmp_path / "my runs")


def open_log(runs: Path, directory: str = "train/run", spec: RunSpec | None = None, **settings: Any) -> RunLog:
    named = {"experiment": "train", "run_name": "run", **settings}
    return RunLog(runs, runs / directory, spec or a_spec(), **named)


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
    prelude = "import os, signal, sys, time\nfrom pathlib import Path\nfrom test_tracking import *\n"
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code, *map(str, arguments)], stderr=subprocess.PIPE, text=True
    )


def test_a_tail_reads_what_is_new_and_all_of_a_file_that_an_attempt_has_rewritten(runs):
    log = open_log(runs)
    log_steps(log, 0, 3)
    tail = Tail(log.directory / EVENTS)
    anew, events = tail.read()
    assert anew and [event.get("step") for event in events] == [None, 0, 1, 2, 3]
    whole = (log.directory / EVENTS).stat().st_size
    with (log.directory / EVENTS).open("a") as file:
        file.write('{"half a li')
    assert tail.read() == (False, [])
    os.truncate(log.directory / EVENTS, whole)
    log.close()
    again = open_log(runs)
    again.resume(1)
    anew, events = tail.read()
    assert anew and [event["type"] for event in events] == ["start", "metrics", "metrics", "start"]
    again.metrics(2, {COLUMN: 0.5})
    assert [event["values"] for event in tail.read()[1]] == [{COLUMN: 0.5}]


def test_progress_says_what_a_watcher_needs(runs):
    told: list[dict[str, object]] = []
    with open_log(runs, on_progress=lambda progress: told.append(dict(progress))) as log:
        log.metrics(3, {COLUMN: 0.5, "throughput/tokens_per_second": 900.0, "seconds/total": 12.0})
        log.progress("test", 4, 4)
        shown = read_progress(log.directory)
    assert [(progress["phase"], progress["done"], progress["accuracy"]) for progress in told] == [
        ("", 0, 0.5), ("test", 4, 0.5)
    ]  # fmt: skip
    wanted = {"phase": "test", "done": 4, "total": 4, "step": 3, "accuracy": 0.5}
    assert wanted.items() <= shown.items()
    assert (shown["tokens_per_second"], shown["seconds"]) == (900.0, 12.0)
    assert read_progress(runs / "nothing") == {}
    assert (read_result(log.directory) or {})["state"] == "stopped"  # it did not finish


def test_a_run_log_loads_neither_mlflow_nor_torch():
    code = "import sys, cohort.harness.record.run, cohort.harness.record.study\n"
    code += "print({'mlflow', 'torch', 'pandas', 'optuna'} & set(sys.modules))"
    assert python(code, check=True).stdout == "set()\n"


def test_the_store_has_all_of_a_run_and_is_asked_no_more_for_one_that_was_copied_whole(runs, monkeypatch):
    monkeypatch.setattr(record_run, "SYSTEM_SECONDS", 0.0)
    log = open_log(runs)
    log_steps(log, 0, 20)
    log.metrics(21, {"policy/loss": math.nan, "kl/old": math.inf, "kl/reference": -math.inf})
    log.samples([fake_trials.sample(0, "first"), fake_trials.sample(0, "second")])
    log.samples([])
    log.per_problem({"p1": 0.25})
    log.finish("complete", None, {"accuracy_final": 0.45})
    line = (log.directory / EVENTS).read_text().splitlines()[22]
    values = json.loads(line, parse_constant=pytest.fail)["values"]  # strict JSON has no NaN
    assert (values["policy/loss"], values["kl/old"], values["kl/reference"]) == ("nan", "inf", "-inf")
    assert values["system/memory_bytes"] > 1e7  # a Python process has more than 10 MB
    assert set(log.latest) == {COLUMN, "seconds/step", "policy/loss", "kl/old", "kl/reference"}

    run_id = in_mlflow(runs, log.directory)
    stored = {(key, step): value for key, step, value in in_store(runs, run_id)}
    assert math.isnan(stored.pop(("policy/loss", 21)))
    assert stored.pop(("kl/old", 21)) == sys.float_info.max == -stored.pop(("kl/reference", 21))
    assert stored == {(k, s): v for k, s, v in in_file(log.directory) if not k.startswith(("kl", "policy"))}
    run = MlflowClient(tracking_uri(runs)).get_run(run_id)
    assert (run.info.status, run.data.tags["cohort.state"], run.info.run_name) == ("FINISHED", "complete", "run")
    assert (run.data.metrics["summary/accuracy_final"], run.data.params["algorithm.group_size"]) == (0.45, "8")

    monkeypatch.setattr(MlflowClient, "get_metric_history", lambda *_: pytest.fail("asked again"))
    assert in_mlflow(runs, log.directory) == run_id


@pytest.mark.slow
@pytest.mark.attack("A kill in the middle of a run")
def test_a_run_and_its_copy_that_are_killed_continue_as_the_same_run_and_nothing_is_there_twice(runs):
    code = """
with mirrored(Path(sys.argv[1]), Path(sys.argv[1]) / "train" / "run"):
    log = open_log(Path(sys.argv[1]))
    log.resume(-1)
    log_steps(log, 0, 30)
    log.samples([fake_trials.sample(15, "kept"), fake_trials.sample(15, "kept too")])
    log.samples([fake_trials.sample(30, "dropped")])
    place = lambda: MirrorState.load(log.directory).run_id
    wait_for(lambda: place() and len(in_store(Path(sys.argv[1]), place())) == 62)
    print("{\\"half a li", file=log._file, end="", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert child(code, runs).wait(120) == -signal.SIGKILL
    first = MirrorState.load(runs / "train/run").run_id
    with mirrored(runs, runs / "train/run"):
        log = open_log(runs)
        log.resume(20)  # the last checkpoint; the store already has steps 21 to 30
        assert log.latest[COLUMN] == 0.2
        log_steps(log, 21, 40)
        log.samples([fake_trials.sample(30, "again")])
        log.finish("complete", None, {})
    assert active_runs(runs) == [first] == [MirrorState.load(log.directory).run_id]
    expected = {(key, step) for key in (COLUMN, "seconds/step") for step in range(41)}
    assert Counter((key, step) for key, step, _ in in_store(runs, str(first))) == Counter(expected)
    assert in_store(runs, str(first)) == in_file(log.directory)
    assert all(map(is_as_written, (log.directory / EVENTS).read_bytes().splitlines()))
    samples = [event for event in read_events(log.directory / EVENTS) if event["type"] == "samples"]
    assert [row["completion"] for event in samples for row in event["rows"]] == ["kept", "kept too", "again"]


@pytest.mark.parametrize(
    ("resumed", "last", "scale", "same_mirror"), [(3, 12, 2.0, True), (3, 4, 1.0, False), (-1, 2, 1.0, True)],
    ids=["other values", "fewer steps", "started anew"],
)  # fmt: skip
def test_a_repetition_that_differs_replaces_the_run_in_the_store(runs, resumed, last, scale, same_mirror):
    mirror = RecordMirror(runs, runs / "train" / "run")
    log = open_log(runs)
    log_steps(log, 0, 9)
    mirror.copy()
    (first,) = active_runs(runs)
    log.close()
    again = open_log(runs)
    again.resume(resumed)
    log_steps(again, resumed + 1, last, scale)
    again.samples([fake_trials.sample(2)])
    again.finish("complete", None, {})
    (mirror if same_mirror else RecordMirror(runs, runs / "train" / "run")).copy()
    (new,) = active_runs(runs)
    assert new != first
    assert in_store(runs, new) == in_file(again.directory)
    assert max(step for _, step, _ in in_store(runs, new)) == last


def test_costs_that_differ_do_not_replace_the_run(runs):
    for attempt in (1.0, 2.0):
        log = open_log(runs)
        log.resume(0)
        log.metrics(1, {COLUMN: 0.5, "seconds/step": attempt})
        log.close()
        in_mlflow(runs, log.directory)
    (found,) = active_runs(runs)
    assert in_store(runs, found) == [("seconds/step", 1, 1.0), (COLUMN, 1, 0.5)]


@pytest.mark.attack("A lost or locked MLflow store")
def test_a_store_that_cannot_be_written_delays_the_copy_and_loses_nothing(runs, monkeypatch, caplog):
    monkeypatch.setattr(follow, "DRAIN_SECONDS", 0.2)
    blocker = sqlite3.connect(runs / "mlflow.db", isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    with mirrored(runs, runs / "train" / "run"), open_log(runs) as log:
        log_steps(log, 0, 25)
        log.finish("complete", None, {"accuracy_final": 0.25})
    assert "everything is in" in caplog.text
    assert (read_result(log.directory) or {})["state"] == "complete"
    blocker.execute("ROLLBACK")
    wait_for(lambda: "mlflow" not in [thread.name for thread in follow.threading.enumerate()])
    for _ in range(2):
        catch_up(runs)
        (run_id,) = active_runs(runs)
        assert in_store(runs, run_id) == in_file(log.directory)


def test_of_two_processes_one_copies_a_record_and_another_goes_on_when_it_ends(runs):
    log = open_log(runs)
    log_steps(log, 0, 3)
    run_id = in_mlflow(runs, log.directory)
    with file_lock(log.directory / "mlflow.lock"), mirrored(runs, log.directory):  # another process has it
        log_steps(log, 4, 5)
    assert len(in_store(runs, run_id)) == 2 * 4
    lock = file_lock(log.directory / "mlflow.lock").acquire()
    with mirrored(runs, log.directory):
        log_steps(log, 6, 7)
        lock.lock.release()
    assert in_store(runs, run_id) == in_file(log.directory)
    assert active_runs(runs) == [run_id]


def test_a_report_waits_for_the_mirror_of_a_large_study_no_longer_than_a_runs_end_does(runs, monkeypatch, caplog):
    folder = begin_study(runs, a_study(), "cohort study run sizes")
    for seed in range(3):
        log_trial(runs, "group_size=2", seed, "complete")
    monkeypatch.setattr(follow, "DRAIN_SECONDS", -1.0)
    catch_up(runs, folder)
    assert "has not received 3 runs of 'sizes'" in caplog.text and "`cohort ui` copies it later" in caplog.text
    assert not any("seed" in name for name in shown(runs))
    catch_up(runs)  # as `cohort ui` does
    assert sum("seed" in name for name in shown(runs)) == 3


def log_trial(
    runs: Path, arm: str, seed: int, state: str, rows: Sequence[SampleRow] = (), study: str = "sizes", **spec: Any
) -> RunLog:
    factors = json.dumps({"algorithm.group_size": int(arm[-1])})
    own = {"arm": arm, "seed": str(seed), "factors": factors, "group": arm}
    tags = fake_trials.of_study(runs, study, f"{arm}-{seed}", **own)
    place, title = f"studies/{study}/trials/{arm}-{seed}", f"{arm} | seed {seed}"
    log = open_log(runs, place, a_spec(seed=seed, **spec), experiment=study, run_name=title, tags=tags)
    log.metrics(0, {COLUMN: 0.25})
    log.metrics(1, {COLUMN: 0.5, "policy/loss": math.nan, "kl/old": math.inf})
    log.samples(rows or [fake_trials.sample(1)])
    log.per_problem({"p1": 0.25}, "start")
    log.per_problem({"p1": 0.75})
    summary = {"accuracy_final": 0.5, "seconds": 1.5} if state == "complete" else {}
    log.finish(state, None if state == "complete" else f"it was {state}", summary)  # pyright: ignore
    return log


def shown(runs: Path) -> dict[str, Any]:
    """All that MLflow shows of the study: of each run its state, metrics, parameters, tags and artifacts."""
    client, found = MlflowClient(tracking_uri(runs)), {}
    parent = MirrorState.load(runs / "studies" / "sizes").run_id
    experiment = client.get_experiment_by_name("sizes")
    for run in client.search_runs([experiment.experiment_id] if experiment else []):
        own = ("mlflow.parentRunId", "cohort.token", "mlflow.user")  # ids of a store, and who wrote it
        tags = {key: value for key, value in run.data.tags.items() if key not in own}
        below = {"child": run.data.tags.get("mlflow.parentRunId") == parent}
        files = sorted(file.path for file in client.list_artifacts(run.info.run_id))
        values = repr(in_store(runs, run.info.run_id))  # text: NaN is not equal to itself
        found[str(run.info.run_name)] = [run.info.status, values, run.data.params, tags, below, files]
    return found


def test_a_study_is_read_from_its_folder_alone_wherever_it_is(tmp_path, monkeypatch):
    runs = tmp_path / "runs"
    folder = begin_study(runs, a_study(), "cohort study run sizes")
    for threads in ("2", "1"):  # the second time from the beginning
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        log_trial(runs, "group_size=4", 0, "complete")
    log_trial(runs, "group_size=2", 1, "invalid")
    assert not (runs / "mlflow.db").exists()
    record = read_folder(Path(shutil.copytree(folder, tmp_path / "copy")))
    assert repr(record) == repr(read_study(runs, "sizes"))  # text: NaN is not equal to itself
    assert (record.name, record.question, record.metric) == ("sizes", "Do larger groups help?", COLUMN)
    assert (record.arms, record.baseline) == (["group_size=2", "group_size=4"], "group_size=2")
    assert (record.seeds, record.expected, record.command) == ([0, 1], 4, "cohort study run sizes")
    assert record.spec == a_study().model_dump(mode="json")
    assert {"python", "git_commit", "mlflow", "torch"} <= set(record.versions)
    invalid, complete = record.trials  # in the study's order of arms
    assert (complete.arm, complete.seed, complete.trial) == ("group_size=4", 0, "group_size=4-0")
    assert complete.threads == ["1", "2"] and complete.versions["processor"]
    assert complete.spec == a_spec(seed=0).model_dump(mode="json")
    assert complete.factors == {"algorithm.group_size": 4}
    assert complete.history[COLUMN] == [(0, 0.25), (1, 0.5)]
    assert math.isnan(complete.history["policy/loss"][0][1])
    assert complete.history["kl/old"] == [(1, math.inf)]
    assert set(complete.history) == {COLUMN, "policy/loss", "kl/old"}
    assert complete.summary == {"accuracy_final": 0.5, "seconds": 1.5}
    assert (complete.per_problem, complete.start_per_problem) == ({"p1": 0.75}, {"p1": 0.25})
    assert list(complete.samples) == [fake_trials.sample(1)]
    assert (invalid.state, invalid.reason, complete.reason) == ("invalid", "it was invalid", None)
    begin_study(runs, a_study(seeds=[0, 1, 2]), "")
    again = read_study(runs, "sizes")
    assert (again.seeds, again.command, len(again.trials)) == ([0, 1, 2], "cohort study run sizes", 2)
    with pytest.raises(ValueError, match="has no study 'size'; did you mean 'sizes'"):
        read_study(runs, "size")


@pytest.mark.slow
@pytest.mark.attack("A lost or locked MLflow store")
def test_a_study_without_a_store_to_its_end_shows_the_same_later_as_one_with_it(runs, new_runs):
    folder = begin_study(runs, a_study())
    copy = RecordMirror(runs, folder).copy
    for arm in ("group_size=2", "group_size=4"):
        copy()
        log_trial(runs, arm, 0, "complete")
    failed = {"trial": "lost", "arm": "group_size=4", "seed": 1, "factors": {}, "reason": "its workers died"}
    write_json(folder / STATUS, {"state": "complete", "stopped": [], "failed": [failed]})
    copy()
    (folder / "report").mkdir()
    (folder / "report" / "index.html").write_text("<p>yes")
    write_evidence(folder, read_folder(folder), "Yes, by 3 points.", {"group_size=2": PALETTE[4]})
    copy()
    later = runs.parent / "later"
    shutil.copytree(runs / "studies", later / "studies", ignore=shutil.ignore_patterns("mlflow.*"))
    catch_up(new_runs(later))
    assert shown(later) == shown(runs)
    client, found = MlflowClient(tracking_uri(later)), shown(later)
    assert len(found) == 4 and all(below["child"] for name, (*_, below, _) in found.items() if name != "sizes")
    assert found["group_size=4 | seed 1"][0] == "FAILED"
    run = client.get_run(str(MirrorState.load(later / "studies" / "sizes").run_id))
    assert run.data.tags["mlflow.note.content"] == "Do larger groups help?\n\nYes, by 3 points."
    assert [file.path for file in client.list_artifacts(run.info.run_id, "report")] == ["report/index.html"]
    assert found["group_size=2 | seed 0"][3]["mlflow.runColor"] == PALETTE[4]
    assert run.data.params["factors.algorithm.group_size"] == "[2, 4]"
    assert (run.data.params["design"], run.data.tags["cohort.seeds"]) == ("grid", "[0, 1]")
    assert repr(read_folder(folder)) == repr(read_study(later, "sizes"))
    written = (later / "mlflow.db").read_bytes()
    catch_up(later)
    assert (later / "mlflow.db").read_bytes() == written


def test_the_parent_run_stays_while_the_folder_does_and_then_starts_anew(runs):
    parent = open_study(runs, a_study(), "first")
    assert open_study(runs, a_study(seeds=[0, 1, 2]), "second") == parent
    tags = MlflowClient(tracking_uri(runs)).get_run(parent).data.tags
    assert (tags["cohort.seeds"], tags["cohort.command"], tags["cohort.arm"]) == ("[0, 1, 2]", "second", "study")
    MirrorState(token="").save(runs / "studies" / "sizes")  # as on a host that shares only the store and the document
    assert open_study(runs, a_study(), "third") == parent
    shutil.rmtree(runs / "studies")
    assert open_study(runs, a_study(), "fourth") != parent


def test_the_first_view_leaves_out_clones_and_stopped_trials(runs):
    open_study(runs, a_study())
    log_trial(runs, "group_size=2", 0, "complete")
    log_trial(runs, "group_size=4", 0, "stopped")
    tags = fake_trials.of_study(runs, "sizes", "clone", arm="clone 1 of group_size=2: steps=3", phase="exploratory")
    log = open_log(runs, "studies/sizes/trials/clone", a_spec(seed=0), experiment="sizes", run_name="c", tags=tags)
    log.finish("complete", None, {})
    catch_up(runs)
    client = MlflowClient(tracking_uri(runs))
    experiment = client.get_experiment_by_name("sizes")
    found = read_view(experiment.tags)
    every, shown = (client.search_runs([experiment.experiment_id], text) for text in ("", found[0]["searchFilter"]))
    assert len(every) == 4
    assert {run.data.tags.get("cohort.arm", "study") for run in shown} == {"study", "group_size=2"}


def test_the_page_and_the_view_of_a_study_have_its_columns_its_metric_first_and_its_arms_as_groups(runs):
    open_study(runs, a_study())
    page = "http://127.0.0.1:5000/#/experiments/1/runs?workflowType=machine_learning"
    assert study_pages(runs, "http://127.0.0.1:5000/") == {"sizes": page}
    found = read_view(MlflowClient(tracking_uri(runs)).get_experiment("1").tags)
    assert found is not None
    view, colors = found
    assert {"tags.`cohort.state`", "params.`algorithm.group_size`", "tags.`cohort.seed`"} < set(view["selectedColumns"])
    assert view["columnOrder"] == ["attributes.`Run Name`", *view["selectedColumns"]] == list(view["columnWidths"])
    assert view["columnWidths"]["attributes.`Run Name`"] > 250  # of MLflow's 190 a name gets half
    assert view["orderByKey"] == "metrics.`summary/test_accuracy`"
    assert view["compareRunCharts"][0]["metricKey"] == "validation/accuracy"
    assert view["groupBy"]["groupByKeys"] == [{"mode": "tag", "groupByData": "cohort.arm"}]
    arms = {"tag.cohort.arm.group_size=2": PALETTE[0], "tag.cohort.arm.group_size=4": PALETTE[1]}
    assert colors == {"tag.cohort.arm.study": GREY, **arms}  # of the parent run, and of the trials
    # changed by hand, or absent
    assert [read_view({"mlflow.sharedViewState.cohort": text}) for text in ("", "[]", '{"state": 3}')] == [None] * 3
    assert read_view({}) is None


@pytest.mark.attack("Hostile text on a page or in a file")
def test_a_label_cannot_leave_the_data_of_the_start_page(record_property):
    tried = ["</script><script>alert(1)</script>", "<!--<script>", "\u2028'"]
    for label in tried:
        text = page("<html><head></head></html>", [{"id": "1", "view": {}, "colors": {label: GREY}}])
        assert text.count("<") == 8  # of html, head, style and the script: each opened and closed
        assert "\u2028" not in text
    record_property("tried", len(tried))


def test_a_run_is_named_by_its_arm_and_seed_and_coloured_as_its_arm(tmp_path):
    factors = {"algorithm.group_size": [2, 4], "algorithm.kl_beta": [0.0, 0.04]}
    plan = Plan(a_study(factors=factors), tmp_path)
    assert plan.run_name(plan.keys[1]) == "group_size=2, kl_beta=0.04 | seed 0"
    tags = [plan.tags(key) for key in plan.keys[:4]]
    assert [tag["mlflow.runColor"] for tag in tags] == list(PALETTE[:4])
    many = a_study(factors={"algorithm.kl_beta": [n / 100 for n in range(8)]}, baseline="kl_beta=0.02").arm_colors()
    assert {label for label, color in many.items() if color != GREY} == {"kl_beta=0.02"}  # more arms than colours


def traces_of(runs: Path, run_id: str) -> list[Trace]:
    client = MlflowClient(tracking_uri(runs))
    wanted = f"metadata.`mlflow.sourceRun` = '{run_id}'"
    return list(client.search_traces(locations=[client.get_run(run_id).info.experiment_id], filter_string=wanted))


def test_the_first_rollouts_of_a_step_become_traces_with_their_rewards_as_assessments(runs, caplog):
    log = open_log(runs, tags={"cohort.arm": "a", "cohort.seed": "3"})
    row = dataclasses.replace(
        fake_trials.sample(5, "nul \x00 and surrogate \ud800"), correct=False, reward=-0.5, answer=None,
        rewards={"accuracy": 0.0, "format": -1.0, "broken": math.nan},
    )  # fmt: skip
    log.samples([row] + [fake_trials.sample(5, str(i)) for i in range(9)])
    log.finish("complete", None, {})
    found = {trace.info.response_preview: trace for trace in traces_of(runs, in_mlflow(runs, log.directory))}
    assert set(found) == {"nul \ufffd and surrogate ?", "0", "1", "2"}  # the first 4 of 10
    assert not caplog.messages  # OpenTelemetry warns of a span that is OK and has a description
    assert {text: trace.info.state.value for text, trace in found.items()} == {
        "nul \ufffd and surrogate ?": "ERROR", "0": "OK", "1": "OK", "2": "OK"
    }  # fmt: skip
    trace = found["nul \ufffd and surrogate ?"]
    assert {a.name: a.value for a in trace.info.assessments} == {
        "correct": False, "reward": -0.5, "reward_accuracy": 0.0, "reward_format": -1.0, "expected_answer": "2"
    }  # fmt: skip
    (span,) = trace.data.spans
    assert (span.status.status_code.value, span.status.description) == ("ERROR", "no answer found")
    assert (span.inputs, span.outputs) == ({"prompt": "1+1="}, {"completion": "nul \ufffd and surrogate ?"})
    tags = {"arm": "a", "seed": "3", "step": "5", "split": "validation", "num_tokens": "7", "finish_reason": "stop"}
    assert tags.items() <= trace.info.tags.items()


def test_a_resumed_run_has_every_trace_once_and_a_replaced_one_takes_its_traces_along(runs):
    log = open_log(runs)
    for step in (1, 2):
        log.metrics(step, {COLUMN: step / 100})
        log.samples([fake_trials.sample(step, f"first {step}")])
    log.close()
    first = in_mlflow(runs, log.directory)
    again = open_log(runs)
    again.resume(2)
    again.samples([fake_trials.sample(3, "first 3")])
    again.close()
    assert in_mlflow(runs, again.directory) == first
    texts = sorted(str(trace.info.response_preview) for trace in traces_of(runs, first))
    assert texts == ["first 1", "first 2", "first 3"]
    other = open_log(runs)
    other.resume(1)
    other.metrics(2, {COLUMN: 0.9})  # not what the store has
    other.samples([fake_trials.sample(2, "second 2")])
    other.finish("complete", None, {})
    new = in_mlflow(runs, other.directory)
    assert new != first and traces_of(runs, first) == []
    assert sorted(str(trace.info.response_preview) for trace in traces_of(runs, new)) == ["first 1", "second 2"]


def test_the_number_of_traces_can_be_set_and_a_wrong_one_is_refused(runs, monkeypatch):
    monkeypatch.setenv("COHORT_TRACES", "0")
    log = open_log(runs)
    log.samples([fake_trials.sample(1)])
    log.finish("complete", None, {})
    assert traces_of(runs, in_mlflow(runs, log.directory)) == []
    monkeypatch.setenv("COHORT_TRACES", "-1")
    with pytest.raises(ValueError, match=r"COHORT_TRACES must be a whole number .* got '-1'"):
        check_runs_folder(runs)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that even root cannot write to")
def test_a_runs_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"must be a folder, but .* is a file"):
        check_runs_folder(tmp_path / "file" / "deeper")
    with pytest.raises(ValueError, match="must be writable, but writing to '/proc' fails"):
        check_runs_folder(Path("/proc/runs"))


def test_a_store_of_another_version_is_refused(runs):
    check_runs_folder(runs)
    assert [file.name for file in runs.iterdir()] == ["mlflow.db"]  # nothing was written
    with sqlite3.connect(runs / "mlflow.db") as database:
        database.execute("UPDATE alembic_version SET version_num = 'abc'")
    with pytest.raises(ValueError, match=r"must have schema \w+ of MLflow [\d.]+, got abc; .* 'mlflow db upgrade"):
        check_runs_folder(runs)


@pytest.mark.attack("NUL and broken Unicode in a reason")
def test_a_reason_that_a_file_store_refuses_is_recorded_with_its_characters_replaced(runs):
    study = a_study().model_copy(update={"question": HOSTILE})
    folder = begin_study(runs, study, f"cohort study run {HOSTILE}")
    arm = study.arm_labels()[0]
    tags = {**fake_trials.of_study(runs, "sizes", "one", arm=arm), "odd": HOSTILE}
    log = RunLog(runs, folder / "trials" / "one", a_spec(seed=0), experiment="sizes", run_name="t", tags=tags)
    log.metrics(0, {"validation/accuracy": 0.5})
    log.finish("failed", HOSTILE + "x" * 1_000_000, {})
    (trial,) = read_study(runs, "sizes").trials
    assert str(trial.reason).startswith(HOSTILE)
    run = MlflowClient(tracking_uri(runs)).get_run(in_mlflow(runs, log.directory))
    assert run.data.tags["cohort.reason"].startswith(SHOWN) and run.data.tags["odd"] == SHOWN


@pytest.mark.attack("NUL and broken Unicode in a label")
@pytest.mark.parametrize("label", ["a\0b", "a\ud800", "a\u202eb", "a\nb", "a  b", " a", "", "a" * 101])
def test_an_arm_whose_label_would_not_look_the_same_everywhere_is_refused(label):
    run = {"task": "arithmetic", "algorithm": "grpo"}
    with pytest.raises(SpecError, match="labels of arms must be 1 to 100 printable characters"):
        parse_study({"name": "s", "question": "?", "run": run, "arms": {label: {"steps": 3}}}, "s.yaml")
