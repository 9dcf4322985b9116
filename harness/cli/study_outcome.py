"""Runs a study for the command line, shows its outcome and writes its report."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from harness.cli.views import studies
from harness.console import terminal

if TYPE_CHECKING:
    from harness.spec.study import StudySpec
    from harness.study.ray_cluster import Cluster


def run_and_report(
    study: StudySpec,
    runs: Path,
    workers: int | None,
    command: str,
    as_json: bool,
    *,
    storage: str | None = None,
    cluster: Cluster | None = None,
) -> None:
    from harness.console.progress import study_view
    from harness.policy.device import resolve_device
    from harness.study.runner import run_study

    for arm in study.checked_arms():
        resolve_device(arm.spec.device)
    with study_view() as view:
        status = run_study(
            study,
            runs,
            workers=workers,
            command=command,
            on_status=view.update,
            report=False,
            storage=storage,
            cluster=cluster,
        )
    if not status.finished:  # asked to stop
        raise KeyboardInterrupt
    record, files = write_report(study.name, runs)
    if len(record.trials) < len(status.trials):
        terminal.say(
            f"This host's MLflow store has {len(record.trials)} of {len(status.trials)} trials, and so has its report: "
            "other hosts ran the rest. `cohort study status` shows all of them.",
            stderr=True,
        )
    if as_json:
        paths = {"report": files.html, "csv": files.csv, "markdown": files.markdown}
        document = {"study": study.name, "answer": files.answer, **paths, "command": command}
        terminal.print_json({**document, "counts": status.counts(), "trials": status.trials})
    else:
        studies.show_results(record)
        for trial in status.trials:
            if trial.state != "complete":
                reason = f" ({trial.reason})" if trial.reason else ""
                terminal.say(f"{trial.arm} | seed {trial.seed}: {trial.state}{reason}")
        terminal.say(f"\n{files.answer}\n")
        terminal.say(f"Report: {files.html}")
        terminal.say(f"Browse: cohort ui --runs {shlex.quote(str(runs))}")
        terminal.say(f"Reproduce: {command}")
    raise typer.Exit(0 if status.all_valid else 1)


def write_report(name: str, runs: Path) -> tuple[Any, Any]:
    """(StudyRecord, ReportFiles) of a study; the report is logged to its MLflow run too."""
    from harness.tracking.mlflow_studies import log_report, read_study

    record = read_study(runs, name)
    folder = runs / "studies" / name / "report"
    files = importlib.import_module("reports.render").write_report(record, folder)
    log_report(runs, name, folder, files.answer)
    return record, files
