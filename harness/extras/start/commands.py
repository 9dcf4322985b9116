"""`cohort start`: asks for a model, a task and what to compare; writes the study file, says its cost, offers to run it.

Answers are lines of standard input, from a person or a pipe. A bad answer is told and asked again; what comes after the
file are commands that are printed.
"""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import typer

from ...cli.commands import app, command
from ...console import terminal

T = TypeVar("T")
EXAMPLE = "printf '%s\\n' tiny arithmetic algorithms n | cohort start"
MODELS = {
    "tiny": "167 thousand parameters, made on the spot; can learn arithmetic alone",
    "models/smollm2": "a real chat model of 135 million parameters, from `make smollm2`",
    "FOLDER, FILE.gguf or Hub id": "any causal language model, such as Qwen/Qwen2.5-0.5B-Instruct",
}
TASKS = {
    "arithmetic": "short sums, made on the spot",
    "gsm8k": "word problems, of the Hub or a copy of yours; `cohort list tasks` has others",
    "FILE or FOLDER": "your own problems with numbers as answers: .csv, .jsonl, .parquet",
}
COMPARED = {
    "algorithms": "grpo, ppo, and grpo_self_consistency, which sees no gold answers",
    "group size": "8, 4 or 16 answers to each problem, at equal numbers of answers",
    "kl": "no pull to the start, or two weights of it",
    "PATH=A,B": "any setting, such as optimizer.learning_rate=1e-5,1e-4; `cohort list settings`",
}


@command("start", "cohort start", EXAMPLE)
def start() -> None:
    """Write a first study: asks for a model, a task and what to compare, says time and memory, and offers to run it.

    Answers are lines of standard input; an empty one takes the answer in brackets. The study file explains each of its
    lines. All that follows it is done by commands that are printed.
    """
    terminal.say("Three questions make a study file; Enter takes the answer in brackets.")
    from . import study  # seconds

    model = _ask("1. Which model learns?", MODELS, study.default_model(), study.checked_model)
    task = _ask("2. Which problems?", TASKS, study.default_task(model), lambda given: _task(model, given))
    text = _ask("3. What is compared?", COMPARED, "algorithms", lambda given: study.study_file(model, task, given))
    names = (f"my_study{number if number > 1 else ''}" for number in count(1))
    name = next(one for one in names if not Path(f"{one}.yaml").exists() and not _is_known(one))
    Path(f"{name}.yaml").write_text(text, encoding="utf-8")
    terminal.say(f"\nWritten: {name}.yaml. Its comments explain each line; change what you like before it runs.")
    if code := _do("study", "run", f"{name}.yaml", "--dry-run"):
        raise typer.Exit(code)
    if _ask("Run it now? (y or n)", {}, "y", _yes, at_end="n"):
        raise typer.Exit(_do("study", "run", f"{name}.yaml"))
    terminal.say(f"To run it: cohort study run {name}.yaml")


def _is_known(name: str) -> bool:
    from ...api.settings import runs_folder

    return (runs_folder(None) / "studies" / name).exists()


def _ask(
    title: str, answers: Mapping[str, str], default: str, read: Callable[[str], T], at_end: str | None = None
) -> T:
    """What `read` makes of an answer; asks again while it raises ValueError or OSError.

    `at_end` is the answer where the input has ended. ValueError without one.
    """
    if answers:
        terminal.show_table(f"\n{title}", ["answer", ""], answers.items())
    else:
        terminal.say(f"\n{title}", style="bold")
    while True:
        try:
            given = input(f"[{default}] > ").strip() or default
        except EOFError:
            if at_end is None:
                fix = f"answer in a terminal, or one answer a line: {EXAMPLE}"
                raise ValueError(f"the input has ended before the answer to '{title}'; {fix}") from None
            given = at_end
        except KeyboardInterrupt:
            raise KeyboardInterrupt("Nothing has run.") from None
        if not sys.stdin.isatty():
            terminal.say(given)
        try:
            return read(given)
        except (ValueError, OSError) as error:
            terminal.fail(error)


def _task(model: str, given: str) -> dict[str, Any]:
    """The settings of a task by its name, or of one that reads this file or folder, and where its rows are."""
    from ... import plugins
    from . import study

    is_name = given in plugins.names("task") or not (Path(given).expanduser().exists() or {"/", "."} & {*given})
    name = given if is_name else "gsm8k"
    fields = plugins.settings_class("task", name).model_fields
    raw: dict[str, Any] = {"name": name}
    if "path" in fields:
        copy = Path("data") / name
        default = str(copy if copy.exists() else fields["path"].default)
        raw["path"] = (
            _ask(f"Where are the rows of {name}? A file, a folder or a Hub id", {}, default, str) if is_name else given
        )
        known = study.fields_of(raw["path"]) if name == "gsm8k" else []
        if known and not {*study.COLUMNS} <= {*known}:
            raw["columns"] = {role: _ask_field(role, known, guesses) for role, guesses in study.COLUMNS.items()}
    return study.checked_task(model, raw)


def _ask_field(role: str, known: Sequence[str], guesses: Sequence[str]) -> str:
    likely = next((one for one in guesses if one in known), known[0])
    return _ask(f"Which field holds the {role}? ({', '.join(known)})", {}, likely, str)


def _yes(given: str) -> bool:
    if given.lower() not in ("y", "yes", "n", "no"):
        raise ValueError(f"answer y or n, got '{given}'")
    return given.lower().startswith("y")


def _do(*words: str) -> int:
    """The exit code of a command of this program, which is printed first."""
    terminal.say(f"\n$ {shlex.join(['cohort', *words])}", style="bold")
    try:
        app(args=list(words), prog_name="cohort")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
