"""Defines the groups of commands; `command` adds a function to one, with examples below its help and errors as exit
codes."""

import functools
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

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
study_app = typer.Typer(no_args_is_help=True, help="Run and inspect studies: a question, its arms, its seeds.")
list_app = typer.Typer(no_args_is_help=True, help="List the settings and plugins that a study file can name.")
task_app = typer.Typer(no_args_is_help=True, help="Look at the problems of a task as the policy reads them.")
reward_app = typer.Typer(no_args_is_help=True, help="Fit reward models on the stored rollouts of a run.")
probe_app = typer.Typer(no_args_is_help=True, help="Test whether a model already knows a benchmark.")


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


app.add_typer(study_app, name="study")
app.add_typer(list_app, name="list")
app.add_typer(task_app, name="task")
app.add_typer(reward_app, name="reward-model")
app.add_typer(probe_app, name="probe")


def command(group: typer.Typer, name: str, *examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command with examples below its help, and turn its errors into exit codes."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except Exception as error:
                from ..ground.disk import damaged_store, disk_full
                from ..plugins import raised_by

                runs = Path(kwargs.get("runs", "."))
                shown = disk_full(error, runs) or damaged_store(error, runs) or error
                bad = isinstance(
                    shown, ValueError | OSError
                )  # bad input, or a model, disk or network that cannot be reached
                plugin = raised_by(shown)
                code = 2 if isinstance(shown, ValueError) and not plugin else 1
                if not (bad or plugin) or os.environ.get("COHORT_TRACEBACK"):
                    raise
                if plugin:
                    shown = f"{plugin}; COHORT_TRACEBACK=1 before the command shows where it was called"
                terminal.fail(shown)
                raise typer.Exit(code) from None
            except KeyboardInterrupt:
                terminal.say("Interrupted. The same command continues where it stopped.", stderr=True)
                raise typer.Exit(130) from None
            finally:
                terminal.hush()

        about = (" ".join(part.split()) for part in (function.__doc__ or "").split("\n\n"))  # terminals vary in width
        epilog = "\n\n".join(["[bold]Examples[/]", *map(escape, examples)])
        group.command(name, help="\n\n".join(about), epilog=epilog)(run)
        return function

    return register


@contextmanager
def uncollected() -> Iterator[None]:
    """Meanwhile nothing looks for cycles to free, which takes an eighth of a command that imports much and keeps it.

    Not for one that trains: its cycles may hold tensors.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.freeze()  # all from this time becomes old; as young objects they would be searched at once, for 0.2 s
            gc.unfreeze()
            gc.enable()
