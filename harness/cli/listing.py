"""What `cohort list` says of plugins, read from their classes: summary, facts, settings with default and range."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from harness import plugins

_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def describe_plugins(kind: plugins.Kind, facts: Sequence[str]) -> list[dict[str, Any]]:
    """One JSON-like mapping for each plugin of a kind, with the named class attributes among its keys."""
    return [_describe(kind, name, facts) for name in plugins.names(kind)]


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.])\s+(?=[A-Z`])", paragraph)[0]


def _describe(kind: plugins.Kind, name: str, facts: Sequence[str]) -> dict[str, Any]:
    cls: Any = plugins.load(kind, name)
    settings = plugins.settings_class(kind, name)
    document = importlib.import_module(cls.__module__).__doc__ or cls.__doc__ or ""
    return {
        "name": name,
        "summary": first_sentence(document),
        **{fact: getattr(cls, fact) for fact in facts},
        "settings": [_setting(key, field) for key, field in settings.model_fields.items() if key != "name"],
    }


def _setting(name: str, field: FieldInfo) -> dict[str, Any]:
    bounds = [f"{sign} {getattr(m, key)}" for m in field.metadata for key, sign in _SIGNS.items() if hasattr(m, key)]
    if get_origin(field.annotation) is Literal:
        bounds.append(" or ".join(map(str, get_args(field.annotation))))
    default = "required" if field.is_required() else field.get_default(call_default_factory=True)
    return {"name": name, "default": default, "range": ", ".join(bounds), "description": field.description or ""}
