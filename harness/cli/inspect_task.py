"""What `cohort task show` tells of a task: its settings, sizes, and problems exactly as a policy reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from harness.interfaces import Task
from harness.training.grading import problem_rows
from harness.types import Split


def inspect_task(task: Task, split: Split, count: int, model: str | None) -> dict[str, Any]:
    """Settings, sizes of the splits (or why one is missing), the first problems of `split`, a worked solution.

    With a model the problems are shown through its chat template, as the model will read them.
    """
    prompts = task.prompts(split)
    problems = problem_rows(prompts[:count])
    if model is not None:
        _encode(problems, model)
    demonstrations = _or_reason(task.demonstrations)
    shown = demonstrations[0] if demonstrations and not isinstance(demonstrations, str) else None
    return {
        "task": task.name,
        "settings": task.model_dump(mode="json"),
        "sizes": {name: _size(task, name) for name in ("train", "validation", "test")},
        "skipped_rows": task.num_skipped_rows(split),
        "max_completion_tokens": task.max_completion_tokens,
        "split": split,
        "problems": problems,
        "worked_solution": None if shown is None else {"prompt": shown.prompt, "completion": shown.completion},
    }


def _size(task: Task, split: Split) -> int | str:
    found = _or_reason(lambda: task.prompts(split))
    return found if isinstance(found, str) else len(found)


def _or_reason(read: Callable[[], Any]) -> Any:
    """What `read` gives, or the message of its ValueError."""
    try:
        return read()
    except ValueError as error:
        return str(error)


def _encode(problems: Sequence[dict[str, Any]], model: str) -> None:
    """Replace each prompt by what the model's tokenizer hands on, and add its length in tokens."""
    from harness.policy.model import load_tokenizer
    from harness.policy.text import encode_prompt

    tokenizer = load_tokenizer(model)
    for problem in problems:
        ids = encode_prompt(tokenizer, problem["prompt"])
        problem["prompt"] = str(tokenizer.decode(ids, skip_special_tokens=False))
        problem["prompt_tokens"] = len(ids)
