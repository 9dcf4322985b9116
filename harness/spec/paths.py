"""Lists every setting by its full path, as files and `--set` name it."""

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from .. import plugins
from ..data import Section


def settings(model: type[Section], raw: Mapping[str, Any] | None = None) -> Iterator[tuple[str, FieldInfo]]:
    """The full path and the field of every setting of a section, including nested sections.

    A plugin (task, algorithm, engine) that `raw` names counts with its settings, otherwise as one setting.
    """
    for key, field in model.model_fields.items():
        node = raw.get(key) if isinstance(raw, Mapping) else None
        if key in getattr(model, "plugin_fields", ()):
            owner = _named_plugin(key, node)
        else:  # `seeds`, a list or a section, is one setting
            owner = None if isinstance(field.default, list) else section_of(field.annotation)
        if owner is None:
            yield key, field
        else:
            yield from ((f"{key}.{path}", inner) for path, inner in settings(owner, node))


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field with this annotation holds, or None; `LoRA | None` holds a LoRA."""
    if get_origin(annotation) in (UnionType, Union):
        annotation = next(kind for kind in get_args(annotation) if kind is not type(None))
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _named_plugin(kind: Any, node: Any) -> type[Section] | None:
    name = node.get("name") if isinstance(node, Mapping) else node
    return plugins.settings_class(kind, name) if isinstance(name, str) and name in plugins.names(kind) else None
