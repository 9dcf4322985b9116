"""Whether an error says that a disk is full, and the sentence for it: no writer can do anything else about that."""

import errno
import shutil
from pathlib import Path

EXIT_STATUS = errno.ENOSPC  # of a worker process that met a full disk
_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
# Libraries that write below Python (SQLite, safetensors, torch) have words instead of a number.
_WORDS = ("No space left on device", "Disk quota exceeded", "disk is full", "PytorchStreamWriter failed writing file")


class DiskFull(OSError):
    """A disk is full; the message says which, and what to do."""


def disk_full(error: BaseException, folder: Path) -> DiskFull | None:
    """The error to raise instead if this one, or one that it came from, tells of a full disk.

    `folder` is where its process writes, for an error that names no file.
    """
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, DiskFull):
            return chain
        if getattr(chain, "errno", None) in _ERRNOS or any(words in str(chain) for words in _WORDS):
            named = getattr(chain, "filename", None)
            return full(Path(named).absolute().parent if isinstance(named, str) else folder)
        chain = chain.__cause__ or chain.__context__
    return None


def full(folder: Path) -> DiskFull:
    """The error for a full disk below `folder`."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    return DiskFull(
        f"a disk is full, or a quota used up ('{folder}' has {free:,} bytes free); free some space, then the same "
        "command continues from the last checkpoints: nothing that was finished is lost"
    )
