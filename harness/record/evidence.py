"""Keeps the input of a study's report: the files of its trials, and `evidence.json` with the rest of the record and the
SHA-256 of every file at that time.

The tracking store knows more than the folder (command, versions, trials' states, trials of other hosts).
`evidence.json` keeps that, so that the report follows from the study's folder alone, wherever it is copied.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..ground.files import FORMAT, read_json, sha256, write_text
from ..mirror.trial_folder import read_trial, sample_row
from .events import EVENTS
from .provenance import versions
from .study import ExploratoryArm, StudyRecord, TrialRecord

EVIDENCE = "evidence.json"
IN_FOLDER = (
    "spec",
    "history",
    "summary",
    "per_problem",
    "start_per_problem",
    "samples",
    "threads",
)  # if files are here
_DRAWN_WITH = ("jinja2", "matplotlib", "scipy")
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """`evidence.json`: the record as its trials' files complete it, the hashes, the versions that wrote the report."""

    record: StudyRecord
    files: Mapping[str, str]
    versions: Mapping[str, str]
    is_as_written: bool


def from_files(record: StudyRecord, folder: Path) -> StudyRecord:
    """The record completed from the trials' files, if they are in the study's folder and readable."""
    return _each_trial(record, partial(by_its_files, folder))


def by_its_files(folder: Path, trial: TrialRecord) -> TrialRecord:
    """The trial completed from its files; unchanged if they are not in the study's folder or unreadable (a warning)."""
    try:
        return read_trial(trial_folder(folder, trial), trial)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("the numbers of trial '%s' are those that MLflow has: %s", trial.trial, error)
        return trial


def write_evidence(folder: Path, record: StudyRecord) -> None:
    """Keep the record (of `from_files`) from which the report in the folder was written."""
    trials = [*record.trials, *(trial for arm in record.exploratory for trial in arm.trials)]
    here = {trial.trial for trial in trials if (trial_folder(folder, trial) / EVENTS).exists()}
    names = ["study.json", "search.json", "seeds.json"]
    names += [f"trials/{trial}/{name}" for trial in sorted(here) for name in (EVENTS, "run.json", "result.json")]
    names += sorted(f.relative_to(folder).as_posix() for f in (folder / "report").rglob("*") if f.is_file())
    document = dataclasses.asdict(record)
    for trial in [*document["trials"], *(trial for arm in document["exploratory"] for trial in arm["trials"])]:
        if trial["trial"] in here:
            for name in IN_FOLDER:
                del trial[name]
    content = {
        "format": FORMAT,
        "versions": writing_versions(),
        "record": document,
        "files": {name: sha256(folder / name) for name in names if (folder / name).exists()},
    }
    write_text(folder / EVIDENCE, json.dumps({**content, "sum": content_sum(content)}, indent=1))


def read_evidence(folder: Path) -> Evidence:
    """The content that `write_evidence` wrote. ValueError for anything else."""
    file = folder / EVIDENCE
    document = read_json(file)
    content = {key: value for key, value in document.items() if key != "sum"}
    try:
        fields = content["record"]
        trials = [_trial(trial) for trial in fields["trials"]]
        clones = [
            ExploratoryArm(**{
                **arm,
                "left_at": {int(seed): step for seed, step in arm["left_at"].items()},
                "trials": [_trial(trial) for trial in arm["trials"]],
            })
            for arm in fields["exploratory"]
        ]  # fmt: skip
        record = StudyRecord(**{**fields, "trials": trials, "exploratory": clones})
        files = {str(name): str(digest) for name, digest in content["files"].items()}
        return Evidence(record, files, content["versions"], document.get("sum") == content_sum(content))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file} is not what Cohort wrote there ({error!r:.200}); restore it from a copy") from None


def trial_folder(folder: Path, trial: TrialRecord) -> Path:
    """The folder of a trial's files. ValueError for a name that leads elsewhere."""
    if not trial.trial or Path(trial.trial).name != trial.trial or "\\" in trial.trial:
        raise ValueError(f"{folder / EVIDENCE}: a trial's name must be that of a folder, got {trial.trial!r:.80}")
    return folder / "trials" / trial.trial


def writing_versions() -> dict[str, str]:
    """The versions that decide how a report is written."""
    return {**versions(), **{package: importlib.metadata.version(package) for package in _DRAWN_WITH}}


def _trial(fields: Mapping[str, Any]) -> TrialRecord:
    """A trial as stored in the file, without the content of its own files."""
    empty = {"spec": {}, "history": {}, "summary": {}, "per_problem": {}, "samples": []}
    trial = TrialRecord(**{**empty, **fields})
    history = {key: [(int(step), float(value)) for step, value in series] for key, series in trial.history.items()}
    samples: Any = [sample_row(row) for row in fields.get("samples", [])]
    return dataclasses.replace(trial, seed=int(trial.seed), history=history, samples=samples)


def _each_trial(record: StudyRecord, read: Any) -> StudyRecord:
    clones = [dataclasses.replace(arm, trials=list(map(read, arm.trials))) for arm in record.exploratory]
    return dataclasses.replace(record, trials=list(map(read, record.trials)), exploratory=clones)


def content_sum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
