"""Keeps the workers of a pool at work, or a single worker that a scheduler's job or a cluster's pod runs.

The single one starts the same worker process as a pool, restarts it when it dies, and ends when no trial is left that
it could take. It ignores trials that other workers run.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..base.machine import in_group
from ..mirror.address import TRACKING_URI, remote_uri
from ..mirror.follow import mirrored
from ..record.status import StudyStatus
from ..record.study import keep_document
from .queue import Queue, open_queue
from .storage.base import StorageUnavailable
from .worker import EXECUTE, MAX_WAIT_SECONDS, STORAGE, log, worker_main
from .workers import WorkerPool

HINT = "; `cohort study run NAME --workers 0` starts one for workers like this one"
PATIENCE_SECONDS = 90.0  # longer than the lease of a dead worker, so that its trial can be taken over


def work(
    name: str,
    runs: Path | str,
    *,
    storage: str | None = None,
    execute: str = EXECUTE,
    patience: float = PATIENCE_SECONDS,
    on_status: Callable[[StudyStatus], None] | None = None,
) -> tuple[StudyStatus, Sequence[int]]:
    """Run trials of a started study, one after another, until none is left to take or a signal asks to stop; returns
    the study's progress and the signals that came.

    ValueError for a study that was not started. `run_study` explains the other arguments.
    """
    runs = Path(runs).resolve()
    if in_group():  # of torch's agent, which starts it again: this process is the worker, or follows it
        worker_main(name, runs, execute=execute, storage=storage, patience=patience)
        return open_queue(name, runs, storage, HINT).status(), ()
    environment = {STORAGE: storage or "", TRACKING_URI: remote_uri() or ""}
    queue = open_queue(name, runs, storage, HINT)
    options = {"name": name, "runs": str(runs), "execute": execute, "patience": patience}
    pool = WorkerPool(options, 1, queue.plan.folder / "logs", environment, queue.plan.study.devices)
    pool.prefix = f"worker-{socket.gethostname()}-{os.getpid()}"
    keep_document(queue.plan.folder, queue.storage.read_document() or {})  # this host may share only a database
    with pool.running(scheduled=True) as stop, mirrored(runs, queue.plan.folder):
        return supervise(pool, queue, on_status, leaves=True), stop.signals


def supervise(
    pool: WorkerPool, queue: Queue, on_status: Callable[[StudyStatus], None] | None, *, leaves: bool = False
) -> StudyStatus:
    """Keep the workers running and the caller informed until nothing is left to do; returns the study's progress.

    If the storage does not answer, the workers continue, and are watched again when it answers. A pool that `leaves`
    does not restart workers for trials that others run.
    """
    begun = False
    while True:
        began = time.monotonic()
        try:
            alive, status = pool.collect(queue.num_claims()), queue.status()
            if on_status is not None:
                on_status(status)
        except StorageUnavailable as error:
            if not pool.collect(None) and pool.stop.is_set():
                raise
            log.warning("%s; the workers continue", error)
            pool.rest(MAX_WAIT_SECONDS)
            continue
        open_trials = [trial for trial in status.trials if trial.is_open]
        unfinished = len(open_trials) + status.to_come
        waiting = unfinished - len([trial for trial in open_trials if trial.state == "running"])
        if not alive and (pool.stop.is_set() or not (waiting if leaves and begun else unfinished)):
            return status
        pool.fill(unfinished, waiting)
        spent = time.monotonic() - began if begun else 0.0  # the first look also measures this machine
        begun = True
        pool.rest(min(9 * spent, MAX_WAIT_SECONDS))  # a large study is watched less often
