"""Follows a record with the plugin mirrors, a process for each: one that hangs, raises or dies costs a warning alone.

The process ends when its standard input has something or is closed: the record is whole, or its command was killed.
"""

import faulthandler
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import Timeout

from .. import plugins
from ..base.files import file_lock, read_json, text_sum, write_json
from ..base.machine import python_path
from ..interfaces import Mirror, MirroredRun
from ..record.events import EVENTS, Tail
from ..record.run import RunInfo

FOLLOW_SECONDS = 1.0  # between two looks at a live record
CALL_SECONDS = 20.0  # after which a call of a mirror counts as hanging
DRAIN_SECONDS = 60.0  # how long the end of a run or study waits for its mirrors
MIRRORS = "mirrors"  # the folder of the runs folder for their own files
log = logging.getLogger(__name__)


@contextmanager
def followed(names: Sequence[str], runs: Path, folder: Path) -> Iterator[None]:
    """Inside the context each named mirror copies the record in a folder as it grows, and at the end the rest."""
    started: list[tuple[subprocess.Popen[bytes], threading.Thread]] = []
    for name in names:
        out = _place(runs, name, folder) / "mirror.log"
        command = [sys.executable, "-P", "-m", "cohort.harness.mirror.others", name, str(runs), str(folder)]
        command += [str(CALL_SECONDS)]
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("wb") as output:
                process = subprocess.Popen(
                    command, env={**os.environ, "PYTHONPATH": python_path()}, stdin=subprocess.PIPE, stdout=output,
                    stderr=output, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            log.warning("the mirror %s does not follow '%s': %s", name, folder.name, error)
            continue
        thread = threading.Thread(target=_warn_at_end, args=(process, name, folder, out), daemon=True)
        thread.start()
        started.append((process, thread))
    try:
        yield
    finally:
        over = time.monotonic() + DRAIN_SECONDS
        for process, _ in started:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as end:
                end.write(b".")  # a child of this process may keep the pipe open
        for process, thread in started:
            thread.join(max(0.0, over - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what the mirror started
            thread.join()


def _warn_at_end(process: subprocess.Popen[bytes], name: str, folder: Path, out: Path) -> None:
    if process.wait() == 0:
        return
    said = out.read_text("utf-8", errors="replace").strip()
    why = f"a call took more than {CALL_SECONDS:.0f} s" if "Timeout (" in said else ascii(said[-200:].split("\n")[-1])
    log.warning("the mirror %s lacks some of '%s' (%s; see %s); everything is in '%s', and the same command copies it",
                name, folder.name, why, out, folder)  # fmt: skip


class _Copy:
    """The copy of one run; `copied.json` in its place says which run the mirror has whole, and its size."""

    def __init__(self, kind: type[Mirror], place: Path, directory: Path, seconds: float) -> None:
        self.kind, self.place, self.directory, self.seconds = kind, place, directory, seconds
        self._tail, self._mirror = Tail(directory / EVENTS), None
        self._copied, self._number = (0, ""), ""
        with suppress(OSError, ValueError, KeyError):
            known = read_json(place / "copied.json")
            self._copied = known["size"], known["id"]

    def copy(self) -> None:
        """Hand over new events. Raises the mirror's errors; ValueError for a record that cannot be read."""
        size = self._tail.file.stat().st_size
        if self._copied == (size, self._number):
            return
        with self._tail.file.open("rb") as file:
            self._number = number = text_sum(file.readline(10_000))  # of the first attempt's start, which stays
        if self._copied == (size, number):
            return
        anew, events = self._tail.read()
        if anew and events and (info := RunInfo.load(self.directory)) is not None:
            self.close()
            shutil.rmtree(self.place, ignore_errors=True)
            self.place.mkdir(parents=True)
            self._mirror = self.kind()
            with self._bounded():
                self._mirror.open(MirroredRun(number, info.experiment, info.name, info.tags, info.spec, self.place))
        if (mirror := self._mirror) is None:
            return
        for start in range(0, len(events), 1000):
            with self._bounded():
                mirror.add(events[start : start + 1000])
        if self._tail.history.finish:
            self.close()
            self._copied, self._tail = (size, number), Tail(self._tail.file)  # without what it has read
            write_json(self.place / "copied.json", {"size": size, "id": number}, sync=False)

    def close(self) -> None:
        mirror, self._mirror = self._mirror, None
        if mirror is not None:
            with self._bounded():
                mirror.close()

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Inside, a call that hangs ends this process, with the tracebacks of its threads."""
        faulthandler.dump_traceback_later(self.seconds, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def follow(name: str, runs: Path, folder: Path, seconds: float) -> int:
    """Copy a record to a mirror until standard input ends, then the rest; returns how many runs failed.

    Raises the mirror's error for the first run; after that, an error of one run costs no other.
    """
    kind, place, copies = plugins.load("mirror", name), _place(runs, name, folder), dict[Path, _Copy]()
    lock, failed, over = file_lock(place / "lock"), set[Path](), False
    while True:
        with suppress(Timeout):  # another process copies the record
            lock.acquire(timeout=0)
            for file in (folder / EVENTS, *sorted(folder.glob(f"trials/*/{EVENTS}"))):
                one = file.parent
                if one in failed or not file.is_file():
                    continue
                if one not in copies:
                    own = place / (one.relative_to(folder) if one != folder else "run")
                    copies[one] = _Copy(kind, own, one, seconds)
                try:
                    copies[one].copy()
                    if over:
                        copies[one].close()
                except Exception as error:
                    if len(copies) == 1:
                        raise
                    traceback.print_exc()
                    print(f"{one.name}: {type(error).__name__}: {error}", flush=True)
                    failed.add(one)
        if over:
            return len(failed)
        over = bool(select.select([0], [], [], FOLLOW_SECONDS)[0])


def _place(runs: Path, name: str, folder: Path) -> Path:
    """Where a mirror keeps what belongs to a record."""
    return runs / MIRRORS / name / folder.relative_to(runs)


if __name__ == "__main__":
    sys.exit(min(1, follow(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))))
