"""`cohort verify`."""

from typing import Annotated

import typer

from ...cli.commands import command
from ...cli.options import RUNS, Json, Runs
from ...console import terminal

_SHOWN = 50


@command(
    "verify",
    "cohort verify quickstart",
    "cohort verify /mnt/copy/studies/quickstart",
    "cohort verify quickstart --json",
)
def verify(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A study in the runs folder, or any study's folder.")],
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Recompute every number of a study's report and results.csv from its stored completions and events.

    Completions are graded again. Exit code 0 if all numbers match; otherwise 1, with a list of the cells that do not.
    It needs only the study's folder, not the MLflow store or the machine that ran the study, and changes nothing.
    """
    from .verification import verify as verified

    record, findings = verified(study, runs=runs)
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
