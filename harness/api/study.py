"""Studies: load one, run it to its report, look at its progress, open its result.

Bad input is a ValueError before any model loads. The environment variables of the command line count here too:
COHORT_RUNS, COHORT_MIRROR, COHORT_TRACKING_URI, COHORT_STORAGE, and the variables of extras.
"""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import plugins
from ..base.files import read_json
from ..console import progress, terminal
from ..record.status import StudyStatus
from ..record.study import StudyRecord, read_folder, study_settings
from ..settings import load
from ..settings.errors import SpecError
from ..settings.raw import parse_overrides, read_yaml, with_overrides
from ..settings.run import Optimizer, get_path
from ..settings.study import StudySpec, parse_study
from ..study import queue, runner
from ..study.estimates import planned
from ..study.preflight import auto_workers
from . import reporting
from .settings import RATE, REPORTING, Settings, as_texts, runs_folder, scale_settings, shell, suited_rate

if TYPE_CHECKING:
    from ...reports.render import ReportFiles
    from .result import Result

# tqdm.auto, which transformers uses, asks notebooks without ipywidgets to install them; no bars are drawn here.
warnings.filterwarnings("ignore", "IProgress not found")

TINY_COLD_START = 400


@dataclass(frozen=True)
class Study:
    """A study that can run: the file that it comes from, and the settings that were changed since.

    `command` reproduces it; it is empty for a started study, which keeps the command that it has.
    """

    source: str
    settings: Sequence[str]
    spec: StudySpec = field(repr=False)
    command: str = field(repr=False, default="")

    @property
    def name(self) -> str:
        """The name of its folder in RUNS/studies."""
        return self.spec.name

    @property
    def question(self) -> str:
        return self.spec.question

    @property
    def arms(self) -> list[str]:
        """Labels of the arms that are compared, as far as they are known before it runs."""
        return self.spec.arm_labels()

    def with_set(self, /, **settings: Any) -> Study:
        """The study with other settings, named as after `--set`: `with_set(steps=20, **{"algorithm.kl_beta": 0.1})`.

        A field of the study (`name`, `seeds`, `factors`, `metric`, ...) changes the study, any other the run of all
        arms. ValueError for a setting that is unknown, out of range, or varied by the study itself.
        """
        kept = [text for text in self.settings if text.partition("=")[0].strip() not in settings]
        return load_study(self.source, [*kept, *as_texts(settings)])


def load_study(name_or_path: str | Path, settings: Settings = ()) -> Study:
    """A shipped study by name (`cohort list studies` shows them), or one from a YAML file."""
    source, texts = str(name_or_path), as_texts(settings)
    spec = load.load_study(source, texts)
    names_rate = [RATE in arm.overrides or get_path(spec.run, RATE) for arm in spec.checked_arms()]
    if "model" in spec.run:  # whose rate may be tiny's
        texts += (suited_rate if any(names_rate) else scale_settings)(spec.run["model"], texts, file=spec.run)
        spec = load.load_study(source, texts)
    return Study(source, texts, spec, shell(f"cohort study run {shlex.quote(source)}", {"--set": texts}))


def study_of(name_or_path: str | Path, settings: Settings = (), runs: str | Path | None = None) -> Study:
    """A study of the runs folder with the settings of its start, unless others are given; else as `load_study`."""
    file, texts = runs_folder(runs) / "studies" / str(name_or_path) / "study.json", as_texts(settings)
    if texts or not file.is_file():
        return load_study(name_or_path, texts)
    return Study(str(name_or_path), texts, parse_study(study_settings(read_json(file)), str(file)))


def comparison(
    algorithms: Sequence[str],
    tasks: Sequence[str],
    model: str = "tiny",
    *,
    seeds: Sequence[int] = (0, 1, 2),
    tune: int | None = None,
    controls: Sequence[str] = (),
    settings: Settings = (),
    name: str | None = None,
) -> Study:
    """The study of `compare`: an arm for each algorithm and task, all else equal; the first one is the baseline."""
    for what, names in (("algorithms", algorithms), ("tasks", tasks), ("controls", controls)):
        if len(set(names)) != len(names) or not all(names) or not (names or what == "controls"):
            raise SpecError(f"`{what}` must be distinct names, got '{','.join(names)}'")
    texts = as_texts(settings)
    known = [name for name in algorithms if name in plugins.names("algorithm")]  # others are refused below
    critics = [name for name in known if getattr(plugins.load("algorithm", name), "needs_critic", False)]
    texts += scale_settings(model, texts, has_critic=bool(critics))
    run: dict[str, Any] = {"model": model} | ({"cold_start": {"steps": TINY_COLD_START}} if model == "tiny" else {})
    raw: dict[str, Any] = {
        "name": name or f"compare-{'-'.join(tasks)}",
        "question": f"Which of {', '.join(algorithms)} learns {' and '.join(tasks)} best from the same start with the "
        "same rollouts?",
        "design": "compare",
        "compare": {"algorithms": list(algorithms), "tasks": list(tasks)},
        "seeds": list(seeds),
    }
    for path, value in parse_overrides(texts).items():
        if path.partition(".")[0] in StudySpec.model_fields:
            raw = with_overrides(raw, {path: value}, whole=StudySpec.dotted_keys)
        else:
            run = with_overrides(run, {path: value})
    if controls:
        raw["compare"]["controls"] = list(controls)
    if tune is not None:
        rate = Optimizer.model_validate(run.get("optimizer", {})).learning_rate
        space = {"optimizer.learning_rate": {"low": rate / 5, "high": rate * 5, "log": True}}
        raw["search"] = {"space": space, "trials": tune, "seeds": [max(raw["seeds"]) + 1]}
    given = {"--algorithms": ",".join(algorithms), "--task": ",".join(tasks), "--model": model, "--tune": tune}
    given |= {"--seeds": ",".join(map(str, seeds)), "--controls": ",".join(controls) or None, "--set": texts}
    spec = parse_study({**raw, "run": run}, where="cohort compare")
    return Study(spec.name, texts, spec, shell("cohort compare", {**given, "--name": name}))


def run(study: Study | str | Path, *, workers: int | None = None, runs: str | Path | None = None) -> Result:
    """The result of a study, run as by `cohort study run`, whose options `workers` (None: auto) and `runs` are.

    Blocks until nothing is left to run, and shows progress. Ctrl-C (or the interrupt of a notebook) lets each trial
    finish its step and write a checkpoint, then raises KeyboardInterrupt; the same call continues. A trial that fails
    or becomes invalid is named and does not stop the others. `study` is from `load_study`, or a name or path.
    """
    from .result import Result

    folder = runs_folder(runs)
    study = study if isinstance(study, Study) else study_of(study, (), folder)
    try:
        ended = run_to_report(study, folder, workers, storage=os.environ.get("COHORT_STORAGE"))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same call continues where the study stopped") from None
    say_without_result(ended.status, folder)
    return Result(ended.record, folder / "studies" / ended.record.name, folder)


def compare(
    algorithms: Sequence[str],
    tasks: Sequence[str],
    model: str = "tiny",
    *,
    workers: int | None = None,
    runs: str | Path | None = None,
    **settings: Any,
) -> Result:
    """The result of the study that `cohort compare` runs.

    `settings` go to `comparison`: seeds, tune, controls, settings, name.
    """
    return run(comparison(algorithms, tasks, model, **settings), workers=workers, runs=runs)


@dataclass(frozen=True)
class Ended:
    """A study with nothing left to run: its progress, its record, its report."""

    status: StudyStatus
    record: StudyRecord
    files: ReportFiles

    @property
    def all_valid(self) -> bool:
        """Whether all trials are valid; one that cannot be read is not, whatever the queue says."""
        return self.status.all_valid and all(trial.state != "failed" for trial in self.record.trials)


def run_to_report(study: Study, runs: Path, workers: int | None = None, *, storage: str | None = None) -> Ended:
    """Run a study, show its progress, and write its report.

    The recorded command includes the number of workers, because it sets their threads, which affect the last bits of
    results. KeyboardInterrupt if the study was asked to stop.
    """
    spec, command = study.spec, study.command
    workers = auto_workers(spec) if workers is None else workers
    if command:
        command = f"{command} --workers {workers}"
    with suppress(SpecError, ConnectionError):  # it was not started, or its storage is away, which the run says
        if at_work := queue.study_status(spec.name, runs, storage).counts().get("running"):
            what = f"{at_work} trial{'s' * (at_work > 1)} at work"
            terminal.say(f"'{spec.name}' runs already ({what}); this command joins it.", stderr=True)

    with progress.study_view() as view:
        status = runner.run_study(spec, runs, workers=workers, command=command, on_status=view, storage=storage)
    if not status.finished:  # asked to stop
        raise KeyboardInterrupt
    with progress.phase_bar(f"report of {spec.name}", REPORTING):
        record, files = reporting.write_report(spec.name, runs)
    return Ended(status, record, files)


def say_without_result(status: StudyStatus, runs: Path) -> None:
    """Print every trial that is not complete, with the reason, and where the tracebacks are."""
    for trial in status.trials:
        if trial.state != "complete":
            reason = f" ({trial.reason})" if trial.reason else ""
            terminal.say(f"{trial.arm} | seed {trial.seed}: {trial.state}{reason}")
    if any(trial.state == "failed" for trial in status.trials):
        terminal.say(f"Tracebacks of failed trials: {runs / 'studies' / status.name / 'logs'}/worker-*.log")


def start(study: Study, runs: Path, storage: str | None = None) -> str:
    """Set up a study whose trials other commands run, and return that command."""
    runner.start_study(study.spec, runs, command=study.command, storage=storage)
    return f"cohort study work {shlex.quote(study.name)} --runs {shlex.quote(str(runs))}"


def dry_run(study: Study, runs: Path, workers: int | None, storage: str | None = None) -> dict[str, Any]:
    """The cost of a study, after every check that `run` makes; writes nothing."""
    with progress.phase_bar(f"dry run of {study.name}", "settings, models, data, memory and disk"):
        return runner.dry_run(study.spec, runs, workers=workers, storage=storage)


def show(study: Study) -> dict[str, Any]:
    """A study's settings, one run with every setting, its arms and its budget."""
    arms = [
        {"arm": arm.label, "overrides": dict(arm.overrides), "steps": arm.spec.steps,
         "rollouts": arm.spec.num_rollouts}
        for arm in study.spec.design_arms()
    ]  # fmt: skip
    counts = list(planned(study.spec))
    rollouts = sum(count * arm.spec.num_rollouts for arm, count in counts)
    return {
        **study.spec.model_dump(mode="json"),
        "resolved_run": study.spec.checked_arms()[0].spec.model_dump(mode="json"),
        "design_arms": arms,
        "budget": {"trials": sum(count for _, count in counts), "rollouts": rollouts},
    }


def list_studies(runs: str | Path | None = None) -> list[dict[str, str]]:
    """Name, place and question of the shipped studies and of those in the runs folder."""
    files = sorted((runs_folder(runs) / "studies").glob("*/study.json"))
    places = {"shipped": load.shipped_studies(), "in the runs folder": {file.parent.name: file for file in files}}
    documents = []
    for name, file in {name: file for known in places.values() for name, file in known.items()}.items():
        try:
            question = " ".join(str((read_yaml(file) or {}).get("question", "")).split())
        except (ValueError, AttributeError) as error:
            question = f"not readable: {error}"
        where = " and ".join(place for place, known in places.items() if name in known)
        documents.append({"name": name, "where": where, "question": question})
    return documents


def watch(name: str, runs: str | Path | None = None, storage: str | None = None) -> None:
    """Show what `cohort study status --watch` shows, until nothing is left to run or Ctrl-C."""
    with suppress(KeyboardInterrupt):
        progress.show_live(queue.open_queue(name, runs_folder(runs).resolve(), storage).status)


def open_result(name_or_folder: str | Path, *, runs: str | Path | None = None) -> Result:
    """The result of a study that has begun, by its name in the runs folder or by its own folder.

    Reads what `cohort report` reads: the study's folder, wherever it is.
    """
    from .result import Result

    folder = Path(name_or_folder)
    if (folder / "study.json").is_file():
        folder = folder.resolve()
        store = folder.parent.parent if folder.parent.name == "studies" else None
    elif len(folder.parts) == 1:
        store = runs_folder(runs)
        folder = store / "studies" / folder
    else:
        raise SpecError(f"'{folder}' is not the folder of a study: it has no study.json")
    return Result(read_folder(folder) if store is None else reporting.read_record(folder.name, store), folder, store)
