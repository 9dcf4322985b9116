"""Verifies a study from its folder alone: grades its completions, checks its logs, and writes its report again.

Completions determine all metrics of the evaluations, each test problem's score, the verdict of every rollout shown or
kept, and accuracy and length of the training steps whose batch was kept. Events determine `result.json`. Losses,
rewards, seconds and memory cannot be recomputed from kept files; the checksum of their line shows a change.
"""

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast

from ....reports.render import write_report
from ....reports.trials import test_last
from ... import plugins
from ...api.settings import runs_folder
from ...base.files import sha256
from ...data import GradedGroup, Split
from ...interfaces import Task
from ...record.events import EVENTS, RunHistory, is_as_written, is_torn, read_history
from ...record.evidence import Evidence, read_evidence, sealed_files, writing_versions
from ...record.run import RESULT, SYSTEM, RunInfo, read_result
from ...record.study import STUDY, StudyRecord, TrialRecord, read_folder
from ...run.evaluate import NO_LIMIT, completions_file, evaluate_again, evaluation_metrics
from ...run.grading import grade, group_of
from ...run.step import rollout_metrics
from ...settings.errors import parsed

TABLE = "results.csv"
_WRITTEN = (".html", ".md", ".csv", ".svg")  # files of a report that are written alike each time
Basis = Literal["completions", "events", "report"]
TOLERANCE = 1e-9  # relative: another machine may round a mean differently


@dataclass(frozen=True)
class CellMismatch:
    """A cell that does not match: `trial` has arm and seed, `place` is a column, metric or line of a file."""

    trial: str
    file: str
    place: str
    stored: Any
    derived: Any

    def __str__(self) -> str:
        where = " | ".join(filter(None, [self.trial, self.file, self.place]))
        cells = ("nothing" if value is None else f"{value!r:.120}" for value in (self.stored, self.derived))
        return "{}: stored {}, derived {}".format(where, *cells)


@dataclass
class Findings:
    """Mismatches by cell, missing evidence, and in `numbers` the count of values compared, by what they came from."""

    mismatches: list[CellMismatch] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    numbers: Counter[Basis] = field(default_factory=Counter)
    completions: int = 0  # graded again
    files: int = 0  # whose hash was compared

    @property
    def is_verified(self) -> bool:
        return not (self.mismatches or self.lacks)


@dataclass(frozen=True)
class Scope:
    """The scope of comparisons: the whole study, or one trial, whose files are named from `folder` on."""

    findings: Findings
    trial: str = ""
    folder: str = ""

    def of(self, arm: str | None, seed: int, folder: str = "") -> "Scope":
        return Scope(self.findings, f"{arm} | seed {seed}", folder)

    def differs(self, file: str, place: str, stored: Any, derived: Any) -> None:
        self.findings.mismatches.append(CellMismatch(self.trial, self.folder + file, place, stored, derived))

    def compare(self, basis: Basis, file: str, place: str, stored: Any, derived: Any) -> None:
        self.findings.numbers[basis] += 1
        same = stored == derived
        if isinstance(stored, float | int) and isinstance(derived, float | int):
            both_nan = math.isnan(stored) and math.isnan(derived)
            same = both_nan or math.isclose(stored, derived, rel_tol=TOLERANCE, abs_tol=1e-12)
        if not same:
            self.differs(file, place, stored, derived)

    def has_file(self, root: Path, file: str, stored: str) -> bool:
        """Whether a file that must be there is; if so, its SHA-256 is compared with the stored one."""
        if not (root / file).is_file():
            self.differs(file, "", None, "a file of the study")
            return False
        self.findings.files += 1
        if (derived := sha256(root / file)) != stored:
            self.differs(file, "SHA-256", stored[:16], derived[:16])
        return True

    def lacks(self, words: str) -> None:
        self.findings.lacks.append(": ".join(filter(None, [self.trial, words])))


_LAST = {  # of a run's summary -> the metric whose last value it is
    "accuracy_final": "validation/accuracy", "rollouts": "train/rollouts",
    "generated_tokens": "train/generated_tokens", "optimizer_steps": "train/optimizer_steps",
    "peak_memory_bytes": "memory/peak_bytes", "learner_peak_bytes": "memory/learner_peak_bytes",
}  # fmt: skip
_AREAS: Mapping[str, Split] = {"validation": "validation", "test": "test", "start": "test"}  # of metrics -> split
Tests = Mapping[str, tuple[Split, Task]]  # area of metrics -> the split and the task that it measures
# What files that a run cannot have written raise here.
BAD_FILE = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)


def verify(study: str | Path, *, runs: str | Path | None = None) -> tuple[StudyRecord, Findings]:
    """The record of a study, and what `cohort verify` finds of it."""
    own = runs_folder(runs) / "studies" / study
    place = own if own.is_dir() else Path(study)
    if not place.is_dir():
        raise ValueError(f"'{study}' is no study in '{runs_folder(runs)}' and no study's folder; unpack an archive")
    return verify_study(place)


def verify_study(folder: Path, write: Callable[..., Any] = write_report) -> tuple[StudyRecord, Findings]:
    """The study's record, and everything that does not follow from the files in its folder. Writes nothing there.

    ValueError for a folder that is not a study's, has no results or no evidence.
    """
    if not (folder / STUDY).is_file():
        raise ValueError(f"'{folder}' is not the folder of a study: it has no {STUDY}")
    evidence, findings = read_evidence(folder), Findings()
    everywhere = Scope(findings)
    for name, digest in evidence.files.items():
        everywhere.has_file(folder, name, digest)
    for name in sorted({*sealed_files(folder)} - {*evidence.files}):
        everywhere.differs(name, "", "a file of the study", None)
    record = read_folder(folder, evidence.extras)
    for name, words in record.strange.items():
        everywhere.differs(f"trials/{name}", "", words, "a run of this study")
    if not record.strange and all(trial.state != "complete" for trial in record.trials):
        raise ValueError(f"study '{record.name}' has no results: no trial is complete")
    for trial in [*record.trials, *(trial for arm in record.exploratory for trial in arm.trials)]:
        scope = everywhere.of(trial.arm, trial.seed, f"trials/{trial.trial}/")
        try:
            check_trial(folder / "trials" / trial.trial, trial, scope)
        except BAD_FILE as error:
            scope.differs("", "", "files of a run", f"{type(error).__name__}: {error}")
    _check_search(record, everywhere)
    _check_report(folder, record, evidence, everywhere, write)
    return record, findings


def _check_search(record: StudyRecord, scope: Scope) -> None:
    """Compare the values by which a search judged its arms with the metrics of their trials."""
    arms = {arm["label"]: arm.get("seeds", {}) for arm in (record.search or {}).get("arms", [])}
    for trial in record.trials:
        at = scope.of(trial.arm, trial.seed)
        for metric, value in arms.get(trial.arm, {}).get(str(trial.seed), {}).items():
            series = trial.history.get(metric)
            at.compare("events", "search.json", metric, value, series[-1][1] if series else None)
    if record.search is not None:
        scope.findings.notes.append("search.json: best arm and importances are compared by hash alone")


def _check_report(
    folder: Path, record: StudyRecord, evidence: Evidence, scope: Scope, write: Callable[..., Any]
) -> None:
    """Write the report again and compare the table cell by cell, the text line by line, figures whole."""
    with TemporaryDirectory(prefix="cohort-verify-") as scratch:
        try:
            write(record, Path(scratch), ("svg",))
        except BAD_FILE as error:
            return scope.differs("report", "", "a report", f"{type(error).__name__}: {error}")
        written = sorted(file for file in Path(scratch).rglob("*") if file.suffix in _WRITTEN)
        anew = {file.relative_to(scratch).as_posix(): file.read_bytes() for file in written}
    files = {name: folder / "report" / name for name in anew}
    stored = {name: file.read_bytes() if file.is_file() else b"" for name, file in files.items()}
    _compare_table(stored[TABLE], anew.pop(TABLE), scope)
    differing = [name for name in anew if stored[name] != anew[name]]
    scope.findings.numbers["report"] += len(anew) - len(differing)
    here = writing_versions()
    others = [f"{key} {value}" for key, value in sorted(evidence.versions.items()) if here.get(key) != value]
    untouched = all(files[n].is_file() and evidence.files.get(f"report/{n}") == sha256(files[n]) for n in differing)
    if differing and others and untouched:
        scope.findings.notes.append(
            f"{len(differing)} of {len(anew)} files of the report were written by other versions ("
            f"{', '.join(others)}) and look otherwise when written by this one; they are compared by hash alone, "
            "results.csv cell by cell"
        )
        return
    for name in differing:
        if name.endswith(".svg"):
            scope.differs(f"report/{name}", "", "another figure", "the figure of these numbers")
        else:
            _compare_lines(f"report/{name}", stored[name], anew[name], scope)
    scope.findings.notes.append("figures as PDF and PNG are compared by hash alone, SVG figures are redrawn")


def _compare_table(stored: bytes, derived: bytes, scope: Scope) -> None:
    (header, *rows), (columns, *anew) = (
        list(csv.reader(io.StringIO(text.decode("utf-8", "replace"), newline=""))) or [[]] for text in (stored, derived)
    )
    if header != columns or [*map(len, rows)] != [*map(len, anew)]:
        return _compare_lines(f"report/{TABLE}", stored, derived, scope)
    for row, new in zip(rows, anew, strict=True):
        trial = dict(zip(columns, new, strict=True))
        at = scope.of(trial.get("arm"), int(trial["seed"]))
        for column, cell, value in zip(columns, row, new, strict=True):
            at.compare("report", f"report/{TABLE}", column, cell, value)


def _compare_lines(name: str, stored: bytes, derived: bytes, scope: Scope) -> None:
    lines, others = (text.decode("utf-8", "replace").split("\n") for text in (stored, derived))
    if len(lines) != len(others):
        scope.differs(name, "", f"{len(lines)} lines", f"{len(others)} lines")
    for number, (one, other) in enumerate(zip(lines, others, strict=False), 1):
        if one != other:
            start = max(0, next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0) - 30)
            scope.differs(name, f"line {number}", one[start : start + 80], other[start : start + 80])


def check_trial(directory: Path, trial: TrialRecord, scope: Scope) -> None:
    """Compare everything in a trial's folder. Raises errors of many kinds for files that a run cannot have written."""
    for number, line in enumerate((directory / EVENTS).read_bytes().partition(b"\0")[0].split(b"\n")[:-1], 1):
        if not is_as_written(line):
            found = re.match(rb'{"type":"(\w+)"(?:,"step":(\d+))?', line)
            of = "" if not found else f" ({b' of step '.join(filter(None, found.groups())).decode()})"
            scope.differs(EVENTS, f"line {number}{of}", "the sum of another line", "its own sum")
    if is_torn(directory / EVENTS):
        scope.lacks(f"{EVENTS} ends in half a line, as a kill leaves it, which counts for nothing")
    info, history, result = RunInfo.load(directory), read_history(directory / EVENTS), read_result(directory)
    if info is None:
        return scope.differs("", "run.json", None, "settings of a run")
    scope.compare("events", "run.json", "seed", info.spec.get("seed"), trial.seed)
    _check_result(trial, history, result, scope)
    if "task" not in info.spec:
        return scope.lacks("its scores were imported, so nothing can be graded again")
    try:
        given = (info.spec["task"], *info.spec["evaluation"].get("tests", ()))
        task, *others = (parsed(cast(type[Task], plugins.load("task", str(x["name"]))), x, "task") for x in given)
    except ValueError as error:
        return scope.lacks(f"its task cannot be loaded here, so nothing is graded ({error})")
    tests: dict[str, tuple[Split, Task]] = {area: (split, task) for area, split in _AREAS.items()}
    tests |= {f"{area}_{other.name}": ("test", other) for area in ("test", "start") for other in others}
    _check_kept(directory, task, tests, history, info.spec, scope)
    try:  # the rollouts that were logged for the reader
        rows = history.rows()
        _check_verdicts(EVENTS, rows, grade(task, [group_of([row]) for row in rows], NO_LIMIT), scope)
    except BAD_FILE as error:
        scope.differs(EVENTS, "samples", "rollouts of a run", repr(error))


def _check_result(trial: TrialRecord, history: RunHistory, result: Mapping[str, Any] | None, scope: Scope) -> None:
    """Compare `result.json` with the events, and their summary with the metrics."""
    end = history.finish[0] if history.finish else None
    if end is None or result is None:
        if end is not result:
            scope.differs(RESULT, "state", *(one and one["state"] for one in (result, end)))
        return None
    summary = {key: float(value) for key, value in end["summary"].items()}
    metrics = {key: value for key, value in history.latest().items() if not key.startswith(SYSTEM)}
    for name, derived in (("summary", summary), ("metrics", metrics)):
        for key in sorted({*derived, *result[name]}):
            scope.compare("events", RESULT, f"{name}/{key}", result[name].get(key), derived.get(key))
    for key in ("state", "reason"):
        scope.compare("events", RESULT, key, result[key], end[key])
    last = {key: metrics[metric] for key, metric in _LAST.items() if metric in metrics}
    if steps := history.history.get("validation/accuracy"):
        last["accuracy_initial"] = steps[min(steps)][0]
    if steps := sorted(history.history.get("test/accuracy", {}).items()):
        last["test_accuracy"] = fmean(value for _, (value, _) in steps[-test_last(trial.spec) :])
    for key in last.keys() & summary.keys():
        scope.compare("events", EVENTS, f"finish/{key}", summary[key], last[key])


def _group_size(spec: Mapping[str, Any], step: int) -> int:
    """Completions of each prompt in a step of a run, or of one of its stages."""
    for stage in spec.get("stages", ()):
        if step <= (steps := stage.get("steps", 1)):
            if "rejection" in stage:
                return int(stage["rejection"]["num_samples"])
            spec = {**spec, **stage}
            break
        step -= steps
    return int(spec["algorithm"]["group_size"])


def _check_kept(
    directory: Path, task: Task, tests: Tests, history: RunHistory, spec: Mapping[str, Any], scope: Scope
) -> None:
    """Compare kept files with their hashes, and the values that the run (settings: `spec`) logged with the files."""
    known = [(area, step) for area in tests for step in history.history.get(f"{area}/accuracy", {})]
    evaluations = {completions_file(*one): one for one in known}
    lacking = Counter(tests[area][0] for file, (area, _) in evaluations.items() if file not in history.kept)
    for split, number in lacking.items():
        scope.lacks(f"{number} evaluations on the {split} split have no completions")
    for file, (step, digest) in history.kept.items():
        if not re.fullmatch(r"(rollouts|completions)/[\w-]+\.jsonl", file, re.ASCII):
            scope.differs(EVENTS, "kept", file, "a file of the run")
            continue
        if not scope.has_file(directory, file, digest):
            continue
        try:
            rows = [json.loads(line) for line in (directory / file).read_text(encoding="utf-8").splitlines()]
            if file in evaluations:
                _check_evaluation(rows, *evaluations[file], tests, history, scope)
            elif file.startswith("rollouts/") and rows:
                size = _group_size(spec, step)
                groups = [rows[start : start + size] for start in range(0, len(rows), size)]
                graded = grade(task, [group_of(group) for group in groups], NO_LIMIT)
                derived = rollout_metrics(graded, [[float(row["reward"]) for row in group] for group in groups])
                _check_verdicts(file, rows, graded, scope)
                for key, value in derived.items():
                    stored = history.history.get(key, {}).get(step, (None,))[0]
                    scope.compare("completions", EVENTS, f"{key} at step {step}", stored, value)
        except BAD_FILE as error:
            scope.differs(file, "", "rows of a run", repr(error))


def _check_evaluation(
    rows: Sequence[Mapping[str, Any]], area: str, step: int, tests: Tests, history: RunHistory, scope: Scope
) -> None:
    """Compare an evaluation's metrics, and the score of every test problem, with values from its completions."""
    split, task = tests[area]
    result = evaluate_again(task, rows, split)
    scope.findings.completions += sum(len(row["samples"]) + len(row["greedy"]) for row in rows)
    derived = evaluation_metrics(result, area)
    logged = {key: steps[step][0] for key, steps in history.history.items() if step in steps}
    for key in sorted({*derived, *(key for key in logged if key.startswith(f"{area}/"))}):
        scope.compare("completions", EVENTS, f"{key} at step {step}", logged.get(key), derived.get(key))
    if split == "test":
        scores = {prompt: count / result.metrics["num_samples"] for prompt, count in result.correct_counts.items()}
        known = history.fractions.get(area, {}).get(step, {})
        for prompt in sorted({*scores, *known}):
            scope.compare("completions", EVENTS, f"{area} problem {prompt}", known.get(prompt), scores.get(prompt))
            families = [found.families.get(prompt) for found in (history, result)]
            scope.compare("completions", EVENTS, f"families/{prompt}", *families)


def _check_verdicts(file: str, rows: Sequence[Mapping[str, Any]], graded: Sequence[GradedGroup], scope: Scope) -> None:
    """Compare the answer and the verdict of every row with a new grading of its completion."""
    derived = [pair for g in graded for pair in zip(g.answers, g.correct or (), strict=True)]
    scope.findings.completions += len(rows)
    for row, (answer, correct) in zip(rows, derived, strict=True):
        at = f"step {row['step']}, {row['split']} problem {row['prompt_id']}"
        scope.compare("completions", file, f"answer, {at}", row["answer"], answer)
        scope.compare("completions", file, f"correct, {at}", row["correct"], correct)
