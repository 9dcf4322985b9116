"""Defines the storage of a study's queue: Optuna's storage, one lock, the leases of running trials, and a document.

By default all four are files in the study's folder (`files.py`). With `--storage URL` an extra keeps them in
a database, and hosts without a common disk can share a study. Only `open_storage` depends on the kind.
"""

import logging
import os
import sys
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import psutil
from optuna.storages import BaseStorage

log = logging.getLogger(__name__)


class StorageUnavailable(ConnectionError):
    """The storage cannot be reached now."""


class Lease:
    """The right of this process to run a trial; a thread keeps renewing it, even after a failed connection.

    `renew` writes a heartbeat and tells whether the lease is still ours; `give_up` lets others take it.

    The process ends at once if another one has taken over, because two writers in one folder would corrupt the run.
    """

    def __init__(self, words: str, beat_seconds: float, renew: Callable[[], bool], give_up: Callable[[], None]) -> None:
        self._words, self._beat_seconds, self._renew, self._give_up = words, beat_seconds, renew, give_up
        self._released = threading.Event()
        self._lock = threading.Lock()  # between a heartbeat and the release
        threading.Thread(target=self._beat, name="lease", daemon=True).start()

    def release(self) -> None:
        self._released.set()  # first: without an answer the lease ends by its age
        with self._lock:
            self._give_up()

    def _beat(self) -> None:
        reached = True
        while not self._released.wait(self._beat_seconds):
            try:
                with self._lock:
                    if self._released.is_set():
                        return
                    ours = self._renew()
            except OSError as error:  # the storage, or the shared disk, does not answer
                if reached:
                    log.warning("%s; the run continues", error)
                reached = False
                continue
            if not ours:
                print(f"lost {self._words}: ending at once", file=sys.stderr, flush=True)
                os._exit(3)
            reached = True


@lru_cache(maxsize=1)
def host_id() -> str:
    """A name that two processes share only if they see each other's process ids: the same boot and container.

    Host names are not unique. On a system without such a name each process gets its own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return uuid.uuid4().hex


def this_process() -> dict[str, Any]:
    """The arguments of `is_alive`: machine, process id and start time (seconds since 1970)."""
    return {"host": host_id(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def is_alive(host: str, pid: int, started: float) -> bool | None:
    """Whether a process is alive; None if it is on another machine, or if its id now belongs to another process."""
    if host != host_id():
        return None
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return True if abs(process.create_time() - started) < 2 else None
    except psutil.NoSuchProcess:
        return False


class Storage(ABC):
    """The storage of one study's queue. The name of a trial's folder identifies the trial."""

    place: str  # in words, without a password
    document_place: str

    def check(self) -> None:  # noqa: B027
        """StorageUnavailable if it cannot be used; writes nothing."""

    def errors(self) -> AbstractContextManager[None]:
        """Turns a lost connection inside it into StorageUnavailable; the operation can then be repeated."""
        return nullcontext()

    @abstractmethod
    def exists(self) -> bool:
        """Whether anything was ever written for this study; writes nothing."""

    @cached_property
    @abstractmethod
    def optuna(self) -> BaseStorage:
        """Optuna's storage; writes only under `lock()`."""

    @abstractmethod
    def lock(self) -> AbstractContextManager[object]:
        """Mutual exclusion between all processes of the study, on all hosts; ends when its holder dies."""

    @abstractmethod
    def take_lease(self, directory: Path) -> Lease | None:
        """Take the lease of the trial in `directory`; None if a living worker has it."""

    @abstractmethod
    def held(self, directories: Collection[Path]) -> set[Path]:
        """The trials' folders whose lease a living worker holds."""

    @abstractmethod
    def progress(self, directories: Collection[Path]) -> dict[Path, dict[str, Any]]:
        """The last progress that each trial reported (`read_progress`)."""

    @abstractmethod
    def read_document(self) -> dict[str, Any] | None:
        """The document of the study from its start (digest and spec); None if it was never started."""

    @abstractmethod
    def write_document(self, document: Mapping[str, Any]) -> None: ...

    def remove(self, names: Collection[str]) -> None:  # noqa: B027
        """Delete what lies outside of the study's folder; `names` are the names of its Optuna studies."""
