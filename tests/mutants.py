"""Which changes of the product does no test see? Changes one node of a file at a time and runs the tests that reach it.

    python tests/mutants.py [FILE or FOLDER ...] [--sample N [--seed S]] [--tests FILE ...] [--short]

A first run notes which lines each file of tests reaches. A mutant is a process of its own that loads the changed text,
so the checkout stays as it is. It is killed once a test fails, hangs, or the tests take three times as long as they
should. Survivors are printed. `tests/mutants.txt` lists those that change nothing that matters, each with its reason:
they count as known. With more than `MOST_LEFT` of the mutants left, the exit status is 1.

mutmut 3 and cosmic-ray 8 do not fit: the first names a mutant by another module path than the package's, the second
rewrites files of the checkout.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import copy
import importlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
KNOWN = Path(__file__).with_suffix(".txt")
MOST_LEFT = 0.03
NOTES = "_reached_lines"  # the built-in name by which functions know where to note
STALLED = 60.0  # seconds in which a test that has not come to a standstill takes some time of the processor
SLOW = 20.0  # seconds of processor; a slower file of tests is asked only about lines that no quicker one reaches
SHORT = (("algorithms/_functional.py", "reports/claims.py"), 12, ("tests/test_objectives.py", "tests/test_claims.py"))
FILES = ("algorithms", "harness/rewards", "harness/run", "harness/extras/confidence/rewards", "reports/analysis.py",
         "reports/anova.py", "reports/capability.py", "reports/claims.py", "reports/findings.py",
         "reports/statistics.py", "reports/suites.py", "reports/trials.py")  # fmt: skip
HEAVY = ("torch", "numpy", "scipy.stats", "pandas", "pydantic", "transformers", "matplotlib.pyplot",
         "peft", "optuna", "mlflow.store.tracking.sqlalchemy_store", "mlflow.server", "statsmodels.api")  # fmt: skip

OTHER: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
TWINS = {"min": "max", "any": "all", "minimum": "maximum", "amin": "amax", "argmin": "argmax", "ceil": "floor",
         "fmin": "fmax"}  # fmt: skip
TWINS |= {other: name for name, other in TWINS.items()}
DROPPED = ("clamp", "abs", "masked_fill", "where")  # methods whose call may be left out
UNTOUCHED = ("strict", "description", "dtype", "encoding")  # keywords that guard, name or say how


@dataclass
class Mutant:
    """`parent.field` (its item `index`) becomes `new`; `where` is the function around it."""

    file: str
    where: str
    line: int
    parent: ast.AST
    field: str
    index: int | None
    new: ast.AST

    def swap(self) -> None:
        """Put the new node in the place of the old, or back."""
        values = getattr(self.parent, self.field)
        if self.index is None:
            setattr(self.parent, self.field, self.new)
            self.new = values
        else:
            values[self.index], self.new = self.new, values[self.index]

    @property
    def key(self) -> str:
        """Text that stays the same while the file changes elsewhere."""
        if isinstance(self.new, ast.operator | ast.cmpop | ast.boolop):
            before = _shown(self.parent)
            self.swap()
            after = _shown(self.parent)
            self.swap()
        else:
            old = getattr(self.parent, self.field)
            before, after = _shown(old if self.index is None else old[self.index]), _shown(self.new)
        return f"{self.file} | {self.where} | {before} -> {after}"


def _shown(node: Any) -> str:
    return " ".join(ast.unparse(node).split())[:160]


def changes(node: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
    """(field, index, new child) of the changes to a node's own fields, and (\"\", None, node) for one in its place."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            yield "ops", i, OTHER[type(op)]()
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OTHER and not _is_text(node):
        yield "op", None, OTHER[type(node.op)]()
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.BitAnd):
        yield "", None, node.left
    if isinstance(node, ast.AugAssign):
        yield "", None, ast.Assign([node.target], node.value)
    if isinstance(node, ast.BoolOp):
        yield "op", None, OTHER[type(node.op)]()
    if isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield "", None, node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        value = node.value
        yield "", None, ast.Constant(not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else
                                     2 * value or 1.0)  # fmt: skip
    if isinstance(node, ast.IfExp):
        yield from (("", None, side) for side in (node.body, node.orelse))
    if isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
        yield "test", None, ast.UnaryOp(ast.Not(), node.test)
    if isinstance(node, ast.comprehension):
        yield from (("ifs", i, ast.Constant(True)) for i in range(len(node.ifs)))
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in TWINS:
            func = copy.deepcopy(node.func)
            setattr(func, "attr" if isinstance(func, ast.Attribute) else "id", TWINS[name])
            yield "func", None, func
        if name in DROPPED and isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") != "np":
            yield "", None, node.func.value
        for i, keyword in enumerate(node.keywords):
            if keyword.arg is not None and keyword.arg not in UNTOUCHED and name != "Field":
                yield "", None, ast.Call(node.func, node.args, [*node.keywords[:i], *node.keywords[i + 1 :]])
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "", None, ast.Pass()


def _is_text(node: ast.BinOp | ast.AugAssign) -> bool:
    sides = [node.value] if isinstance(node, ast.AugAssign) else [node.left, node.right]
    texts = [s.value if isinstance(s, ast.Constant) else s for s in sides]
    return any(isinstance(one, ast.JoinedStr | str) for one in texts)


def mutants(file: str, tree: ast.Module) -> list[Mutant]:
    """All mutants of a file; annotations, decorators, f-strings, slices, `assert` and `raise` stay as they are."""
    found: list[Mutant] = []

    def visit(node: ast.AST, where: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            where = node.name if where == "module" else f"{where}.{node.name}"
        places = [(f, i, v) for f, vs in ast.iter_fields(node) for i, v in
                  (enumerate(vs) if isinstance(vs, list) else [(None, vs)]) if isinstance(v, ast.AST)]  # fmt: skip
        for field, index, child in places:
            skipped = field in ("annotation", "returns", "decorator_list", "type_params") or isinstance(
                child, ast.Assert | ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Slice
            )
            skipped |= isinstance(child, ast.keyword) and child.arg in UNTOUCHED
            if skipped or getattr(getattr(child, "test", None), "id", "") == "TYPE_CHECKING":
                continue
            line = getattr(child, "lineno", getattr(node, "lineno", 0))
            for own, place, new in changes(child):
                at = (node, field, index) if own == "" else (child, own, place)
                if isinstance(child, ast.stmt | ast.expr) and isinstance(new, ast.stmt | ast.expr):
                    new = ast.copy_location(copy.copy(new), child)
                    ast.fix_missing_locations(new)
                found.append(Mutant(file, where, line, *at, new))
            visit(child, where)

    visit(tree, "module")
    return found


# Tests -------------------------------------------------------------------------------------------------------------


def in_child(work: Any, seconds: float) -> Any:
    """What `work()` returns in a process of its own, as JSON has it; None if it dies, hangs or takes more than so many
    seconds of processor."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        try:
            with os.fdopen(writing, "w") as file:
                json.dump(work(), file)
        finally:
            os._exit(0)
    os.close(writing)
    ended = threading.Event()
    threading.Thread(target=_watched, args=(pid, seconds, ended), daemon=True).start()
    with os.fdopen(reading) as file:
        answer = file.read()
    ended.set()
    os.waitpid(pid, 0)
    return json.loads(answer) if answer else None


def _watched(pid: int, seconds: float, ended: threading.Event) -> None:
    """Kill a process that has taken so many seconds of processor, or none for `STALLED` seconds."""
    spent, since = 0.0, time.monotonic()
    while not ended.wait(1.0):
        with contextlib.suppress(psutil.Error):
            tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            now = sum(sum(process.cpu_times()[:4]) for process in tree)
            if now > spent + 0.02:
                spent, since = now, time.monotonic()
            if spent > seconds or time.monotonic() > since + STALLED:
                os.killpg(pid, signal.SIGKILL)
                return


def run_changed(trees: Mapping[str, ast.Module], tests: Sequence[str]) -> int:
    """The exit status of these files of tests in a process that has loaded nothing of the product, whose files have
    these trees."""
    original, changed = SourceFileLoader.get_code, {str(ROOT / file): tree for file, tree in trees.items()}

    def get_code(loader: SourceFileLoader, name: str) -> Any:
        tree = changed.get(loader.path)
        return original(loader, name) if tree is None else compile(tree, loader.path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_code  # pyright: ignore
    os.chdir(ROOT)
    return int(pytest.main(["-xqs", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", *tests]))


def noting(file: str) -> ast.Module:
    """The tree of a file whose functions note the first line of each of their statements."""
    tree = ast.parse((ROOT / file).read_text("utf-8"), file)
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            within = getattr(node, field, None)
            if isinstance(within, list) and not isinstance(node, ast.Module | ast.ClassDef):
                notes = [ast.parse(f"{NOTES}.add(({file!r}, {one.lineno}))").body[0] for one in within]
                setattr(node, field, [one for pair in zip(notes, within, strict=True) for one in pair])
    return tree


def survey(files: Sequence[str], tests: Sequence[str]) -> dict[str, tuple[float, set[tuple[str, int]]]]:
    """File of tests -> (seconds of processor, the (file, line) that it reaches), without those that fail."""
    trees, found = {file: noting(file) for file in files}, {}

    def one(name: str) -> Any:
        reached = set[tuple[str, int]]()
        setattr(builtins, NOTES, reached)
        since = time.process_time()
        return run_changed(trees, [name]), time.process_time() - since, sorted(reached)

    for name in tests:
        status, seconds, reached = in_child(lambda name=name: one(name), 1200) or (1, 0.0, [])
        if status:
            print(f"left out, because it fails without a mutant: {name}")
        else:
            found[name] = seconds, {(file, line) for file, line in reached}
    return found


def tests_of(
    mutant: Mutant, tree: ast.Module, reached: Mapping[str, tuple[float, set[tuple[str, int]]]]
) -> dict[str, float]:
    """The files of tests that reach a mutant's statement with their seconds, the quickest first; of a line that runs
    once, at import, all that reach its file."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    own = {line for _, lines in reached.values() for file, line in lines if file == mutant.file}
    if any(f.body[0].lineno <= mutant.line <= (f.end_lineno or 0) for f in functions):
        spans = [range(n.lineno, _last(n) + 1) for n in ast.walk(tree) if isinstance(n, ast.stmt)]
        own &= set(min((span for span in spans if mutant.line in span), key=len))
    found = {name: took for name, (took, lines) in reached.items() if lines & {(mutant.file, line) for line in own}}
    quick = {name: took for name, took in found.items() if took <= SLOW}
    return dict(sorted((quick or found).items(), key=lambda pair: pair[1]))


def _last(node: Any) -> int:
    """The last line of a statement, or of its head if it holds others."""
    return node.body[0].lineno - 1 if isinstance(getattr(node, "body", None), list) else node.end_lineno


def is_seen(mutant: Mutant, tree: ast.Module, tests: Mapping[str, float]) -> bool:
    def work() -> int:
        mutant.swap()
        return run_changed({mutant.file: tree}, [*tests])

    return bool(tests) and in_child(work, 20 + 3 * sum(tests.values())) != 0


def known() -> dict[str, str]:
    """Mutant -> why it may survive."""
    rows = [line for line in KNOWN.read_text().splitlines() if line and not line.startswith("#")]
    return {key: reason for key, _, reason in (row.rpartition(" | ") for row in rows)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=FILES, help="product files or folders")
    parser.add_argument("--sample", type=int, help="so many mutants, drawn at random, not all")
    parser.add_argument("--seed", type=int, default=0, help="of that draw")
    parser.add_argument("--tests", nargs="*", metavar="FILE", help="these files of tests alone, which may see fewer")
    parser.add_argument("--short", action="store_true", help=f"{SHORT[1]} mutants of {' and '.join(SHORT[0])}")
    chosen = parser.parse_args()
    chosen_files, sample = SHORT[:2] if chosen.short else (chosen.files, chosen.sample)
    places = [ROOT / name for name in chosen_files]
    paths = [file for place in places for file in (sorted(place.glob("*.py")) if place.is_dir() else [place])]
    files = [path.relative_to(ROOT).as_posix() for path in paths]
    trees = {file: ast.parse((ROOT / file).read_text("utf-8"), file) for file in files}
    every = [mutant for file, tree in trees.items() for mutant in mutants(file, tree)]
    drawn = every if sample is None else random.Random(chosen.seed).sample(every, min(sample, len(every)))
    for name in HEAVY:  # once, not in every child
        importlib.import_module(name)
    whole = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    reached = survey(files, SHORT[2] if chosen.short else chosen.tests or whole)
    print(f"{len(drawn)} of {len(every)} mutants of {len(files)} files; {len(reached)} files of tests", flush=True)
    reasons, listed, left = known(), 0, 0
    for mutant in drawn:
        tests = tests_of(mutant, trees[mutant.file], reached)
        if mutant.key in reasons:
            listed += 1
        elif not is_seen(mutant, trees[mutant.file], tests):
            left += 1
            print(f"{mutant.key}  (line {mutant.line}, {len(tests)} files of tests)", flush=True)
    keys = {mutant.key for mutant in every}
    stale = [key for key in reasons if key not in keys and key.partition(" | ")[0] in files]
    print("".join(f"no longer a mutant, strike it from {KNOWN.name}: {key}\n" for key in stale), end="")
    share = left / max(len(drawn), 1)
    print(f"{len(drawn)} mutants, {listed} listed with a reason, {left} left ({share:.1%})")
    return int(share > MOST_LEFT or bool(stale))


if __name__ == "__main__":
    sys.exit(main())
