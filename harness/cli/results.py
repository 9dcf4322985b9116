"""`cohort import`, `report`, `verify`, `study export` and `ui`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from .. import api
from ..console import terminal
from .commands import command
from .options import RUNS, Json, Runs, Started, TrackingUri

_SHOWN = 50


@command(
    "import",
    "cohort import scores.csv --as mine --baseline grpo",
    "cohort import logs --as mine --score exact_match,strict-match",
)
def import_scores(
    scores: Annotated[Path, typer.Argument(metavar="SCORES", help="A table of scores, or a folder ARM/SEED/ of logs.")],
    name: Annotated[str, typer.Option("--as", metavar="NAME", help="Name of the study that this makes.")],
    baseline: Annotated[
        str | None, typer.Option(metavar="ARM", help="The arm to compare with; by default the first.")
    ] = None,
    score: Annotated[str | None, typer.Option(metavar="NAME", help="Which score, where files have several.")] = None,
    runs: Runs = RUNS,
) -> None:
    """Make a study of scores that other programs measured: error bars, tests and a report for runs that you have.

    A table (CSV, JSONL, parquet) has the columns arm, seed, problem and score (0 to 1). A folder holds ARM/SEED/ with
    the files of each run: sample logs of lm-eval, details of lighteval, logs of inspect, completions that TRL or verl
    dump, or a table. Nothing is graded again.
    """
    result = api.import_scores(scores, name, baseline=baseline, score=score, runs=runs)
    terminal.say(f"{name}: {len(result.trials)} runs, {result.problems.prompt_id.nunique():,} problems")
    terminal.say(result.answer)
    terminal.say(f"Its report: cohort report {name}")


@command("report", "cohort report quickstart --open", "cohort report group_size kl_beta")
def report(
    studies: Annotated[list[str], typer.Argument(metavar="STUDY...", help="Names of studies in the runs folder.")],
    browser: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    runs: Runs = RUNS,
    tracking_uri: TrackingUri = None,
) -> None:
    """Write a study's report again from its files; several studies of one task give one report.

    A report of several studies goes to RUNS/reports, with arms named `study: arm`. Trials that ran on
    other hosts come from the MLflow server that --tracking-uri names.
    """
    files = api.report(*studies, runs=runs)
    terminal.say(files.answer)
    terminal.say(f"Report: {files.html}")
    if browser:
        typer.launch(files.html.resolve().as_uri())


@command(
    "verify",
    "cohort verify quickstart",
    "cohort verify /mnt/copy/studies/quickstart",
    "cohort verify quickstart.zip --json",
)
def verify(
    study: Annotated[
        str, typer.Argument(metavar="STUDY", help="A study in the runs folder, a study's folder, or a capsule (.zip).")
    ],
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Recompute every number of a study's report and results.csv from its stored completions and events.

    Completions are graded again. Exit code 0 if all numbers match; otherwise 1, with a list of the cells that do not.
    It needs only the study's folder, not the MLflow store or the machine that ran the study, and changes nothing.
    """
    record, findings = api.verify(study, runs=runs)
    code = 0 if findings.is_verified else 1
    if as_json:
        terminal.print_json({"study": record.name, "verified": findings.is_verified, **vars(findings)})
        raise typer.Exit(code)
    numbers = findings.numbers
    for line in (
        f"{record.name}: {len(record.trials)} trials",
        f"{findings.completions:,} completions graded again; {numbers['completions']:,} accuracies, verdicts and "
        "lengths compared with them",
        f"{numbers['events']:,} numbers of results compared with the events",
        f"{numbers['report']:,} cells and pages of the report written again and compared",
        "Values that cannot be recomputed (losses, rewards, seconds, memory): their lines compared with checksums",
        f"{findings.files:,} files compared with their SHA-256",
        *(f"Note: {note}" for note in findings.notes),
    ):
        terminal.say(line)
    for words in findings.lacks:
        terminal.say(f"Lacks: {words}", style="yellow")
    for mismatch in findings.mismatches[:_SHOWN]:
        terminal.say(f"Mismatch: {mismatch}", style="red")
    if (more := len(findings.mismatches) - _SHOWN) > 0:
        terminal.say(f"and {more:,} more mismatches; --json has all")
    if findings.is_verified:
        terminal.say("Verified. Hashes and checksums reveal damage, not intent: a forger could recompute them.")
    else:
        counts = f"{len(findings.mismatches):,} mismatches, {len(findings.lacks):,} lacks"
        terminal.say(f"Not verified: {counts}.", style="bold red")
    raise typer.Exit(code)


@command("study export", "cohort study export quickstart quickstart.zip")
def study_export(
    study: Started,
    file: Annotated[Path, typer.Argument(metavar="FILE.zip", help="The capsule to write; it must not exist.")],
    runs: Runs = RUNS,
) -> None:
    """Write a capsule: one zip file with a study's spec, versions, events, completions, report, tables and hashes.

    `cohort verify FILE.zip` verifies it on any machine.
    """
    count = api.export_capsule(runs / "studies" / study, file)
    terminal.say(f"{file}: {count} files, {terminal.mebibytes(file.stat().st_size)} MiB")


@command("ui", "cohort ui", "cohort ui --port 5001 --open")
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1.")] = 5000,
    browser: Annotated[bool, typer.Option("--open", help="Open the newest study's page in a browser.")] = False,
    runs: Runs = RUNS,
    tracking_uri: TrackingUri = None,
) -> None:
    """Serve the MLflow pages of the runs folder on 127.0.0.1 until Ctrl-C, with all that its records have.

    With the --tracking-uri of an MLflow server, print the addresses of its pages instead.
    """

    def show(pages: Mapping[str, str]) -> None:
        for name, page in pages.items():
            terminal.say(f"{name}: {page}")
        if browser:
            typer.launch([*pages.values()][-1])

    if (ending := api.browse(runs, port, show)) is not None:
        terminal.fail(ending)
        raise typer.Exit(1)
