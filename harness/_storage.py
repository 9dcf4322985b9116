"""Where the queue of a study lives: Optuna's storage, one lock, the leases of running trials, and the study's document.

By default all four are files in the study's folder: Optuna's journal, a file lock, a lease file in each trial's folder,
`study.json`. With `--storage postgresql://...` they are in a database (`_postgres.py`), so that hosts without a common
disk can share a study. `open_storage` chooses; nothing else knows which of the two it has.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from harness import tracking
from harness._files import file_lock, read_json, write_json
from harness._lease import FileLease, is_held


class StorageUnavailable(ConnectionError):
    """The storage cannot be reached now."""


class Lease(Protocol):
    """That this process runs a trial; it ends the process at once where another one has taken over."""

    def release(self) -> None: ...


class Storage(ABC):
    """What the queue of one study asks of the place where it lives. Trials are named by their folders' names."""

    place: str  # in words, without a password
    document_place: str

    def check(self) -> None:  # noqa: B027
        """StorageUnavailable where it cannot be used; writes nothing."""

    def errors(self) -> AbstractContextManager[None]:
        """Turns the loss of a connection inside into StorageUnavailable: what was asked can be asked again."""
        return nullcontext()

    @abstractmethod
    def exists(self) -> bool:
        """Whether anything was ever written for this study; asks without writing."""

    @cached_property
    @abstractmethod
    def optuna(self) -> BaseStorage:
        """Optuna's storage; writes only under `lock()`."""

    @abstractmethod
    def lock(self) -> AbstractContextManager[object]:
        """Mutual exclusion between all processes of the study, on all hosts; ends when its holder dies."""

    @abstractmethod
    def take_lease(self, directory: Path) -> Lease | None:
        """The lease of the trial in `directory`, ours from now on; None where a living worker has it."""

    @abstractmethod
    def held(self, directories: Collection[Path]) -> set[Path]:
        """Those of the trials' folders whose lease a living worker holds."""

    @abstractmethod
    def progress(self, directories: Collection[Path]) -> dict[Path, dict[str, Any]]:
        """What each trial last said of itself (`tracking.read_progress`); trials that said nothing are absent."""

    @abstractmethod
    def read_document(self) -> dict[str, Any] | None:
        """The document of the study as it was started (digest and spec); None where it was not."""

    @abstractmethod
    def write_document(self, document: Mapping[str, Any]) -> None: ...


class LocalStorage(Storage):
    """Files in the study's folder, for the processes of one machine or of one shared disk."""

    def __init__(self, folder: Path) -> None:
        self._journal, self._lock, self._document = folder / "optuna.journal", folder / "lock", folder / "study.json"
        self.place = f"'{folder}'"
        self.document_place = f"'{self._document}'; delete '{folder}' to start anew"

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
        found = {directory: tracking.read_progress(directory) for directory in directories}
        return {directory: shown for directory, shown in found.items() if shown}

    def read_document(self) -> dict[str, Any] | None:
        return read_json(self._document) if self._document.exists() else None

    def write_document(self, document: Mapping[str, Any]) -> None:
        write_json(self._document, document)


def open_storage(folder: Path, name: str, url: str | None = None) -> Storage:
    """The storage of the study `name`, whose folder on this host is `folder`; connects to nothing yet.

    ValueError for a URL that is not a PostgreSQL one, or without its driver.
    """
    if not url:
        return LocalStorage(folder)
    from harness._postgres import PostgresStorage

    return PostgresStorage(name, url)


def masked(url: str) -> str:
    """The URL without its password, however it is written."""
    url = url.replace("+psycopg", "")
    return re.sub(r"(password=)[^&]*", r"\1***", re.sub(r"(//[^:/@]*):.*@", r"\1:***@", url))


class _JournalLock(JournalFileOpenLock):
    """The journal's lock: freed by the operating system when its holder dies, and on taking it half a line that a
    killed writer left at the end is cut off."""

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal))
        self._journal = journal
        self._lock = file_lock(journal.with_name(journal.name + ".lock"))

    def acquire(self) -> bool:
        self._lock.acquire()
        with self._journal.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            if size and (file.seek(size - 1), file.read(1))[1] != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        self._lock.release()
