"""`cohort probe contamination`."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import api
from ..console import terminal
from . import options
from .commands import command, probe_app


@command(
    probe_app,
    "contamination",
    "cohort probe contamination tiny --task arithmetic --set cold_start.steps=400",
    "cohort probe contamination Qwen/Qwen2.5-0.5B --task gsm8k --path data/gsm8k --problems 200",
    "cohort probe contamination runs/train/my-run --task math500 --path data/math500 --reference fresh.jsonl",
)
def contamination(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="'tiny', a Hub id, a model folder or a checkpoint.")],
    task: Annotated[str, typer.Option(help="Task by name.")],
    split: Annotated[str, typer.Option(help="Split to probe: train, validation or test.")] = "test",
    reference: Annotated[
        str,
        typer.Option(
            metavar="SPLIT|PATH",
            help="Problems of the same kind to compare with, ideally ones that the model cannot have seen.",
        ),
    ] = "validation",
    path: options.DataPath = None,
    problems: Annotated[int, typer.Option(min=2, metavar="N", help="Most problems of each set.")] = 500,
    sets: options.Sets = None,
    name: options.Name = None,
    runs: options.Runs = options.RUNS,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Test whether a model knows the problems of a benchmark better than other problems of the same kind.

    The model completes questions from their first part, and its log-probs of each question are compared with those of
    variants with other numbers. Permutation tests compare both scores with a reference (Holm-corrected).
    Results go to RUNS/probes/NAME and to MLflow's experiment `probe`; reports of studies with the same model and task
    show them.
    """
    from ..data import InvalidRun

    options.use_store(tracking_uri)
    settings = [*(sets or ()), *options.data_path(path)]
    try:
        found = api.probe(
            model, task, split=split, reference=reference, num_problems=problems, settings=settings, name=name,
            runs=runs,
        )  # fmt: skip
    except InvalidRun as error:
        terminal.fail(error)
        raise typer.Exit(1) from None
    said, directory = found.pop("said"), runs / "probes" / found["name"]
    if as_json:
        terminal.print_json({**found, "verdict": said["verdict"], "directory": directory})
        return
    headers = list(said["headers"])
    terminal.show_table(said["title"], headers, said["rows"], numeric=headers[1:])
    terminal.say(said["exact"])
    terminal.say(said["verdict"])
    terminal.say(f"Files: {directory}")
