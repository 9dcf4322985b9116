"""`cohort list`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from ..console import terminal
from .commands import command, list_app
from .options import RUNS, Json, Runs
from .study import study_list

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from ..plugins import Kind

Plugin = Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show only this one, in full.")]
LISTS = {"algorithm": "algorithms", "task": "tasks", "engine": "engines", "rewards": "rewards"}  # field -> its list
SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


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
    from ..spec import paths
    from ..spec.errors import did_you_mean
    from ..spec.run import RunSpec
    from ..spec.study import StudySpec

    fields = list(paths.settings(StudySpec if section == "study" else RunSpec))
    if section not in (None, "study"):
        known = list(dict.fromkeys(["study", *(path.partition(".")[0] for path, _ in fields)]))
        chosen = [(path, field) for path, field in fields if f"{path}.".startswith(f"{section}.")]
        if not chosen:
            paths_too = [*known, *(path for path, _ in fields)]
            raise ValueError(
                f"SECTION must be one of {', '.join(known)} or a full path, got '{section}'; "
                f"{did_you_mean(str(section), paths_too)}".rstrip("; ")
            )
        fields = chosen
    documents = [_setting(path, field) for path, field in fields]
    for document in documents:
        if document["name"] in LISTS:
            document["range"] = f"cohort list {LISTS[document['name']]}"
    if as_json:
        terminal.print_json(documents)
        return
    keys = ("name", "default", "range", "description")
    terminal.show_table(
        "", ["setting", "default", "range", "meaning"], [[str(d[key]) for key in keys] for d in documents]
    )


@command(list_app, "studies", "cohort list studies")
def list_studies(runs: Runs = RUNS, as_json: Json = False) -> None:
    """List the shipped studies and those in the runs folder (same as `cohort study list`)."""
    study_list(runs, as_json)


def _show_plugins(
    kind: Kind, name: str | None, as_json: bool, facts: Sequence[str] = (), tables: Sequence[str] = ()
) -> None:
    """Print plugins. `facts` are class attributes for the first table; each mapping of `tables` gets its own table."""
    from .. import plugins

    if name is not None:
        plugins.load(kind, name)  # says what there is, if not this
    documents = [_describe(kind, one, [*facts, *tables]) for one in ([name] if name else plugins.names(kind))]
    if as_json:
        terminal.print_json(documents)
        return
    if name is not None:
        terminal.say(documents[0]["document"] + "\n")
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
    """A plugin as its class and module describe it: summary, facts (class attributes), settings."""
    from .. import plugins

    cls: Any = plugins.load(kind, name)
    settings = plugins.settings_class(kind, name)
    document = importlib.import_module(cls.__module__).__doc__ or cls.__doc__ or ""
    return {
        "name": name,
        "summary": _first_sentence(document),
        "document": document.strip(),
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
