"""Copies the event file of a run to MLflow, in batches from a thread, so that training never waits for the store."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..data import FINAL, SampleRow
from ..ground.files import file_lock, read_json, strict, write_json
from ..ground.inputs import digest, short
from ..record.events import EVENTS, RunHistory
from ..record.system import SystemSampler
from .address import SILENT_SECONDS, check_answers, is_outage, remote_uri, said_after, store_name, tracking_uri
from .store import (
    STATUS,
    SUMMARY,
    SYSTEM,
    active_run,
    as_stored,
    connect,
    experiment_of,
    import_mlflow,
    inputs_tag,
    log_diff,
    log_params,
    set_tags,
    source_tags,
)
from .traces import TraceWriter, delete_traces, storable, traces_per_split

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Run


POLICY = "cohort.policy"  # the tag that names the final policy
FLUSH_SECONDS = 5.0
RETRY_SECONDS = 1.0
SAMPLES_SECONDS = 30.0
LONGEST_RETRY_SECONDS = 20.0
SYSTEM_SECONDS = 10.0
COST_AREAS = ("seconds", "throughput", "memory", "flops", "system")  # metrics that may differ between two equal runs
_Key = tuple[str, int]  # metric, step
_paused: dict[Path, Copier] = {}  # of the runs that this process paused, by folder; they may still be copying
log = logging.getLogger(__name__)


@dataclass
class Identity:
    """`run.json`: which MLflow run belongs to a folder. The token is stored before the run is created, so that a run
    created just before a crash is found again."""

    experiment: str
    run_name: str
    parent_run_id: str | None
    tags: dict[str, str] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)  # what the run reads
    prompt: str = ""  # the first one, as the policy reads it
    objective: dict[str, str] = field(default_factory=dict)
    token: str = ""
    run_id: str | None = None
    superseded: str | None = None
    synced: bool = False

    @classmethod
    def load(cls, directory: Path) -> Identity | None:
        file = directory / "run.json"
        if not file.exists():
            return None
        fields = read_json(file)
        try:
            return cls(**{key: value for key, value in fields.items() if key != "format"})
        except TypeError as error:
            raise ValueError(f"{file} names no run of MLflow ({error}); restore it from a copy, or move its folder "
                             "away: the run then starts again from the beginning") from None  # fmt: skip

    def save(self, directory: Path) -> None:
        write_json(directory / "run.json", dataclasses.asdict(self))


class Copier:
    """Copies the events of one run to MLflow, in its own thread after `start`, or in `flush`.

    A (metric, step) that the store has is not sent again. A killed attempt may have logged steps after its last
    checkpoint, and repeating them need not give exactly the same values. If the store has a different value for a step,
    or steps that the ended run does not have, a new MLflow run made from the file replaces the old one. Costs (seconds,
    memory) always differ between attempts, so their first value stays.
    """

    def __init__(self, runs: Path, directory: Path, identity: Identity) -> None:
        self.runs, self.directory = runs, directory
        self.identity = identity
        self.history = RunHistory()
        self._lock = threading.Lock()  # guards history, _pending and _samples_changed
        self._pending: list[_Key] = []
        self._samples_changed = False
        self._client: MlflowClient | None = None
        self._traces: TraceWriter | None = None
        self._trace_limit = traces_per_split()
        self._system: dict[str, float] = {}
        self._stored: dict[_Key, float] = {}
        self._samples_at = -math.inf
        self._error: Exception | None = None
        self._wake, self._stop = threading.Event(), threading.Event()
        self._give_up = threading.Event()
        self._thread: threading.Thread | None = None
        self._before: Copier | None = None  # of the previous attempt, if this process paused it
        self._begun: dict[_Key, float] = {}  # values with which this attempt began, if there was a previous one
        self._copied: tuple[int, int] | None = None  # attempts and stored values, set when the thread has copied all

    def push(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            self.history.add(event)
            if event["type"] == "metrics":
                self._pending += [(key, event["step"]) for key in event["values"]]
            elif event["type"] == "samples":
                self._samples_changed = True

    def start(self) -> None:
        import_mlflow()  # imported here: two threads that import large packages at the same time can fail
        self._before = _paused.pop(self.directory, None)
        if self._before is not None:
            self._begun = {
                (key, n): as_stored(v) for key, steps in self.history.history.items() for n, (v, _) in steps.items()
            }
        self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def take_system(self) -> dict[str, float]:
        """The newest `system/...` metrics that were not taken yet; usually empty."""
        system, self._system = self._system, {}
        return system

    def stop(self, drain_seconds: float | None) -> None:
        """Let the thread finish its work, and warn if it could not copy all; None does not wait."""
        if self._thread is None:
            return
        self._stop.set()
        self._wake.set()
        if drain_seconds is None:
            _paused[self.directory] = self
            return
        name, store = self.identity.run_name, store_name(self.runs)
        words = f"waiting up to {drain_seconds:.0f} s for {store} to take all of '{name}'"
        with said_after(SILENT_SECONDS, words) if remote_uri() else nullcontext():
            self._thread.join(drain_seconds)
        if self._thread.is_alive():
            self._give_up.set()
            log.warning(
                "MLflow has not received all of '%s' (%d values left; %s); everything is in %s and is copied when "
                "the same command runs again",
                name, len(self._pending), self._error, self.directory / EVENTS,
            )  # fmt: skip

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        if self._before is not None:
            self._before.join()
        sampler, sampled = SystemSampler(), time.monotonic()
        wait, retry = 0.0, RETRY_SECONDS
        while not self._give_up.is_set():
            self._wake.wait(wait)
            self._wake.clear()
            last = self._stop.is_set()
            if time.monotonic() - sampled >= SYSTEM_SECONDS:
                self._system, sampled = sampler.sample(), time.monotonic()
            try:
                check_answers(aloud=False)
                self.flush()
            except Exception as error:  # kept, retried, and reported by stop(): training goes on without the store
                if self._error is None and remote_uri() is not None and is_outage(error):
                    log.warning(
                        "%s does not answer (%s); '%s' goes on, and what the store misses is copied when it returns",
                        store_name(self.runs), error, self.identity.run_name,
                    )  # fmt: skip
                self._error, self._client = error, None  # the stored values are read again: an answer may be lost
                (self._give_up if last else self._stop).wait(retry)  # a new step does not shorten the wait
                wait, retry = 0.0, min(2 * retry, LONGEST_RETRY_SECONDS)
                continue
            self._error = None
            wait, retry = FLUSH_SECONDS, RETRY_SECONDS
            if last:
                self._copied = len(self.history.attempts), len(self._stored)
                self.history, self._stored, self._begun = RunHistory(), {}, {}  # a paused run's copier stays in memory
                return

    def has_artifacts(self) -> bool:
        """Whether the runs folder has the files of a copied run; always true for a remote store."""
        if remote_uri() is not None:
            return True
        names = ["config.yaml", *["samples.json"] * bool(self.history.samples)]
        names += ["per_problem.json"] * bool(self.history.per_problem)
        names += ["start_per_problem.json"] * bool(self.history.start_per_problem)
        folder = self.runs / "mlartifacts" / self.identity.experiment / self._run_id() / "artifacts"
        return all((folder / name).exists() for name in names)

    def flush(self) -> None:
        """Copy all events up to now. Raises MLflow's error if the store refuses them; nothing is lost then."""
        with file_lock(self.directory / "mlflow.lock"):
            self._flush()

    def _flush(self) -> None:
        client = self._client or self._go_on() or self._attach()
        with (self.directory / EVENTS).open("rb") as file:
            os.fsync(file.fileno())  # so that a power cut loses little; done here, outside the training thread
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
        self._copy_traces()
        if finish is not None:
            self._copy_end(client, finish)

    def _contradicts(self, values: Mapping[_Key, tuple[float, int]]) -> bool:
        """Whether the store has another value for one of these, except for costs."""
        known = {key: as_stored(value) for key, (value, _) in values.items() if key in self._stored}
        return any(
            value != self._stored[key] and not (math.isnan(value) and math.isnan(self._stored[key]))
            for key, value in known.items()
            if key[0].partition("/")[0] not in COST_AREAS
        )

    def _went_further(self, finish: Mapping[str, Any]) -> bool:
        """Whether the store has values of steps that this run, now ended, never reached."""
        if finish["state"] not in FINAL:
            return False
        with self._lock:
            return any(
                step not in self.history.history.get(key, {})
                for key, step in self._stored
                if not key.startswith((SUMMARY, SYSTEM))
            )

    def _replace(self) -> None:
        """Start a new MLflow run, which is filled from the file, and delete the old one."""
        self.identity = dataclasses.replace(self.identity, run_id=None, token="", superseded=self._run_id())
        self.identity.save(self.directory)
        self._client = self._traces = None
        self._samples_at = -math.inf
        with self._lock:
            self._pending = [(key, step) for key, steps in self.history.history.items() for step in steps]
            self._samples_changed = bool(self.history.samples)
        self._attach()

    def _go_on(self) -> MlflowClient | None:
        """The client of the previous attempt, if this process paused it and nobody has worked on the run since."""
        before, self._before = self._before, None
        if before is None or before._client is None:
            return None
        old, new = before.identity, self.identity
        with self._lock:
            unchanged = before._copied == (len(self.history.attempts) - 1, len(self._begun))
        if not unchanged or (old.parent_run_id, old.spec) != (new.parent_run_id, new.spec):
            return None
        new.run_id, new.token = old.run_id, old.token
        new.save(self.directory)
        self._say_running(before._client)
        self._client, self._stored, self._traces = before._client, self._begun, before._traces
        return self._client

    def _attach(self) -> MlflowClient:
        """Connect, find or create the MLflow run, and read the values that it has."""
        client = connect(self.runs)
        identity = Identity.load(self.directory) or self.identity
        self.identity = identity
        run = active_run(client, identity.run_id) or self._find_by_token(client) or self._create(client)
        identity.run_id = run.info.run_id
        identity.save(self.directory)
        self._stored = {
            (key, metric.step): metric.value
            for key in run.data.metrics
            for metric in client.get_metric_history(identity.run_id, key)
        }
        self._describe(client)
        if self._trace_limit:
            tags = {key: value for key, value in identity.tags.items() if key in ("cohort.arm", "cohort.seed")}
            shown = {key.removeprefix("cohort."): value for key, value in tags.items()}
            shown["run"] = identity.run_name
            uri = tracking_uri(self.runs)
            self._traces = TraceWriter(uri, run.info.experiment_id, run.info.run_id, shown)
        if (old := active_run(client, identity.superseded)) is not None:
            delete_traces(tracking_uri(self.runs), old.info.experiment_id, old.info.run_id)
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
        experiment = experiment_of(client, self.runs, identity.experiment)
        identity.token = uuid.uuid4().hex
        identity.save(self.directory)
        tags = {"cohort.kind": "run", "cohort.token": identity.token, "cohort.trial": self.directory.name}
        tags |= source_tags() | {key: storable(value) for key, value in identity.tags.items()}
        if identity.parent_run_id is not None:
            tags["mlflow.parentRunId"] = identity.parent_run_id
        with self._lock:
            began = self.history.attempts[0]["time"] if self.history.attempts else None
        return client.create_run(experiment.experiment_id, start_time=began, tags=tags, run_name=identity.run_name)

    def _describe(self, client: MlflowClient) -> None:
        """Parameters, configuration and state; harmless when repeated."""
        run_id = self._run_id()
        log_params(client, run_id, {**self.identity.spec, "objective": self.identity.objective})
        client.log_inputs(run_id, datasets=_datasets(self.identity))
        self._say_running(client)
        if self.identity.inputs:
            client.log_dict(run_id, self.identity.inputs, "inputs.json")
            set_tags(client, run_id, inputs_tag(self.identity.inputs))
        if self.identity.prompt:
            client.log_text(run_id, self.identity.prompt, "prompt.txt")
        client.log_text(run_id, yaml.safe_dump(self.identity.spec, sort_keys=False), "config.yaml")
        if self.identity.parent_run_id is None:
            log_diff(client, run_id)

    def _say_running(self, client: MlflowClient) -> None:
        with self._lock:
            threads = sorted({attempt.get("threads", "") for attempt in self.history.attempts} - {""})
        tags = {"cohort.state": "running", "cohort.reason": "", "cohort.threads": " ".join(threads)}
        set_tags(client, self._run_id(), tags)
        client.update_run(self._run_id(), status="RUNNING")

    def _copy_metrics(
        self, client: MlflowClient, todo: Sequence[_Key], values: Mapping[_Key, tuple[float, int]]
    ) -> None:
        from mlflow.entities import Metric

        for start in range(0, len(todo), 1000):  # MLflow's limit per request
            batch = todo[start : start + 1000]
            new = [key for key in dict.fromkeys(batch) if key not in self._stored]
            if new:
                client.log_batch(self._run_id(), [Metric(key[0], *values[key], key[1]) for key in new])
            self._stored |= {key: as_stored(values[key][0]) for key in new}
            with self._lock:
                del self._pending[: len(batch)]

    def _copy_samples(self, client: MlflowClient, rows: Sequence[Mapping[str, Any]]) -> None:
        """The samples table, rewritten whole, in the form of MlflowClient.log_table: the UI shows it as a table."""
        columns = [item.name for item in dataclasses.fields(SampleRow)]
        table = {"columns": columns, "data": [[row.get(column, {}) for column in columns] for row in rows]}
        client.log_dict(self._run_id(), strict(table), "samples.json")
        shown = json.dumps([{"path": "samples.json", "type": "table"}])
        client.set_tag(self._run_id(), "mlflow.loggedArtifacts", shown)
        self._samples_at = time.monotonic()
        with self._lock:
            self._samples_changed = len(self.history.rows()) > len(rows)

    def _copy_traces(self) -> None:
        """Send the first rollouts of every step and split as traces, unless the store takes only metrics."""
        if self._traces is None:
            return
        with self._lock:
            rows = {
                (step, split, i): (row, self.history.sample_times[step, split])
                for (step, split), (_, members) in self.history.samples.items()
                for i, row in enumerate(members[: self._trace_limit])
            }
        try:
            self._traces.write(rows)
        except Exception as error:
            if is_outage(error):
                raise
            self._traces = None
            log.warning("rollouts of '%s' do not become traces: %s", self.identity.run_name, error)

    def _copy_end(self, client: MlflowClient, finish: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        summary = {key: float(value) for key, value in finish["summary"].items()}
        with self._lock:
            problems = {name: dict(getattr(self.history, name)) for name in ("per_problem", "start_per_problem")}
        for name, fractions in problems.items():
            if fractions:
                client.log_dict(self._run_id(), fractions, f"{name}.json")
        if finish["state"] == "complete" and summary:
            metrics = [Metric(SUMMARY + key, value, finish["time"], 0) for key, value in summary.items()]
            client.log_batch(self._run_id(), metrics)
        tags = {"cohort.state": finish["state"], "cohort.reason": finish["reason"] or "", **self._policy_tag(finish)}
        set_tags(client, self._run_id(), {**tags, "cohort.summary": json.dumps(strict(summary))})
        client.set_terminated(self._run_id(), STATUS[finish["state"]], end_time=finish["time"])
        self.identity.synced = finish["state"] != "paused"  # a paused run has another attempt, perhaps begun by now
        self.identity.save(self.directory)

    def _policy_tag(self, finish: Mapping[str, Any]) -> dict[str, str]:
        """The path of the final policy relative to the runs folder, so that it also holds in a copied folder."""
        kept = self.identity.spec.get("checkpoints", {}).get("finished")
        if kept is None:
            kept = "weights" if self.identity.parent_run_id is None else "nothing"
        policy = max(self.directory.glob("checkpoints/step-*/policy"), default=None)
        if finish["state"] not in FINAL or policy is None:
            return {}
        where = (
            Path(os.path.relpath(policy, self.runs)).as_posix()
            if kept == "weights"
            else "not kept; checkpoints.finished=weights keeps it"
        )
        return {POLICY: storable(where)}

    def _run_id(self) -> str:
        assert self.identity.run_id is not None
        return self.identity.run_id


def _datasets(identity: Identity) -> list[DatasetInput]:
    """The splits of the run's task: its name, and a digest of its settings and of the files or commits that it reads.

    No row is copied. Splits may share files; then each digest covers them.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    task, found = identity.spec.get("task"), []
    if task is None:  # a run of several stages has tasks in each stage
        return []
    reads = {source: files for source, files in identity.inputs.items() if not source.startswith("model ")}
    for split in ("train", "validation", "test") if identity.spec["steps"] else ("validation", "test"):
        known = {"task": task, "split": split, "reads": reads}
        source = json.dumps({"task": task, "reads": short(reads)})
        dataset = Dataset(task["name"], digest(known), "cohort", storable(source))
        found.append(DatasetInput(dataset, [InputTag("mlflow.data.context", split)]))
    return found
