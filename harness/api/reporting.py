"""Writes reports from the records of studies."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..console.progress import phase_bar
from ..mirror.address import MLFLOW, mirrors
from ..mirror.follow import catch_up
from ..mirror.store import check_server
from ..mirror.studies import fetch_study
from ..record.evidence import write_evidence
from ..record.study import StudyRecord, keep_look, read_study
from .settings import REPORTING, runs_folder

if TYPE_CHECKING:
    from ...reports.render import ReportFiles


def report(*names: str, runs: str | Path | None = None) -> "ReportFiles":
    """The files of the report that `cohort report` writes of one study, or of several."""
    folder = runs_folder(runs)
    with phase_bar(f"report of {' and '.join(names)}", REPORTING):
        from ...reports import render
        from ...reports.join import join

        check_server()
        if len(names) == 1:
            return write_report(names[0], folder)[1]
        records = [read_record(name, folder) for name in names]
        joined = join(records)
        for record in records:
            keep_look(folder / "studies" / record.name, record)
        return render.write_report(joined, folder / "reports" / "+".join(names))


def write_report(name: str, runs: Path) -> "tuple[StudyRecord, ReportFiles]":
    """A study's record, and the files of the report that is written from it."""
    record = read_record(name, runs)
    return record, keep_report(record, runs)


def read_record(name: str, runs: Path) -> StudyRecord:
    """A study's record, with the trials that only an MLflow server has."""
    fetch_study(runs, name)
    return read_study(runs, name)


def keep_report(record: StudyRecord, runs: Path) -> "ReportFiles":
    """The report of a study, sealed with its evidence; the MLflow run gets it too."""
    from ...reports import render

    folder = runs / "studies" / record.name
    keep_look(folder, record)
    files = render.write_report(record, folder / "report")
    write_evidence(folder, record, files.answer, files.colors)
    if MLFLOW in mirrors():
        catch_up(runs, folder)
    return files
