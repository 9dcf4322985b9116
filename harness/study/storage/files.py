"""Stores a queue in the study's folder: Optuna's journal, a file lock, lease files and `study.json`."""

import os
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from ...base.files import file_lock, read_json, write_json
from ...record.run import read_progress
from .base import Lease, Storage, is_alive, this_process

BEAT_SECONDS = 2.0
GRACE_SECONDS = 60.0  # how long a worker on another machine may be watched without a heartbeat
LOOK_SECONDS = 15.0  # most seconds that count between two looks: a watcher that slept has watched nothing


class LocalStorage(Storage):
    """Files in the study's folder, for the processes of one machine or of one shared disk.

    `clock` gives monotonic seconds. It is the only clock: times of other machines are never compared.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Folder -> the last heartbeat of its worker, when this process looked, seconds watched without a new heartbeat.
        self._watched: dict[Path, tuple[tuple[int, int], float, float]] = {}
        self._journal, self._lock = folder / "optuna.journal", folder / "lock"
        self._document = folder / "study.json"
        self.place = f"'{folder}'"
        self.document_place = f"'{self._document}'"

    def exists(self) -> bool:
        return self._journal.exists()

    @cached_property
    def optuna(self) -> BaseStorage:
        return JournalStorage(JournalFileBackend(str(self._journal), lock_obj=_JournalLock(self._journal)))

    def lock(self) -> AbstractContextManager[object]:
        return file_lock(self._lock)

    def take_lease(self, directory: Path) -> Lease | None:
        return FileLease(directory)

    def held(self, directories: Collection[Path]) -> set[Path]:
        return {directory for directory in directories if self._is_held(directory)}

    def progress(self, directories: Collection[Path]) -> dict[Path, dict[str, Any]]:
        return {directory: read_progress(directory) for directory in directories}

    def read_document(self) -> dict[str, Any] | None:
        return read_json(self._document) if self._document.exists() else None

    def write_document(self, document: Mapping[str, Any]) -> None:
        write_json(self._document, document)

    def _is_held(self, directory: Path) -> bool:
        """Whether a living worker holds the lease of a trial's folder.

        On this machine the process decides (a suspended one is alive). The heartbeats that this process sees decide for
        another machine, for a process id that now belongs to another process, and for a lease that cannot be read.
        """
        file, alive = directory / "lease", None
        try:
            with suppress(ValueError, KeyError, TypeError):  # torn
                holder = read_json(file)
                alive = is_alive(holder["host"], holder["pid"], holder["started"])
            stat = file.stat()  # after the file was opened: a shared disk is asked then, and not a cache
        except FileNotFoundError:
            alive, stat = False, None
        if alive is not None or stat is None:
            self._watched.pop(directory, None)
            return bool(alive)
        now, mark = self._clock(), (stat.st_ino, stat.st_mtime_ns)
        before, looked, silence = self._watched.get(directory, (mark, now, 0.0))
        silence = silence + min(now - looked, LOOK_SECONDS) if mark == before else 0.0
        self._watched[directory] = mark, now, silence
        return silence < GRACE_SECONDS


class FileLease(Lease):
    """A file in a trial's folder that names the worker of the trial, touched every few seconds."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "lease"
        self._token = uuid.uuid4().hex
        directory.mkdir(parents=True, exist_ok=True)
        write_json(self._file, {"token": self._token, **this_process()})
        super().__init__(f"the lease {self._file}", BEAT_SECONDS, self._touch, self._remove)

    def _touch(self) -> bool:
        if ours := self._is_ours():
            os.utime(self._file)
        return ours

    def _remove(self) -> None:
        if self._is_ours():
            self._file.unlink()

    def _is_ours(self) -> bool:
        try:
            return read_json(self._file)["token"] == self._token
        except FileNotFoundError:
            return False
        except (ValueError, KeyError):  # torn by the disk, because a worker who takes over writes a complete one
            return True


class _JournalLock(JournalFileOpenLock):
    """The journal's lock. The operating system frees it when its holder dies, and taking it cuts off half a line that a
    killed writer left at the end."""

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal))
        self._journal = journal
        self._lock = file_lock(journal.with_name(journal.name + ".lock"))

    def acquire(self) -> bool:
        self._lock.acquire()
        with self._journal.open("rb+") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            if file.read(1) not in (b"", b"\n"):
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        self._lock.release()
