"""`cohort start`: asks for a model, a task and what to compare; writes the study file, says its cost, offers to run it.

Answers are lines of standard input, from a person or a pipe. A bad answer is told and asked again; what comes after the
file are commands that are printed.
"""

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import typer

from ...cli.commands import app, command
from ...console import terminal

T = TypeVar("T")
EXAMPLE = "printf '%s\\n' tiny arithmetic algorithms n | cohort start"
MODEL, SUMS = "models/smollm2", "models/sums"  # of `make smollm2`
MODELS, TASKS, COMPARED = Path(__file__).with_name("questions.txt").read_text("utf-8").strip().split("\n\n")
FIELDS = {"question": ("question", "prompt", "problem", "text"), "answer": ("answer", "target", "gold", "solution")}


@command("start", "cohort start", EXAMPLE)
def start() -> None:
    """Write a first study: asks for a model, a task and what to compare, says time and memory, and offers to run it.

    Answers are lines of standard input; an empty one takes the answer in brackets. The study file explains each of its
    lines. All that follows it is done by commands that are printed.
    """
    terminal.say("Three questions make a study file; Enter takes the answer in brackets.")
    from ...api.settings import runs_folder  # seconds
    from .study import checked_model, study_file

    model = _ask(MODELS, MODEL if Path(MODEL, "config.json").is_file() else "tiny", checked_model)
    task = SUMS if model == MODEL and Path(SUMS).is_dir() else "arithmetic"
    chosen = _ask(TASKS, task, lambda given: _task(model, given))
    text = _ask(COMPARED, "algorithms", lambda given: study_file(chosen, given))
    files = (Path(f"my_study{number}.yaml") for number in count(1))
    file = next(one for one in files if not (one.exists() or (runs_folder(None) / "studies" / one.stem).exists()))
    file.write_text(text, encoding="utf-8")
    terminal.say(f"\nWritten: {file}. Its comments explain each line; change what you like before it runs.")
    if code := _do("study", "run", str(file), "--dry-run"):
        raise typer.Exit(code)
    try:
        wanted = typer.confirm("\nRun it now?", default=True)
    except typer.Abort:  # the end of the answers
        wanted = False
    if wanted:
        raise typer.Exit(_do("study", "run", str(file)))
    terminal.say(f"\nTo run it: cohort study run {file}")


def _ask(question: str, default: str, read: Callable[[str], T]) -> T:
    """What `read` makes of an answer; asks again while it raises ValueError. ValueError where the input has ended."""
    terminal.say(f"\n{question}")
    while True:
        try:
            given = input(f"[{default}] > ").strip() or default
        except EOFError:
            fix = f"answer in a terminal, or one answer a line: {EXAMPLE}"
            raise ValueError(f"the input has ended before the answer to '{question.splitlines()[0]}'; {fix}") from None
        if not sys.stdin.isatty():
            terminal.say(given)
        try:
            return read(given)
        except (ValueError, OSError) as error:
            terminal.fail(error)


def _task(model: str, given: str) -> dict[str, Any]:
    """The study on a task of this name, or on rows of this file or folder; asks where its rows are."""
    from ... import plugins
    from .study import fields_of, values

    is_name = given in plugins.names("task") or not (Path(given).expanduser().exists() or {"/", "."} & {*given})
    raw: dict[str, Any] = {"name": given} if is_name else {"name": "gsm8k", "path": given}
    fields = plugins.settings_class("task", raw["name"]).model_fields
    if is_name and "path" in fields:
        default = f"data/{given}" if Path("data", given).exists() else fields["path"].default
        raw["path"] = _ask(f"Where are the rows of {given}? A file, a folder or a Hub id", default, str)
    known = fields_of(raw["path"]) if raw["name"] == "gsm8k" else []
    for role, names in FIELDS.items() if known and not {*FIELDS} <= {*known} else ():
        likely = next((name for name in names if name in known), known[0])
        asked = f"Which field holds the {role}? ({', '.join(known)})"
        raw.setdefault("columns", {})[role] = _ask(asked, likely, str)
    return values(model, raw)


def _do(*words: str) -> int:
    """The exit code of a command of this program, which is printed first."""
    terminal.say(f"\n$ cohort {' '.join(words)}", style="bold")
    try:
        app(args=list(words), prog_name="cohort")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
