"""Reads what the functions of the API are given: settings, folders, addresses."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..spec.errors import SpecError

Settings = Mapping[str, Any] | Sequence[str]  # dotted path -> value, or texts PATH=VALUE as after `--set`
RUNS = Path("runs")
REPORTING = "reading the results and drawing the figures"


def runs_folder(folder: str | Path | None) -> Path:
    return Path(folder or os.environ.get("COHORT_RUNS") or RUNS)


def shell(command: str, options: Mapping[str, Any]) -> str:
    """A shell command with more options; a list repeats its option, None leaves it out."""
    words = [command]
    for option, value in options.items():
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is not None:
                words += [option, shlex.quote(str(item))]
    return " ".join(words)


def as_texts(settings: Settings) -> list[str]:
    """The settings as texts after `--set`, from which the same values are read."""
    if not isinstance(settings, Mapping):
        return list(settings)
    texts = []
    for path, value in settings.items():
        try:
            text = yaml.safe_dump(_plain(value), default_flow_style=True, width=float("inf"), allow_unicode=True)
        except yaml.YAMLError:
            kinds = "numbers, text, lists and mappings"
            raise SpecError(f"setting '{path}' must be made of {kinds}, got {type(value).__name__}") from None
        texts.append(f"{path}={text.strip().removesuffix('...').strip()}")
    return texts


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's, tuples as lists, paths as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value
