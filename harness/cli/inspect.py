"""`cohort grade` and `cohort task show`: graders and problems, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import api
from ..console import terminal
from .commands import app, command, task_app
from .options import DataPath, Json, Sets, data_path
from .views import answers


@command(
    app,
    "grade",
    "cohort grade --task gsm8k --cases answers.jsonl",
    "cohort grade --task math --cases runs/train/my-run/rollouts/step-000041.jsonl --grader all",
)
def grade(
    task: Annotated[str, typer.Option(help="Task by name; its equality decides what is correct.")],
    cases: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", help="JSON Lines with gold, completion and optionally label.")
    ],
    grader: Annotated[str, typer.Option(help="strict (what rewards use), lenient, math_verify, or all.")] = "strict",
    show: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of verdicts to show, disagreements first.")
    ] = 20,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Processes for symbolic comparison.")] = 1,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Grade stored completions: show each row's verdict and extracted answer, agreement with labels, and rows per
    second."""
    result = api.grade(task, cases, grader=grader, workers=workers, settings=sets or ())
    if as_json:
        terminal.print_json({"task": task, "cases": cases, **vars(result)})
        return
    answers.show_grades(f"{cases} as {task}", result, show)


@command(
    task_app,
    "show",
    "cohort task show arithmetic",
    "cohort task show gsm8k -n 3 --path data/gsm8k --set task.answer_format=think_answer --set task.shots=2",
    "cohort task show gsm8k --path data/gsm8k --model Qwen/Qwen2.5-0.5B-Instruct --set prompt.system='Be brief.'",
    "cohort task show math --model Qwen/Qwen3-0.6B --set prompt.template_arguments.enable_thinking=false",
)
def task_show(
    task: Annotated[str, typer.Argument(help="Task by name.")],
    count: Annotated[int, typer.Option("-n", min=0, metavar="N", help="Problems shown.")] = 3,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    path: DataPath = None,
    model: Annotated[str | None, typer.Option(help="Show the texts exactly as this model reads them.")] = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Show a task's settings, sizes and problems exactly as a policy reads them."""
    settings = [*(sets or ()), *data_path(path)]
    document = api.describe_task(task, settings, split=split, count=count, model=model)
    if as_json:
        terminal.print_json(document)
    else:
        answers.show_task(document)
