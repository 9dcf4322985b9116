"""Recognises errors of a disk that takes no more, full or gone, and writes the message for them."""

import errno
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

EXIT_STATUS = errno.ENOSPC  # of a worker process that met a full disk
UNFIT = 2  # of one whose machine cannot run the study
_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ESTALE)
# Libraries that write below Python (SQLite, safetensors, torch) have words instead of a number.
_WORDS = ("No space left on device", "Disk quota exceeded", "disk is full", "PytorchStreamWriter failed writing file",
          "File too large")  # fmt: skip


class DiskFull(OSError):
    """A disk takes no more; the message says which, and what to do."""


def disk_full(error: BaseException, folder: Path) -> DiskFull | None:
    """The error to raise instead if this one, or one that it came from, tells of a full disk.

    `folder` is where its process writes, for an error that names no file.
    """
    for one in chain(error):
        if isinstance(one, DiskFull):
            return one
        if getattr(one, "errno", None) in _ERRNOS or any(words in str(one) for words in _WORDS):
            named = getattr(one, "filename", None)
            return full(Path(named).absolute().parent if isinstance(named, str) else folder)
    return None


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error and the errors that caused it."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__


def full(folder: Path) -> DiskFull:
    """The error for a full disk below `folder`."""
    folder = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    free, most = shutil.disk_usage(folder).free, resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    limit = "" if most == resource.RLIM_INFINITY else f", and a file has at most {most:,} bytes by `ulimit -f`"
    return DiskFull(
        f"a disk is full, read-only or away, or a quota used up ('{folder}' has {free:,} bytes free{limit}); free some "
        "space or mount it again, then the same command continues from the last checkpoints; no finished result is lost"
    )
