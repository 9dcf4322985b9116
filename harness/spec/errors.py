"""Writes the message for a wrong file or override: file, key, rule, value and the nearest valid key."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import ValidationError

from .. import plugins
from ..data import Section
from . import paths

S = TypeVar("S", bound=Section)


class SpecError(ValueError):
    """A user's settings cannot run; the message names the file, the key, the rule, the value and a fix."""


def parsed(model: type[S], raw: Any, where: str) -> S:
    """The section that a mapping describes; otherwise SpecError with `where`, key, rule and value."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise SpecError(explain(error, model, raw if isinstance(raw, Mapping) else {}, where)) from None


def did_you_mean(word: str, known: Sequence[str], cutoff: float = 0.5) -> str:
    """The question "did you mean ...?" with the known word closest to `word`; empty if none is close."""
    near = plugins.nearest(word, list(known), cutoff)
    return f"did you mean '{near}'? " if near else ""


def explain(error: ValidationError, model: type[Section], raw: Mapping[str, Any], where: str) -> str:
    """One line for each thing wrong with `raw`: where, key, rule, value, and the nearest valid key."""
    lines = []
    for item in error.errors():
        keys = [str(key) for key in item["loc"] if not str(key).startswith("function-")]
        path = ".".join(keys)
        value = "" if item["type"] in ("missing", "extra_forbidden") else f", got {_short(item['input'])}"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            owner = _class_at(model, raw, keys[:-1])
            known = list(owner.model_fields) if owner else []
            asked = did_you_mean(keys[-1], known, cutoff=0.8) or _elsewhere(model, raw, keys[-1])
            message = f"unknown key '{keys[-1]}'; {asked or did_you_mean(keys[-1], known)}"
            message += f"valid keys: {', '.join(known)}" if known else ""
            message = message.rstrip("; ")
        elif item["type"] == "missing":
            message = "is required"
        elif isinstance(item["input"], list) and item["type"].endswith(("_type", "literal_error")) and _is_run(model):
            message += (
                f"; one run has one value: to vary it, list them under factors, '{path}: {_short(item['input'])}'"
            )
            value = ""
        elif item["type"] == "value_error":
            value = ""  # our own messages name the value
        named = f"{path}: " if path and not message.startswith(path) else ""
        lines.append(f"{where}: {named}{message}{value}")
    return "\n".join(lines)


def _class_at(model: type[Section], raw: Mapping[str, Any], keys: Sequence[str]) -> type[Section] | None:
    owner: type[Section] = model
    node: Any = raw
    names = iter(keys)
    for key in names:
        node = node.get(key) if isinstance(node, Mapping) else None
        if key not in owner.model_fields:
            return None
        if key in getattr(owner, "plugin_fields", ()):
            name = node if isinstance(node, str) else (node or {}).get("name")
            kind: Any = key
            owner = plugins.settings_class(kind, str(name))
            continue
        annotation = owner.model_fields[key].annotation
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        while get_origin(annotation) is dict:  # the next key is a name that the user chose
            annotation = get_args(annotation)[1]
            next(names, None)
        section = paths.section_of(annotation)
        if section is None:
            return None
        owner = section
    return owner


def _is_run(model: type[Section]) -> bool:
    return hasattr(model, "plugin_fields")


def _elsewhere(model: type[Section], raw: Mapping[str, Any], key: str) -> str:
    """The question with the full path of a setting of that name in another section; empty if there is none."""
    found = [path for path, _ in paths.settings(model, raw) if path.rpartition(".")[2] == key]
    return f"did you mean '{found[0]}'? " if found else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
