"""Where plugins are found: a file's name is the plugin's name, and installed packages add theirs by entry points.

`algorithms/x.py`, `tasks/x.py`, `harness/rewards/x.py` and `harness/engines/x.py` each hold one public class; a third
party declares the same under the entry-point groups `cohort.algorithms`, `cohort.tasks`, `cohort.rewards` and
`cohort.engines`.
"""

from __future__ import annotations

import importlib
import pkgutil
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Literal

from harness.interfaces import Algorithm, Reward, RolloutEngine, Task

Kind = Literal["algorithm", "task", "reward", "engine"]

_PACKAGE = {"algorithm": "algorithms", "task": "tasks", "reward": "harness.rewards", "engine": "harness.engines"}
_BASE: dict[str, type] = {"algorithm": Algorithm, "task": Task, "reward": Reward, "engine": RolloutEngine}


def names(kind: Kind) -> list[str]:
    """Names of all plugins of a kind, sorted, without importing them."""
    package = importlib.import_module(_PACKAGE[kind])
    files = [m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")]
    return sorted({*files, *_external(kind)})


@cache
def load(kind: Kind, name: str) -> type:
    """The plugin's class. ValueError with the nearest name for an unknown one."""
    known = names(kind)
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ValueError(f"unknown {kind} '{name}'; {hint}available: {', '.join(known)}")
    external = _external(kind)
    if name in external:
        return external[name].load()
    return _only_plugin(importlib.import_module(f"{_PACKAGE[kind]}.{name}"), kind)


def nearest(word: str, known: list[str]) -> str | None:
    """The known word most like `word`, or None where nothing is close."""
    near = get_close_matches(word, known, n=1, cutoff=0.5)
    return near[0] if near else None


def _external(kind: Kind) -> dict:
    return {point.name: point for point in entry_points(group=f"cohort.{kind}s")}


def _only_plugin(module: ModuleType, kind: Kind) -> type:
    base = _BASE[kind]
    found = [
        value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, base)
        and value.__module__ == module.__name__
        and name[0] != "_"
    ]
    if len(found) != 1:
        raise ValueError(f"{module.__name__} must define exactly one public {base.__name__} class, found {len(found)}")
    return found[0]
