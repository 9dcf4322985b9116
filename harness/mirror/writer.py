"""Copies the record of one run to MLflow: each call adds everything that the store lacks."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..base.files import read_json, write_json
from ..data import FINAL
from ..record.events import EVENTS, Tail
from ..record.provenance import DIFF
from ..record.run import INFO, SYSTEM, RunInfo
from . import store
from .address import is_outage, remote_uri, traces_per_split, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

POLICY = "cohort.policy"  # the tag that names the final policy
RECORD = Path("record")  # the artifact folder with a run's record
RECORDED = ("*.json", EVENTS, "completions/*.jsonl", "rollouts/*.jsonl")  # what that has
COST_AREAS = ("seconds", "throughput", "memory", "flops", "system")  # metrics that may differ between two equal runs
_Key = tuple[str, int]  # metric, step
log = logging.getLogger(__name__)


@dataclass
class MirrorState:
    """`mlflow.json`: the run in MLflow that shows the record of a folder.

    The token is stored before the run is created, so that a run created just before a crash is found again. `copied`
    has the files that the run was last given whole: name of a file -> its size or stamp.
    """

    token: str = ""
    run_id: str = ""
    copied: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> MirrorState:
        file = folder / "mlflow.json"
        try:
            return cls(**read_json(file))
        except (OSError, ValueError, TypeError):  # none, or torn: the record is whole without it
            return cls()

    def save(self, folder: Path) -> None:
        write_json(folder / "mlflow.json", dataclasses.asdict(self))

    def run_in(self, client: MlflowClient, experiment: str) -> Run | None:
        """The active run with this id, or else this token."""
        if (run := store.active_run(client, self.run_id)) is not None:
            return run
        wanted = f"tags.`cohort.token` = '{self.token}'"
        found = client.get_experiment_by_name(experiment) if self.token else None
        return next(iter(store.search_runs(client, [found.experiment_id], wanted) if found is not None else ()), None)


class RunMirror:
    """The copy of one run.

    A (metric, step) that the store has is not sent again. A killed attempt may have logged steps after its last
    checkpoint, and repeating them need not give exactly the same values. If the store has a different value for a step,
    or steps that the ended run does not have, a new MLflow run made from the record replaces the old one. Costs
    (seconds, memory) always differ between attempts, so their first value stays.
    """

    def __init__(self, runs: Path, directory: Path) -> None:
        self.runs, self.directory = runs, directory
        self.place = MirrorState.load(directory)
        self._tail = Tail(directory / EVENTS)
        self._pending: list[_Key] = []  # logged, and perhaps not in the store
        self._info: RunInfo | None = None  # once the store's values are known
        self._traces: Any = None  # a TraceWriter, whose module loads MLflow
        self._stored: dict[_Key, float] = {}
        self._told: tuple[Any, ...] = ()  # the ending that the store shows
        self._known = False  # whether the store has had an answer about a run that was copied whole

    def copy(self, client: MlflowClient, parent: str | None = None) -> None:
        """Copy what is new, for a child of the MLflow run `parent`. Raises MLflow's error if the store refuses it;
        nothing is lost then. ValueError for a record that cannot be read."""
        file = self.directory / EVENTS
        size = file.stat().st_size if file.exists() else 0
        if not size or (self.place.copied.get(EVENTS) == size and self._is_there(client, parent)):
            return
        anew, events = self._tail.read()
        logged = [event for event in events if event["type"] == "metrics"]
        self._pending = [] if anew else self._pending
        self._pending += [(key, event["step"]) for event in logged for key in event["values"]]
        if not self._tail.history.attempts:
            return
        try:
            info = self._info or self._attach(client, parent)
            finish = next(iter(self._tail.history.finish), None)
            if self._is_contradicted(finish):
                info = self._replace(client)
            self._copy_metrics(client)
            self._copy_traces(info)
            self._copy_state(client, info, finish)
        except BaseException:
            self._info = None  # the stored values are read again: an answer may be lost
            raise
        if finish is not None:
            self.place.copied = {EVENTS: size}
            self.place.save(self.directory)
            self._known = True

    def _is_there(self, client: MlflowClient, parent: str | None) -> bool:
        """Whether the run that was copied whole is still in this store, below the same parent."""
        if not self._known and (run := store.active_run(client, self.place.run_id)) is not None:
            self._known = run.data.tags.get("mlflow.parentRunId") == parent
        return self._known

    def _is_contradicted(self, finish: Mapping[str, Any] | None) -> bool:
        """Whether the store has another value than the record, except for costs, or steps that the ended run lacks."""
        for key, step in self._stored.keys() & {*self._pending}:
            known, value = self._stored[key, step], store.as_stored(self._tail.history.history[key][step][0])
            same = value == known or (math.isnan(value) and math.isnan(known))
            if not same and key.partition("/")[0] not in COST_AREAS:
                return True
        ended = finish is not None and finish["state"] in FINAL
        logged = [place for place in self._stored if not place[0].startswith((store.SUMMARY, SYSTEM))]
        return ended and any(step not in self._tail.history.history.get(key, {}) for key, step in logged)

    def _replace(self, client: MlflowClient) -> RunInfo:
        """Delete the MLflow run, and fill a new one from the record."""
        from .traces import delete_traces

        old = client.get_run(self.place.run_id)
        delete_traces(tracking_uri(self.runs), old.info.experiment_id, self.place.run_id)
        client.delete_run(self.place.run_id)
        self.place = MirrorState()
        self._pending = [(key, step) for key, steps in self._tail.history.history.items() for step in steps]
        return self._attach(client, old.data.tags.get("mlflow.parentRunId"))

    def _attach(self, client: MlflowClient, parent: str | None) -> RunInfo:
        """Find or create the MLflow run, describe it, and read the values that it has."""
        info = RunInfo.load(self.directory)
        if info is None:
            raise ValueError(f"'{self.directory}' has no {INFO}; restore it from a copy")
        run = self.place.run_in(client, info.experiment)
        if run is None:
            experiment = store.experiment_of(client, self.runs, info.experiment)
            self.place.token = uuid.uuid4().hex
            self.place.save(self.directory)
            tags = {"cohort.kind": "run", "cohort.token": self.place.token}
            tags |= {key: store.storable(value) for key, value in info.tags.items()}
            began = self._tail.history.attempts[0]["time"]
            run = client.create_run(experiment.experiment_id, start_time=began, tags=tags, run_name=info.name)
        self.place.run_id, self.place.copied = run.info.run_id, {}
        self.place.save(self.directory)
        if parent is not None and run.data.tags.get("mlflow.parentRunId") != parent:
            store.set_tags(client, self.place.run_id, {"mlflow.parentRunId": parent})
        stored = {key: client.get_metric_history(self.place.run_id, key) for key in run.data.metrics}
        self._stored = {(key, metric.step): metric.value for key, series in stored.items() for metric in series}
        self._told = ()
        store.log_params(client, self.place.run_id, {**info.spec, "objective": info.objective})  # harmless if repeated
        store.set_tags(client, self.place.run_id, store.source_tags(vars(info)))
        if info.prompt:
            client.log_text(self.place.run_id, info.prompt, "prompt.txt")
        client.log_text(self.place.run_id, yaml.safe_dump(info.spec, sort_keys=False), "config.yaml")
        if (self.directory / DIFF).exists():
            client.log_artifact(self.place.run_id, str(self.directory / DIFF))
        if traces_per_split():
            from .traces import TraceWriter

            tags = {key: value for key, value in info.tags.items() if key in ("cohort.arm", "cohort.seed")}
            shown = {key.removeprefix("cohort."): value for key, value in tags.items()} | {"run": info.name}
            self._traces = TraceWriter(tracking_uri(self.runs), run.info.experiment_id, self.place.run_id, shown)
        self._info = info
        return info

    def _copy_metrics(self, client: MlflowClient) -> None:
        from mlflow.entities import Metric

        values = self._tail.history.history
        new = [place for place in dict.fromkeys(self._pending) if place not in self._stored]
        for start in range(0, len(new), 1000):  # MLflow's limit per request
            batch = [Metric(key, *values[key][step], step) for key, step in new[start : start + 1000]]
            client.log_batch(self.place.run_id, batch)
            self._stored |= {(metric.key, metric.step): store.as_stored(metric.value) for metric in batch}
        self._pending.clear()

    def _copy_traces(self, info: RunInfo) -> None:
        """Send the first rollouts of every step and split as traces, unless the store takes only metrics."""
        if self._traces is None:
            return
        history, most = self._tail.history, traces_per_split()
        first = {place: members[:most] for place, (_, members) in history.samples.items()}
        rows = {(*at, i): (row, history.sample_times[at]) for at, some in first.items() for i, row in enumerate(some)}
        try:
            self._traces.write(rows)
        except Exception as error:
            if is_outage(error):
                raise
            self._traces = None
            log.warning("rollouts of '%s' do not become traces: %s", info.name, error)

    def _copy_state(self, client: MlflowClient, info: RunInfo, finish: Mapping[str, Any] | None) -> None:
        """The run's state, and at its end its summary, its policy and, on a server, its record."""
        from mlflow.entities import Metric

        end = finish or {"state": "running", "reason": None, "time": None}
        state, told = end["state"], (end["state"], end["reason"], end["time"])
        if told == self._told:
            return
        tags = {"cohort.reason": end["reason"] or ""}
        if state == "complete":
            summary = end["summary"].items()
            metrics = [Metric(store.SUMMARY + key, float(value), end["time"], 0) for key, value in summary]
            client.log_batch(self.place.run_id, metrics)
        if state != "running" and remote_uri() is not None:
            for file in (file for name in RECORDED for file in self.directory.glob(name)):
                folder = (RECORD / file.relative_to(self.directory)).parent.as_posix()
                client.log_artifact(self.place.run_id, str(file), folder)  # for hosts that share only a server
        finished = info.spec.get("checkpoints", {}).get("finished")
        stays = finished == "weights" or (finished is None and "cohort.study" not in info.tags)  # by default no trial's
        policies = self.directory.glob("checkpoints/step-*/policy") if stays and state in FINAL else ()
        if (policy := max(policies, default=None)) is not None:
            tags[POLICY] = Path(os.path.relpath(policy, self.runs)).as_posix()  # as it also is in a copied folder
        store.show_state(client, self.place.run_id, state, end["time"], tags)
        self._told = told
