"""`cohort list`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from harness.cli.commands import command, list_app
from harness.cli.options import RUNS, Json, Runs
from harness.cli.study import study_list
from harness.console import terminal

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from harness.plugins import Kind

SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@command(list_app, "algorithms", "cohort list algorithms", "cohort list algorithms --json")
def list_algorithms(as_json: Json = False) -> None:
    """List the algorithms: the objective of each, then its settings with defaults and ranges."""
    _show_plugins("algorithm", as_json, facts=("needs_critic", "sees_gold", "min_group_size"), tables=("objective",))


@command(list_app, "tasks", "cohort list tasks")
def list_tasks(as_json: Json = False) -> None:
    """List the tasks with their settings, defaults and ranges."""
    _show_plugins("task", as_json)


@command(list_app, "rewards", "cohort list rewards")
def list_rewards(as_json: Json = False) -> None:
    """List the rewards with their settings, defaults and ranges."""
    _show_plugins("reward", as_json, facts=("sees_gold",))


@command(list_app, "engines", "cohort list engines")
def list_engines(as_json: Json = False) -> None:
    """List the rollout engines with their settings, defaults and ranges."""
    _show_plugins("engine", as_json, facts=("exact_logprobs",))


@command(list_app, "studies", "cohort list studies")
def list_studies(runs: Runs = RUNS, as_json: Json = False) -> None:
    """List the shipped studies and those in the runs folder (as `cohort study list`)."""
    study_list(runs, as_json)


def _show_plugins(kind: Kind, as_json: bool, facts: Sequence[str] = (), tables: Sequence[str] = ()) -> None:
    """`facts` are class attributes for the first table, `tables` mappings that each get a table of their own."""
    from harness import plugins

    documents = [_describe(kind, name, [*facts, *tables]) for name in plugins.names(kind)]
    if as_json:
        terminal.print_json(documents)
        return
    rows = [(d["name"], *(str(d[fact]) for fact in facts), d["summary"]) for d in documents]
    terminal.show_table("", [kind, *facts, "summary"], rows)
    for table in tables:
        columns = list(dict.fromkeys(key for document in documents for key in document[table]))
        cells = [(d["name"], *(d[table].get(column, "") for column in columns)) for d in documents]
        terminal.show_table(table.capitalize(), [kind, *columns], cells)
    keys = ("name", "default", "range", "description")
    settings = [
        (document["name"] if i == 0 else "", *(str(field[key]) for key in keys))
        for document in documents
        for i, field in enumerate(document["settings"])
    ]
    terminal.show_table("Settings", [kind, "setting", "default", "range", "meaning"], settings)


def _describe(kind: Kind, name: str, facts: Sequence[str]) -> dict[str, Any]:
    """A plugin as its class and its module tell: summary, facts (class attributes), settings."""
    from harness import plugins

    cls: Any = plugins.load(kind, name)
    settings = plugins.settings_class(kind, name)
    document = importlib.import_module(cls.__module__).__doc__ or cls.__doc__ or ""
    return {
        "name": name,
        "summary": _first_sentence(document),
        **{fact: getattr(cls, fact) for fact in facts},
        "settings": [_setting(key, field) for key, field in settings.model_fields.items() if key != "name"],
    }


def _first_sentence(text: str) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.])\s+(?=[A-Z`])", paragraph)[0]


def _setting(name: str, field: FieldInfo) -> dict[str, Any]:
    bounds = [f"{sign} {getattr(m, key)}" for m in field.metadata for key, sign in SIGNS.items() if hasattr(m, key)]
    if get_origin(field.annotation) is Literal:
        bounds.append(" or ".join(map(str, get_args(field.annotation))))
    default = "required" if field.is_required() else field.get_default(call_default_factory=True)
    return {"name": name, "default": default, "range": ", ".join(bounds), "description": field.description or ""}
