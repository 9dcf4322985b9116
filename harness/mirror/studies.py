"""Shows a study in MLflow as a parent run with its trials as children, and fetches the records of trials that ran
where only an MLflow server is shared."""

from __future__ import annotations

import json
import logging
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.arms import GREY
from ..base.files import publish_folder, read_json
from ..base.words import in_markdown
from ..data import FINAL
from ..record.events import EVENTS, is_as_written
from ..record.evidence import EVIDENCE, Evidence, read_evidence
from ..record.provenance import DIFF
from ..record.run import INFO, RunInfo, read_result
from ..record.study import LOOKS, SEARCH, STATUS, STUDY, read_folder, study_settings
from . import store
from .address import is_outage, remote_uri
from .others import MIRRORS
from .view import ARM, PHASE, RUN_COLOR, STUDY_GROUP, color_tag, view_tag
from .writer import RECORD, RECORDED, MirrorState

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

LEFT_OUT = "run %.40r in MLflow is no trial of '%s' and is left out: %.300s"
FETCH_SECONDS = 300.0  # the same command fetches what is left then
MAX_NOTE = 5000  # characters of a tag that every store takes
log = logging.getLogger(__name__)


class StudyMirror:
    """The copy of a study's own files in its parent run. A file is copied again when it changed."""

    def __init__(self, runs: Path, folder: Path) -> None:
        self.runs, self.folder = runs, folder
        self.place = MirrorState.load(folder)
        self._is_known = False

    def copy(self, client: MlflowClient) -> str:
        """Copy what is new; the id of the parent run."""
        if not self._is_known or STUDY in self._changed():
            self._open(client)
            self._is_known = True
        return self.place.run_id

    def finish(self, client: MlflowClient) -> None:
        """Copy what speaks of the trials' runs too, and so comes after them."""
        run_id = self.place.run_id
        for name, stamp in self._changed().items():
            if name in (SEARCH, LOOKS):
                client.log_artifact(run_id, str(self.folder / name))
            elif name == STATUS:
                status = read_json(self.folder / STATUS)
                self._show_failures(client, run_id, status["failed"])
                store.show_state(client, run_id, status["state"])
            elif name == EVIDENCE:
                self._show_report(client, run_id, read_evidence(self.folder))
            else:  # a new start: its files are copied next time
                return
            self.place.copied[name] = stamp
            self.place.save(self.folder)

    def _changed(self) -> dict[str, list[int]]:
        """The files that the run does not have as they are now, with their stamps."""
        files = [self.folder / name for name in (STUDY, SEARCH, LOOKS, STATUS, EVIDENCE)]
        stats = {file.name: file.stat() for file in files if file.exists()}
        stamps = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
        return {name: stamp for name, stamp in stamps.items() if self.place.copied.get(name) != stamp}

    def _open(self, client: MlflowClient) -> None:
        """Find or make the parent run. Hosts that share only the store and the study's document share the run."""
        changed, document = self._changed(), read_json(self.folder / STUDY)
        spec = study_settings(document)
        self.place.token = document["id"]
        run = self.place.run_in(client, spec["name"])
        if run is None:
            experiment = store.experiment_of(client, self.runs, spec["name"])
            tags = {"cohort.kind": "study", "cohort.study": spec["name"], "cohort.token": document["id"]}
            run = client.create_run(experiment.experiment_id, tags=tags, run_name=spec["name"])
        if run.info.run_id != self.place.run_id:
            self.place.run_id, self.place.copied = run.info.run_id, {}
            self.place.save(self.folder)
            changed = self._changed()
        if STUDY not in changed:
            return
        run_id, experiment_id = run.info.run_id, run.info.experiment_id
        client.log_artifact(run_id, str(self.folder / STUDY))
        if (self.folder / DIFF).exists():
            client.log_artifact(run_id, str(self.folder / DIFF))
        design = {key: value for key, value in spec.items() if key not in ("name", "question", "seeds") and value}
        store.log_params(client, run_id, design, known=run.data.params)
        shown, note = document["shown"], in_markdown(spec["question"])
        view = view_tag(spec["metric"], shown["factors"], document["labels"])
        for key, value in ((store.NOTE, note), view, color_tag(shown["colors"])):
            client.set_experiment_tag(experiment_id, key, store.storable(value))
        tags = {"cohort.command": document["command"], "cohort.seeds": json.dumps(spec["seeds"])}
        tags |= {ARM: STUDY_GROUP, PHASE: STUDY_GROUP, store.NOTE: note, **store.source_tags(document)}
        store.show_state(client, run_id, "running", tags=tags)
        self.place.copied = {STUDY: changed[STUDY]}  # what follows speaks of the study as it is now
        self.place.save(self.folder)

    def _show_failures(self, client: MlflowClient, run_id: str, failed: Sequence[Mapping[str, Any]]) -> None:
        """Mark the runs of failed trials; a trial without files, or whose files cannot be read, gets a run for it."""
        if not failed:
            return
        experiment = client.get_run(run_id).info.experiment_id
        known = _trial_runs(client, experiment, run_id)
        for one in failed:
            run = known.get((one["arm"], one["seed"]))
            if run is not None and (_state(run) in FINAL or run.data.tags.get("cohort.reason") == one["reason"]):
                continue
            if run is None:
                tags = {
                    "cohort.kind": "trial", "cohort.study": self.folder.name, "cohort.trial": one["trial"],
                    ARM: one["arm"], "cohort.seed": str(one["seed"]), "mlflow.parentRunId": run_id,
                    PHASE: "final",
                }  # fmt: skip
                run = client.create_run(experiment, tags=tags, run_name=f"{one['arm']} | seed {one['seed']}")
            store.show_state(client, run.info.run_id, "failed", tags={"cohort.reason": one["reason"] or ""})

    def _show_report(self, client: MlflowClient, run_id: str, report: Evidence) -> None:
        """Attach the report, its answer as the note, and give the runs the figures' colours."""
        client.log_artifacts(run_id, str(self.folder / "report"), "report")
        question = read_json(self.folder / STUDY)["question"]
        note = "\n\n".join(map(in_markdown, filter(None, (question, report.answer))))
        store.set_tags(client, run_id, {store.NOTE: note[:MAX_NOTE]})
        if report.colors:
            colors, experiment = {}, client.get_run(run_id).info.experiment_id
            for (arm, _), run in _trial_runs(client, experiment, run_id).items():
                color = report.colors.get(arm) or run.data.tags.get(RUN_COLOR, GREY)  # a report has no clones
                colors[arm] = color
                if color != run.data.tags.get(RUN_COLOR):
                    store.set_tags(client, run.info.run_id, {RUN_COLOR: color})
            client.set_experiment_tag(experiment, *color_tag(colors))


def fetch_study(runs: Path, name: str) -> None:
    """Bring the records of a study's ended trials that an MLflow server has and this runs folder lacks; nothing
    without a server, and a warning if it does not answer, or not in full within FETCH_SECONDS. A study that never ran
    here gets its document too."""
    if remote_uri() is None:
        return
    try:
        over = time.monotonic() + FETCH_SECONDS
        store.answered(lambda: _fetch(runs, name, over), FETCH_SECONDS)
    except Exception as error:
        if not is_outage(error):
            raise
        log.warning("%s; '%s' is read from the runs folder alone", error, name)


def forget_study(runs: Path, folder: Path) -> None:
    """Delete its mirrors' files and its runs in MLflow (kept until `mlflow gc`); a warning if the store is away."""
    for place in (runs / MIRRORS).glob(f"*/studies/{folder.name}"):
        shutil.rmtree(place, ignore_errors=True)
    try:
        if not (run_id := MirrorState.load(folder).run_id) or store.moved_from(runs) is not None:
            return
        client = store.connect(runs)
        if (parent := store.active_run(client, run_id)) is not None:
            wanted = f"tags.`mlflow.parentRunId` = '{run_id}'"
            for run in store.search_runs(client, [parent.info.experiment_id], wanted):
                client.delete_run(run.info.run_id)
            client.delete_run(run_id)
    except Exception as error:
        if not is_outage(error):
            raise
        log.warning("%s; MLflow keeps its copy of '%s'", error, folder.name)


def _fetch(runs: Path, name: str, over: float) -> None:
    from mlflow.exceptions import MlflowException

    client, folder = store.connect(runs), runs / "studies" / name
    parent = store.active_run(client, MirrorState.load(folder).run_id)
    if parent is None and (experiment := client.get_experiment_by_name(name)) is not None:  # the newest of this name
        parent = next(iter(store.search_runs(client, [experiment.experiment_id], "tags.`cohort.kind` = 'study'")), None)
    if parent is None:
        return
    if not (folder / STUDY).is_file():
        here = {file.path for file in client.list_artifacts(parent.info.run_id)}
        if STUDY not in here:
            return
        with tempfile.TemporaryDirectory() as scratch:
            for file in here & {STUDY, SEARCH, LOOKS, DIFF}:
                client.download_artifacts(parent.info.run_id, file, scratch)
            if (given := read_folder(Path(scratch), {}).name) != name:
                raise ValueError(f"the study '{name}' in MLflow calls itself {given!r:.80}; choose another name")
            shutil.copytree(scratch, folder, dirs_exist_ok=True)
        MirrorState(uuid.uuid4().hex, parent.info.run_id).save(folder)
    for key, run in _trial_runs(client, parent.info.experiment_id, parent.info.run_id).items():
        try:
            _fetch_trial(client, folder, key, run, over)
        except (ValueError, MlflowException) as error:
            if is_outage(error):
                raise
            log.warning(LEFT_OUT, run.info.run_id, name, error)


def _fetch_trial(client: MlflowClient, folder: Path, key: tuple[str, int], run: Run, over: float) -> None:
    """Bring the record of an ended trial that the study's folder lacks; one of ours that has not ended is set aside.
    Nothing is written after `over`, when a report is being made.

    ValueError, before anything is written there, for a record that is none of this study.
    """
    if not re.fullmatch(r"[\w=-][\w.=-]*", name := run.data.tags.get("cohort.trial", ""), re.ASCII):
        raise ValueError(f"a trial's name must be the name of its folder, got {name!r:.80}")
    ended = read_result(directory := folder / "trials" / name)
    if _state(run) == "running" or (ended is not None and (ended["state"] in FINAL or _state(run) not in FINAL)):
        return
    if (directory / "lease").exists() or all(f.path != str(RECORD) for f in client.list_artifacts(run.info.run_id)):
        return
    with tempfile.TemporaryDirectory() as scratch:
        like, got = Path(scratch, "study"), Path(scratch, "study", "trials", name)
        got.mkdir(parents=True)
        for file in (file for file in (STUDY, SEARCH, LOOKS) if (folder / file).exists()):
            shutil.copy(folder / file, like)
        record = Path(client.download_artifacts(run.info.run_id, str(RECORD), scratch))
        for file in (file for pattern in RECORDED for file in record.glob(pattern) if file.is_file()):
            (place := got / file.relative_to(record)).parent.mkdir(exist_ok=True)
            shutil.copy(file, place)
        study = read_folder(like, {})
        ours = [*study.trials, *(trial for arm in study.exploratory for trial in arm.trials)]
        if read_result(got) is None or [(t.trial, (t.arm, t.seed)) for t in ours] != [(name, key)]:
            raise ValueError(study.strange.get(name, f"'{name}' has no ended trial of its arm and seed"))
        if not all(map(is_as_written, (got / EVENTS).read_bytes().split(b"\n")[:-1])):
            raise ValueError(f"a line of its {EVENTS} was changed after it was written")
        if (other := _folder_of(folder, key)) not in (None, name):
            raise ValueError(f"this trial is in '{other}'")
        if time.monotonic() > over:
            raise TimeoutError
        with publish_folder(directory) as new:
            shutil.copytree(got, new, dirs_exist_ok=True)
            size = (new / EVENTS).stat().st_size
            MirrorState(run.data.tags.get("cohort.token", ""), run.info.run_id, copied={EVENTS: size}).save(new)
            if directory.exists():
                aside = directory.rename(directory.with_name(f".{name}.{uuid.uuid4().hex[:8]}"))
                log.warning("'%s' ended on another host; what this one has of it is now in '%s'", name, aside)


def _folder_of(folder: Path, key: tuple[str, int]) -> str | None:
    """The name of the folder that has a trial of this arm and seed here."""
    for file in (folder / "trials").glob(f"[!.]*/{INFO}"):
        with suppress(ValueError):  # of a damaged one
            tags = (RunInfo.load(file.parent) or RunInfo("", "")).tags
            if (tags.get(ARM), tags.get("cohort.seed")) == (key[0], str(key[1])):
                return file.parent.name
    return None


def _trial_runs(client: MlflowClient, experiment: str, parent: str) -> dict[tuple[str, int], Run]:
    """The MLflow run that counts for each (arm, seed): the newest complete one, or else the newest."""
    trials: dict[tuple[str, int], Run] = {}
    for run in store.search_runs(client, [experiment], f"tags.`mlflow.parentRunId` = '{parent}'"):  # newest first
        try:
            key = (run.data.tags[ARM], int(run.data.tags["cohort.seed"]))
        except (KeyError, ValueError) as error:
            log.warning(LEFT_OUT, run.info.run_id, parent, f"its tags lack {error}")
            continue
        if key not in trials or (_state(run) == "complete" and _state(trials[key]) != "complete"):
            trials[key] = run
    return trials


def _state(run: Run) -> Any:
    return run.data.tags.get("cohort.state", "running")
