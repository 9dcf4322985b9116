"""Figures of the house: lines of the core, of each extra and of the tests; rooms, arrows, circles, a step's files,
settings, commands and options.

    python tests/house.py [FOLDER of a checkout, by default this one]

A room is a package of `harness/`, a loose module there, or a top-level folder. Imports inside functions count, imports
for the type checker do not. It runs with the checkout's own code, so that two commits are measured by the same words.
"""

from __future__ import annotations

import ast
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

PRODUCT = ("harness", "algorithms", "tasks", "studies", "reports", "cohort")
NAMED = ("base", "ground", "devices", "settings", "spec", "data", "interfaces", "policy", "engines", "plugins")
NOT_FOLLOWED = tuple(f"harness/{name}" for name in NAMED)


def modules(root: Path) -> dict[str, ast.Module]:
    files = [file for folder in PRODUCT for file in (root / folder).rglob("*.py")]
    names = {".".join(f.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): f for f in files}
    return {name: ast.parse(file.read_text("utf-8")) for name, file in names.items()}


def imported(name: str, tree: ast.Module, known: set[str]) -> set[str]:
    """The modules that module `name` imports, relatively or by their full names."""
    is_package = any(other.startswith(f"{name}.") for other in known)
    package = ["cohort", *name.split(".")[: None if is_package else -1]]
    for_checker = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in for_checker:
            continue
        if isinstance(node, ast.Import):
            found |= {own(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = own(".".join([*above, *filter(None, [node.module])]))
            full = {f"{module}.{alias.name}" for alias in node.names}
            found |= {one if one in known else module for one in full}
    return found & known


def own(module: str) -> str:
    return module.removeprefix("cohort.")


def room(module: str) -> str:
    parts = module.split(".")
    if extra(module) != "core":
        return f"extra {extra(module)}"
    return ".".join(parts[:2]) if parts[0] == "harness" else parts[0]


def extra(module: str) -> str:
    """The extra that a module belongs to; `core` for all others."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["harness", "extras"] and len(parts) > 2 and parts[2] != "__init__" else "core"


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = list(arrows.get(start, ()))
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += arrows.get(name, ())
        return seen

    below = {name: reached(name) for name in arrows}
    return sorted({tuple(sorted(o for o in below[n] if n in below.get(o, ()))) for n in arrows if n in below[n]})


def load(root: Path, *names: str) -> Any:
    """The module; of several names, by which commits knew it, the first that is there."""
    module = next(name for name in names if (root / f"{name.replace('.', '/')}.py").exists() or name == names[-1])
    return importlib.import_module(f"cohort.{module}" if (root / "cohort").exists() else module)


def step_stays(root: Path) -> tuple[int, int]:
    """(stays, files) of a reader who follows one `train_step` through its calls, in the order of execution.

    The reader reads a function when it is first called and never again; a stay begins where a function stands in
    another file than the one read before it. `NAMED` rooms are read by their names: what every room uses, and the
    inside of an engine and a model. What is left are the files of the step, its algorithm, its task and its rewards.
    """
    home = next(f for f in (root / "harness").rglob("*.py") if "def train_step(" in f.read_text())
    step_module = load(root, ".".join(home.relative_to(root).with_suffix("").parts))
    raw = {"task": "arithmetic", "algorithm": "grpo", "rollouts_per_step": 8, "steps": 1, "device": "cpu"}
    spec = load(root, "harness.settings.run", "harness.spec.run").parse_run(raw, "house")
    seen: set[Any] = set()
    read: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        file = os.path.relpath(code.co_filename, root).removeprefix("cohort/")
        if event != "call" or code in seen or code.co_name.startswith("<"):
            return
        seen.add(code)
        if file.startswith(PRODUCT) and not file.startswith(NOT_FOLLOWED):
            read.append(file)

    class Forgetful:
        def __getattr__(self, _: str) -> Any:
            return lambda *args: None

    class AtOnce:  # reads what a thread does where it begins
        def submit(self, work: Any, *args: Any) -> Any:
            done = Future[Any]()
            done.set_result(work(*args))
            return done

    load(root, "harness.run.grading")._thread = AtOnce()
    with tempfile.TemporaryDirectory() as folder:
        prepare = load(root, "harness.run.build", "harness.run.state").prepare
        run, _ = prepare(spec, Path(folder), Forgetful(), Path(folder), lambda: False)
        prompts = spec.task.prompts("train")
        sys.setprofile(note)
        try:
            step_module.train_step(run, prompts, 0)
        finally:
            sys.setprofile(None)
    return sum(before != file for before, file in zip(["", *read], read, strict=False)), len(set(read))


def settings(root: Path) -> Counter[str]:
    """Declared fields of all sections of runs, studies and plugins, except `name`: of the core and of each extra."""
    for file in sorted(file for folder in PRODUCT for file in (root / folder).rglob("*.py")):
        if "Section" in file.read_text("utf-8") or file.parent.name in (
            "algorithms",
            "tasks",
            "rewards",
            "samplers",
            "engines",
            "stages",
        ):
            with contextlib.suppress(ImportError):  # a library of an extra
                load(root, ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"))

    def below(cls: type) -> set[type]:
        return {inner for one in cls.__subclasses__() for inner in (one, *below(one))}

    sections: Any = below(load(root, "harness.data").Section)
    homes = {one: extra(one.__module__.removeprefix("cohort.")) for one in sections}
    known = ((one, name) for one in sections for name in one.__annotations__ if name in one.model_fields)
    return Counter(homes[one] for one, name in known if name != "name")


def commands(root: Path) -> tuple[int, int]:
    """(commands, their options) of the command line, `--help` apart."""
    import typer

    def leaves(command: Any) -> list[Any]:
        inner = getattr(command, "commands", None)
        return [command] if inner is None else [leaf for one in inner.values() for leaf in leaves(one)]

    found = leaves(typer.main.get_command(load(root, "harness.cli.app").app))
    return len(found), sum(getattr(p, "param_type_name", "") == "option" for one in found for p in one.params)


def main(root: Path) -> None:
    os.chdir(root)
    sys.path.insert(0, str(root))
    trees = modules(root)
    arrows = {name: imported(name, tree, set(trees)) - {name} for name, tree in trees.items()}
    rooms = {r: {room(m) for n in arrows if room(n) == r for m in arrows[n]} - {r} for r in {room(n) for n in arrows}}
    lines, parts = Counter[str](), Counter[str]()
    for file in files(root, *PRODUCT):
        module, count = file.removesuffix(".py").replace("/", "."), (root / file).read_text("utf-8").count("\n")
        lines[room(module)] += count
        parts[extra(module)] += count
    code = sum(len(code_lines((root / f).read_text("utf-8"))) for f in files(root, *PRODUCT))
    wing = {name: count for name, count in sorted(parts.items()) if name != "core"}
    print(f"modules {len(arrows)}, arrows between them {sum(map(len, arrows.values()))}, circles {circles(arrows)}")
    print(f"rooms {len(rooms)}, arrows between them {sum(map(len, rooms.values()))}, circles {circles(rooms)}")
    print(f"product lines of Python {lines.total()}, of them {code} neither import nor docstring nor comment nor blank")
    print(f"  core {parts['core']}, extras {sum(wing.values())}: {words(wing)}")
    print(f"  by room: {', '.join(f'{name} {count}' for name, count in lines.most_common())}")
    print("one train_step is {} stays in {} files".format(*step_stays(root)))
    print(f"lines of tests {sum((root / f).read_text('utf-8').count(chr(10)) for f in files(root, 'tests'))}")
    found = settings(root)
    print(f"settings of the core {found.pop('core')}, of extras {sum(found.values())}: {words(found)}")
    print("commands {}, options {}".format(*commands(root)))


def code_lines(text: str) -> list[int]:
    """Numbers of the lines that are neither import nor docstring nor comment nor blank."""
    other: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node = body[0]
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        other |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return [number for number, line in lines if number not in other and line.strip() and line.strip()[0] != "#"]


def words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def files(root: Path, *folders: str) -> list[str]:
    """The files of Python that git knows below these folders."""
    listed = subprocess.run(["git", "-C", str(root), "ls-files", *folders], capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split() if name.endswith(".py")]


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve())
