"""Verifies a study from its folder alone: its trials, its search's findings, and its report, which it writes again."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...reports.render import write_report
from ..ground.files import sha256
from ..record.evidence import EVIDENCE, Evidence, read_evidence, writing_versions
from ..record.study import STUDY, StudyRecord, read_folder
from .verify_trial import BAD_FILE, Findings, Place, check_trial

WriteReport = Callable[..., Any]  # as `write_report`
TABLE = "results.csv"
_WRITTEN = (".html", ".md", ".csv", ".svg")  # files of a report that are written alike each time


def verify_study(folder: Path, write: WriteReport = write_report) -> tuple[StudyRecord, Findings]:
    """The study's record, and everything that does not follow from the files in its folder. Writes nothing there.

    ValueError for a folder that is not a study's, has no results or no evidence.
    """
    if not (folder / STUDY).is_file():
        raise ValueError(f"'{folder}' is not the folder of a study: it has no {STUDY}")
    evidence, findings = read_evidence(folder), Findings()
    everywhere = Place(findings)
    if not evidence.is_as_written:
        everywhere.differs(EVIDENCE, "sum", "the sum of another content", "its own sum")
    for name, digest in evidence.files.items():
        if not (folder / name).is_file():
            everywhere.differs(name, "", None, "a file of the study")
        else:
            everywhere.compare_hash(name, digest, sha256(folder / name))
    record = read_folder(folder, evidence.probes)
    if all(trial.state != "complete" for trial in record.trials):
        raise ValueError(f"study '{record.name}' has no results: no trial is complete")
    for trial in [*record.trials, *(trial for arm in record.exploratory for trial in arm.trials)]:
        place = Place(findings, trial.arm, trial.seed, f"trials/{trial.trial}/")
        try:
            check_trial(folder / "trials" / trial.trial, trial, place)
        except BAD_FILE as error:
            place.differs("", "", "files of a run", f"{type(error).__name__}: {error}")
    _check_search(record, everywhere)
    _check_report(folder, record, evidence, everywhere, write)
    return record, findings


def _check_search(record: StudyRecord, place: Place) -> None:
    """Compare the values by which a search judged its arms with the metrics of their trials."""
    trials = {(trial.arm, trial.seed): trial for trial in record.trials}
    for arm in (record.search or {}).get("arms", []):
        for seed, values in arm.get("seeds", {}).items():
            trial = trials.get((arm["label"], int(seed)))
            for metric, value in values.items() if trial is not None else ():
                series = trial.history.get(metric, ()) if trial is not None else ()
                last = series[-1][1] if series else None
                Place(place.findings, arm["label"], int(seed)).compare("events", "search.json", metric, value, last)
    if record.search is not None:
        place.findings.notes.append("search.json: Pareto set, best arm and importances are compared by hash alone")
    if record.two_stage is not None:
        place.findings.notes.append("seeds.json: the decision on the number of seeds is compared by hash alone")


def _check_report(folder: Path, record: StudyRecord, evidence: Evidence, place: Place, write: WriteReport) -> None:
    """Write the report again and compare the table cell by cell, the text line by line, figures whole."""
    with TemporaryDirectory(prefix="cohort-verify-") as scratch:
        try:
            write(record, Path(scratch), ("svg",))
        except BAD_FILE as error:
            return place.differs("report", "", "a report", f"{type(error).__name__}: {error}")
        written = sorted(file for file in Path(scratch).rglob("*") if file.suffix in _WRITTEN)
        anew = {file.relative_to(scratch).as_posix(): file.read_bytes() for file in written}
    files = {name: folder / "report" / name for name in anew}
    stored = {name: file.read_bytes() if file.is_file() else b"" for name, file in files.items()}
    _compare_table(stored[TABLE], anew.pop(TABLE), place)
    differing = [name for name in anew if stored[name] != anew[name]]
    place.findings.numbers["report"] += len(anew) - len(differing)
    here = writing_versions()
    others = [f"{key} {value}" for key, value in sorted(evidence.versions.items()) if here.get(key) != value]
    untouched = all(
        files[name].is_file() and evidence.files.get(f"report/{name}") == sha256(files[name]) for name in differing
    )
    if differing and others and untouched:
        place.findings.notes.append(
            f"{len(differing)} of {len(anew)} files of the report were written by other versions ("
            f"{', '.join(others)}) and look otherwise when written by this one; they are compared by hash alone, "
            "results.csv cell by cell"
        )
        return
    for name in differing:
        if name.endswith(".svg"):
            place.differs(f"report/{name}", "", "another figure", "the figure of these numbers")
        else:
            _compare_lines(f"report/{name}", stored[name], anew[name], place)
    place.findings.notes.append("figures as PDF and PNG are compared by hash alone, SVG figures are redrawn")


def _compare_table(stored: bytes, derived: bytes, place: Place) -> None:
    (header, *rows), (columns, *anew) = (
        list(csv.reader(io.StringIO(text.decode("utf-8", "replace"), newline=""))) or [[]] for text in (stored, derived)
    )
    if header != columns or [*map(len, rows)] != [*map(len, anew)]:
        return _compare_lines(f"report/{TABLE}", stored, derived, place)
    for row, new in zip(rows, anew, strict=True):
        trial = dict(zip(columns, new, strict=True))
        at = Place(place.findings, trial.get("arm"), int(trial["seed"]))
        for column, cell, value in zip(columns, row, new, strict=True):
            at.compare("report", f"report/{TABLE}", column, cell, value)


def _compare_lines(name: str, stored: bytes, derived: bytes, place: Place) -> None:
    lines, others = (text.decode("utf-8", "replace").split("\n") for text in (stored, derived))
    if len(lines) != len(others):
        place.differs(name, "", f"{len(lines)} lines", f"{len(others)} lines")
    for number, (one, other) in enumerate(zip(lines, others, strict=False), 1):
        if one != other:
            first = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
            start = max(0, first - 30)
            place.differs(name, f"line {number}", one[start : start + 80], other[start : start + 80])
