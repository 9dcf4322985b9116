"""The child process of `tasks._gym`: it imports the package reasoning-gym, makes its problems and scores answers.

Some verifiers evaluate the text of an answer as Python (`eval`, sympy's `parse_expr`). A completion is never evaluated:
if the source of a verifier, or of its imports from the package, could do so, an answer reaches it only if it is plain
arithmetic or a plain list, and a generator whose own answers are more than that is refused.

It answers one line of JSON with another, and ends when its input closes or its parent is gone. The kernel ends it when
making problems, or scoring an answer, overruns its limits.
"""

import ast
import dataclasses
import importlib
import json
import os
import re
import resource
import signal
import sys
from copy import deepcopy
from functools import cache, lru_cache
from typing import Any

from ._child import next_line

PACKAGE = "reasoning_gym"
MAKE_SECONDS = 60.0  # processor time for problems that are made at once
PATIENCE = 4.0  # the clock's limit, as a multiple of that of processor time
NO_MEMORY = 1  # the child's exit status when it runs out of memory
MAX_CHARS = 200  # of an answer to a verifier that could evaluate it

# Neither holds a letter, so that there is no name, attribute or call of one; neither a power nor a repeated list.
_ARITHMETIC = re.compile(r"(?:[-+/(),. \n0-9]|\*(?!\*))*")
_LIST = re.compile(r"""[-\[\],. \n0-9'"]*""")
_CALLS = {"eval", "exec", "compile", "__import__", "literal_eval", "parse_expr", "sympify", "system"}
_IMPORTS = {"sympy", "subprocess", "pickle"}


def serve() -> None:
    """Answer one question per line until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    parent = os.getppid()
    answers = os.dup(1)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    importlib.import_module(PACKAGE)  # an extra, and slow, so only here
    memory = int(sys.argv[1])
    for kind, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (value, value))
    os.write(answers, b"{}\n")
    while (line := next_line(parent)) is not None:
        name, *arguments = json.loads(line)
        limit(MAKE_SECONDS)
        try:
            reply = {"make": make, "score": score}[name](*arguments)
        except MemoryError:
            os._exit(NO_MEMORY)  # as if killed: the rest of the memory is not enough for the next question
        limit(0)
        with os.fdopen(os.dup(answers), "wb") as pipe:  # all of it, however long
            pipe.write(json.dumps(reply).encode() + b"\n")


def limit(cpu_seconds: float) -> None:
    """Let the kernel end the process after that much processor time, or `PATIENCE` times as long; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # the default action of both signals ends the process
    signal.setitimer(signal.ITIMER_REAL, PATIENCE * cpu_seconds)


def make(part: list[Any], first: int, last: int, keys: list[str]) -> dict[str, Any]:
    """The items of a part from `first` to before `last`, each [question, own answer or None, values of `keys`]; or the
    reason that there are none, which `ReasoningGym` puts into words."""
    dataset, settings, seed, size = part
    registered = _registered()
    if dataset not in registered:
        return {"unknown": sorted(registered)}
    try:
        generator = _generator(dataset, settings, seed, size)
        items = [generator[index] for index in range(first, last)]
    except MemoryError:
        raise
    except Exception as error:  # whatever its checks and its code raise about settings
        known = [field.name for field in dataclasses.fields(registered[dataset][1])]
        known = ", ".join(name for name in known if name not in ("seed", "size"))
        return {"error": " ".join(str(error).split()) or type(error).__name__, "known": known}
    rows: list[Any] = []
    for item in items:
        fields = {"question": item["question"], **item.get("metadata", {})}
        if missing := [key for key in keys if key not in fields]:
            return {"missing": missing[0], "known": ", ".join(fields)}
        answer = None if item["answer"] is None else str(item["answer"])
        if (why := why_evaluated(dataset)) and (answer is None or not is_plain(answer)):
            return {"unsafe": why, "answer": repr(answer)[:60]}
        rows.append([item["question"], answer, [_spelled(fields[key]) for key in keys]])
    return {"items": rows}


def score(part: list[Any], index: int, answer: str, cpu_seconds: float) -> dict[str, float]:
    """The verifier's score from 0 to 1 for an answer to the item `index` of a part."""
    if why_evaluated(part[0]) and not is_plain(answer):
        return {"score": 0.0}
    generator, item = _generator(*part), deepcopy(_item(*part, index))  # a verifier may change it
    limit(cpu_seconds)
    try:
        value = float(generator.score_answer(answer, item))
    except MemoryError:
        raise
    except Exception:  # a verifier raises anything on text that is no answer
        value = 0.0
    return {"score": min(max(value, 0.0), 1.0) if value == value else 0.0}


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


if __name__ == "__main__":
    serve()
