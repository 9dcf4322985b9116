"""Defines the command line: `command` adds a function to it, with examples below its help and errors as exit codes."""

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.markup import escape
from typer.models import OptionInfo

from ..console import terminal

app = typer.Typer(
    name="cohort",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Controlled comparisons of reinforcement-learning algorithms on mathematical reasoning.",
    epilog="Start with [bold]cohort study run quickstart[/]; [bold]cohort doctor[/] checks this machine.",
)
GROUPS = {
    "study": "Run and inspect studies: a question, its arms, its seeds.",
    "task": "Look at the problems of a task as the policy reads them.",
}
groups = {name: typer.Typer(no_args_is_help=True, help=about) for name, about in GROUPS.items()}
for _name, _group in groups.items():
    app.add_typer(_group, name=_name)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        terminal.say(f"cohort-rl {version('cohort-rl')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


def command(path: str, *examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command, such as `study run`, with examples below its help, and errors as exit codes."""
    *group, name = path.split()

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except Exception as error:
                from ..base.disk import disk_full
                from ..data import InvalidRun
                from ..mirror.store import damaged_store
                from ..plugins import raised_by

                runs = Path(kwargs.get("runs", "."))
                shown = disk_full(error, runs) or damaged_store(error, runs) or error
                # Input, a model, disk or network out of reach, or a result that must not be used.
                bad = isinstance(shown, ValueError | OSError | InvalidRun)
                plugin = raised_by(shown)
                if not (bad or plugin) or os.environ.get("COHORT_TRACEBACK"):
                    raise
                told = _in_options(str(shown), function)
                hint = "; COHORT_TRACEBACK=1 before the command shows where it was called"
                terminal.fail(f"{plugin}{hint}" if plugin else told)
                raise typer.Exit(2 if isinstance(shown, ValueError) and not plugin else 1) from None
            except KeyboardInterrupt as stop:
                told = str(stop) or "The same command continues where it stopped."
                terminal.say(f"Interrupted. {told}", stderr=True)
                raise typer.Exit(130) from None

        about = (" ".join(part.split()) for part in (function.__doc__ or "").split("\n\n"))  # terminals vary in width
        epilog = "\n\n".join(["[bold]Examples[/]", *map(escape, examples)])
        (groups[group[0]] if group else app).command(name, help="\n\n".join(about), epilog=epilog)(run)
        return function

    return register


def _in_options(text: str, function: Callable[..., None]) -> str:
    """An error of the API, which names arguments (`name`), in the words of a command: their options (--name)."""
    words: dict[str, str] = {}
    for name, hint in get_type_hints(function, include_extras=True).items():
        for about in getattr(hint, "__metadata__", ()):
            written = getattr(about, "param_decls", None) or [f"--{name.replace('_', '-')}"]
            words[name] = written[0] if isinstance(about, OptionInfo) else about.metavar or name
    words |= {ours: words[own] for own, ours in (("sets", "settings"), ("task", "tasks")) if own in words}
    return re.sub(r"`(\w+)`", lambda found: words.get(found[1], found[0]), text)
