"""`cohort grade` and `cohort task show`: graders and problems, without a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..console import terminal
from .commands import app, command, task_app
from .options import DataPath, Json, Sets, checked_split, data_path
from .views import answers

if TYPE_CHECKING:
    from ..data import PromptFormat, Split
    from ..interfaces import Task


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
    from ..api.regrade import graders, read_cases, regrade
    from ..spec.load import load_run

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
    from ..spec.load import load_run

    part = checked_split(split)
    spec = load_run(None, [*(sets or ()), *data_path(path)], {"task": task, "algorithm": "grpo"})
    document = _inspect(spec.task, part, count)
    if model is not None:
        _encode(document, model, spec.prompt)
    if as_json:
        terminal.print_json(document)
    else:
        answers.show_task(document)


def _inspect(task: Task, split: Split, count: int) -> dict[str, Any]:
    """Settings, sizes of the splits (or why one is missing), the first problems of `split`, a worked solution."""
    from ..run.grading import problem_rows

    prompts = task.prompts(split)
    demonstrations = _or_reason(task.demonstrations)
    parts: tuple[Split, ...] = ("train", "validation", "test")
    shown = demonstrations[0] if demonstrations and not isinstance(demonstrations, str) else None
    return {
        "task": task.name,
        "settings": task.model_dump(mode="json"),
        "sizes": {part: _or_reason(lambda part=part: len(task.prompts(part))) for part in parts},
        "skipped_rows": task.num_skipped_rows(split),
        "max_completion_tokens": task.max_completion_tokens,
        "split": split,
        "problems": problem_rows(prompts[:count]),
        "worked_solution": None if shown is None else {"prompt": shown.prompt, "completion": shown.completion},
    }


def _or_reason(read: Callable[[], Any]) -> Any:
    """The result of `read`, or the message of its ValueError."""
    try:
        return read()
    except ValueError as error:
        return str(error)


def _encode(document: dict[str, Any], model: str, prompt: PromptFormat) -> None:
    """Replace each text by the model's input, and add its length in tokens and the tokens that end a completion."""
    from ..policy.text import load_codec

    codec = load_codec(model, prompt)
    for problem in document["problems"]:
        ids = codec.encode(problem["prompt"])
        problem |= {"prompt": codec.decode(ids), "prompt_tokens": len(ids)}
    if solution := document["worked_solution"]:
        solution["prompt"] = codec.decode(codec.encode(solution["prompt"]))
        solution["completion"] = codec.decode(codec.encode_completion(solution["completion"]))
    document["completion_ends"] = [codec.decode([i]) for i in codec.end_ids()]
