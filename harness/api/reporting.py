"""Writes reports, and while a study runs one from time to time, in a child process with low priority:
`python -m cohort.harness.api.reporting STUDY RUNS`."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from .settings import REPORTING, runs_folder

if TYPE_CHECKING:
    from ...reports.render import ReportFiles
    from ..record.study import StudyRecord

EVERY_SECONDS = 480.0
SHARE = 0.02  # largest share of the time


def report(*names: str, runs: str | Path | None = None) -> "ReportFiles":
    """Write a study's report again; several studies of one task give one report, in RUNS/reports."""
    from ...reports.join import join
    from ...reports.render import write_report as render
    from ..console.progress import phase_bar
    from ..mirror.store import check_server

    folder = runs_folder(runs)
    with phase_bar(f"report of {' and '.join(names)}", REPORTING):
        check_server()
        if len(names) == 1:
            return write_report(names[0], folder)[1]
        return render(join([read_record(name, folder) for name in names]), folder / "reports" / "+".join(names))


def write_report(name: str, runs: Path) -> "tuple[StudyRecord, ReportFiles]":
    """A study's record, and the files of the report that is written from it."""
    record = read_record(name, runs)
    return record, keep_report(record, runs)


def read_record(name: str, runs: Path) -> "StudyRecord":
    """A study's record, with the trials that only an MLflow server has."""
    from ..mirror.studies import fetch_study
    from ..record.study import read_study

    fetch_study(runs, name)
    return read_study(runs, name)


def keep_report(record: "StudyRecord", runs: Path) -> "ReportFiles":
    """The report of a study, sealed for `cohort verify`; the MLflow run gets it too."""
    from ...reports.render import write_report
    from ..mirror.follow import catch_up
    from ..record.evidence import write_evidence

    folder = runs / "studies" / record.name
    files = write_report(record, folder / "report")
    write_evidence(folder, record, files.answer, files.means, files.colors)
    catch_up(runs, folder)
    return files


class Refresher:
    """Starts a new rendering when it is due; ends it at the end, because the study writes the last report."""

    def __init__(
        self, name: str, runs: Path, command: Sequence[str] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._command = command or [sys.executable, "-P", "-m", __name__, name, str(runs)]
        self._log = runs / "studies" / name / "logs" / "report.log"
        self._clock = clock
        self._child: subprocess.Popen[bytes] | None = None
        self._began, self._due = 0.0, clock() + EVERY_SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def tick(self) -> None:
        """Start or finish a rendering if it is time; called repeatedly while the study runs."""
        now = self._clock()
        if self._child is not None and self._child.poll() is not None:
            self._child = None
            self._due = now + max(EVERY_SECONDS, (now - self._began) / SHARE)
        elif self._child is None and now >= self._due:
            self._began = now
            self._child = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        from ..mirror.address import TRACKING_URI, remote_uri
        from ..study.launchers.local import HOME

        path = os.pathsep.join(filter(None, [HOME, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, TRACKING_URI: remote_uri() or "", "OMP_NUM_THREADS": "1"}
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as output:
            return subprocess.Popen(
                self._command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip


if __name__ == "__main__":
    os.nice(19)
    write_report(sys.argv[1], Path(sys.argv[2]))
