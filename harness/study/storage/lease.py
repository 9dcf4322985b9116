"""The lease of a trial in files: its worker touches a file in its folder; without that another worker gets it."""

import os
import platform
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from harness.files import read_json, write_json

BEAT_SECONDS = 2.0
GRACE_SECONDS = 60.0  # how old the last heartbeat of a worker on another machine may be


class FileLease:
    """A file in a trial's folder that names the worker of the trial, touched every few seconds from a thread.

    A worker that finds another's name in it ends at once: two writers in one folder would spoil the run.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / "lease"
        self._token = uuid.uuid4().hex
        directory.mkdir(parents=True, exist_ok=True)
        write_json(self._file, {"token": self._token, "host": platform.node(), **this_process()})
        self._released = threading.Event()
        self._lock = threading.Lock()  # between a heartbeat and the release
        threading.Thread(target=self._beat, name="lease", daemon=True).start()

    def release(self) -> None:
        with self._lock:
            self._released.set()
            if self._is_ours():
                self._file.unlink()

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            with self._lock:
                if self._released.is_set():
                    return
                if not self._is_ours():
                    print(f"lost the lease {self._file}: ending at once", file=sys.stderr, flush=True)
                    os._exit(3)
                os.utime(self._file)

    def _is_ours(self) -> bool:
        return self._file.exists() and read_json(self._file)["token"] == self._token


def is_held(directory: Path) -> bool:
    """Whether a living worker holds the lease of a trial's folder.

    On this machine the process decides (a suspended one is alive). The age of the last heartbeat decides for another
    machine, or if another process has got the process id.
    """
    file = directory / "lease"
    try:
        holder, age = read_json(file), time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return False
    alive = is_alive(holder["pid"], holder["started"]) if holder["host"] == platform.node() else None
    return age < GRACE_SECONDS if alive is None else alive


def this_process() -> dict[str, Any]:
    """The arguments of `is_alive`: process id and start time (seconds since 1970)."""
    return {"pid": os.getpid(), "started": psutil.Process().create_time()}


def is_alive(pid: int, started: float) -> bool | None:
    """Whether a process of this machine lives; None if another process has got its id."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return True if abs(process.create_time() - started) < 2 else None
    except psutil.NoSuchProcess:
        return False
