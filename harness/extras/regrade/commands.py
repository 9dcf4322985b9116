"""`cohort grade`."""

from pathlib import Path
from typing import Annotated

import typer

from ...cli.commands import command
from ...cli.options import Json, Sets
from ...console import terminal
from ...console.terminal import percent, shortened, yes


@command(
    "grade",
    "cohort grade --task gsm8k --cases answers.jsonl",
    "cohort grade --task math --cases runs/train/my-run/rollouts/step-000041.jsonl --grader all",
)
def grade(
    task: Annotated[str, typer.Option(help="Task by name; its equality decides what is correct.")],
    cases: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", help="JSON Lines with gold, completion, perhaps question and label.")
    ],
    grader: Annotated[str, typer.Option(help="strict (what rewards use), lenient, math_verify, or all.")] = "strict",
    show: Annotated[int, typer.Option(min=0, metavar="N", help="Verdicts to show, disagreements first.")] = 20,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Processes for symbolic comparison.")] = 1,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Grade stored completions: show each row's verdict and extracted answer, agreement with labels, and rows per
    second."""
    from .grade import grade as graded

    result = graded(task, cases, grader=grader, workers=workers, settings=sets or ())
    if as_json:
        terminal.print_json({"task": task, "cases": cases, **vars(result)})
        return
    verdicts, summaries, disagree = result.verdicts, result.summaries, {*result.disagreements}
    labelled = any(summary.agreement is not None for summary in summaries.values())
    headers = ["grader", "correct", "answered"]
    headers += ["agrees with labels", "wrongly right", "wrongly wrong"] if labelled else []
    headers += ["rows/s"]
    rows = []
    for name, s in summaries.items():
        against = [percent(s.agreement), s.false_positives, s.false_negatives] if labelled else []
        rows.append([name, percent(s.correct), percent(s.answered), *against, f"{s.rows_per_second:,.0f}"])
    terminal.show_table(f"{cases} as {task}: {len(verdicts):,} rows", headers, rows, numeric=headers[1:])
    if len(summaries) > 1:
        terminal.say(f"Graders disagree on {len(disagree):,} of {len(verdicts):,} rows.")
    wrong = {v.row for v in verdicts if v.label is not None and {*v.correct.values()} != {v.label}}
    order = sorted(verdicts, key=lambda v: (v.row not in disagree, v.row not in wrong, v.row))
    cells = [
        [v.row, shortened(v.gold), "" if v.label is None else yes(v.label)]
        + [part for name in summaries for part in (shortened(v.answers[name] or "-"), yes(v.correct[name]))]
        for v in order[:show]
    ]
    if cells:
        columns = [part for name in summaries for part in (f"{name} answer", f"{name} right")]
        terminal.show_table("Verdicts", ["row", "gold", "label", *columns], cells, numeric=["row"])
    if len(order) > show:
        terminal.say(f"{len(order) - show:,} more rows; --show N or --json shows them")
