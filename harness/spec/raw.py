"""Settings before they are validated: YAML text, `path=value` overrides, and the digest of JSON-like values."""

from __future__ import annotations

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


def with_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of `raw` with each dotted path set; a plugin given by name alone becomes a mapping.

    A key of a mapping that itself holds dots (`factors`, `search.space`) is matched as a whole; a number for a reward
    is its weight and leaves its other settings as they are.
    """
    result = deepcopy(dict(raw))
    for dotted, value in overrides.items():
        head, _, rest = dotted.partition(".")
        if head in ("factors", "arms") and rest:
            result.setdefault(head, {})[rest] = value
            continue
        if dotted.startswith("search.space."):
            result.setdefault("search", {}).setdefault("space", {})[rest.removeprefix("space.")] = value
            continue
        node: dict[str, Any] = result
        keys = dotted.split(".")
        for depth, key in enumerate(keys[:-1]):
            child = node.get(key)
            if child is None:
                child = {}
            elif isinstance(child, str):
                child = {"name": child}
            elif keys[0] == "rewards" and depth == 1 and isinstance(child, int | float):
                child = {"weight": child}
            elif not isinstance(child, dict):
                raise SpecError(f"'{dotted}': '{'.'.join(keys[: depth + 1])}' is {child!r}, which has no keys")
            node[key] = child
            node = child
        old = node.get(keys[-1])
        if keys[0] == "rewards" and len(keys) == 2 and isinstance(old, dict) and isinstance(value, int | float):
            value = {**old, "weight": value}
        node[keys[-1]] = value
    return result


def digest(value: Any) -> str:
    """The first 16 hex digits of the SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_yaml(path: Path) -> Any:
    """A YAML (or JSON) file's content; SpecError where it is missing, malformed, or has a key twice."""
    try:
        return _parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not valid YAML: {error}") from None


def _parse_yaml(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which lets the last of two equal keys win, made to refuse them."""

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
