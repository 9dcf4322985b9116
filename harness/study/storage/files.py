"""The storage in files: Optuna's journal, a file lock, lease files and `study.json` in the study's folder."""

import os
import platform
import time
import uuid
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from harness.files import file_lock, read_json, write_json
from harness.study.storage.base import Lease, Storage, is_alive, this_process
from harness.tracking.run_log import read_progress

BEAT_SECONDS = 2.0
GRACE_SECONDS = 60.0  # how old the last heartbeat of a worker on another machine may be


class LocalStorage(Storage):
    """Files in the study's folder, for the processes of one machine or of one shared disk."""

    def __init__(self, folder: Path) -> None:
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
        return {directory for directory in directories if is_held(directory)}

    def progress(self, directories: Collection[Path]) -> dict[Path, dict[str, Any]]:
        found = {directory: read_progress(directory) for directory in directories}
        return {directory: shown for directory, shown in found.items() if shown}

    def read_document(self) -> dict[str, Any] | None:
        return read_json(self._document) if self._document.exists() else None

    def write_document(self, document: Mapping[str, Any]) -> None:
        write_json(self._document, document)


class FileLease(Lease):
    """A file in a trial's folder that names the worker of the trial, touched every few seconds."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "lease"
        self._token = uuid.uuid4().hex
        directory.mkdir(parents=True, exist_ok=True)
        write_json(self._file, {"token": self._token, "host": platform.node(), **this_process()})
        super().__init__(f"the lease {self._file}", BEAT_SECONDS)

    def _renew(self) -> bool:
        if ours := self._is_ours():
            os.utime(self._file)
        return ours

    def _give_up(self) -> None:
        if self._is_ours():
            self._file.unlink()

    def _is_ours(self) -> bool:
        try:
            return read_json(self._file)["token"] == self._token
        except FileNotFoundError:
            return False
        except (ValueError, KeyError):  # torn by the disk, for a worker who takes over writes a whole one
            return True


def is_held(directory: Path) -> bool:
    """Whether a living worker holds the lease of a trial's folder.

    On this machine the process decides (a suspended one is alive). The age of the last heartbeat decides for another
    machine, if another process has got the process id, and for a lease that cannot be read.
    """
    file = directory / "lease"
    try:
        age = time.time() - file.stat().st_mtime
        alive = _holder_lives(file)
    except FileNotFoundError:
        return False
    return age < GRACE_SECONDS if alive is None else alive


def _holder_lives(file: Path) -> bool | None:
    """Whether the process that a lease names lives; None if only the lease's age can tell."""
    try:
        holder = read_json(file)
        return is_alive(holder["pid"], holder["started"]) if holder["host"] == platform.node() else None
    except (ValueError, KeyError):  # torn
        return None


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
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if file.read(1) not in (b"", b"\n"):
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        self._lock.release()
