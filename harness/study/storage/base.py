"""Where the queue of a study lives: Optuna's storage, one lock, the leases of running trials, and the study's document.

By default all four are files in the study's folder: Optuna's journal, a file lock, a lease file in each trial's folder,
`study.json`. With `--storage postgresql://...` they are in a database (`_postgres.py`), so that hosts without a common
disk can share a study. `open_storage` chooses; nothing else knows which of the two it has.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from optuna.storages import BaseStorage


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


def masked(url: str) -> str:
    """The URL without its password, however it is written."""
    url = url.replace("+psycopg", "")
    return re.sub(r"(password=)[^&]*", r"\1***", re.sub(r"(//[^:/@]*):.*@", r"\1:***@", url))
