"""Writes, locks and hashes files and folders, so that no reader takes half a file for a complete one, even after a
crash."""

import hashlib
import json
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from filelock import FileLock

FORMAT = 3  # of every JSON file of a runs folder: see docs/record.md
MANIFEST = "manifest.json"
_SUM = ',\n "sum": "'
LARGE = 2**26  # bytes from which a file's hash is kept on disk
SETTLED_SECONDS = 2.0  # a file that changed less long ago could change again within one tick of its clock
_hashes: dict[tuple[str, int, int, int, int], str] = {}


def file_lock(path: Path) -> "FileLock":
    """A lock between processes, for `with`; the operating system frees it when its holder dies."""
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path)


def write_json(file: Path, document: Mapping[str, Any], *, sync: bool = True) -> None:
    """Replace a JSON file as a whole, so that a reader or a crash never sees half of it; adds `format` and `sum`."""
    content = json.dumps(strict({"format": FORMAT, **document}), indent=1).removesuffix("\n}")
    write_text(file, f'{content}{_SUM}{text_sum(content.encode())}"\n}}', sync=sync)


def read_json(file: Path) -> dict[str, Any]:
    """The document that `write_json` wrote, without format and sum. ValueError for another format or content."""
    try:
        document = json.loads(text := file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"{file} is not valid JSON ({error}); restore it from a copy, or use another `name` or `runs` folder"
        ) from None
    found = document.pop("format", None) if isinstance(document, dict) else None
    if found != FORMAT:
        raise ValueError(
            f"{file} must have format {FORMAT}, got {found!r}: it was written by another version of Cohort; "
            "use that version, or another folder with --runs"
        )
    content = text.rpartition(_SUM)[0]
    if document.pop("sum", None) is None or text != f'{content}{_SUM}{text_sum(content.encode())}"\n}}':
        raise ValueError(f"{file} was changed after it was written: its checksum does not match; restore a copy")
    return document


def text_sum(content: bytes) -> str:
    """The first 16 hex digits of the SHA-256: it shows damage, not forgery."""
    return hashlib.sha256(content).hexdigest()[:16]


def strict(value: Any) -> Any:
    """The same JSON-like value with non-finite numbers as "nan", "inf", "-inf", which strict JSON can hold."""
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def partial_folder(folder: Path) -> Path:
    """Where a folder is filled before it is published."""
    return folder.with_name(f".partial-{folder.name}")


@contextmanager
def publish_folder(folder: Path) -> Iterator[Path]:
    """A new folder to fill beside `folder`, synced and moved there at the end, so that `folder` is always complete.

    It replaces the old folder. One process at a time may publish the same folder; the next one removes the remains of a
    killed one.
    """
    assert folder.name not in ("", ".."), "a folder to replace has a name of its own"
    partial = partial_folder(folder)
    for leftover in folder.parent.glob(f"{partial.name}*"):
        shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    yield partial
    for path in (*partial.rglob("*"), partial):  # a folder too: it holds the names of its files
        sync(path)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    sync(folder.parent)


def write_hashed(file: Path, write: Callable[[Any], object]) -> str:
    """The SHA-256 of a new file, computed while `write` fills the stream that it gets."""
    digest = hashlib.sha256()
    with file.open("wb") as stream:

        def put(data: Any) -> int:
            digest.update(data)
            return stream.write(data)

        write(SimpleNamespace(write=put, flush=stream.flush))
    return digest.hexdigest()


def write_manifest(
    folder: Path, name: str = MANIFEST, *, known: Mapping[str, str] = {}, **facts: Any
) -> dict[str, str]:
    """The SHA-256 of every file of a folder, the `known` ones as given; written with `facts` as the file `name`."""
    files = {file: known.get(file) or sha256(folder / file) for file in _names(folder) if file != name}
    (folder / name).write_text(json.dumps({"format": FORMAT, "files": files, **facts}), encoding="utf-8")
    return files


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None unless the folder holds exactly the files that it names, unchanged."""
    with suppress(ValueError):
        return whole_manifest(folder)
    return None


def whole_manifest(folder: Path, name: str = MANIFEST) -> dict[str, Any]:
    """The same; ValueError that names the first file that differs."""
    file, digests = name, {}
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        manifest = json.loads((folder / name).read_text(encoding="utf-8"))
        digests, here = {**manifest["files"]}, {*_names(folder)} - {name}
        if manifest["format"] == FORMAT:
            for file in sorted({*digests, *here}):
                if file not in here or sha256(folder / file) != digests.get(file):
                    break
            else:
                return manifest
    words = "is torn, altered or missing" if file in (name, *digests) else "was added"
    raise ValueError(f"'{folder / file}' {words}")


def _names(folder: Path) -> list[str]:
    """The files of a folder, at any depth, without hidden ones."""
    files = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    return sorted(file.as_posix() for file in files if not any(part.startswith(".") for part in file.parts))


def sha256(file: Path, notes: Path | None = None) -> str:
    """The SHA-256 of a file, as hex digits; ValueError for one that changes meanwhile.

    A file is not read again as long as its inode, size and times stay: its modification time can be set back, its
    change time cannot. The folder `notes` keeps the hashes of large files for other processes.
    """
    stamp = _stamp(file)
    note = notes / hashlib.sha256(repr(stamp).encode()).hexdigest() if notes and stamp[2] >= LARGE else None
    noted = note.read_text(encoding="utf-8", errors="replace") if note is not None and note.is_file() else ""
    noted = noted if re.fullmatch("[0-9a-f]{64}", noted) else None
    digest = _hashes.get(stamp) or noted
    if digest is None:
        settled = time.time_ns() - max(stamp[3:]) > SETTLED_SECONDS * 1e9
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if _stamp(file) != stamp:
            raise ValueError(f"'{file}' changes while it is read; wait until it is complete, then start again")
        if not settled:
            return digest
    _hashes[stamp] = digest
    if note is not None and noted is None:
        sync(file)  # or else a power cut could change the content behind the same times
        note.parent.mkdir(parents=True, exist_ok=True)
        write_text(note, digest)
    return digest


def _stamp(file: Path) -> tuple[str, int, int, int, int]:
    """The absolute path of a file, its inode, size in bytes, modification time and change time (ns)."""
    status = file.stat()
    return str(file.absolute()), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(file: Path, text: str, *, sync: bool = True) -> None:
    """Replace a text file as a whole.

    The new file is safe on disk, its name only after `sync` of the folder: a power cut may bring the old one back.
    """
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.{os.getpid()}")
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        if sync:
            os.fsync(stream.fileno())
    partial.replace(file)


def sweep(folder: Path) -> None:
    """Delete the partial files that dead processes left in a folder (`write_text`); living processes keep theirs."""
    import psutil

    for partial in folder.glob(".*.*"):
        pid = partial.name.rpartition(".")[2]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            partial.unlink(missing_ok=True)
