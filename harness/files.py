"""Writes and locks small files, so that neither a reader nor a crash ever sees half of one."""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

FORMAT = 1  # of every JSON file of a runs folder


def file_lock(path: Path) -> FileLock:
    """A lock between processes, for `with`; the operating system frees it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path)


def write_json(file: Path, document: Mapping[str, Any], *, sync: bool = True) -> None:
    """Replace a JSON file as a whole, so that a reader or a crash never sees half of it; adds `format`."""
    write_text(file, json.dumps(strict({"format": FORMAT, **document}), indent=1), sync=sync)


def read_json(file: Path) -> dict[str, Any]:
    """A file that `write_json` wrote. ValueError for one of another format."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"{file} is not valid JSON ({error}); restore it from a copy, or use another name or another --runs"
        ) from None
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise ValueError(
            f"{file} must have format {FORMAT}, got {found!r}: it was written by another version of Cohort; "
            "use that version, or another folder with --runs"
        )
    return document


def strict(value: Any) -> Any:
    """The same JSON-like value with non-finite numbers as "nan", "inf", "-inf", which strict JSON can hold."""
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def publish_folder(folder: Path) -> Iterator[Path]:
    """A new folder to fill beside `folder`, synced and moved there at the end: a folder with that name is whole.

    It replaces the old folder. One process at a time may publish the same folder; the next one removes the remains of a
    killed one.
    """
    partial = folder.with_name(f".partial-{folder.name}")
    for leftover in folder.parent.glob(f"{partial.name}*"):
        shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    yield partial
    for file in (f for f in partial.rglob("*") if f.is_file()):
        sync(file)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    sync(folder.parent)


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(file: Path, text: str, *, sync: bool = True) -> None:
    """Replace a text file as a whole."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        if sync:
            os.fsync(stream.fileno())
    partial.replace(file)
