"""Makes problems with the package reasoning-gym and scores answers: the work of a child process (`tasks._child`).

Some verifiers evaluate the text of an answer as Python (`eval`, sympy's `parse_expr`). A completion is never evaluated:
if the source of a verifier, or of its imports from the package, could do so, an answer reaches it only if it is plain
arithmetic or a plain list, and a generator whose own answers are more than that is refused.
"""

import ast
import dataclasses
import importlib
import json
import re
import sys
from collections.abc import Callable
from copy import deepcopy
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any

from ._child import Begin

PACKAGE = "reasoning_gym"
MAKE_SECONDS = 60.0  # processor time for problems that are made at once
PATIENCE = 4.0  # the clock's limit, as a multiple of that of processor time
MAX_CHARS = 200  # of an answer to a verifier that could evaluate it

# Neither holds a letter, so that there is no name, attribute or call of one; neither a power nor a repeated list.
_ARITHMETIC = re.compile(r"(?:[-+/(),. \n0-9]|\*(?!\*))*")
_LIST = re.compile(r"""[-\[\],. \n0-9'"]*""")
_CALLS = {"eval", "exec", "compile", "__import__", "literal_eval", "parse_expr", "sympify", "system"}
_IMPORTS = {"sympy", "subprocess", "pickle"}

Limit = Callable[[float], None]  # of processor time, and of the clock by it


def prepare() -> Callable[..., Any]:
    """The function that answers what `make` or `score` is asked."""
    importlib.import_module(PACKAGE)  # an extra, and slow, so only here
    questions = {"make": make, "score": score}

    def answer(begin: Begin, name: str, *arguments: Any) -> Any:
        def limit(cpu_seconds: float) -> None:
            begin(0, cpu_seconds, PATIENCE * cpu_seconds)

        limit(MAKE_SECONDS)
        return questions[name](limit, *arguments)

    return answer


def make(limit: Limit, part: list[Any], first: int, last: int, keys: list[str]) -> list[list[Any]] | str:
    """The items of a part from `first` to before `last`, each [question, own answer or None, values of `keys`]; or a
    sentence with the reason that there are none."""
    dataset, *_ = part
    registered = _registered()
    if dataset not in registered:
        near = get_close_matches(dataset, registered, n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        return f"unknown task.dataset '{dataset}'; {hint}available: {', '.join(sorted(registered))}"
    try:
        generator = _generator(*part)
        items = [generator[index] for index in range(first, last)]
    except MemoryError:
        raise
    except Exception as error:  # whatever its checks and its code raise about settings
        names = [field.name for field in dataclasses.fields(registered[dataset][1])]
        known = ", ".join(name for name in names if name not in ("seed", "size"))
        says = " ".join(str(error).split()) or type(error).__name__
        return (
            f"task.settings must let the generator '{dataset}' make problems, it says: {says}; its settings are {known}"
        )
    rows: list[list[Any]] = []
    for item in items:
        fields = {"question": item["question"], **item.get("metadata", {})}
        if missing := [key for key in keys if key not in fields]:
            return (
                f"task.template must name parts of a problem of '{dataset}', got {{{missing[0]}}}; "
                f"it has {', '.join(fields)}"
            )
        answer = None if item["answer"] is None else str(item["answer"])
        if (why := why_evaluated(dataset)) and (answer is None or not is_plain(answer)):
            return (
                f"task.dataset must be a generator whose verifier could run nothing of a completion, got '{dataset}': "
                f"{why}, which may evaluate an answer as code, and its own answers are more than plain arithmetic, "
                f"such as {repr(answer)[:60]}; take another generator"
            )
        rows.append([item["question"], answer, [_spelled(fields[key]) for key in keys]])
    return rows


def score(limit: Limit, part: list[Any], index: int, answer: str, cpu_seconds: float) -> float:
    """The verifier's score from 0 to 1 for an answer to the item `index` of a part."""
    if why_evaluated(part[0]) and not is_plain(answer):
        return 0.0
    generator, item = _generator(*part), deepcopy(_item(*part, index))  # a verifier may change it
    limit(cpu_seconds)
    try:
        value = float(generator.score_answer(answer, item))
    except MemoryError:
        raise
    except Exception:  # a verifier raises anything on text that is no answer
        return 0.0
    return min(max(value, 0.0), 1.0) if value == value else 0.0


def is_plain(answer: str) -> bool:
    """Whether nothing but numbers, arithmetic and brackets can come of evaluating an answer."""
    return len(answer) <= MAX_CHARS and bool(_ARITHMETIC.fullmatch(answer) or _LIST.fullmatch(answer))


@cache
def why_evaluated(dataset: str) -> str:
    """The call or import in the source of a generator that could evaluate an answer; empty if there is none.

    Every function of sympy evaluates text, so importing it is enough.
    """
    waiting, seen = [_registered()[dataset][0].__module__], set[str]()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        with open(str(sys.modules[module].__file__), encoding="utf-8") as file:
            tree = ast.parse(file.read())
        names = list(_imported(module, tree))
        calls = {_called(node) for node in ast.walk(tree) if isinstance(node, ast.Call)} & _CALLS
        imports = {name.partition(".")[0] for name in names} & _IMPORTS
        if calls or imports:
            return f"{module} {'calls ' + min(calls) if calls else 'imports ' + min(imports)}"
        waiting += [name for name in names if name.startswith(f"{PACKAGE}.") and name in sys.modules]
    return ""


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return "" if function.attr == "compile" else function.attr  # of patterns; the built-in one is no attribute
    return function.id if isinstance(function, ast.Name) else ""


def _imported(module: str, tree: ast.Module) -> list[str]:
    """Every module that the imports of a module may name; some are attributes of modules instead."""
    is_package = str(sys.modules[module].__file__).endswith("__init__.py")
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names


def _registered() -> dict[str, Any]:
    """Name -> (class, settings class) of every generator except `composite`, which makes others by name."""
    found = importlib.import_module(f"{PACKAGE}.factory").DATASETS
    return {name: classes for name, classes in found.items() if name != "composite"}


@lru_cache(maxsize=16)
def _generator(dataset: str, settings: str, seed: int, size: int) -> Any:
    create = importlib.import_module(f"{PACKAGE}.factory").create_dataset
    return create(dataset, **json.loads(settings), seed=seed, size=size)


@lru_cache(maxsize=1024)
def _item(dataset: str, settings: str, seed: int, size: int, index: int) -> Any:
    return _generator(dataset, settings, seed, size)[index]


def _spelled(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
