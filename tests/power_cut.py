"""What a power cut may leave of a folder, at every place where a program writes to it.

A file's content is safe once the file was flushed (fsync), a name once its folder was. What was not flushed may be
there, may be lost, may be half there, or may be zeros where a file kept its length; names may be lost apart from that.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Image = dict[str, bytes | None]  # path -> content, None for a folder
OPERATIONS = ("rename", "replace", "unlink", "rmdir", "mkdir")


class Disk:
    """Follows what happens in a folder and collects all that a power cut might have left of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.images: dict[str, Image] = {}  # by digest
        self._held: dict[int, int] = {}  # inode -> a descriptor: an inode that is held is not given out again
        self._contents: dict[int, bytes] = {}  # that are safe
        self._names: dict[int, dict[str, int]] = {}
        for path in (root, *root.rglob("*")):
            self._note_flush(self._hold(path))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, every flush, rename, removal and new folder of this process is a place for a power cut."""
        genuine = {name: getattr(os, name) for name in (*OPERATIONS, "fsync")}

        def cut_around(operation: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                self.cut()
                result = operation(*args, **kwargs)
                self.cut()
                return result

            return run

        def flush(descriptor: int) -> None:
            self._hold_all()
            self._note_flush(os.fstat(descriptor).st_ino)

        try:
            for name in OPERATIONS:
                setattr(os, name, cut_around(genuine[name]))
            os.fsync = cut_around(flush)
            yield
        finally:
            for name, operation in genuine.items():
                setattr(os, name, operation)
            for descriptor in self._held.values():
                os.close(descriptor)

    def cut(self) -> None:
        """Keep what the disk may hold if the power goes now."""
        self._hold_all()
        for names_safe in (False, True):
            for fate in ("kept", "lost", "half", "zeros"):
                image: Image = {}
                self._look(self.root.stat().st_ino, "", names_safe, fate, image)
                digest = hashlib.sha256(repr(sorted(image.items())).encode()).hexdigest()
                self.images.setdefault(digest, image)

    def _look(self, inode: int, path: str, names_safe: bool, fate: str, image: Image) -> None:
        for name, child in (self._names.get(inode, {}) if names_safe else self._listed(inode)).items():
            if stat.S_ISDIR(os.fstat(self._held[child]).st_mode):
                image[f"{path}{name}"] = None
                self._look(child, f"{path}{name}/", names_safe, fate, image)
            else:
                image[f"{path}{name}"] = self._content(child, fate)

    def _content(self, inode: int, fate: str) -> bytes:
        now, safe = self._read(inode), self._contents.get(inode, b"")
        if fate == "kept" or now == safe:
            return now
        if not now.startswith(safe):  # written over, not appended to
            safe = b""
        half = now[len(safe) : (len(safe) + len(now)) // 2]
        return safe + {"lost": b"", "half": half, "zeros": bytes(len(now) - len(safe))}[fate]

    def _note_flush(self, inode: int) -> None:
        if inode in self._held and stat.S_ISDIR(os.fstat(self._held[inode]).st_mode):
            self._names[inode] = self._listed(inode)
        elif inode in self._held:
            self._contents[inode] = self._read(inode)

    def _hold_all(self) -> None:
        for path in (self.root, *self.root.rglob("*")):
            self._hold(path)

    def _hold(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)
        return inode

    def _listed(self, inode: int) -> dict[str, int]:
        with os.scandir(self._held[inode]) as entries:
            return {entry.name: entry.inode() for entry in entries}

    def _read(self, inode: int) -> bytes:
        return os.pread(self._held[inode], os.fstat(self._held[inode]).st_size, 0)


def restore(image: Image, folder: Path) -> Path:
    """A new folder with what a power cut has left."""
    folder.mkdir()
    for name, content in sorted(image.items()):
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
    return folder
