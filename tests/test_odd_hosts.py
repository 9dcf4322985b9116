"""Hosts, clocks and disks that are not as they should be leave a study as an undisturbed one, or say so."""

import contextlib
import dataclasses
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_trials
import pytest
from cohort.harness.record.events import EVENTS, read_events
from cohort.harness.record.status import StudyStatus
from cohort.harness.study import runner
from cohort.harness.study.launchers import local
from cohort.harness.study.queue import study_status
from cohort.harness.study.worker import Unfit, worker_main
from cohort.reports.analysis import analysed
from cohort.reports.prose.notes import notes
from fake_study import fake_study, with_trials
from fake_trials import a_study
from queues import a_queue, at_work, check_as_undisturbed, open_queue, run
from zygote import Zygote

pytestmark = pytest.mark.usefixtures("plugins")


# Versions -------------------------------------------------------------------------------------------------------------


@pytest.mark.attack("A worker of another version that joins a study")
def test_a_worker_whose_version_reads_the_settings_otherwise_takes_no_trial(tmp_path: Path):
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


# Clocks ---------------------------------------------------------------------------------------------------------------


def train_back(spec: Any, directory: Path, log: Any, **more: Any) -> Any:
    """As the fake run, but the clock of the host jumps back an hour at each step."""
    nanoseconds, seconds, metrics = time.time_ns, time.time, log.metrics

    def jump(step: int, values: Any) -> None:
        metrics(step, values)
        time.time_ns, time.time = (lambda: nanoseconds() - step * 3600 * 10**9), (lambda: seconds() - step * 3600)

    log.metrics = jump
    try:
        return fake_trials.train(spec, directory, log, **more)
    finally:
        time.time_ns, time.time = nanoseconds, seconds


@pytest.mark.attack("A clock that jumps back an hour")
def test_a_clock_that_jumps_back_changes_nothing(runs: Path):
    study = a_study(seeds=[0])
    run(study, runs, execute="test_odd_hosts:train_back", workers=1)
    check_as_undisturbed(study, runs)
    for key in (plan := open_queue(study, runs).plan).keys:
        times = [event["time"] for event in read_events(plan.directory(key) / EVENTS)]
        assert min(b - a for a, b in itertools.pairwise(times)) < -3_000_000  # ms


# Disks ----------------------------------------------------------------------------------------------------------------


def slow(operation: Callable[..., Any]) -> Callable[..., Any]:
    def later(*args: Any, **kwargs: Any) -> Any:
        time.sleep(float(os.environ["SLOW_DISK"]))
        return operation(*args, **kwargs)

    return later


def train_slowly(*args: Any, **kwargs: Any) -> Any:
    """The fake run, in a worker whose queue answers after SLOW_DISK seconds."""
    from cohort.harness.study.queue import Queue

    for name in ("_read", "_attributes"):
        setattr(Queue, name, slow(getattr(Queue, name)))
    return fake_trials.train(*args, **kwargs)


@pytest.mark.attack("A queue on a disk that answers after seconds")
@pytest.mark.parametrize("seconds", [0.5, pytest.param(5.0, marks=pytest.mark.long)])
def test_a_run_does_not_wait_at_each_step_for_a_queue_that_answers_late(
    runs: Path, seconds: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLOW_DISK", str(seconds))
    study = a_study(seeds=[0])
    run(study, runs, execute="test_odd_hosts:train_slowly", workers=1)
    queue = open_queue(study, runs)
    for key in queue.plan.keys:
        times = [e["time"] for e in read_events(queue.plan.directory(key) / EVENTS) if e["type"] == "metrics"]
        waits = [b - a for a, b in itertools.pairwise(times) if b - a > 900 * seconds]
        assert len(waits) <= 2, times  # `is_held` at some of the seven steps
    check_as_undisturbed(study, runs)


# Many workers ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.attack("30 workers at their first claim")
def test_30_workers_that_claim_at_once_take_a_trial_each(
    runs: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
):
    monkeypatch.setattr(runner, "mirrored", lambda *_: contextlib.nullcontext())
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], str(Path(__file__).parent)]))
    (runs / "hold").touch()
    most = [0]

    def release(status: StudyStatus) -> None:
        most[0] = max(most[0], at_work(status))
        if most[0] == 30:
            (runs / "hold").unlink(missing_ok=True)

    study = a_study(seeds=list(range(15)))
    with contextlib.closing(Zygote()) as zygote:
        monkeypatch.setattr(local, "start_worker", zygote.start_worker)
        run(study, runs, release, workers=30)
    assert open_queue(study, runs).num_claims() == 30  # none twice
    check_as_undisturbed(study, runs)
    record_property("tried", 30)


# The Python API -------------------------------------------------------------------------------------------------------

KERNEL = """
import sys, cohort
from cohort.harness.study import runner, worker
worker.EXECUTE = runner.EXECUTE = "fake_trials:train"
runner.run_study.__kwdefaults__["execute"] = "fake_trials:train"
from fake_trials import a_study
from cohort.harness.api.study import Study
print(cohort.run(Study("sizes", (), a_study(seeds=[0])), workers=1, runs=sys.argv[1]))
"""


@pytest.mark.long
@pytest.mark.attack("Ctrl-C and a killed kernel through the Python API")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_notebook_that_is_interrupted_or_killed_goes_on_where_it_was(runs: Path, number: int):
    (runs / "hold").touch()
    command = [sys.executable, "-c", KERNEL, str(runs)]
    kernel = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until(lambda: (runs / "studies/sizes/study.json").exists() and at_work(study_status("sizes", runs)), kernel)
    kernel.send_signal(number)
    said, _ = kernel.communicate(timeout=300)
    if number == signal.SIGINT:
        assert said.strip().endswith("KeyboardInterrupt: the same call continues where the study stopped"), said
    until(lambda: study_status("sizes", runs).counts().get("stopped"))  # the worker ends after its step
    (runs / "hold").unlink()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.search(r"2 of 2 trials", done.stdout), done
    assert open_queue(a_study(seeds=[0]), runs).num_claims() == 3
    check_as_undisturbed(a_study(seeds=[0]), runs)


def until(condition: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.1)
