"""Where results are kept: a run's own event file is the truth, MLflow the copy that one browses and reports from.

A run appends to `events.jsonl` in its folder, one JSON object a line, flushed at once: `start` of an attempt, `metrics`
of a step, `samples`, `per_problem`, `finish`. A thread copies the events to MLflow in batches, so that a slow or absent
store never holds up training; what it could not copy stays in the file and is copied by the next attempt or by
`replay`. In MLflow a study is a parent run and a trial a child run; `read_study` needs the store alone.

Non-finite metrics are kept: as "nan", "inf" or "-inf" in the file (strict JSON), as NaN or the largest double in MLflow
(its convention), and as floats again when read. This module is the only importer of mlflow, inside functions because
the import takes seconds.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import platform
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self
from urllib.parse import quote, unquote, urlsplit

import yaml

from harness._events import EVENTS, RunHistory, event_line, read_events
from harness._files import FORMAT, file_lock, read_json, strict, write_json, write_text
from harness._provenance import versions
from harness.plugins import nearest
from harness.types import SampleRow, StudyRecord, TrialRecord, TrialState

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run

    from harness.spec import RunSpec, StudySpec

FLUSH_SECONDS = 5.0
FLUSH_STEPS = 20
MIN_FREE_BYTES = 100_000_000
COST_AREAS = ("seconds", "throughput", "memory")  # metrics that two equal runs do not share
RETRY_SECONDS = 1.0
SAMPLES_SECONDS = 30.0
PROGRESS_SECONDS = 0.25
SUMMARY = "summary/"
NOTE = "mlflow.note.content"
_TRAINING_PAGES = "workflowType=machine_learning"  # the UI has others, for chat agents
_LARGEST = sys.float_info.max  # how MLflow stores infinity
_STATUS = {"running": "RUNNING", "complete": "FINISHED", "invalid": "FAILED", "failed": "FAILED", "stopped": "KILLED",
           "pruned": "KILLED"}  # fmt: skip

_Key = tuple[str, int]  # metric, step
log = logging.getLogger(__name__)


def tracking_uri(runs: Path) -> str:
    """The address of the MLflow store of a runs folder."""
    return f"sqlite:///{runs.resolve() / 'mlflow.db'}"


def check_runs(runs: Path, min_free_bytes: int = MIN_FREE_BYTES) -> None:
    """Raise ValueError where results cannot be written to `runs`, or were written there by another version.

    Writes nothing that stays; the folder need not exist yet.
    """
    folder = runs.resolve()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise ValueError(f"the runs folder must be a folder, but '{folder}' is a file; choose another with --runs")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"the runs folder must be writable, but writing to '{folder}' fails ({error.strerror}); "
            "choose another with --runs or COHORT_RUNS"
        ) from None
    free = shutil.disk_usage(folder).free
    if free < min_free_bytes:
        raise ValueError(
            f"the runs folder needs {min_free_bytes / 1e6:.0f} MB of free disk, '{folder}' has {free / 1e6:.0f} MB; "
            "free some space or choose another disk with --runs"
        )
    for file in sorted((runs / "studies").glob("*/study.json")):
        read_json(file)
    _check_store(runs)


def read_result(directory: Path) -> dict[str, Any] | None:
    """`result.json` of an ended run (state, reason, summary, metrics: the last value of each), or None."""
    file = directory / "result.json"
    return read_json(file) if file.exists() else None


def read_progress(directory: Path) -> dict[str, Any]:
    """`progress.json`: phase, done, total, step, accuracy, tokens_per_second, seconds; empty before the start."""
    file = directory / "progress.json"
    return read_json(file) if file.exists() else {}


class RunLog:
    """The `RunLogger` of one run: the event file first, MLflow second.

    Nothing of the store's troubles reaches the training run; `finish` waits for the copy, at most `drain_seconds`, and
    warns of what is missing.
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
        parent_run_id: str | None,
        tags: Mapping[str, str],
    ) -> Self:
        """The log of a new run, or of one that continues in the same folder as the same MLflow run."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "result.json").unlink(missing_ok=True)
        identity = _Identity.load(directory)
        document = spec.model_dump(mode="json")
        if identity is None or (identity.parent_run_id, identity.spec) != (parent_run_id, document):
            identity = _Identity(experiment, run_name, parent_run_id, spec=document)
        identity.tags = dict(tags)
        identity.objective = dict(spec.algorithm.objective)
        identity.synced = False
        identity.save(directory)
        return cls(directory, _Copier(runs, directory, identity))

    def __init__(self, directory: Path, copier: _Copier) -> None:
        self.directory = directory
        self._copier = copier
        self._path = directory / EVENTS
        self._file: IO[str] | None = None
        self._latest: dict[str, float] = {}
        self._progress: dict[str, Any] = {"phase": "", "done": 0, "total": 0, "step": 0}
        self._progress_written = -math.inf
        self._steps_pending = 0
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
    def latest(self) -> Mapping[str, float]:
        """The last value of every metric of this run."""
        return self._latest

    def resume(self, step: int) -> None:
        """Keep what was logged up to `step` (nothing for -1) and go on from there; comes before anything is logged."""
        assert self._file is None, "resume() comes before the first event"
        kept = [e for e in read_events(self._path) if e["type"] == "start" or e.get("step", math.inf) <= step]
        write_text(self._path, "".join(event_line(event) for event in kept))
        self._file = self._path.open("a", encoding="utf-8")
        for event in kept:
            self._copier.push(event)
        self._append({"type": "start", "host": platform.node(), "pid": os.getpid()})
        self._latest = self._copier.history.latest()
        self._note_progress(self._latest, step)
        self._copier.start()

    def progress(self, phase: str, done: int, total: int) -> None:
        self._progress |= {"phase": phase, "done": done, "total": total}
        self._write_progress(now=done >= total)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        numbers = {key: float(value) for key, value in values.items()}
        self._append({"type": "metrics", "step": step, "values": numbers})
        self._latest |= numbers
        self._note_progress(numbers, step)
        self._write_progress()
        self._steps_pending += 1
        evaluation = any(key.startswith(("validation/", "test/")) for key in numbers)
        if evaluation or self._steps_pending >= FLUSH_STEPS:
            self._steps_pending = 0
            self._copier.wake()

    def samples(self, rows: Sequence[SampleRow]) -> None:
        if rows:
            dicts = [dataclasses.asdict(row) for row in rows]
            self._append({"type": "samples", "step": max(row.step for row in rows), "rows": dicts})

    def per_problem(self, fractions: Mapping[str, float]) -> None:
        step = self._progress["step"]
        self._append({"type": "per_problem", "step": step, "fractions": dict(fractions)})

    def finish(self, state: TrialState, reason: str | None, summary: Mapping[str, float]) -> None:
        """Record how the run ended, wait until MLflow has everything, and close."""
        end = {"state": state, "reason": reason, "summary": {key: float(value) for key, value in summary.items()}}
        self._append({"type": "finish", **end})
        write_json(self.directory / "result.json", {**end, "metrics": self._latest})
        self._write_progress(now=True)
        self._closed = True
        self._copier.stop(self.drain_seconds)
        if self._file is not None:
            self._file.close()

    def close(self) -> None:
        """Release what the log holds; a run that did not `finish` counts as stopped."""
        if not self._closed:
            self.finish("stopped", "ended by an error or an interrupt", {})

    def _append(self, event: dict[str, Any]) -> None:
        if self._file is None:
            self.resume(-1)
        assert self._file is not None
        event["time"] = time.time_ns() // 1_000_000
        self._file.write(event_line(event))
        self._file.flush()
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


def replay(runs: Path, directory: Path, parent_run_id: str | None) -> None:
    """Copy to MLflow what it lacks of the run in `directory`; cheap where nothing is missing.

    Raises MLflow's own error where the store cannot be written.
    """
    identity, events = _Identity.load(directory), read_events(directory / EVENTS)
    if identity is None or not events or (identity.synced and identity.parent_run_id == parent_run_id):
        return
    if identity.parent_run_id != parent_run_id:  # the store was made anew
        identity = _Identity(identity.experiment, identity.run_name, parent_run_id, identity.tags, identity.spec)
        identity.save(directory)
    copier = _Copier(runs, directory, identity)
    for event in events:
        copier.push(event)
    copier.flush()


@dataclass
class _Identity:
    """`run.json`: which MLflow run belongs to a folder. The token is stored before the run is created, so that a run
    created just before a crash is found again."""

    experiment: str
    run_name: str
    parent_run_id: str | None
    tags: dict[str, str] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, str] = field(default_factory=dict)
    token: str = ""
    run_id: str | None = None
    superseded: str | None = None
    synced: bool = False

    @classmethod
    def load(cls, directory: Path) -> _Identity | None:
        file = directory / "run.json"
        if not file.exists():
            return None
        fields = read_json(file)
        return cls(**{key: value for key, value in fields.items() if key != "format"})

    def save(self, directory: Path) -> None:
        write_json(directory / "run.json", dataclasses.asdict(self))


class _Copier:
    """Copies the events of one run to MLflow, from a thread of its own after `start`, or in `flush`.

    A (metric, step) that the store has is not sent again. If the store has another value there, or steps that the
    ended run does not have (an attempt that was killed went on after its last checkpoint, and the machine does not
    repeat itself exactly), the MLflow run is replaced by a new one made from the file alone. Costs (seconds, memory)
    always differ between attempts, so there the first value stays.
    """

    def __init__(self, runs: Path, directory: Path, identity: _Identity) -> None:
        self.runs, self.directory, self.identity = runs, directory, identity
        self.history = RunHistory()
        self._lock = threading.Lock()  # guards history, _pending and _samples_changed
        self._pending: list[_Key] = []
        self._samples_changed = False
        self._client: MlflowClient | None = None
        self._stored: dict[_Key, float] = {}
        self._samples_at = -math.inf
        self._error: Exception | None = None
        self._wake, self._stop, self._give_up = threading.Event(), threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def push(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            self.history.add(event)
            if event["type"] == "metrics":
                self._pending += [(key, event["step"]) for key in event["values"]]
            elif event["type"] == "samples":
                self._samples_changed = True

    def start(self) -> None:
        import_mlflow()  # here: two threads that import large packages at once can trip over each other
        self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def stop(self, drain_seconds: float) -> None:
        """Let the thread finish its work, and warn of what it could not copy."""
        if self._thread is None:
            return
        self._stop.set()
        self._wake.set()
        self._thread.join(drain_seconds)
        if self._thread.is_alive():
            self._give_up.set()
            log.warning(
                "MLflow could not be given all of '%s' (%d values left; %s); everything is in %s and is copied when "
                "the same command runs again",
                self.identity.run_name, len(self._pending), self._error, self.directory / EVENTS,
            )  # fmt: skip

    def _run(self) -> None:
        wait = 0.0
        while not self._give_up.is_set():
            self._wake.wait(wait)
            self._wake.clear()
            last = self._stop.is_set()
            try:
                self.flush()
            except Exception as error:  # kept, retried, and reported by stop(): training goes on without the store
                self._error, wait = error, RETRY_SECONDS
                continue
            self._error, wait = None, FLUSH_SECONDS
            if last:
                return

    def flush(self) -> None:
        """Copy all that is there now. Raises MLflow's error where the store does not take it; nothing is lost then."""
        with file_lock(self.directory / "mlflow.lock"):
            self._flush()

    def _flush(self) -> None:
        client = self._client or self._attach()
        with (self.directory / EVENTS).open("rb") as file:
            os.fsync(file.fileno())  # so that a power cut loses little; here, off the training thread
        with self._lock:
            todo = self._pending[:]
            values = {(key, step): self.history.history[key][step] for key, step in todo}
            rows = self.history.rows() if self._samples_changed else None
            finish = self.history.finish[0] if self.history.finish else None
        if self._contradicts(values) or (finish and self._went_further(finish)):
            self._replace()
            return self._flush()
        self._copy_metrics(client, todo, values)
        if rows is not None and (finish or time.monotonic() - self._samples_at > SAMPLES_SECONDS):
            self._copy_samples(client, rows)
        if finish is not None:
            self._copy_end(client, finish)

    def _contradicts(self, values: Mapping[_Key, tuple[float, int]]) -> bool:
        """Whether the store has another value for one of these, costs apart."""
        known = {key: _as_stored(value) for key, (value, _) in values.items() if key in self._stored}
        return any(
            value != self._stored[key] and not (math.isnan(value) and math.isnan(self._stored[key]))
            for key, value in known.items()
            if key[0].partition("/")[0] not in COST_AREAS
        )

    def _went_further(self, finish: Mapping[str, Any]) -> bool:
        """Whether the store has values of steps that this ended run, not to be continued, never reached."""
        if finish["state"] not in ("complete", "invalid", "pruned"):
            return False
        with self._lock:
            return any(
                step not in self.history.history.get(key, {})
                for key, step in self._stored
                if not key.startswith(SUMMARY)
            )

    def _replace(self) -> None:
        """Start a new MLflow run, to be filled from the file alone, and delete the old one."""
        self.identity = dataclasses.replace(self.identity, run_id=None, token="", superseded=self._run_id())
        self.identity.save(self.directory)
        self._client, self._samples_at = None, -math.inf
        with self._lock:
            self._pending = [(key, step) for key, steps in self.history.history.items() for step in steps]
            self._samples_changed = bool(self.history.samples)
        self._attach()

    def _attach(self) -> MlflowClient:
        """Connect, find or create the MLflow run, and learn what it already has."""
        client = connect(self.runs)
        self.identity = identity = _Identity.load(self.directory) or self.identity
        run = _active_run(client, identity.run_id) or self._find_by_token(client) or self._create(client)
        identity.run_id = run.info.run_id
        identity.save(self.directory)
        self._stored = {
            (key, metric.step): metric.value
            for key in run.data.metrics
            for metric in client.get_metric_history(identity.run_id, key)
        }
        self._describe(client)
        if (old := _active_run(client, identity.superseded)) is not None:
            client.delete_run(old.info.run_id)
        self._client = client
        return client

    def _find_by_token(self, client: MlflowClient) -> Run | None:
        experiment = client.get_experiment_by_name(self.identity.experiment)
        if not self.identity.token or experiment is None:
            return None
        found = client.search_runs([experiment.experiment_id], f"tags.`cohort.token` = '{self.identity.token}'")
        return found[0] if found else None

    def _create(self, client: MlflowClient) -> Run:
        identity = self.identity
        experiment = _experiment(client, self.runs, identity.experiment)
        identity.token = uuid.uuid4().hex
        identity.save(self.directory)
        tags = {"cohort.kind": "run", "cohort.token": identity.token, "cohort.trial": self.directory.name}
        tags |= source_tags() | identity.tags
        if identity.parent_run_id is not None:
            tags["mlflow.parentRunId"] = identity.parent_run_id
        with self._lock:
            began = self.history.attempts[0]["time"] if self.history.attempts else None
        return client.create_run(experiment.experiment_id, start_time=began, tags=tags, run_name=identity.run_name)

    def _describe(self, client: MlflowClient) -> None:
        """Parameters, configuration and state; harmless when repeated."""
        from mlflow.entities import Param

        run_id = self._run_id()
        settings = [*_flatten(self.identity.spec), *_flatten(self.identity.objective, "objective.")]
        params = [Param(key, str(value)) for key, value in settings]
        for start in range(0, len(params), 100):  # MLflow's limit per request
            client.log_batch(run_id, params=params[start : start + 100])
        _set_tags(client, run_id, {"cohort.state": "running", "cohort.reason": ""})
        client.update_run(run_id, status="RUNNING")
        client.log_text(run_id, yaml.safe_dump(self.identity.spec, sort_keys=False), "config.yaml")

    def _copy_metrics(
        self, client: MlflowClient, todo: Sequence[_Key], values: Mapping[_Key, tuple[float, int]]
    ) -> None:
        from mlflow.entities import Metric

        for start in range(0, len(todo), 1000):  # MLflow's limit per request
            batch = todo[start : start + 1000]
            new = [key for key in dict.fromkeys(batch) if key not in self._stored]
            if new:
                client.log_batch(self._run_id(), [Metric(key[0], *values[key], key[1]) for key in new])
            self._stored |= {key: _as_stored(values[key][0]) for key in new}
            with self._lock:
                del self._pending[: len(batch)]

    def _copy_samples(self, client: MlflowClient, rows: Sequence[Mapping[str, Any]]) -> None:
        """The samples table, rewritten whole, in the form of MlflowClient.log_table: the UI shows it as a table."""
        columns = [item.name for item in dataclasses.fields(SampleRow)]
        table = {"columns": columns, "data": [[row[column] for column in columns] for row in rows]}
        client.log_dict(self._run_id(), strict(table), "samples.json")
        shown = json.dumps([{"path": "samples.json", "type": "table"}])
        client.set_tag(self._run_id(), "mlflow.loggedArtifacts", shown)
        self._samples_at = time.monotonic()
        with self._lock:
            self._samples_changed = len(self.history.rows()) > len(rows)

    def _copy_end(self, client: MlflowClient, finish: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        summary = {key: float(value) for key, value in finish["summary"].items()}
        with self._lock:
            per_problem = dict(self.history.per_problem)
        if per_problem:
            client.log_dict(self._run_id(), per_problem, "per_problem.json")
        if finish["state"] == "complete" and summary:
            metrics = [Metric(SUMMARY + key, value, finish["time"], 0) for key, value in summary.items()]
            client.log_batch(self._run_id(), metrics)
        tags = {"cohort.state": finish["state"], "cohort.reason": finish["reason"] or ""}
        _set_tags(client, self._run_id(), {**tags, "cohort.summary": json.dumps(strict(summary))})
        client.set_terminated(self._run_id(), _STATUS[finish["state"]], end_time=finish["time"])
        self.identity.synced = True
        self.identity.save(self.directory)

    def _run_id(self) -> str:
        assert self.identity.run_id is not None
        return self.identity.run_id


def open_study(runs: Path, study: StudySpec, command: str) -> str:
    """The id of the study's parent run, created or brought up to date; the same one as long as its folder stays."""
    client = connect(runs)
    file = _study_run_file(runs, study.name)
    known = study_run_id(runs, study.name) if file.exists() else None
    run = _active_run(client, known)
    if run is None:
        experiment = _experiment(client, runs, study.name)
        tags = {"cohort.kind": "study", "cohort.study": study.name, **source_tags()}
        run = client.create_run(experiment.experiment_id, tags=tags, run_name=study.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"run_id": run.info.run_id})
    run_id = run.info.run_id
    labels = study.arm_labels()
    document = {
        "format": FORMAT,
        "spec": study.model_dump(mode="json"),
        "arms": labels,
        "baseline": study.baseline or next(iter(labels), ""),
        "command": command,
        "versions": versions(),
    }
    client.log_dict(run_id, document, "study.json")
    client.set_experiment_tag(run.info.experiment_id, NOTE, study.question)
    client.set_experiment_tag(run.info.experiment_id, "mlflow.experiment.primaryMetric.name", study.metric)
    _set_tags(client, run_id, {"cohort.state": "running", "cohort.command": command, NOTE: study.question})
    client.update_run(run_id, status="RUNNING")
    return run_id


def study_run_id(runs: Path, name: str) -> str:
    """The id of the parent run that `open_study` made for the study in this runs folder."""
    return read_json(_study_run_file(runs, name))["run_id"]


def log_search(runs: Path, run_id: str, document: Mapping[str, Any]) -> None:
    """Attach what a study's search has found to its parent run, where `read_study` finds it."""
    connect(runs).log_dict(run_id, {"format": FORMAT, **document}, "search.json")


def close_study(runs: Path, run_id: str, state: TrialState) -> None:
    """Record in the study's parent run how the study ended."""
    client = connect(runs)
    _set_tags(client, run_id, {"cohort.state": state})
    client.set_terminated(run_id, _STATUS[state])


def read_study(runs: Path, name: str) -> StudyRecord:
    """The study rebuilt from the MLflow store: one record for each (arm, seed) that has begun.

    Where an (arm, seed) has several MLflow runs, the newest complete one counts, or else the newest. ValueError for a
    study that the store does not have.
    """
    client = _existing_store(runs)
    parent = _newest_parent(client, name) if client else None
    if client is None or parent is None:
        near = nearest(name, known := list_studies(runs))
        hint = f"did you mean '{near}'? " if near else ""
        raise ValueError(
            f"the MLflow store in '{runs}' has no study '{name}'; {hint}"
            + (f"it has: {', '.join(known)}" if known else "run one with: cohort study run NAME")
        )
    document = _artifact(runs, parent, "study.json")
    if document is None or document.get("format") != FORMAT:
        raise ValueError(f"study '{name}' in '{runs}' is incomplete or of another version; run the study again")
    spec = document["spec"]
    children = _search(client, parent.info.experiment_id, f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    trials: dict[tuple[str, int], Run] = {}
    for run in children:  # newest first
        key = (run.data.tags["cohort.arm"], int(run.data.tags["cohort.seed"]))
        if key not in trials or (_state(run) == "complete" and _state(trials[key]) != "complete"):
            trials[key] = run
    search = _artifact(runs, parent, "search.json")
    arms = document["arms"] or sorted({arm for arm, _ in trials})  # those of a search are numbered
    wanted = [(arm, seed) for arm in arms for seed in spec["seeds"]]
    found = {key: _trial_record(client, runs, trials[key]) for key in wanted if key in trials}
    for arm in (search or {}).get("arms", []):
        if arm["state"] == "pruned":  # no mean over fewer seeds than the others have
            found |= {key: _given_up(trial, arm["reason"]) for key, trial in found.items() if key[0] == arm["label"]}
            wanted = [key for key in wanted if key in found or key[0] != arm["label"]]
    return StudyRecord(
        name=name,
        question=spec["question"],
        metric=spec["metric"],
        baseline=document["baseline"] or next(iter(arms), ""),
        arms=arms,
        seeds=spec["seeds"],
        expected=len(wanted),
        spec=spec,
        trials=list(found.values()),
        command=document["command"],
        versions=document["versions"],
        search=search,
    )


def _given_up(trial: TrialRecord, reason: str) -> TrialRecord:
    """A complete trial of an arm that was pruned later, marked as pruned."""
    return dataclasses.replace(trial, state="pruned", reason=reason) if trial.state == "complete" else trial


def list_studies(runs: Path) -> list[str]:
    """Names of the studies in the store, sorted; empty where there is no store yet."""
    client = _existing_store(runs)
    if client is None:
        return []
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    parents = _search(client, experiments, "tags.`cohort.kind` = 'study'")
    return sorted({run.data.tags["cohort.study"] for run in parents})


def log_report(runs: Path, name: str, folder: Path, answer: str | None = None) -> None:
    """Attach a written report to the study's parent run, and the answer to the note that the UI shows there."""
    client = connect(runs)
    parent = _newest_parent(client, name)
    if parent is None:
        raise ValueError(f"the MLflow store in '{runs}' has no study '{name}'")
    client.log_artifacts(parent.info.run_id, str(folder), "report")
    if answer:
        document = _artifact(runs, parent, "study.json") or {"spec": {"question": name}}
        client.set_tag(parent.info.run_id, NOTE, f"{document['spec']['question']}\n\n{answer}")


@dataclass(frozen=True)
class UIServer:
    """A running `mlflow server`; closing it ends its processes."""

    address: str
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        """The page that lists the experiments."""
        return f"{self.address}/#/experiments?{_TRAINING_PAGES}"

    def wait(self) -> int:
        """Block until the server ends; its exit status."""
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_ui(runs: Path, port: int, timeout_seconds: float = 120.0) -> UIServer:
    """A server of the MLflow pages of `runs` on 127.0.0.1 that answers already; an empty store is created if needed.

    ValueError where the port is in use, RuntimeError with the server's last words where it does not come up.
    """
    check_port(port)
    check_runs(runs)
    connect(runs)
    artifacts = (runs / "mlartifacts").resolve().as_uri()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", tracking_uri(runs)]
    command += ["--default-artifact-root", artifacts, "--artifacts-destination", artifacts]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        server = UIServer(f"http://127.0.0.1:{port}", process)
        deadline = time.monotonic() + timeout_seconds
        while not _answers(f"{server.address}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                server.close()
                output.seek(0)
                raise RuntimeError(
                    f"the MLflow server did not start:\n{output.read().decode(errors='replace')[-2000:]}"
                )
            time.sleep(0.2)
    return server


def study_url(runs: Path, name: str, address: str) -> str:
    """The page of a study's trials, best first, on the MLflow server at `address`.

    Sorted by a metric MLflow lists all runs; sorted by date it would hide the trials behind their parent run.
    """
    parent = _newest_parent(connect(runs), name)
    document = _artifact(runs, parent, "study.json") if parent else None
    if parent is None or document is None:
        raise ValueError(f"the MLflow store in '{runs}' has no study '{name}'")
    order = quote(f"metrics.`{document['spec']['metric']}`", safe="")
    page = f"{address}/#/experiments/{parent.info.experiment_id}/runs?{_TRAINING_PAGES}"
    return f"{page}&orderByKey={order}&orderByAsc=false"


def check_port(port: int) -> None:
    """ValueError where 127.0.0.1:port cannot be listened on."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(
                f"port {port} on 127.0.0.1 cannot be used ({error.strerror}); choose another with --port"
            ) from None


def import_mlflow() -> None:
    """Load MLflow, without its telemetry and without its messages on creating a store."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # its errors are raised too
    logging.getLogger("alembic").setLevel(logging.WARNING)
    import mlflow  # noqa: F401


def connect(runs: Path) -> MlflowClient:
    """A client of the runs folder's store, which is created where there is none."""
    import_mlflow()
    from mlflow import MlflowClient

    store = runs.resolve() / "mlflow.db"
    if not store.exists():
        store.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(runs / "mlflow.lock"):
            if not store.exists():
                _create_store(store)
    return MlflowClient(tracking_uri(runs))


def source_tags() -> dict[str, str]:
    """MLflow's own tags that say which code made a run, and the versions."""
    tags = {"mlflow.source.name": "cohort", "mlflow.source.type": "LOCAL", "cohort.versions": json.dumps(versions())}
    commit = versions()["git_commit"].removesuffix("-dirty")
    return tags | ({"mlflow.source.git.commit": commit} if commit != "unknown" else {})


def _check_store(runs: Path) -> None:
    """ValueError where mlflow.db is no store, has another schema, or belongs to a runs folder that was moved."""
    store = runs.resolve() / "mlflow.db"
    if not store.exists():
        return
    remedy = "move it away, or use another folder with --runs"
    try:
        with closing(sqlite3.connect(f"file:{quote(str(store))}?mode=ro", uri=True)) as database:
            found = [row[0] for row in database.execute("SELECT version_num FROM alembic_version")]
            places = [row[0] for row in database.execute("SELECT artifact_location FROM experiments")]
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{store} is not an MLflow store ({error}); {remedy}") from None
    if found != [head := _schema_version()]:
        raise ValueError(
            f"{store} must have schema {head} of MLflow {versions()['mlflow']}, got {', '.join(found) or 'none'}; "
            f"another version wrote it; upgrade it with 'mlflow db upgrade {tracking_uri(runs)}', {remedy}"
        )
    for place in places:
        parent = Path(unquote(urlsplit(place).path)).parent
        if parent.name == "mlartifacts" and parent != runs.resolve() / "mlartifacts":
            raise ValueError(
                f"{store} keeps its artifacts in '{parent}', which is not beside it: the runs folder was moved; "
                "move it back to go on, or use another folder with --runs (reports can be read from here)"
            )


def _schema_version() -> str:
    """The schema revision that the installed MLflow reads and writes."""
    from alembic.script import ScriptDirectory

    import_mlflow()
    import mlflow

    head = ScriptDirectory(str(Path(mlflow.__file__).parent / "store" / "db_migrations")).get_current_head()
    assert head is not None
    return head


def _create_store(store: Path) -> None:
    """Make an empty store beside its place and move it there, so that a crash cannot leave half a schema."""
    from mlflow import MlflowClient

    for leftover in store.parent.glob("mlflow.db.new*"):
        leftover.unlink()
    new = store.with_name("mlflow.db.new")
    MlflowClient(f"sqlite:///{new}").search_experiments(max_results=1)
    new.rename(store)


def _study_run_file(runs: Path, name: str) -> Path:
    return runs / "studies" / name / "mlflow.json"


def _existing_store(runs: Path) -> MlflowClient | None:
    return connect(runs) if (runs / "mlflow.db").exists() else None


def _experiment(client: MlflowClient, runs: Path, name: str) -> Experiment:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            client.create_experiment(name, (runs.resolve() / "mlartifacts" / name).as_uri())
        except MlflowException:  # another process may have been first
            if client.get_experiment_by_name(name) is None:
                raise
        found = client.get_experiment_by_name(name)
    assert found is not None
    if found.lifecycle_stage != "active":
        raise ValueError(
            f"the experiment '{name}' was deleted in MLflow; restore it with 'mlflow experiments restore "
            f"--experiment-id {found.experiment_id}' or choose another name"
        )
    return found


def _active_run(client: MlflowClient, run_id: str | None) -> Run | None:
    """The run, or None where the store does not have it or it was deleted."""
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return None
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return run if run.info.lifecycle_stage == "active" else None


def _newest_parent(client: MlflowClient, name: str) -> Run | None:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return None
    wanted = f"tags.`cohort.kind` = 'study' and tags.`cohort.study` = '{name}'"
    return next(iter(_search(client, experiment.experiment_id, wanted)), None)


def _search(client: MlflowClient, experiments: str | list[str], wanted: str) -> list[Run]:
    """All active runs that match, newest first."""
    ids = [experiments] if isinstance(experiments, str) else experiments
    found: list[Run] = []
    token = None
    while True:
        page = client.search_runs(
            ids, wanted, max_results=1000, order_by=["attributes.start_time DESC"], page_token=token
        )
        found += page
        token = page.token
        if not token:
            return found


def _trial_record(client: MlflowClient, runs: Path, run: Run) -> TrialRecord:
    tags, run_id = run.data.tags, run.info.run_id
    table = _artifact(runs, run, "samples.json") or {"columns": [], "data": []}
    samples = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    return TrialRecord(
        trial=tags["cohort.trial"],
        arm=tags["cohort.arm"],
        seed=int(tags["cohort.seed"]),
        state=_state(run),
        reason=tags.get("cohort.reason") or None,
        spec=_artifact(runs, run, "config.yaml") or {},
        factors=json.loads(tags["cohort.factors"]),
        history={key: _history(client, run_id, key) for key in sorted(run.data.metrics) if not key.startswith(SUMMARY)},
        summary={key: float(value) for key, value in json.loads(tags.get("cohort.summary", "{}")).items()},
        per_problem=_artifact(runs, run, "per_problem.json") or {},
        samples=[SampleRow(**{**row, "reward": _number(row["reward"])}) for row in samples],
    )


def _state(run: Run) -> Any:
    return run.data.tags.get("cohort.state", "running")


def _history(client: MlflowClient, run_id: str, key: str) -> list[tuple[int, float]]:
    """(step, value), steps rising; the newest value of a step counts."""
    points = sorted(client.get_metric_history(run_id, key), key=lambda metric: metric.timestamp)
    return sorted({metric.step: _from_stored(metric.value) for metric in points}.items())


def _artifact(runs: Path, run: Run, name: str) -> Any:
    """A run's JSON or YAML artifact, or None; found beside the store too where the runs folder was moved."""
    file = Path(unquote(urlsplit(run.info.artifact_uri or "").path)) / name
    if not file.exists():
        file = runs / Path(*file.parts[-5:])  # mlartifacts/<experiment>/<run>/artifacts/<name>
    if not file.exists():
        return None
    text = file.read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)


def _set_tags(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])


def _flatten(spec: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in spec.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _as_stored(value: float) -> float:
    """A metric as MLflow keeps it: infinities become the largest double."""
    return math.copysign(_LARGEST, value) if math.isinf(value) else value


def _from_stored(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) >= _LARGEST else value


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False
