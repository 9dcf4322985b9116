"""Settings before they are validated: YAML text, `path=value` overrides, and the digest of JSON-like values."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from harness.spec.errors import SpecError


def parse_overrides(items: Sequence[str]) -> dict[str, Any]:
    """`path=value` strings as a mapping; values are read as YAML (`true`, `0.1`, `[1, 2]`, text)."""
    result: dict[str, Any] = {}
    for item in items:
        path, equals, value = item.partition("=")
        if not equals or not path.strip():
            raise SpecError(f"--set takes path=value, got '{item}'; for example --set algorithm.kl_beta=0.01")
        try:
            result[path.strip()] = _parse_yaml(value)
        except yaml.YAMLError as error:
            raise SpecError(f"--set {path.strip()}: the value is not valid YAML: {error}") from None
    return result


def with_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any], whole: Sequence[str] = ()) -> dict[str, Any]:
    """A deep copy of `raw` with each dotted path set.

    `whole` names mappings whose keys may hold dots: the rest of a path below one of them is one key. A plain value with
    a path below it becomes the mapping that it stands for. A number for a reward changes only its weight.
    """
    result = deepcopy(dict(raw))
    for dotted, value in overrides.items():
        *above, last = _keys(dotted, whole)
        node = result
        for depth, key in enumerate(above, start=1):
            child = _mapping(node.get(key), above[:depth])
            if child is None:
                raise SpecError(f"'{dotted}': '{'.'.join(above[:depth])}' is {node[key]!r}, which has no keys")
            node[key] = child
            node = child
        old = node.get(last)
        if above == ["rewards"] and isinstance(old, dict) and is_number(value):
            value = {**old, "weight": value}
        node[last] = value
    return result


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float, but no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def digest(value: Any) -> str:
    """The first 16 hex digits of the SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_yaml(path: Path) -> Any:
    """The content of a YAML (or JSON) file; SpecError for a file that is missing, malformed, or has a key twice."""
    try:
        return _parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not valid YAML: {error}") from None


def _keys(dotted: str, whole: Sequence[str]) -> list[str]:
    for name in whole:
        if dotted.startswith(f"{name}."):
            return [*name.split("."), dotted.removeprefix(f"{name}.")]
    return dotted.split(".")


def _mapping(value: Any, path: Sequence[str]) -> dict[str, Any] | None:
    """The mapping that a value is or stands for: text names a plugin, a number in `rewards` is a weight."""
    if isinstance(value, str):
        return {"name": value}
    if len(path) == 2 and path[0] == "rewards" and is_number(value):
        return {"weight": value}
    return {} if value is None else value if isinstance(value, dict) else None


def _parse_yaml(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, but refusing two equal keys, of which PyYAML takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                raise yaml.YAMLError(
                    f"line {line}: key '{key.value}' is already in line {lines[key.value]}; remove one"
                )
            lines[key.value if isinstance(key, yaml.ScalarNode) else ""] = line
        return node
