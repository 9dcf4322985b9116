"""Follows records and copies them to MLflow: beside a live run or study, and later all that a runs folder has.

One process at a time copies a record: it holds `mlflow.lock` in its folder. A store that is away only delays the copy.
"""

import logging
import math
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path

from filelock import Timeout

from ..base.disk import disk_full
from ..base.files import file_lock
from ..record.run import INFO
from ..record.study import STUDY
from .address import MLFLOW, is_outage, mirrors, remote_uri, store_name
from .others import DRAIN_SECONDS, FOLLOW_SECONDS, followed
from .store import answered, connect, import_mlflow, moved_from
from .studies import StudyMirror
from .writer import RunMirror

RETRY_SECONDS = 5.0
SILENT_SECONDS = 2.0  # after which it says so
log = logging.getLogger(__name__)


class RecordMirror:
    """The copy of one record: a run, or a study with its trials."""

    def __init__(self, runs: Path, folder: Path) -> None:
        self.runs, self.folder = runs, folder
        self._study = StudyMirror(runs, folder) if (folder / STUDY).exists() else None
        self._member = cache(partial(RunMirror, runs))  # by the folder of the run
        self._unreadable: dict[Path, str] = {}

    def copy(self, seconds: float = math.inf) -> int:
        """Copy what is new; no further run after so many seconds, and returns how many runs that leaves out. Raises
        MLflow's error if the store refuses it, ConnectionError if it does not answer."""
        over = time.monotonic() + seconds
        client = connect(self.runs)
        if self._study is None:
            self._member(self.folder).copy(client)
            return 0
        parent = self._study.copy(client)
        files = sorted(self.folder.glob(f"trials/*/{INFO}"))
        for number, file in enumerate(files):
            if time.monotonic() > over:
                return len(files) - number
            member = self._member(file.parent)
            try:
                member.copy(client, parent)
            except ValueError as error:  # of its record; the others are copied
                if self._unreadable.get(file.parent) != str(error):
                    log.warning("'%s' is not copied to MLflow: %s", file.parent.name, error)
                    self._unreadable[file.parent] = str(error)
        self._study.finish(client)
        return 0


@contextmanager
def mirrored(runs: Path, folder: Path) -> Iterator[None]:
    """Inside the context each mirror copies the record in a folder as it grows; at the end it copies the rest."""
    runs, folder, names = runs.resolve(), folder.resolve(), mirrors()
    with ExitStack() as stack:
        if MLFLOW in names:
            stack.enter_context(_to_mlflow(runs, folder))
        stack.enter_context(followed([name for name in names if name != MLFLOW], runs, folder))
        yield


@contextmanager
def _to_mlflow(runs: Path, folder: Path) -> Iterator[None]:
    """Inside the context a thread copies the record to MLflow.

    Errors of the store never reach what runs inside: one line says that the store does not answer, and one at the end
    if it lacks something after DRAIN_SECONDS, which `cohort ui` copies later.
    """
    import_mlflow()  # here: two threads that import large packages at the same time can fail
    stop, give_up = threading.Event(), threading.Event()
    errors: list[Exception] = []  # since the last copy that succeeded
    thread = threading.Thread(target=_follow, args=(runs, folder, stop, give_up, errors), name="mlflow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        store = store_name(runs)
        thread.join(SILENT_SECONDS)
        if thread.is_alive():
            log.warning("waiting up to %.0f s for %s to take all of '%s'", DRAIN_SECONDS, store, folder.name)
            thread.join(DRAIN_SECONDS)
        if thread.is_alive() or errors:
            give_up.set()
            log.warning("%s has not received all of '%s' (%s); everything is in '%s', and `cohort ui` copies it later",
                        store, folder.name, errors[-1] if errors else "slow", folder)  # fmt: skip


def _follow(runs: Path, folder: Path, stop: threading.Event, give_up: threading.Event, errors: list[Exception]) -> None:
    """Copy a record until all is copied after `stop`, or until `give_up`."""
    lock, mirror = file_lock(folder / "mlflow.lock"), None
    while not give_up.is_set():
        last = stop.is_set()
        try:
            if mirror is None and any((folder / name).exists() for name in (STUDY, INFO)):
                lock.acquire(timeout=0)
                mirror = RecordMirror(runs, folder)
            if mirror is not None:
                mirror.copy()
        except Timeout:  # another process copies the record
            pass
        except Exception as error:  # kept, retried, and reported at the end: the run goes on without the store
            if not errors and remote_uri() is not None and is_outage(error):
                log.warning("%s; '%s' goes on, and what the store misses is copied when it returns",
                            error, folder.name)  # fmt: skip
            errors[:] = [error]
            if last and disk_full(error, folder) is not None:
                break
            (give_up if last else stop).wait(RETRY_SECONDS)
            continue
        errors.clear()
        if last:
            break
        stop.wait(FOLLOW_SECONDS)
    lock.release()


def catch_up(runs: Path, folder: Path | None = None) -> None:
    """Copy all records of a runs folder, or that in `folder` for DRAIN_SECONDS, if nobody does; warns of the rest."""
    runs = runs.resolve()
    try:
        if moved_from(runs) is not None:  # MLflow would write there
            return
    except sqlite3.DatabaseError as error:
        log.warning("%s cannot be read (%s); the records are whole without it", store_name(runs), error)
        return
    import_mlflow()
    found = [file.parent for files in (f"studies/*/{STUDY}", f"*/*/{INFO}") for file in sorted(runs.glob(files))]
    in_parts, before = folder is not None or remote_uri() is not None, math.inf
    for one in found if folder is None else [folder.resolve()]:

        def copy(one: Path = one) -> int:  # the lock is held as long as it copies, whoever waits for it
            with file_lock(one / "mlflow.lock").acquire(timeout=0):
                return RecordMirror(runs, one).copy(DRAIN_SECONDS if in_parts else math.inf)

        try:
            while 0 < (left := answered(copy, 2 * DRAIN_SECONDS if remote_uri() else None)) < before and folder is None:
                before = left  # as long as a server takes some of it
            if left:
                log.warning("%s has not received %d runs of '%s' after %.0f s; everything is in '%s', and `cohort ui` "
                            "copies it later", store_name(runs), left, one.name, DRAIN_SECONDS, one)  # fmt: skip
        except Timeout:
            continue
        except Exception as error:  # of MLflow or a library below it; the record stays whole
            log.warning("%s lacks some of '%s': %s", store_name(runs), one.name, error)
            if is_outage(error):
                return
