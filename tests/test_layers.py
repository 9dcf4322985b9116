"""Rooms import downwards only, without a circle; gold stays in `harness/run/grading.py`; no text runs as code.

Every rule is a function from a parsed file to its violations; the tests apply them to all shipped files, and to small
planted violations, so that a rule which sees nothing fails.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from real_data import golden

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("harness", "algorithms", "tasks", "studies", "reports")
API = "cohort"  # its own files, the links in it apart: above all folders
PYTHON = sorted(
    file.relative_to(ROOT).as_posix()
    for files in ((ROOT / API).glob("*.py"), *((ROOT / folder).rglob("*.py") for folder in FOLDERS))
    for file in files
)
EXTRAS = {folder.name for folder in (ROOT / "harness" / "extras").iterdir() if (folder / "__init__.py").exists()}
EXTRAS |= {"one", "another"}  # of no folder, for the rules' tests
NAMED = re.compile(rf"\bcohort\.(?:{'|'.join(FOLDERS)})\.\w[\w.]*")
NAMES_PACKAGES = ("harness/plugins.py",)  # the folders of plugins
TEXT = (".py", ".ipynb", ".yaml", ".toml", ".md", ".html", ".jinja", ".j2", ".css", ".js", ".txt")

# What a file of each folder may import from the project, its own folder apart.
MAY_IMPORT = {
    "harness": (),
    "algorithms": ("harness.data", "harness.interfaces", "harness.base.tensors"),
    "tasks": ("harness.data", "harness.interfaces", *(f"harness.base.{n}" for n in ("inputs", "rationals", "words"))),
    "studies": (),
    "reports": tuple(f"harness.{n}" for n in ("data", "record", "extras", "base.arms", "base.files", "base.words")),
    API: ("harness.api", "harness.extras"),
}
# The rooms of harness/, lowest first: a room imports from those above its line, never from its own line or below.
# `plugins` loads algorithms, tasks, rewards, samplers, engines by name; `api` alone joins studies, records and reports.
# `extras` is the file that finds the wing; `an extra` is a folder of it, above all rooms.
ROOMS = (
    ("extras",), ("base",), ("data",), ("interfaces",), ("plugins",), ("settings",), ("record",), ("devices", "mirror"),
    ("policy",), ("engines", "rewards", "samplers", "checks"), ("run",), ("study",), ("console",), ("api",), ("cli",),
    ("an extra",),
)  # fmt: skip
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}
ONLY_IMPORTER = {
    "mlflow": ("harness/mirror/",),
    "optuna": ("harness/study/", "harness/extras/postgres/", "harness/extras/importance/"),
    "tensorboard": "harness/extras/tensorboard/", "wandb": "harness/extras/wandb/",
}  # fmt: skip
NOT_IN_REPORTS = {"torch", "transformers", "datasets"}
HEAVY = {"torch", "transformers", "datasets", "mlflow", "optuna", "matplotlib", "pandas", "scipy"}
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "__import__", "os.system", "os.popen", "yaml.load", "yaml.load_all", "yaml.unsafe_load",
                "yaml.full_load", "torch.jit.load", "torch.hub.load"}  # fmt: skip

Rule = Callable[[str, ast.Module], Iterator[str]]


def imports(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted module, the project's own without `cohort.`) of every import, those inside functions and those
    named as text included."""
    yield from ((line, module.removeprefix("cohort.")) for line, module in _imports(path, tree))


def relative_imports(path: str, tree: ast.Module) -> Iterator[str]:
    """Own code is imported relatively, so that a user's `tasks.py` or `harness/` is another module."""
    for node in ast.walk(tree):
        named = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in named:
            if module.split(".")[0] in (*FOLDERS, API) and path != f"{API}/__init__.py":
                yield f"{path}:{node.lineno}: import {module} relatively"  # pyright: ignore


@cache
def _imports(path: str, tree: ast.AST) -> list[tuple[int, str]]:
    package, found = [API, *path.split("/")[:-1]] if path.split("/")[0] != API else [API], []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # `from ..harness import record` names harness.record; a name that is no module does no harm.
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            found += [(node.lineno, module), *((node.lineno, f"{module}.{alias.name}") for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and path not in NAMES_PACKAGES:
            found += [(node.lineno, name) for name in NAMED.findall(node.value)]
    return found


def one_way_imports(path: str, tree: ast.Module) -> Iterator[str]:
    folder = path.split("/")[0]
    allowed = MAY_IMPORT[folder] + (("reports",) if path.startswith("harness/api/") else ())
    allowed += ("reports", "tasks", "algorithms") if extra_of(path) else ()
    allowed += ("harness.cli.app",) if path == f"{API}/__main__.py" else ()
    for line, module in imports(path, tree):
        first = module.split(".")[0]
        known = any(f"{module}.".startswith(f"{name}.") or f"{name}.".startswith(f"{module}.") for name in allowed)
        if first in FOLDERS and first != folder and not known:
            yield f"{path}:{line}: {folder} must not import {module}"


def rooms_import_downwards(path: str, tree: ast.Module) -> Iterator[str]:
    """Imports for the type checker count too: what a room must know by name, it knows."""
    own = "an extra" if extra_of(path) else path.removeprefix("harness/").removesuffix(".py").split("/")[0]
    if not path.startswith("harness/") or own == "__init__":
        return
    for line, module in imports(path, tree):
        parts = module.split(".")
        if parts[0] != "harness" or len(parts) < 2 or parts[1] == own or parts[1] not in RANK:
            continue
        if RANK[parts[1]] >= RANK[own]:
            yield f"{path}:{line}: {own} must not import {module}: {parts[1]} is not below it in ROOMS"


def extra_of(path: str) -> str:
    """The extra that a file or dotted module of `harness/extras/NAME` belongs to, else empty."""
    parts = path.removesuffix(".py").replace("/", ".").split(".")
    return parts[2] if parts[:2] == ["harness", "extras"] and len(parts) > 2 and parts[2] in EXTRAS else ""


def extras_stand_apart(path: str, tree: ast.Module) -> Iterator[str]:
    """The core imports no extra, an extra no other one, also where a module is named as text."""
    for line, module in imports(path, tree):
        if (other := extra_of(module)) and other != extra_of(path):
            yield f"{path}:{line}: {extra_of(path) or 'the core'} must not import the extra {other}"


def api_is_on_top(path: str, tree: ast.Module) -> Iterator[str]:
    """Nothing below imports `cohort` itself, which hands on the names of the API."""
    for line, module in _imports(path, tree):
        if path != f"{API}/__init__.py" and module == API:
            yield f"{path}:{line}: {module} hands on what lies below; name that"


def circle(files: Mapping[str, ast.Module]) -> list[str]:
    """Modules that import each other in turn, none if there are none; imports for the type checker count."""
    modules = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in files}
    arrows = {name: {m for _, m in imports(file, files[file]) if m in modules} for name, file in modules.items()}
    for name in arrows:  # `from cohort.harness.settings import run` names a package and its module: the module is meant
        packages = {m for m in arrows[name] if any(other.startswith(m + ".") for other in arrows[name])}
        arrows[name] -= {name, *packages}
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as found:
        return found.args[1]
    return []


def single_importers(path: str, tree: ast.Module) -> Iterator[str]:
    for line, module in imports(path, tree):
        library = module.split(".")[0]
        owner = ONLY_IMPORTER.get(library, path)
        if not path.startswith(owner):
            yield f"{path}:{line}: only {owner} may import {library}"
        if path.startswith("reports/") and library in NOT_IN_REPORTS:
            yield f"{path}:{line}: reports never import {library}"


def gold_stops_at_grading(path: str, tree: ast.Module) -> Iterator[str]:
    """`.gold` of a prompt; what only shows logged samples holds no prompts, its `gold` is the text of a sample."""
    shows = path.startswith(("harness/cli/", "reports/")) or (extra_of(path) and path.endswith("/commands.py"))
    if path == "harness/run/grading.py" or shows:
        return
    for node in ast.walk(tree):
        named = isinstance(node, ast.Attribute) and node.attr == "gold"
        indirect = isinstance(node, ast.Call) and _dotted(node.func) in ("getattr", "attrgetter", "operator.attrgetter")
        if named or (indirect and any(isinstance(a, ast.Constant) and a.value == "gold" for a in node.args)):  # pyright: ignore
            yield f"{path}:{node.lineno}: only harness/run/grading.py reads gold"  # pyright: ignore


def no_text_runs_as_code(path: str, tree: ast.Module) -> Iterator[str]:
    for line, module in imports(path, tree):
        if module.split(".")[0] in UNSAFE_MODULES:
            yield f"{path}:{line}: {module} can run code from a file"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = _dotted(node.func)
        keywords = {k.arg: k.value for k in node.keywords if k.arg}
        if name in UNSAFE_CALLS:
            yield f"{path}:{node.lineno}: {name}() runs text as code; use a safe reader"
        if name == "torch.load" and not _is(keywords.get("weights_only"), True):
            yield f"{path}:{node.lineno}: torch.load needs weights_only=True"
        for key in ("shell", "trust_remote_code", "allow_pickle"):
            if key in keywords and not _is(keywords[key], False):
                yield f"{path}:{node.lineno}: {key} must be False"


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


RULES: dict[str, Rule] = {rule.__name__: rule for rule in (
    relative_imports, one_way_imports, api_is_on_top, rooms_import_downwards, extras_stand_apart, single_importers,
    gold_stops_at_grading, no_text_runs_as_code,
)}  # fmt: skip


def test_every_shipped_file_keeps_every_rule_and_none_import_each_other_in_a_circle():
    files = {path: ast.parse((ROOT / path).read_text("utf-8"), path) for path in PYTHON}
    found = [violation for path, tree in files.items() for rule in RULES.values() for violation in rule(path, tree)]
    assert not found, "\n".join(found)
    assert circle(files) == []


@pytest.mark.parametrize(("rule", "path", "source"), golden("violations"))
@pytest.mark.attack("Code that would run text, as a change to Cohort")
def test_a_planted_violation_is_seen(rule, path, source):
    assert list(RULES[rule](path, ast.parse(source)))


@pytest.mark.parametrize(("path", "source"), golden("honest_code"))
def test_honest_code_passes_every_rule(path, source):
    assert [v for rule in RULES.values() for v in rule(path, ast.parse(source))] == []


def test_a_planted_circle_is_seen():
    planted = {
        "harness/settings/run.py": "def f():\n    from . import errors",
        "harness/settings/errors.py": "from .raw import digest",
        "harness/settings/raw.py": "if TYPE_CHECKING:\n    from .run import RunSpec",
        "harness/settings/load.py": "from .run import RunSpec",
    }
    found = circle({path: ast.parse(source) for path, source in planted.items()})
    assert set(found) == {"harness.settings.errors", "harness.settings.raw", "harness.settings.run"}


def test_every_layer_and_room_is_looked_at_and_has_its_place_in_the_order():
    rooms = {path.removeprefix("harness/").removesuffix(".py").split("/")[0] for path in PYTHON if path[:2] == "ha"}
    assert rooms - {"__init__"} == {*RANK} - {"an extra"}
    assert {path.split("/")[0] for path in PYTHON} == {API, *FOLDERS}


def test_source_and_documents_are_ascii():
    files = [f for folder in (*FOLDERS, "tests", "docs") for f in (ROOT / folder).rglob("*") if f.suffix in TEXT]
    files += [f for f in ROOT.iterdir() if f.suffix in TEXT or f.name in ("Makefile", "LICENSE")]
    lines = ((file, n, line) for file in files for n, line in enumerate(file.read_bytes().split(b"\n"), start=1))
    found = [f"{file.relative_to(ROOT)}:{number}: {line[:80]}" for file, number, line in lines if not line.isascii()]
    assert len(files) > 20
    assert not found, "\n".join(found)


def test_a_folder_with_code_is_a_package():
    present = {file.parent for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in present)  # else the wheel lacks it
    links = (file for folder in (*FOLDERS, API, "tests", "docs") for file in (ROOT / folder).rglob("*"))
    assert not [file for file in links if file.is_symlink()]


@pytest.mark.parametrize(("statement", "absent"), [
    ("import cohort; cohort.__all__; dir(cohort)", HEAVY | {"pydantic", "yaml", "numpy", "typer", "rich"}),
    ("import cohort.harness.cli.app, cohort.harness.console.views", HEAVY | {"pydantic", "yaml"}),
    ("import cohort.harness.study.queue", HEAVY - {"optuna"} | {"sqlalchemy"}),
    ("from cohort.harness.settings.load import load_study; load_study('quickstart', []).checked_arms();"
     "from cohort.harness.plugins import names, settings_class;"
     "[settings_class(kind, name) for kind in ('algorithm', 'task', 'reward') for name in names(kind)]",
     HEAVY | {"huggingface_hub"}),
    ("from pathlib import Path; from cohort.harness.mirror import address as a, store; a.tracking_uri(Path());"
     "store._schema_version()", HEAVY | {"alembic", "sqlalchemy"}),
    pytest.param("import cohort.reports.render",  # of which the rule above sees no import by a library
                 {"torch", "transformers", "datasets", "optuna", "scipy.stats"}, marks=pytest.mark.slow),
])  # fmt: skip
def test_what_must_start_quickly_loads_nothing_heavy(statement, absent):
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    names = loaded.stdout.split()
    assert absent & {*names, *(name.split(".")[0] for name in names)} == set()
