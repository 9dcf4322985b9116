"""The place of a study's queue: Optuna's storage, one lock, the leases of running trials, and the study's document.

By default all four are files in the study's folder (`files.py`). With `--storage postgresql://...` they are in a
database (`postgres.py`), and hosts without a common disk can share a study. Only `open_storage` knows which one it is.
"""

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
    """The right of this process to run a trial; it ends the process at once if another one has taken over."""

    def release(self) -> None: ...


class Storage(ABC):
    """The needs of one study's queue. A trial is known by the name of its folder."""

    place: str  # in words, without a password
    document_place: str

    def check(self) -> None:  # noqa: B027
        """StorageUnavailable if it cannot be used; writes nothing."""

    def errors(self) -> AbstractContextManager[None]:
        """Turns the loss of a connection inside into StorageUnavailable: the same can be asked again."""
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
        """The lease of the trial in `directory`, ours from now on; None if a living worker has it."""

    @abstractmethod
    def held(self, directories: Collection[Path]) -> set[Path]:
        """The trials' folders whose lease a living worker holds."""

    @abstractmethod
    def progress(self, directories: Collection[Path]) -> dict[Path, dict[str, Any]]:
        """The last progress that each trial reported (`read_progress`); trials without any are absent."""

    @abstractmethod
    def read_document(self) -> dict[str, Any] | None:
        """The document of the study as it was started (digest and spec); None if it was not."""

    @abstractmethod
    def write_document(self, document: Mapping[str, Any]) -> None: ...


def masked(url: str) -> str:
    """The URL without its password, however it is written."""
    url = url.replace("+psycopg", "")
    return re.sub(r"(password=)[^&]*", r"\1***", re.sub(r"(//[^:/@]*):.*@", r"\1:***@", url))
