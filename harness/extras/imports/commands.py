"""`cohort import`."""

from pathlib import Path
from typing import Annotated

import typer

from ...cli.commands import command
from ...cli.options import RUNS, Runs
from ...console import terminal


@command(
    "import",
    "cohort import scores.csv --as mine --baseline grpo",
    "cohort import logs --as mine --score exact_match,strict-match",
)
def import_scores(
    scores: Annotated[Path, typer.Argument(metavar="SCORES", help="A table of scores, or a folder ARM/SEED/ of logs.")],
    name: Annotated[str, typer.Option("--as", metavar="NAME", help="Name of the study that this makes.")],
    baseline: Annotated[str | None, typer.Option(metavar="ARM", help="Arm to compare with; else the first.")] = None,
    score: Annotated[str | None, typer.Option(metavar="NAME", help="Which score, where files have several.")] = None,
    runs: Runs = RUNS,
) -> None:
    """Make a study of scores that other programs measured: error bars, tests and a report for runs that you have.

    A table (CSV, JSONL, parquet) has the columns arm, seed, problem and score (0 to 1), and if known sample (number of
    one of several completions), step (of training), tokens (generated until then) and family (of related problems). A
    folder holds ARM/SEED/ with the files of each run: sample logs of lm-eval, details of lighteval, logs of inspect,
    completions that TRL, verl or NeMo-RL dump, or a table. Nothing is graded again.
    """
    from . import scores as imports

    result = imports.import_scores(scores, name, baseline=baseline, score=score, runs=runs)
    terminal.say(f"{name}: {len(result.trials)} runs, {result.problems.prompt_id.nunique():,} problems")
    terminal.say(result.answer)
    terminal.say(f"Its report: cohort report {name}")
