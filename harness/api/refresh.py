"""Rewrites the report of a running study from time to time, in a child process with low priority."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

EVERY_SECONDS = 480.0
SHARE = 0.02  # largest share of the time
CODE = "import os; os.nice(19); from cohort.harness.cli.app import main; main()"


class Refresher:
    """Starts a new rendering when it is due; ends it at the end, because the study writes the last report."""

    def __init__(
        self, name: str, runs: Path, command: Sequence[str] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._command = command or [sys.executable, "-P", "-c", CODE, "report", name, "--runs", str(runs)]
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
