"""`cohort samples`."""

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from ...base.files import write_text
from ...cli.commands import command
from ...cli.options import RUNS, Json, Runs, Sets
from ...console import terminal
from ...console.terminal import percent, shortened, yes


@command(
    "samples",
    "cohort samples quickstart grpo --where 'correct and tokens > 20' --grep '7-4'",
    "cohort samples quickstart grpo ppo --out problems.html",
    "cohort samples quickstart --where 'area == \"test\"' --out logs/quickstart.eval",
    "cohort samples answers.jsonl --task gsm8k --grader all",
)
def samples(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A study, a folder of one or of a run, or FILE.jsonl.")],
    arms: Annotated[list[str] | None, typer.Argument(metavar="[ARM]...", help="These arms only.")] = None,
    where: Annotated[
        str, typer.Option(metavar="CONDITION", help="Of area, step, seed, correct, reward, tokens, cut, run_on, ...")
    ] = "",
    grep: Annotated[str, typer.Option(metavar="TEXT", help="A text in the problem or the completion.")] = "",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PAGE.html compares two arms; LOG.eval for inspect, ROWS.jsonl for lm-eval."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Task that grades FILE.jsonl: gold, completion, label.")] = None,
    grader: Annotated[str, typer.Option(help="strict (what rewards use), lenient, math_verify, or all.")] = "strict",
    show: Annotated[int, typer.Option(min=0, metavar="N", help="Samples to show, disagreements first.")] = 20,
    sets: Sets = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Search all completions that a study or a run has kept, or compare two arms problem by problem.

    A condition compares names and constants: arm, seed, step, area (train, validation, test, start), problem, family,
    each tag of a problem (level, subject), sample, greedy, answer, correct, reward, tokens, cut, run_on. --out
    writes a page that filters by itself (which problems only one of two arms solves, their completions side by
    side, which differences are sure), or the samples as other viewers open them, such as `inspect view`. With --task,
    a file of completions is graded: each row's verdict and answer, agreement with labels, and rows per second.
    """
    if task is not None:
        return _grade(task, Path(study), grader, show, sets, as_json)
    if study.endswith(".jsonl"):
        raise ValueError(f"'{study}' is a file of completions, which a task grades; add --task")
    from .exports import export
    from .reading import samples as read

    if out is not None and out.suffix == ".html":
        from ...api.study import open_result
        from .page import page

        result = open_result(study, runs=runs)
        pair = arms or list(dict.fromkeys(result.trials.arm))[:2]
        if len(pair) != 2:
            raise ValueError(f"`out` compares two arms, got {len(pair)}; name two")
        write_text(out, page(result, *pair, runs=runs), sync=False)
        return terminal.say(f"Written: {out}")
    rows = read(study, *(arms or ()), where=where, grep=grep, runs=runs)
    if out is not None:
        return terminal.say(f"Written: {out} ({export(rows, Path(study).name, out):,} samples)")
    if as_json:
        return terminal.print_json({"study": study, "samples": list(rows)})
    cells, shown = [], list(islice(rows, show))
    for row in shown:
        told = [row["arm"], row["seed"], row["area"], row["step"], "greedy" if row["greedy"] else row["sample"]]
        texts = [shortened(row["prompt"]), shortened(row["completion"]), row["answer"] or "-"]
        cells.append([*told, *texts, yes(row["correct"]), row["tokens"]])
    headers = ["arm", "seed", "area", "step", "sample", "problem", "completion", "answer", "right", "tokens"]
    terminal.show_table(f"Samples of {study}", headers, cells, numeric=["seed", "step", "tokens"])
    terminal.say(f"{len(shown) + sum(1 for _ in rows):,} samples; --json has all")


def _grade(task: str, cases: Path, grader: str, show: int, sets: list[str] | None, as_json: bool) -> None:
    from .grade import grade as graded

    result = graded(task, cases, grader=grader, settings=sets or ())
    if as_json:
        return terminal.print_json({"task": task, "cases": cases, **vars(result)})
    verdicts, summaries, disagree = result.verdicts, result.summaries, {*result.disagreements}
    labelled = any(summary.agreement is not None for summary in summaries.values())
    against = ["agrees with labels", "wrongly right", "wrongly wrong"] if labelled else []
    headers = ["grader", "correct", "answered", *against, "rows/s"]
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
