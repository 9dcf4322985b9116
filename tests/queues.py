"""Queues of studies that were just started, and what a kill leaves of a claim: what the tests of studies share."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil
from cohort.harness.ground.files import read_json, write_json
from cohort.harness.record.study import study_document
from cohort.harness.spec.study import StudySpec
from cohort.harness.study.plan import Plan
from cohort.harness.study.queue import Claim, Outcome, Queue, open_storage
from cohort.harness.study.storage.files import FileLease

METRIC = "validation/accuracy"
DONE = Outcome("complete", summary={"accuracy_final": 0.5, "seconds": 8.0, "generated_tokens": 100.0},
               metrics={METRIC: 0.5})  # fmt: skip


def open_queue(study: StudySpec, runs: Path, url: str | None = None, kind: type[Queue] = Queue) -> Queue:
    """A queue as another process would open it."""
    plan = Plan(study, runs)
    return kind(plan, open_storage(plan.folder, study.name, url))


def a_queue(study: StudySpec, runs: Path, url: str | None = None, kind: type[Queue] = Queue) -> Queue:
    """The queue of a study that is started, for the first time or again."""
    queue = open_queue(study, runs, url, kind)
    with queue.storage.lock():
        queue.storage.write_document(study_document(study, "cohort study run"))
        queue.retry_failed()
    return queue


def claimed(queue: Queue) -> Claim:
    claim = queue.claim()
    assert claim is not None
    return claim


def gone() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def die(claim: Claim, queue: Queue) -> None:
    """What a kill of its worker leaves of a claim: a lease that names a process which is gone."""
    claim.lease._released.set()  # pyright: ignore
    if isinstance(claim.lease, FileLease):
        file = claim.lease._file
        write_json(file, {**read_json(file), "pid": gone()})
    else:
        queue.storage._execute("UPDATE cohort_leases SET pid = :pid WHERE study = :study", pid=gone())  # pyright: ignore


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    """A study's workers, without those that were killed and not yet waited for (a zombie has no command line)."""
    found = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "cohort.harness.study.worker" in child.cmdline():
                found.append(child)
    return found
