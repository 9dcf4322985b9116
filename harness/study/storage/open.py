"""Opens the storage that a study's URL names."""

from pathlib import Path

from harness.study.storage.base import Storage
from harness.study.storage.files import LocalStorage


def open_storage(folder: Path, name: str, url: str | None = None) -> Storage:
    """The storage of the study `name`, whose folder on this host is `folder`; connects to nothing yet.

    ValueError for a URL that is not a PostgreSQL one, or without its driver.
    """
    if not url:
        return LocalStorage(folder)
    from harness.study.storage.postgres import PostgresStorage

    return PostgresStorage(name, url)
