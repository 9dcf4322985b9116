"""`cohort list`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from .. import api
from ..console import terminal
from .commands import command, list_app
from .options import Json

if TYPE_CHECKING:
    from ..plugins import Kind

Plugin = Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show only this one, in full.")]
COLUMNS = ("name", "default", "range", "description")


@command(list_app, "algorithms", "cohort list algorithms", "cohort list algorithms grpo")
def list_algorithms(name: Plugin = None, as_json: Json = False) -> None:
    """List the algorithms: the objective of each, then its settings with defaults and ranges."""
    facts = ("needs_critic", "sees_gold", "min_group_size")
    _show_plugins("algorithm", name, as_json, facts, tables=("objective",))


@command(list_app, "tasks", "cohort list tasks", "cohort list tasks gsm8k")
def list_tasks(name: Plugin = None, as_json: Json = False) -> None:
    """List the tasks with their settings, defaults and ranges."""
    _show_plugins("task", name, as_json)


@command(list_app, "rewards", "cohort list rewards", "cohort list rewards majority_vote")
def list_rewards(name: Plugin = None, as_json: Json = False) -> None:
    """List the rewards with their settings, defaults and ranges."""
    _show_plugins("reward", name, as_json, facts=("sees_gold",))


@command(list_app, "engines", "cohort list engines")
def list_engines(name: Plugin = None, as_json: Json = False) -> None:
    """List the rollout engines with their settings, defaults and ranges."""
    _show_plugins("engine", name, as_json, facts=("exact_logprobs",))


@command(list_app, "settings", "cohort list settings", "cohort list settings optimizer", "cohort list settings study")
def list_settings(
    section: Annotated[
        str | None, typer.Argument(metavar="[SECTION]", help="A section of a run, one setting, or `study`.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List every setting of a run by its full path, with default and range; `study` lists the settings of a study file.

    Algorithms, tasks, engines and rewards have their own lists (`cohort list algorithms`, ...).
    """
    documents = api.describe_settings(section)
    if as_json:
        return terminal.print_json(documents)
    rows = [[str(d[key]) for key in COLUMNS] for d in documents]
    terminal.show_table("", ["setting", "default", "range", "meaning"], rows)


def _show_plugins(
    kind: Kind, name: str | None, as_json: bool, facts: Sequence[str] = (), tables: Sequence[str] = ()
) -> None:
    """Print plugins. `facts` are class attributes for the first table; each mapping of `tables` gets its own table."""
    documents = api.describe_plugins(kind, name, [*facts, *tables])
    if as_json:
        return terminal.print_json(documents)
    if name is not None:
        terminal.say(documents[0]["document"] + "\n")
    rows = [(d["name"], *(str(d[fact]) for fact in facts), d["summary"]) for d in documents]
    terminal.show_table("", [kind, *facts, "summary"], rows)
    for table in tables:
        columns = list(dict.fromkeys(key for document in documents for key in document[table]))
        cells = [(d["name"], *(d[table].get(column, "") for column in columns)) for d in documents]
        terminal.show_table(table.capitalize(), [kind, *columns], cells)
    settings = [
        (document["name"] if i == 0 else "", *(str(field[key]) for key in COLUMNS))
        for document in documents
        for i, field in enumerate(document["settings"])
    ]
    terminal.show_table("Settings", [kind, "setting", "default", "range", "meaning"], settings)
