"""Imports run one way, gold stays in `harness/grading.py`, and no shipped file runs text as code.

Every rule is a function from a parsed file to its violations; the tests apply them to all shipped files, and to small
planted violations, so that a rule which sees nothing fails.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("harness", "algorithms", "tasks", "studies", "reports")
PYTHON = sorted(file.relative_to(ROOT).as_posix() for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
TEXT = (".py", ".yaml", ".toml", ".md", ".html", ".jinja", ".j2", ".css", ".js", ".txt")

# What a file of each folder may import from the project, its own folder apart.
MAY_IMPORT = {
    "harness": (),
    "algorithms": ("harness.types", "harness.interfaces", "harness.tensors"),
    "tasks": ("harness.types", "harness.interfaces", "harness.rationals"),
    "studies": (),
    "reports": ("harness.types", "harness.tracking"),
}
ONLY_IMPORTER = {
    "mlflow": tuple(f"harness/_mlflow_{part}.py" for part in ("address", "store", "copy", "studies", "traces")),
    "optuna": ("harness/_queue.py", "harness/_storage.py", "harness/_postgres.py", "harness/_search.py"),
}
HEAVY = {"torch", "transformers", "datasets", "mlflow", "optuna", "matplotlib", "pandas", "scipy"}
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "__import__", "os.system", "os.popen", "yaml.load", "yaml.load_all", "yaml.unsafe_load",
                "yaml.full_load", "torch.jit.load", "torch.hub.load"}  # fmt: skip

Rule = Callable[[str, ast.Module], Iterator[str]]


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import statement, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # `from harness import tracking` names harness.tracking; a name that is no module does no harm.
            yield node.lineno, "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names if not node.level)


def one_way_imports(path: str, tree: ast.Module) -> Iterator[str]:
    folder = path.split("/")[0]
    allowed = MAY_IMPORT[folder]
    for line, module in imports(tree):
        first = module.split(".")[0]
        if module.startswith("."):
            yield f"{path}:{line}: relative import; write the full name"
        elif first in FOLDERS and first != folder and module != first:
            if not any(module == name or module.startswith(name + ".") for name in allowed):
                yield f"{path}:{line}: {folder} must not import {module}"
        elif first in FOLDERS and first != folder and not allowed:
            yield f"{path}:{line}: {folder} must not import {module}"


def single_importers(path: str, tree: ast.Module) -> Iterator[str]:
    for line, module in imports(tree):
        owners = ONLY_IMPORTER.get(module.split(".")[0])
        if owners is not None and path not in owners:
            yield f"{path}:{line}: only {', '.join(owners)} may import {module.split('.')[0]}"


def no_torch_in_reports(path: str, tree: ast.Module) -> Iterator[str]:
    for line, module in imports(tree):
        if path.startswith("reports/") and module.split(".")[0] in ("torch", "transformers", "datasets"):
            yield f"{path}:{line}: reports never import {module}"


def light_command_line(path: str, tree: ast.Module) -> Iterator[str]:
    """`cohort --help` loads the top level of cli.py and _terminal.py only: nothing heavy, nothing that loads it."""
    if path not in ("harness/cli.py", "harness/_terminal.py"):
        return
    for statement in tree.body:
        for line, module in imports(statement) if isinstance(statement, ast.Import | ast.ImportFrom) else ():
            if module.split(".")[0] in HEAVY or (module.startswith("harness.") and module != "harness._terminal"):
                yield f"{path}:{line}: {module} must be imported inside the command that needs it"


def gold_stops_at_grading(path: str, tree: ast.Module) -> Iterator[str]:
    """`.gold` of a prompt; what only shows logged samples holds no prompts, its `gold` is the text of a sample."""
    if path in ("harness/grading.py", "harness/_terminal.py") or path.startswith("reports/"):
        return
    for node in ast.walk(tree):
        named = isinstance(node, ast.Attribute) and node.attr == "gold"
        indirect = isinstance(node, ast.Call) and _dotted(node.func) in ("getattr", "attrgetter", "operator.attrgetter")
        if named or (indirect and any(isinstance(a, ast.Constant) and a.value == "gold" for a in node.args)):  # pyright: ignore
            yield f"{path}:{node.lineno}: only harness/grading.py reads gold"  # pyright: ignore


def no_text_runs_as_code(path: str, tree: ast.Module) -> Iterator[str]:
    for line, module in imports(tree):
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


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        one_way_imports,
        single_importers,
        no_torch_in_reports,
        light_command_line,
        gold_stops_at_grading,
        no_text_runs_as_code,
    )
}


@pytest.mark.parametrize("rule", RULES)
def test_every_shipped_file_keeps(rule: str):
    found = [v for path in PYTHON for v in RULES[rule](path, ast.parse((ROOT / path).read_text("utf-8"), path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        ("one_way_imports", "harness/train.py", "def f():\n    from algorithms.grpo import GRPO"),
        ("one_way_imports", "harness/cli.py", "import reports"),
        ("one_way_imports", "algorithms/grpo.py", "from harness import study"),
        ("one_way_imports", "algorithms/grpo.py", "import tasks.gsm8k"),
        ("one_way_imports", "tasks/gsm8k.py", "from harness.grading import grade"),
        ("one_way_imports", "reports/render.py", "from harness.spec import RunSpec"),
        ("one_way_imports", "reports/render.py", "from harness.types_extra import X"),
        ("one_way_imports", "harness/train.py", "from . import study"),
        ("single_importers", "reports/render.py", "from mlflow.tracking import MlflowClient"),
        ("single_importers", "harness/tracking.py", "import mlflow"),
        ("single_importers", "harness/_mlflow_store.py", "import optuna.storages"),
        ("no_torch_in_reports", "reports/figures.py", "def f():\n    import torch.nn"),
        ("light_command_line", "harness/cli.py", "from harness.study import run_study"),
        ("light_command_line", "harness/_terminal.py", "import pandas as pd"),
        ("gold_stops_at_grading", "harness/train.py", "x = group.prompt.gold"),
        ("gold_stops_at_grading", "algorithms/grpo.py", "x = getattr(prompt, 'gold')"),
        ("no_text_runs_as_code", "tasks/math.py", "x = eval(text)"),
        ("no_text_runs_as_code", "tasks/math.py", "exec(text)"),
        ("no_text_runs_as_code", "harness/checkpoint.py", "from pickle import loads"),
        ("no_text_runs_as_code", "harness/checkpoint.py", "torch.load(path)"),
        ("no_text_runs_as_code", "harness/checkpoint.py", "torch.load(path, weights_only=False)"),
        ("no_text_runs_as_code", "harness/spec.py", "yaml.load(text, Loader=yaml.SafeLoader)"),
        ("no_text_runs_as_code", "harness/tracking.py", "subprocess.run(command, shell=True)"),
        ("no_text_runs_as_code", "harness/model.py", "AutoModel.from_pretrained(name, trust_remote_code=True)"),
        ("no_text_runs_as_code", "harness/model.py", "AutoModel.from_pretrained(name, trust_remote_code=flag)"),
        ("no_text_runs_as_code", "harness/model.py", "np.load(path, allow_pickle=True)"),
        ("no_text_runs_as_code", "harness/cli.py", "os.system(command)"),
    ],
)
def test_a_planted_violation_is_seen(rule: str, path: str, source: str):
    assert list(RULES[rule](path, ast.parse(source)))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("algorithms/ppo.py", "from algorithms._surrogate import loss\nfrom harness.tensors import masked_mean"),
        ("reports/render.py", "from harness import tracking\nfrom harness.types import StudyRecord\nx = row.gold"),
        ("harness/_mlflow_copy.py", "import mlflow"),
        ("harness/_queue.py", "import optuna\nfrom harness import tracking"),
        (
            "harness/cli.py",
            "def f():\n    import torch\n    importlib.import_module('reports.render')",
        ),
        ("harness/grading.py", "x = prompt.gold"),
        ("tasks/math.py", "p = Prompt(id=i, text=t, gold=g)"),
        ("harness/evaluate.py", "model.eval()\ntorch.load(path, weights_only=True)\nyaml.safe_load(text)"),
        ("harness/model.py", "AutoModel.from_pretrained(name, trust_remote_code=False)"),
    ],
)
def test_honest_code_passes_every_rule(path: str, source: str):
    assert [v for rule in RULES.values() for v in rule(path, ast.parse(source))] == []


def test_the_rules_look_at_every_layer():
    seen = {path.split("/")[0] for path in PYTHON}
    assert seen == set(FOLDERS)
    assert {"harness/cli.py", *(file for files in ONLY_IMPORTER.values() for file in files)} <= set(PYTHON)


def test_source_and_documents_are_ascii():
    files = [f for folder in (*FOLDERS, "tests", "docs") for f in (ROOT / folder).rglob("*") if f.suffix in TEXT]
    files += [f for f in ROOT.iterdir() if f.suffix in TEXT or f.name in ("Makefile", "LICENSE")]
    found = []
    for file in files:
        for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
            if not line.isascii():
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.decode('utf-8', 'replace').strip()[:80]}")
    assert len(files) > 20
    assert not found, "\n".join(found)


def test_every_package_folder_is_listed_for_the_wheel():
    # Packages are listed by hand: a new folder that is not listed would be missing from the wheel.
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    present = {str(f.parent.relative_to(ROOT)).replace("/", ".") for d in FOLDERS for f in (ROOT / d).rglob("*.py")}
    assert present == listed


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import harness.cli", HEAVY | {"pydantic", "yaml"}),
        ("import harness.spec", HEAVY),
        ("import reports.render", {"torch", "transformers", "datasets", "optuna"}),
    ],
)
def test_what_must_start_quickly_loads_nothing_heavy(statement: str, absent: set[str]):
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert absent & {name.split(".")[0] for name in loaded.stdout.split()} == set()
