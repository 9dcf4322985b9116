"""`cohort grade` and `cohort task show`: graders and problems, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from harness.cli.commands import app, command, task_app
from harness.cli.options import DataPath, Json, Sets, data_path
from harness.cli.views import answers
from harness.console import terminal

if TYPE_CHECKING:
    from harness.types import Split


@command(
    app,
    "grade",
    "cohort grade --task gsm8k --cases answers.jsonl",
    "cohort grade --task math --cases runs/train/my-run/rollouts/step-000041.jsonl --grader all",
)
def grade(
    task: Annotated[str, typer.Option(help="Task by name: its equality decides.")],
    cases: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="Rows with gold, completion, optionally label.")],
    grader: Annotated[str, typer.Option(help="strict (what rewards use), lenient, math_verify, or all.")] = "strict",
    show: Annotated[int, typer.Option(min=0, metavar="N", help="Verdicts shown; disagreements come first.")] = 20,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Processes for symbolic comparison.")] = 1,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Grade stored completions: verdict and extracted answer of each row, agreement with labels, rows per second."""
    from harness.cli.regrade import graders, read_cases, regrade
    from harness.spec.load import load_run

    spec = load_run(None, sets or (), {"task": task, "algorithm": "grpo"})
    spec.task.use_processes(workers)
    names = list(graders(spec.task)) if grader == "all" else [grader]
    result = regrade(spec.task, read_cases(cases), names, workers)
    if as_json:
        terminal.print_json({"task": task, "cases": cases, **vars(result)})
        return
    answers.show_grades(f"{cases} as {task}", result, show)


@command(
    task_app,
    "show",
    "cohort task show arithmetic",
    "cohort task show gsm8k -n 3 --path data/gsm8k --set task.answer_format=think_answer --set task.shots=2",
    "cohort task show gsm8k --path data/gsm8k --model Qwen/Qwen2.5-0.5B-Instruct",
)
def task_show(
    task: Annotated[str, typer.Argument(help="Task by name.")],
    count: Annotated[int, typer.Option("-n", min=0, metavar="N", help="Problems shown.")] = 3,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    path: DataPath = None,
    model: Annotated[str | None, typer.Option(help="Show prompts through this model's chat template.")] = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Show a task's settings, sizes and problems exactly as a policy reads them."""
    from harness.cli.inspect_task import inspect_task
    from harness.spec.errors import SpecError
    from harness.spec.load import load_run
    from harness.types import Split

    if split not in get_args(Split):
        raise SpecError(f"--split must be one of {', '.join(get_args(Split))}, got '{split}'")
    spec = load_run(None, [*(sets or ()), *data_path(path)], {"task": task, "algorithm": "grpo"})
    document = inspect_task(spec.task, cast("Split", split), count, model)
    if as_json:
        terminal.print_json(document)
    else:
        answers.show_task(document)
