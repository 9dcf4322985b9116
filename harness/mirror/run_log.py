"""Keeps the results of a run: its own event file is authoritative, and MLflow is a copy for browsing and reports.

A run appends to `events.jsonl` in its folder (`events.py`), each event flushed at once. A thread copies the events to
MLflow in batches, so that a slow or absent store never holds up training; the next attempt or `replay` copies the rest.
In MLflow a study is a parent run and a trial a child run; `mlflow_studies.read_study` needs the store alone.

Non-finite metrics are kept: as text in the file, as NaN or the largest double in MLflow (its convention), and as floats
again when read. Only the `mlflow_*` modules import mlflow.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from ..data import SampleRow, TrialState
from ..ground.files import read_json, sync, write_json, write_text
from ..ground.inputs import Inputs
from ..record.events import EVENTS, event_line, is_torn, read_events, summed
from .address import patient
from .store import SYSTEM
from .writer import Copier, Identity

if TYPE_CHECKING:
    from ..spec.run import RunSpec


FLUSH_STEPS = 20
PROGRESS_SECONDS = 0.25
log = logging.getLogger(__name__)


def read_result(directory: Path) -> dict[str, Any] | None:
    """`result.json` of an ended run (state, reason, summary, metrics: the last value of each), or None.

    ValueError if a run cannot have written the file.
    """
    file = directory / "result.json"
    if not file.exists():
        return None
    result = read_json(file)
    try:
        numbers = {name: {k: float(v) for k, v in result[name].items()} for name in ("summary", "metrics")}
        return {"state": str(result["state"]), "reason": result["reason"], **numbers}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file} holds no result of a run ({error!r}); restore it from a copy, or delete it: the run "
                         "then continues from its last checkpoint") from None  # fmt: skip


def read_progress(directory: Path) -> dict[str, Any]:
    """`progress.json`: phase, done, total, step, accuracy, tokens_per_second, seconds.

    Empty before the start, and for an unreadable file, because only progress views read it.
    """
    file = directory / "progress.json"
    try:
        shown = read_json(file) if file.exists() else {}
    except ValueError:
        return {}
    whole = all(isinstance(value, str if key == "phase" else int | float) for key, value in shown.items())
    return shown if whole else {}


class RunLog:
    """The `RunLogger` of one run: the event file first, MLflow second.

    Errors of the store never reach the training run; `finish` waits for the copy, at most `drain_seconds`, and warns if
    it is incomplete.
    """

    drain_seconds = 60.0

    @classmethod
    def open(
        cls,
        runs: Path,
        directory: Path,
        spec: RunSpec,
        *,
        experiment: str,
        run_name: str,
        parent_run_id: str | None = None,
        tags: Mapping[str, str] = {},
        on_progress: Callable[[Mapping[str, Any]], None] = lambda progress: None,
    ) -> Self:
        """The log of a new run, or of a continued run, which keeps its folder and its MLflow run.

        `on_progress` gets the content of `progress.json` at every change.
        """
        directory.mkdir(parents=True, exist_ok=True)
        for folder in directory.parents:  # a power cut loses a folder whose name is not on disk
            if folder.is_relative_to(runs):
                sync(folder)
        (directory / "result.json").unlink(missing_ok=True)
        identity = Identity.load(directory)
        document = spec.model_dump(mode="json")
        if identity is None or (identity.parent_run_id, identity.spec) != (parent_run_id, document):
            identity = Identity(experiment, run_name, parent_run_id, spec=document)
        identity.tags = dict(tags)
        identity.objective = dict(spec.algorithm.objective)
        identity.synced = False
        identity.save(directory)
        return cls(directory, Copier(runs, directory, identity), on_progress)

    def __init__(self, directory: Path, copier: Copier, on_progress: Callable[[Mapping[str, Any]], None]) -> None:
        self.directory = directory
        self._copier = copier
        self._on_progress = on_progress
        self._path = directory / EVENTS
        self._file: IO[str] | None = None
        self.latest: dict[str, float] = {}  # the last value of every metric of this run
        self._progress: dict[str, Any] = {"phase": "", "done": 0, "total": 0, "step": 0}
        self._progress_written = -math.inf
        self._steps_pending = 0
        self._num_events = 0  # number of events in the file, without the `start` events
        self.resumed_at = 0  # training step from which this attempt continues
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def run_id(self) -> str | None:
        """The id of the MLflow run; None until the store has answered."""
        return self._copier.identity.run_id

    @property
    def step(self) -> int:
        """The last training step that was logged."""
        return self._progress["step"]

    def inputs(self, inputs: Inputs) -> None:
        """Record the run's inputs; call before `resume`."""
        self._copier.identity.inputs = dict(inputs)
        self._copier.identity.save(self.directory)

    def prompt(self, text: str) -> None:
        """Record the first prompt as the policy reads it; call before `resume`."""
        self._copier.identity.prompt = text
        self._copier.identity.save(self.directory)

    def resume(self, step: int) -> None:
        """Keep the events up to `step` (none for -1) and continue from there; call before logging anything."""
        assert self._file is None, "resume() comes before the first event"
        events = read_events(self._path)
        if is_torn(self._path):
            log.warning(
                "%s ends in half a line, as a kill or power cut leaves it: that line is left out, and the %d whole "
                "ones before it count", self._path, len(events),
            )  # fmt: skip
        kept = [e for e in events if e["type"] == "start" or e.get("step", math.inf) <= step]
        write_text(self._path, "".join(event_line(event) for event in kept))
        self._file = self._path.open("a", encoding="utf-8")
        self._num_events = _num_events(kept)
        for event in kept:
            self._copier.push(event)
        threads = os.environ.get("OMP_NUM_THREADS", "")
        self._append({"type": "start", "host": platform.node(), "pid": os.getpid(), "threads": threads})
        latest = self._copier.history.latest()
        self.latest = {key: value for key, value in latest.items() if not key.startswith(SYSTEM)}
        self._note_progress(self.latest, step)
        self.resumed_at = self.step
        self._copier.start()

    def sync(self) -> int:
        assert self._file is not None, "sync() comes after resume()"
        os.fsync(self._file.fileno())
        sync(self.directory)
        return self._num_events

    def holds(self, step: int, num_events: int) -> bool:
        return _num_events(e for e in read_events(self._path) if e.get("step", math.inf) <= step) >= num_events

    def progress(self, phase: str, done: int, total: int) -> None:
        self._progress |= {"phase": phase, "done": done, "total": total}
        self._write_progress(now=done >= total)
        self._on_progress(self._progress)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        numbers = {key: float(value) for key, value in values.items()}
        self._append({"type": "metrics", "step": step, "values": numbers | self._copier.take_system()})
        self.latest |= numbers
        self._note_progress(numbers, step)
        self._write_progress()
        self._on_progress(self._progress)
        self._steps_pending += 1
        evaluation = any(key.startswith(("validation/", "test/")) for key in numbers)
        if evaluation or self._steps_pending >= FLUSH_STEPS:
            self._steps_pending = 0
            self._copier.wake()

    def samples(self, rows: Sequence[SampleRow]) -> None:
        if rows:
            dicts = [dataclasses.asdict(row) for row in rows]
            self._append({"type": "samples", "step": max(row.step for row in rows), "rows": dicts})

    def per_problem(self, fractions: Mapping[str, float], area: str = "test") -> None:
        step = self._progress["step"]
        self._append({"type": "per_problem", "step": step, "area": area, "fractions": dict(fractions)})

    def kept(self, step: int, file: str, digest: str) -> None:
        self._append({"type": "kept", "step": step, "file": file, "sha256": digest})

    def finish(self, state: TrialState, reason: str | None, summary: Mapping[str, float]) -> None:
        """Record how the run ended, wait until MLflow has everything, and close. A paused run continues soon, so it
        does not wait."""
        end = {"state": state, "reason": reason, "summary": {key: float(value) for key, value in summary.items()}}
        try:
            self._append({"type": "finish", **end})
            self._closed = True
            self.sync()  # the events must be on disk before the result
            write_json(self.directory / "result.json", {**end, "metrics": self.latest})
            sync(self.directory)
            self._write_progress(now=True)
        finally:
            self._copier.stop(None if state == "paused" else self.drain_seconds)
            if self._file is not None:
                self._file.close()

    def close(self) -> None:
        """Close the log; without `finish` the run counts as stopped, without `resume` it stays as it was."""
        if not self._closed and self._file is not None:
            self.finish("stopped", "ended by an error or an interrupt", {})

    def _append(self, event: dict[str, Any]) -> None:
        if self._file is None:
            self.resume(-1)
        assert self._file is not None
        event["time"] = time.time_ns() // 1_000_000
        self._closed = True  # cleared only after the write: nothing may follow half a line
        self._file.write(event_line(summed(event)))
        self._file.flush()
        self._closed = False
        self._num_events += _num_events([event])
        self._copier.push(event)

    def _note_progress(self, values: Mapping[str, float], step: int) -> None:
        self._progress["step"] = max(step, 0)
        shown = {
            "accuracy": "validation/accuracy",
            "tokens_per_second": "throughput/tokens_per_second",
            "seconds": "seconds/total",
        }
        for name, key in shown.items():
            if math.isfinite(values.get(key, math.nan)):
                self._progress[name] = values[key]

    def _write_progress(self, now: bool = False) -> None:
        if now or time.monotonic() - self._progress_written >= PROGRESS_SECONDS:
            self._progress_written = time.monotonic()
            write_json(self.directory / "progress.json", self._progress, sync=False)


def _num_events(events: Iterable[Mapping[str, Any]]) -> int:
    """The number of these events that belong to a step of the run."""
    return sum("step" in event for event in events)


@patient
def replay(runs: Path, directory: Path, parent_run_id: str | None) -> str | None:
    """Copy the events of the run in `directory` that MLflow lacks; cheap if none are missing.

    Returns the reason if the run's files cannot be read and so nothing was copied. Raises MLflow's own error if the
    store cannot be written.
    """
    try:
        identity, events = Identity.load(directory), read_events(directory / EVENTS)
    except (OSError, ValueError) as error:
        log.warning("a trial was not copied to MLflow: %s", error)
        return str(error)
    if identity is None or not events:
        return None
    same_store = identity.parent_run_id == parent_run_id
    if not same_store:
        identity = dataclasses.replace(identity, parent_run_id=parent_run_id, token="", run_id=None, superseded=None)
    copier = Copier(runs, directory, identity)
    for event in events:
        copier.push(event)
    if same_store and identity.synced and copier.has_artifacts():
        return None
    identity.synced = False
    identity.save(directory)
    copier.flush()
    return None
