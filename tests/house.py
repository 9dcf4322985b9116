"""Figures of the house: lines of rooms, of each extra and of the tests; a step's files, settings, commands, options.

    python tests/house.py

A room is a package of `harness/`, a loose module there, or a top-level folder.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import MagicMock

PRODUCT = ("harness", "algorithms", "tasks", "studies", "reports", "cohort")
NAMED = ("base", "devices", "settings", "data", "interfaces", "policy", "engines", "plugins")
PLUGINS = ("algorithms", "tasks", "rewards", "samplers", "engines", "stages")
ROOT = Path(__file__).resolve().parents[1]
NOT_FOLLOWED = tuple(f"harness/{name}" for name in NAMED)


def room(module: str) -> str:
    parts = module.split(".")
    if extra(module) != "core":
        return f"extra {extra(module)}"
    return ".".join(parts[:2]) if parts[0] == "harness" else parts[0]


def extra(module: str) -> str:
    """The extra that a module belongs to; `core` for all others."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["harness", "extras"] and len(parts) > 2 and parts[2] != "__init__" else "core"


def load(*names: str) -> Any:
    return importlib.import_module(".".join(("cohort", *names)))


def step_stays() -> tuple[int, int]:
    """(stays, files) of a reader who follows one `train_step` through its calls, in the order of execution.

    The reader reads a function when it is first called and never again; a stay begins where a function stands in
    another file than the one read before it. `NAMED` rooms are read by their names: what every room uses, and the
    inside of an engine and a model. What is left are the files of the step, its algorithm, its task and its rewards.
    """
    raw = {"task": "arithmetic", "algorithm": "grpo", "rollouts_per_step": 8, "steps": 1, "device": "cpu"}
    spec = load("harness.settings.run").parse_run(raw, "house")
    seen: set[Any] = set()
    read: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        file = os.path.relpath(code.co_filename, ROOT).removeprefix("cohort/")
        if event != "call" or code in seen or code.co_name.startswith("<"):
            return
        seen.add(code)
        if file.startswith(PRODUCT) and not file.startswith(NOT_FOLLOWED):
            read.append(file)

    class AtOnce:  # reads what a thread does where it begins
        def submit(self, work: Any, *args: Any) -> Any:
            done = Future[Any]()
            done.set_result(work(*args))
            return done

    load("harness.run.grading")._thread = AtOnce()
    with tempfile.TemporaryDirectory() as folder:
        run, _ = load("harness.run.build").prepare(spec, Path(folder), MagicMock(), Path(folder), lambda: False)
        prompts, train_step = spec.task.prompts("train"), load("harness.run.step").train_step
        sys.setprofile(note)
        try:
            train_step(run, prompts, 0)
        finally:
            sys.setprofile(None)
    return sum(before != file for before, file in zip(["", *read], read, strict=False)), len(set(read))


def settings() -> Counter[str]:
    """Declared fields of all sections of runs, studies and plugins, except `name`: of the core and of each extra."""
    for file in files(*PRODUCT):
        path = Path(file)
        if "Section" in (ROOT / path).read_text("utf-8") or path.parent.name in PLUGINS:
            with contextlib.suppress(ImportError):  # a library of an extra
                load(*path.with_suffix("").parts)

    def below(cls: type) -> set[type]:
        return {inner for one in cls.__subclasses__() for inner in (one, *below(one))}

    sections: Any = below(load("harness.data").Section)
    homes = {one: extra(one.__module__.removeprefix("cohort.")) for one in sections}
    known = ((one, name) for one in sections for name in one.__annotations__ if name in one.model_fields)
    return Counter(homes[one] for one, name in known if name != "name")


def commands() -> tuple[int, int]:
    """(commands, their options) of the command line, `--help` apart."""
    import typer

    def leaves(command: Any) -> list[Any]:
        inner = getattr(command, "commands", None)
        return [command] if inner is None else [leaf for one in inner.values() for leaf in leaves(one)]

    found = leaves(typer.main.get_command(load("harness.cli.app").app))
    return len(found), sum(getattr(p, "param_type_name", "") == "option" for one in found for p in one.params)


def main() -> None:
    lines, parts = Counter[str](), Counter[str]()
    for file in files(*PRODUCT):
        module = file.removesuffix(".py").replace("/", ".")
        lines[room(module)] += num_lines(file)
        parts[extra(module)] += num_lines(file)
    wing = {name: count for name, count in sorted(parts.items()) if name != "core"}
    print(f"product lines of Python {lines.total()}")
    print(f"  core {parts['core']}, extras {sum(wing.values())}: {words(wing)}")
    print(f"  by room: {', '.join(f'{name} {count}' for name, count in lines.most_common())}")
    print("one train_step is {} stays in {} files".format(*step_stays()))
    print(f"lines of tests {sum(map(num_lines, files('tests')))}")
    found = settings()
    print(f"settings of the core {found.pop('core')}, of extras {sum(found.values())}: {words(found)}")
    print("commands {}, options {}".format(*commands()))


def words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def num_lines(file: str) -> int:
    return (ROOT / file).read_text("utf-8").count("\n")


def files(*folders: str) -> list[str]:
    """The files of Python that git knows below these folders."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", *folders], capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split() if name.endswith(".py")]


if __name__ == "__main__":
    main()
