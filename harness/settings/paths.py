"""Lists every setting by its full path, as files and `--set` name it."""

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .. import plugins
from ..data import Section


def settings(model: type[BaseModel], raw: Mapping[str, Any] | None = None) -> Iterator[tuple[str, FieldInfo]]:
    """The full path and the field of every setting of a section, including nested sections.

    A plugin (task, algorithm, engine) that `raw` names counts with its settings, otherwise as one setting.
    """
    for key, field in model.model_fields.items():
        node = raw.get(key) if isinstance(raw, Mapping) else None
        kind: Any = field.annotation
        if key in getattr(model, "plugin_fields", ()):
            name = node.get("name") if isinstance(node, Mapping) else node
            kind = plugins.settings_class(key, name) if name in plugins.names(key) else None  # pyright: ignore
        inside = [(f"{key}.{path}", inner) for path, inner in _inside(kind, node)]
        yield from inside or [(key, field)]


def _inside(kind: Any, node: Any) -> Iterator[tuple[str, FieldInfo]]:
    """The settings inside a value of this type; `LoRA | None` holds LoRA's settings."""
    while get_origin(kind) in (UnionType, Union, Annotated):
        kind = get_args(kind)[0]
    if get_origin(kind) is dict and isinstance(node, Mapping):  # by names that the user chose
        for name, value in node.items():
            yield from ((f"{name}.{path}", inner) for path, inner in _inside(get_args(kind)[1], value))
    elif isinstance(kind, type) and issubclass(kind, Section):
        yield from settings(kind, node)


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Dotted path -> value."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{above}{key}.") if isinstance(value, Mapping) and value else {f"{above}{key}": value}
    return found
