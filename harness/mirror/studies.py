"""Writes studies to the MLflow store as a parent run with its trials as children, and reads them back as records."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from ..data import FINAL, GREY, TrialState
from ..ground.files import FORMAT, read_json, write_json
from ..ground.inputs import NO_INPUTS, Inputs, short
from ..record.provenance import versions
from ..record.study import ExploratoryArm, StudyRecord, TrialRecord
from ..spec.errors import did_you_mean
from .address import is_server, patient, remote_uri, store_name
from .store import (
    NOTE,
    STATUS,
    SUMMARY,
    SYSTEM,
    TRAINING_PAGES,
    active_run,
    artifact,
    connect,
    existing_store,
    experiment_of,
    from_stored,
    inputs_tag,
    log_diff,
    log_folder,
    log_params,
    log_table,
    newest_parent,
    search_runs,
    set_tags,
    source_tags,
)
from .traces import storable
from .trial_folder import sample_row
from .view import GROUP, RUN_COLOR, STUDY_GROUP, color_tag, view_tags

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

    from ..spec.study import StudySpec


ByFiles = Callable[[TrialRecord], TrialRecord]  # the trial itself where there are none
PROBE = "probe"  # the experiment of `cohort probe`
MAX_NOTE = 5000  # characters of a tag that every store takes
CONTROL = "cohort.control"  # a tag by which users ask for something


@patient
def open_study(runs: Path, study: StudySpec, command: str, inputs: Inputs = NO_INPUTS) -> str:
    """The id of the study's parent run, after updating it; it stays the same as long as the study's folder exists.

    An empty `command` keeps the recorded command, which started the study.
    """
    client = connect(runs)
    file = _study_run_file(runs, study.name)
    known = study_run_id(runs, study.name) if file.exists() else None
    run = active_run(client, known)
    if run is None:
        experiment = experiment_of(client, runs, study.name)
        tags = {"cohort.kind": "study", "cohort.study": study.name, **source_tags()}
        run = client.create_run(experiment.experiment_id, tags=tags, run_name=study.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"run_id": run.info.run_id})
    run_id = run.info.run_id
    command = command or run.data.tags.get("cohort.command") or f"cohort study run {shlex.quote(study.name)}"
    labels = study.arm_labels()
    document = {
        "format": FORMAT,
        "spec": study.model_dump(mode="json"),
        "arms": labels,
        "baseline": study.baseline or next(iter(labels), ""),
        "command": command,
        "versions": versions(),
        "inputs": inputs,
    }
    client.log_dict(run_id, document, "study.json")
    log_diff(client, run_id)
    design = study.model_dump(mode="json", exclude={"name", "question", "seeds"}, exclude_defaults=True)
    log_params(client, run_id, {"design": study.design, **design}, known=run.data.params)
    client.set_experiment_tag(run.info.experiment_id, NOTE, storable(study.question))
    factors = dict.fromkeys(path for arm in study.checked_arms() for path in arm.levels if path != "arm")
    by_label = study.arm_colors()
    colors = {arm.short_label: by_label[arm.label] for arm in study.checked_arms() if arm.label in by_label}
    for key, value in view_tags(study.metric, list(factors), colors).items():
        client.set_experiment_tag(run.info.experiment_id, key, storable(value))
    client.set_experiment_tag(run.info.experiment_id, "mlflow.experiment.primaryMetric.name", study.metric)
    set_tags(
        client,
        run_id,
        {
            "cohort.state": "running",
            GROUP: STUDY_GROUP,
            "cohort.command": command,
            "cohort.seeds": json.dumps(document["spec"]["seeds"]),
            NOTE: study.question,
            **inputs_tag(inputs),
        },
    )
    client.update_run(run_id, status="RUNNING")
    return run_id


def study_run_id(runs: Path, name: str) -> str:
    """The id of the parent run that `open_study` made for the study in this runs folder."""
    return read_json(_study_run_file(runs, name))["run_id"]


@patient
def log_found(runs: Path, run_id: str, file: str, document: Mapping[str, Any]) -> None:
    """Attach the findings of a study's searches (`search.json`) or first seeds (`seeds.json`) to its parent run, for
    `read_study`."""
    connect(runs).log_dict(run_id, {"format": FORMAT, **document}, file)


@patient
def close_study(runs: Path, run_id: str, state: TrialState, stopped: Sequence[str] = ()) -> None:
    """Record in the study's parent run how the study ended, and which arms were stopped."""
    client = connect(runs)
    set_tags(client, run_id, {"cohort.state": state, "cohort.stopped": json.dumps(list(stopped))})
    client.set_terminated(run_id, STATUS[state])


def take_requests(runs: Path, run_id: str) -> list[tuple[str | None, str]]:
    """(arm, text) of every tag `cohort.control` that a user has set on the study's run (arm None) or on a trial's run.

    Deletes the tags.
    """
    client = connect(runs)
    experiment = client.get_run(run_id).info.experiment_id
    found = []
    for run in search_runs(client, experiment, f"tags.`{CONTROL}` != ''"):
        if run_id in (run.info.run_id, run.data.tags.get("mlflow.parentRunId")):
            found.append((run.data.tags.get("cohort.arm"), run.data.tags[CONTROL].strip()))
            client.delete_tag(run.info.run_id, CONTROL)
    return found


@patient
def log_failures(runs: Path, run_id: str, failures: Mapping[str, tuple[Mapping[str, str], str]]) -> None:
    """Record trials that the study counts as failed: name -> tags and reason.

    A trial whose files cannot be read, or whose workers all died, could not record that itself. A result already in the
    store stays.
    """
    if not failures:
        return
    client = connect(runs)
    experiment = client.get_run(run_id).info.experiment_id
    known = _trial_runs(client, experiment, run_id)
    for name, (tags, reason) in failures.items():
        run = known.get((tags["cohort.arm"], int(tags["cohort.seed"])))
        if run is not None and (_state(run) in FINAL or run.data.tags.get("cohort.reason") == reason):
            continue
        if run is None:
            tags = {**tags, "mlflow.parentRunId": run_id, **source_tags()}
            run = client.create_run(experiment, tags=tags, run_name=name)
        set_tags(client, run.info.run_id, {"cohort.state": "failed", "cohort.reason": reason})
        client.set_terminated(run.info.run_id, STATUS["failed"])


@patient
def log_report(
    runs: Path,
    name: str,
    folder: Path,
    answer: str,
    means: Sequence[Mapping[str, Any]] = (),
    colors: Mapping[str, str] = {},
) -> None:
    """Attach a written report to the study's parent run, and the answer to the note that the UI shows there.

    `means` are its numbers by arm and metric, shown as a table of the run; `colors` are the arms' colours in its
    figures, which the trials' runs get too.
    """
    client = connect(runs)
    parent = newest_parent(client, name)
    if parent is None:
        raise ValueError(f"{store_name(runs)} has no study '{name}'")
    log_folder(client, runs, parent, folder, "report")
    document = artifact(client, runs, parent, "study.json") or {"spec": {"question": name}}
    note = "\n\n".join(filter(None, [document["spec"]["question"], answer, _markdown(means)]))
    note = note if len(note) <= MAX_NOTE else note[:MAX_NOTE].rpartition("\n")[0]
    set_tags(client, parent.info.run_id, {NOTE: note})
    if means:
        log_table(client, runs, parent, means, "arms.json")
    if colors:
        groups = {}
        for (arm, _), run in _trial_runs(client, parent.info.experiment_id, parent.info.run_id).items():
            groups[run.data.tags.get(GROUP, arm)] = colors.get(arm, GREY)
            if (color := colors.get(arm, GREY)) != run.data.tags.get(RUN_COLOR):
                set_tags(client, run.info.run_id, {RUN_COLOR: color})
        client.set_experiment_tag(parent.info.experiment_id, *color_tag(groups))


@patient
def read_study(runs: Path, name: str, by_files: ByFiles | None = None) -> StudyRecord:
    """The study as rebuilt from the MLflow store: one record for each (arm, seed) that has begun.

    If an (arm, seed) has several MLflow runs, the newest complete one counts, or else the newest. For a trial that
    `by_files` reads from elsewhere, the store's metrics are not queried, which saves one query per metric. ValueError
    for a study that the store does not have.
    """
    client = existing_store(runs)
    parent = newest_parent(client, name) if client else None
    if client is None or parent is None:
        known = list_studies(runs)
        there = f"it has: {', '.join(known)}" if known else "run one with: cohort study run NAME"
        raise ValueError(f"{store_name(runs)} has no study '{name}'; {did_you_mean(name, known)}{there}")
    document = artifact(client, runs, parent, "study.json")
    if document is None or document.get("format") != FORMAT:
        raise ValueError(
            f"study '{name}' in {store_name(runs)} is incomplete or of another version; run the study again"
        )
    spec = document["spec"]
    trials = _trial_runs(client, parent.info.experiment_id, parent.info.run_id)
    search = artifact(client, runs, parent, "search.json")
    arms = document["arms"] or sorted({arm for arm, _ in trials})  # the arms of a search are numbered
    seeds, two_stage = spec["seeds"], None
    if isinstance(seeds, Mapping):
        two_stage = {**seeds, **(artifact(client, runs, parent, "seeds.json") or {})}
        begun = {seed for _, seed in trials}  # a study whose process was killed has not attached its decision
        seeds = two_stage.get("seeds") or sorted({*range(two_stage["first"]), *begun})
    wanted = [(arm, seed) for arm in arms for seed in seeds]
    found = {key: _trial_record(client, runs, trials[key], by_files) for key in wanted if key in trials}
    for arm in (search or {}).get("arms", []):
        if arm["state"] == "pruned":  # every mean is over the same number of seeds
            for key, trial in found.items():
                if key[0] == arm["label"] and trial.state == "complete":
                    found[key] = dataclasses.replace(trial, state="pruned", reason=arm["reason"])
            wanted = [key for key in wanted if key in found or key[0] != arm["label"]]
    return StudyRecord(
        name=name,
        question=spec["question"],
        metric=spec["metric"],
        baseline=document["baseline"] or next(iter(arms), ""),
        arms=arms,
        seeds=seeds,
        expected=len(wanted),
        spec=spec,
        trials=list(found.values()),
        command=document["command"],
        versions={**document["versions"], **short(document.get("inputs", {}))},
        search=search,
        stopped=json.loads(parent.data.tags.get("cohort.stopped", "[]")),
        exploratory=_exploratory(client, runs, trials, by_files),
        two_stage=two_stage,
        probes=_probes(client, runs, list(found.values()), document.get("inputs", {})),
    )


@patient
def list_studies(runs: Path, by: Literal["name", "start"] = "name") -> list[str]:
    """Names of the studies in the store, sorted, or the newest last; empty without a store."""
    client = existing_store(runs)
    if client is None:
        return []
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    parents = search_runs(client, experiments, "tags.`cohort.kind` = 'study'")  # newest first
    names = list(dict.fromkeys(run.data.tags["cohort.study"] for run in parents))
    return sorted(names) if by == "name" else names[::-1]


@patient
def study_url(runs: Path, name: str, address: str) -> str:
    """The page of a study's trials on the MLflow server at `address`.

    The pages of `cohort ui` know the study's view. On another server the trials are sorted by the study's metric, best
    first: sorted by date, the parent run would hide them.
    """
    client = connect(runs)
    parent = newest_parent(client, name)
    document = artifact(client, runs, parent, "study.json") if parent else None
    if parent is None or document is None:
        raise ValueError(f"{store_name(runs)} has no study '{name}'")
    page = f"{address}/#/experiments/{parent.info.experiment_id}/runs?{TRAINING_PAGES}"
    if not is_server(remote_uri()):
        return page
    order = quote(f"metrics.`{document['spec']['metric']}`", safe="")
    return f"{page}&orderByKey={order}&orderByAsc=false"


def _markdown(means: Sequence[Mapping[str, Any]]) -> str:
    """The means as a table of a note: one row for each arm, one column for each metric."""
    if not means:
        return ""
    cells: dict[str, dict[str, str]] = {}
    for row in means:
        interval = "" if row["low"] is None else f" [{row['low']:.4g}, {row['high']:.4g}]"
        cells.setdefault(row["arm"], {})[row["metric"]] = f"{row['mean']:.4g}{interval}"
    columns = list(dict.fromkeys(row["metric"] for row in means))
    lines = [["arm", *columns], ["---"] * (len(columns) + 1)]
    lines += [[arm, *(known.get(column, "") for column in columns)] for arm, known in cells.items()]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _study_run_file(runs: Path, name: str) -> Path:
    return runs / "studies" / name / "mlflow.json"


def _trial_runs(client: MlflowClient, experiment: str, parent: str) -> dict[tuple[str, int], Run]:
    """The MLflow run that counts for each (arm, seed): the newest complete one, or else the newest."""
    trials: dict[tuple[str, int], Run] = {}
    for run in search_runs(client, experiment, f"tags.`mlflow.parentRunId` = '{parent}'"):  # newest first
        key = (run.data.tags["cohort.arm"], int(run.data.tags["cohort.seed"]))
        if key not in trials or (_state(run) == "complete" and _state(trials[key]) != "complete"):
            trials[key] = run
    return trials


def _trial_record(client: MlflowClient, runs: Path, run: Run, by_files: ByFiles | None) -> TrialRecord:
    tags, run_id = run.data.tags, run.info.run_id
    known = TrialRecord(
        trial=tags["cohort.trial"],
        arm=tags["cohort.arm"],
        seed=int(tags["cohort.seed"]),
        state=_state(run),
        reason=tags.get("cohort.reason") or None,
        spec={},
        factors=json.loads(tags["cohort.factors"]),
        history={},
        summary={key: float(value) for key, value in json.loads(tags.get("cohort.summary", "{}")).items()},
        per_problem={},
        samples=[],
        threads=tags.get("cohort.threads", "").split(),
    )
    if by_files is not None and (found := by_files(known)) is not known:
        return found
    table = artifact(client, runs, run, "samples.json") or {"columns": [], "data": []}
    keys = sorted(key for key in run.data.metrics if not key.startswith((SUMMARY, SYSTEM)))
    samples = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    return dataclasses.replace(
        known,
        spec=artifact(client, runs, run, "config.yaml") or {},
        history={key: _history(client, run_id, key) for key in keys},
        per_problem=artifact(client, runs, run, "per_problem.json") or {},
        samples=[sample_row(row) for row in samples],
        start_per_problem=artifact(client, runs, run, "start_per_problem.json") or {},
    )


def _exploratory(
    client: MlflowClient, runs: Path, trials: Mapping[tuple[str, int], Run], by_files: ByFiles | None
) -> list[ExploratoryArm]:
    clones: dict[str, dict[int, Run]] = {}
    for (arm, seed), run in sorted(trials.items()):
        if run.data.tags.get("cohort.phase") == "exploratory":
            clones.setdefault(arm, {})[seed] = run
    found = []
    for label, members in clones.items():
        tags = next(iter(members.values())).data.tags
        left_at = {seed: int(run.data.tags["cohort.left_at"]) for seed, run in members.items()}
        records = [_trial_record(client, runs, run, by_files) for run in members.values()]
        changes = json.loads(tags["cohort.changes"])
        found.append(ExploratoryArm(label, tags["cohort.parent"], changes, left_at, records))
    return found


def _probes(client: MlflowClient, runs: Path, trials: Sequence[TrialRecord], inputs: Inputs) -> list[Mapping[str, Any]]:
    """The results of probes on the task with a model that trials start from, the newest first."""
    experiment = client.get_experiment_by_name(PROBE)
    if experiment is None:
        return []
    documents = [artifact(client, runs, run, "probe.json") for run in search_runs(client, experiment.experiment_id, "")]
    found = [one for one in documents if one is not None and one.get("format") == FORMAT]
    starts = [_start(trial.spec) for trial in trials if trial.spec]
    return [
        {key: value for key, value in one.items() if key not in ("format", "spec", "inputs")}
        for one in found
        if _start(one["spec"]) in starts
        and all(inputs[source] == one["inputs"][source] for source in inputs.keys() & one["inputs"].keys())
    ]


def _start(spec: Mapping[str, Any]) -> list[Any]:
    """The settings that decide the model that a run starts from (not the content of files), and the name of its
    task."""
    cold = [spec["task"], spec["prompt"]] if spec["cold_start"]["steps"] else []
    return [spec["model"], spec["task"]["name"], spec["cold_start"], *cold]


def _state(run: Run) -> Any:
    return run.data.tags.get("cohort.state", "running")


def _history(client: MlflowClient, run_id: str, key: str) -> list[tuple[int, float]]:
    """(step, value), steps rising; the newest value of a step counts."""
    points = sorted(client.get_metric_history(run_id, key), key=lambda metric: metric.timestamp)
    return sorted({metric.step: from_stored(metric.value) for metric in points}.items())
