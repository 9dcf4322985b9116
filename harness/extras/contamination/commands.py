"""`cohort contamination`."""

from typing import Annotated

import typer

from ...cli import options
from ...cli.commands import command
from ...console import terminal


@command(
    "contamination",
    "cohort contamination tiny --task arithmetic --set cold_start.steps=400",
    "cohort contamination Qwen/Qwen2.5-0.5B --task gsm8k --set task.path=data/gsm8k --problems 200",
    "cohort contamination runs/train/my-run --task math500 --set task.path=data/math500 --reference fresh.jsonl",
)
def contamination(
    model: options.Model,
    task: options.Task,
    split: options.Split = "test",
    reference: Annotated[
        str,
        typer.Option(metavar="SPLIT|PATH", help="Other such problems, ideally ones that the model cannot have seen."),
    ] = "validation",
    problems: Annotated[int, typer.Option(min=2, metavar="N", help="Most problems of each set.")] = 500,
    sets: options.Sets = None,
    name: options.Name = None,
    runs: options.Runs = options.RUNS,
    mirror: options.Mirror = None,
    as_json: options.Json = False,
) -> None:
    """Test whether a model knows the problems of a benchmark better than other problems of the same kind.

    The model completes questions from their first part, and its log-probs of each question are compared with its
    log-probs of variants with other numbers. Permutation tests compare both scores with a reference (Holm-corrected).
    Results go to RUNS/probes/NAME and to MLflow's experiment `probe`; reports of studies with the same model and task
    show them.
    """
    from .probe import probe

    found = probe(
        model, task, split=split, reference=reference, num_problems=problems,
        settings=sets or (), name=name, runs=runs,
    )  # fmt: skip
    said, directory = found.pop("said"), runs / "probes" / found["name"]
    if as_json:
        terminal.print_json({**found, "verdict": said["verdict"], "directory": directory})
        return
    headers = list(said["headers"])
    terminal.show_table(said["title"], headers, said["rows"], numeric=headers[1:])
    terminal.say(said["exact"])
    terminal.say(said["verdict"])
    terminal.say(f"Files: {directory}")
