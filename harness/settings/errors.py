"""Writes the message for a wrong file or override: file, key, rule, value and the nearest valid key."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..base.words import did_you_mean
from . import paths

S = TypeVar("S", bound=BaseModel)


class SpecError(ValueError):
    """A user's settings cannot run; the message names the file, the key, the rule, the value and a fix."""


def parsed(model: type[S], raw: Any, where: str) -> S:
    """The model that a mapping describes; otherwise SpecError with one line for each thing wrong with it: `where`, key,
    rule, value, and the nearest valid key."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        wrong = error.errors()
    lines, is_run = [], hasattr(model, "plugin_fields")
    for item in wrong:
        keys = [str(key) for key in item["loc"]]
        path = ".".join(keys)
        value = "" if item["type"] in ("missing", "extra_forbidden") else f", got {_short(item['input'])}"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            *above, key = keys
            every, start = [name for name, _ in paths.settings(model, raw)], "".join(f"{name}." for name in above)
            below = [name.removeprefix(start) for name in every if name.startswith(start)]
            known = list(dict.fromkeys(name.split(".")[0] for name in below))
            # The cold start has a learning rate too, and nobody means it who does not name it.
            same = sorted((n for n in every if n.split(".")[-1] == key), key=lambda n: n.startswith("cold_start"))
            asked = did_you_mean(key, known, cutoff=0.8) or (f"did you mean '{same[0]}'? " if same else "")
            asked = asked or did_you_mean(key, known)
            message = f"unknown key '{key}'; {asked}{'valid keys: ' if known else ''}{', '.join(known)}".rstrip("; ")
        elif item["type"] == "missing":
            message = "is required"
        elif is_run and isinstance(item["input"], list) and item["type"].endswith(("_type", "literal_error")):
            fix = f"to vary it, list them under factors, '{path}: {_short(item['input'])}'"
            message, value = f"{message}; one run has one value: {fix}", ""
        elif item["type"] == "string_type" and isinstance(item["input"], dict):
            message = f"{message}; text that begins with a brace needs quotes, '{path}=\"{{...}}\"'"
        elif item["type"] == "value_error":
            value = ""  # our own messages name the value
        named = f"{path}: " if path and not message.startswith(path) else ""
        lines.append(f"{where}: {named}{message}{value}")
    raise SpecError("\n".join(lines))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
