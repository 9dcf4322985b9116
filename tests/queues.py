"""Studies of fakes and their queues: starts, kills, and what must be left at the end."""

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_trials
import psutil
from cohort.harness.base.files import read_json, write_json
from cohort.harness.record.events import read_events
from cohort.harness.record.status import StudyStatus
from cohort.harness.record.study import read_study, study_document
from cohort.harness.settings.study import StudySpec
from cohort.harness.study.plan import Plan
from cohort.harness.study.queue import ClaimedTrial, Queue, TrialOutcome, open_storage
from cohort.harness.study.runner import run_study
from cohort.harness.study.storage.files import FileLease

METRIC = "validation/accuracy"
DONE = TrialOutcome("complete", summary={"accuracy_final": 0.5, "seconds": 8.0, "generated_tokens": 100.0},
               metrics={METRIC: 0.5})  # fmt: skip


def wait_for(find: Callable[[], Any], what: str = "it", seconds: float = 240) -> Any:
    """What `find` returns as soon as it is true; AssertionError naming `what` where it stays false."""
    deadline = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < deadline, f"{what} did not appear within {seconds:.0f} s"
        time.sleep(0.05)
    return found


def open_queue(study: StudySpec, runs: Path, url: str | None = None) -> Queue:
    """A queue as another process would open it."""
    plan = Plan(study, runs)
    return Queue(plan, open_storage(plan.folder, study.name, url))


def a_queue(study: StudySpec, runs: Path, url: str | None = None) -> Queue:
    """The queue of a study that is started, for the first time or again."""
    queue = open_queue(study, runs, url)
    with queue.storage.lock():
        queue.storage.write_document(study_document(study, "cohort study run"))
        queue.retry_failed()
    return queue


def claimed(queue: Queue) -> ClaimedTrial:
    claim = queue.claim()
    assert claim is not None
    return claim


def python(code: str, *words: object, path: object = None, **options: Any) -> Any:
    """A python that has run this code with these arguments; `path` is its PYTHONPATH."""
    environment = {**os.environ, **({} if path is None else {"PYTHONPATH": str(path)})}
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, **options)


def gone() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def die(claim: ClaimedTrial, queue: Queue) -> None:
    """What a kill of its worker leaves of a claim: a lease that names a process which is gone."""
    claim.lease._released.set()  # pyright: ignore
    if isinstance(claim.lease, FileLease):
        file = claim.lease._file
        write_json(file, {**read_json(file), "pid": gone()})
    else:
        queue.storage._rows("UPDATE cohort_leases SET pid = :pid WHERE study = :study", pid=gone())  # pyright: ignore


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    """A study's workers, without those that were killed and not yet waited for (a zombie has no command line)."""
    found = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "cohort.harness.study.worker" in child.cmdline():
                found.append(child)
    return found


def run(
    study: StudySpec, runs: Path, on_status: Callable[[StudyStatus], None] | None = None, *, workers: int = 2,
    **options: Any,
) -> StudyStatus:  # fmt: skip
    """Run a study of fakes to its end."""
    options = {"execute": fake_trials.EXECUTE, **options}
    return run_study(study, runs, workers=workers, command="cmd", on_status=on_status, **options)


def at_work(status: StudyStatus) -> int:
    """The number of trials that run and have done a step; with the file `hold` they then wait."""
    return sum(trial.state == "running" and trial.done >= 1 for trial in status.trials)


def once_at_work(act: Callable[[], object], least: int = 1) -> Callable[[StudyStatus], None]:
    """Does `act` the first time that so many trials are at work."""
    left = [act]

    def look(status: StudyStatus) -> None:
        if left and at_work(status) >= least:
            left.pop()()

    return look


def executions(runs: Path) -> list[str]:
    """The trial folder of each time that a trial was begun or continued."""
    file = runs / "executions.log"
    return [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []


def completions(queue: Queue) -> Counter[tuple[str, int]]:
    """(arm, seed) -> number of its attempts that are complete."""
    attempts = queue._read().by_key
    return Counter(key for key, tried in attempts.items() for t in tried if t.state.name == "COMPLETE")


def check_once_each(queue: Queue) -> None:
    """Every (arm, seed) has exactly one attempt that is complete."""
    assert queue.status().counts() == {"complete": len(queue.plan.keys)}
    assert completions(queue) == Counter(queue.plan.keys)


def check_as_undisturbed(study: StudySpec, runs: Path, url: str | None = None) -> None:
    """Every (arm, seed) is complete once; its files and the record have each step once, as an undisturbed fake logs."""
    queue = open_queue(study, runs, url)
    check_once_each(queue)
    record = {(trial.arm, trial.seed): trial for trial in read_study(runs, study.name).trials}
    assert record.keys() == set(queue.plan.keys)
    for key, trial in record.items():
        spec = queue.plan.spec(key)
        wanted = [(step, fake_trials.accuracy(spec, step)) for step in range(spec.steps + 1)]
        events = read_events(queue.plan.directory(key) / "events.jsonl")
        assert [(e["step"], e["values"][METRIC]) for e in events if e["type"] == "metrics"] == wanted
        assert (trial.state, trial.history[METRIC]) == ("complete", wanted)
        assert [row.step for row in trial.samples] == list(range(1, spec.steps + 1))
