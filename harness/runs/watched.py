"""A run's log that also tells a watching user how far the run is."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.interfaces import RunLogger
from harness.study.status import StudyStatus, TrialStatus
from harness.types import SampleRow


class WatchedLog:
    """A `RunLogger` around another that also tells how far the run is, as a study of this one trial."""

    def __init__(
        self, log: RunLogger, name: str, seed: int, directory: Path, show: Callable[[StudyStatus], None]
    ) -> None:
        self._log, self._name, self._show = log, name, show
        self._started = time.monotonic()
        self._trial = TrialStatus(
            arm=name, seed=seed, state="running", reason=None, phase="loading", done=0, total=0,
            accuracy=None, tokens_per_second=None, seconds=0.0, directory=directory,
        )  # fmt: skip

    def resume(self, step: int) -> None:
        self._log.resume(step)

    def progress(self, phase: str, done: int, total: int) -> None:
        self._log.progress(phase, done, total)
        self._changed(phase=phase, done=done, total=total)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._log.metrics(step, values)
        shown = {"accuracy": "validation/accuracy", "tokens_per_second": "throughput/tokens_per_second"}
        self._changed(**{key: values[name] for key, name in shown.items() if name in values})

    def samples(self, rows: Sequence[SampleRow]) -> None:
        self._log.samples(rows)

    def per_problem(self, fractions: Mapping[str, float]) -> None:
        self._log.per_problem(fractions)

    def _changed(self, **changes: Any) -> None:
        self._trial = dataclasses.replace(self._trial, seconds=time.monotonic() - self._started, **changes)
        self._show(StudyStatus(name=self._name, question="", metric="validation/accuracy", trials=(self._trial,)))
