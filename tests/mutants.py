"""Which changes of the product does no test see? Changes one node of a file at a time and runs the tests that reach it.

    python tests/mutants.py [FILE or FOLDER ...] [--sample N [--seed S]] [--jobs N] [--record FOLDER] [--short]

A first run notes which lines each test reaches, slow ones too. A mutant is a process of its own, so the checkout stays
as it is: a copy of one that has collected all tests, in which functions get changed code. The tests that reach the
change run, the quickest first; one counts that fails, and passes without the change. A mutant of what runs at import is
a process that has loaded nothing yet. `mutants.txt` lists survivors that change nothing that matters, each with its
reason; a row stands for one of the mutants that read alike. With more than `MOST_LEFT` of the mutants left, the exit
status is 1. A run with `--record` goes on where an earlier one ended; delete the folder after a change of tests.

mutmut 3 and cosmic-ray 8 do not fit: the first names a mutant by another module path than the package's, the second
rewrites files of the checkout.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import builtins
import contextlib
import copy
import gc
import hashlib
import importlib
import inspect
import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
KNOWN = Path(__file__).with_suffix(".txt")
MOST_LEFT = 0.03
NOTES = "_reached_lines"  # the built-in name by which functions know where to note
SHARED = defaultdict[str, set[tuple[str, int]]](set)  # what a fixture of several tests reaches
TOOK = defaultdict[str, float](float)  # seconds of processor that it takes
STALLED = 60.0  # seconds in which a test that has not come to a standstill takes some time of the processor
MOST_SECONDS = 6.0, 120.0  # of processor that the tests of a mutant take at first, and if none of them sees it
SHORT = (("algorithms/_functional.py", "reports/claims.py"), 12, ("tests/test_objectives.py", "tests/test_claims.py"))
FILES = ("algorithms", "harness/rewards", "harness/run", "harness/extras/confidence/rewards", "reports/analysis.py",
         "reports/anova.py", "reports/capability.py", "reports/claims.py", "reports/findings.py",
         "reports/statistics.py", "reports/suites.py", "reports/trials.py")  # fmt: skip
HEAVY = ("torch", "numpy", "scipy.stats", "pandas", "pydantic", "transformers", "matplotlib.pyplot",
         "peft", "optuna", "mlflow.store.tracking.sqlalchemy_store", "mlflow.server", "statsmodels.api")  # fmt: skip

Changes = Mapping[CodeType, CodeType]  # of functions
Reached = Mapping[str, tuple[float, Collection[tuple[str, int]]]]  # test -> seconds of processor, (file, line)
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
                old = getattr(*at[:2]) if at[2] is None else getattr(*at[:2])[at[2]]
                if isinstance(old, ast.stmt | ast.expr) and isinstance(new, ast.stmt | ast.expr):
                    new = ast.copy_location(copy.copy(new), old)
                    ast.fix_missing_locations(new)
                found.append(Mutant(file, where, line, *at, new))
            visit(child, where)

    visit(tree, "module")
    return found


# Tests -------------------------------------------------------------------------------------------------------------


def in_child(work: Any, seconds: float) -> Any:
    """What `work()` returns in a process of its own, as JSON has it; None if it dies, hangs or takes more than so many
    seconds of processor. RuntimeError if it raises: a fault of this file is no test that sees something."""
    reading, writing = os.pipe()
    folder = tempfile.mkdtemp()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
        try:
            found = json.dumps([work(), None])
        except BaseException:
            found = json.dumps([None, traceback.format_exc()])
        with os.fdopen(writing, "w") as file:
            file.write(found)
        os._exit(0)
    os.close(writing)
    ended = threading.Event()
    threading.Thread(target=_watched, args=(pid, seconds, ended), daemon=True).start()
    with os.fdopen(reading) as file:
        answer = file.read()
    ended.set()
    os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what a test left
    shutil.rmtree(folder, ignore_errors=True)
    found, error = json.loads(answer) if answer else (None, None)
    if error is not None:
        raise RuntimeError(error)
    return found


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


def with_tests(tests: Collection[str], work: Callable[[pytest.Session], Any], marks: str = "") -> Any:
    """What `work(session)` returns, instead of running these files of tests; None if one cannot be collected."""
    found: list[Any] = []

    class Instead:
        def pytest_runtestloop(self, session: pytest.Session) -> bool:
            found.append(None if session.testsfailed else work(session))
            return True

        @pytest.hookimpl(wrapper=True)
        def pytest_fixture_setup(self, fixturedef: Any) -> Any:
            """What several tests share may be reached before the first of them."""
            reached = getattr(builtins, NOTES, set())
            before, began = {*reached}, _spent()
            reached.clear()
            yield
            if fixturedef.scope != "function":
                SHARED[fixturedef.argname] |= reached
                TOOK[fixturedef.argname] = max(TOOK[fixturedef.argname], _spent() - began)
            reached |= before

    os.chdir(ROOT)
    pytest.main(["-qs", "-m", marks, "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", *tests], [Instead()])
    return found[0] if found else None


def _spent() -> float:
    """Seconds of processor so far, with children that have ended."""
    return sum(os.times()[:4])


def outcomes(session: pytest.Session, items: Sequence[pytest.Item]) -> Iterator[tuple[str, bool]]:
    """(name, whether it passed) of these tests, run in this order."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        failed = session.testsfailed
        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        yield item.nodeid, session.testsfailed == failed


def first_failure(session: pytest.Session, names: Collection[str]) -> str:
    items = {item.nodeid: item for item in session.items}
    return next((name for name, passed in outcomes(session, [items[name] for name in names]) if not passed), "")


def code_of(tree: ast.Module, file: str) -> CodeType:
    return compile(tree, str(ROOT / file), "exec", dont_inherit=True)


def changed_code(old: CodeType, new: CodeType) -> Changes | None:
    """The code of each function that differs; None if what runs at import differs."""
    inner = [[one for one in code.co_consts if isinstance(one, CodeType)] for code in (old, new)]
    own = [(x.co_code, x.co_names, [one for one in x.co_consts if not isinstance(one, CodeType)]) for x in (old, new)]
    is_function, is_alike = bool(old.co_flags & inspect.CO_OPTIMIZED), len(inner[0]) == len(inner[1])
    if old.co_freevars != new.co_freevars or (not is_function and (own[0] != own[1] or not is_alike)):
        return None
    found = {old: new} if is_function and old != new else {}
    for one, other in zip(*inner, strict=True) if is_alike else ():
        changed = changed_code(one, other)
        if changed is None or (changed and not is_function and one.co_name.endswith(("comp>", "expr>"))):
            return None
        found |= changed
    return found


class Functions:
    """All functions of these files of the product that now exist."""

    def __init__(self, files: Sequence[str]) -> None:
        for file in files:
            importlib.import_module("cohort." + file.removesuffix(".py").replace("/", "."))
        self._found = defaultdict[tuple[str, CodeType], list[FunctionType]](list)
        gc.unfreeze()
        for one in gc.get_objects():
            if isinstance(one, FunctionType):
                self._found[one.__code__.co_filename, one.__code__].append(one)
        gc.freeze()

    def change(self, file: str, changed: Changes) -> None:
        for old, new in changed.items():
            for one in self._found.get((str(ROOT / file), old), ()):
                one.__code__ = new


def noting(file: str) -> ast.Module:
    """The tree of a file whose functions note the first line of each of their statements."""
    tree = ast.parse((ROOT / file).read_text("utf-8"), file)
    inside = {node for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) for node in ast.walk(one)}
    for node in inside:
        for field in ("body", "orelse", "finalbody"):
            within = getattr(node, field, None)
            if isinstance(within, list) and not isinstance(node, ast.ClassDef):
                notes = [ast.parse(f"{NOTES}.add(({file!r}, {one.lineno}))").body[0] for one in within]
                setattr(node, field, [one for pair in zip(notes, within, strict=True) for one in pair])
    return tree


def survey(trees: Mapping[str, ast.Module], tests: Sequence[str], marks: str) -> dict[str, Any]:
    """What each test with these marks takes and reaches, without those that fail."""

    def work(session: pytest.Session) -> Any:
        functions, reached, found = Functions([*trees]), set[tuple[str, int]](), {}
        for file, tree in trees.items():
            functions.change(file, changed_code(code_of(tree, file), code_of(noting(file), file)) or {})
        setattr(builtins, NOTES, reached)
        spent = _spent()
        for name, passed in outcomes(session, session.items):
            before, spent = spent, _spent()
            found[name] = spent - before if passed else None, {*reached}
            reached.clear()
        fixtures = {item.nodeid: getattr(item, "fixturenames", ()) for item in session.items}
        for name, (took, lines) in found.items():  # each may be the first that needs them
            whole = None if took is None else took + sum(TOOK[one] for one in fixtures[name])
            found[name] = whole, sorted(lines.union(*(SHARED[one] for one in fixtures[name])))
        return found

    rows = in_child(lambda: with_tests(tests, work, marks), math.inf)
    failing = [name for name, (took, _) in rows.items() if took is None]
    print("".join(f"left out, because it fails without a mutant: {name}\n" for name in failing), end="")
    return {name: row for name, row in rows.items() if name not in failing}


def surveyed(trees: Mapping[str, ast.Module], tests: Sequence[str], record: Path, pool: ThreadPoolExecutor) -> Reached:
    """What all tests take and reach, from the record if it is of the same files."""
    kept = record / "reached.json"
    files, rows = json.loads(kept.read_text()) if kept.exists() else (None, {})
    if files != [*trees]:
        parts = pool.map(partial(survey, trees, tests), ("slow", "not slow"))
        rows = dict(row for part in parts for row in part.items())
        kept.write_text(json.dumps([[*trees], rows]))
    return {name: (took, {(file, line) for file, line in lines}) for name, (took, lines) in rows.items()}


def reaching(mutant: Mutant, tree: ast.Module, reached: Reached) -> list[list[str]]:
    """The tests that reach a mutant's statement, the quickest first, as many as take `MOST_SECONDS` at first and then;
    of a line that runs once, at import, those that reach its file."""
    functions, span = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)], range(sys.maxsize)
    if any(f.body[0].lineno <= mutant.line <= (f.end_lineno or 0) for f in functions):
        spans = [range(n.lineno, _last(n) + 1) for n in ast.walk(tree) if isinstance(n, ast.stmt)]
        span = min((span for span in spans if mutant.line in span), key=len)
    found = {name: took for name, (took, lines) in reached.items()
             if any(file == mutant.file and line in span for file, line in lines)}  # fmt: skip
    names = sorted(found, key=found.__getitem__)
    sums = [*itertools.accumulate(found[name] for name in names)]
    first, last = (max(1, bisect.bisect_right(sums, most)) for most in MOST_SECONDS)
    return [names[:first], names[first:last]]


def _last(node: Any) -> int:
    """The last line of a statement, or of its head if it holds others."""
    return node.body[0].lineno - 1 if isinstance(getattr(node, "body", None), list) else node.end_lineno


def limit(names: Collection[str], reached: Reached) -> float:
    """Seconds of processor after which tests are taken to hang."""
    return 20 + 3 * sum(reached[name][0] for name in names)


def is_seen_anew(mutant: Mutant, tree: ast.Module, reached: Reached) -> bool:
    """Whether a test sees the change in a process that has loaded nothing of the product yet; tests that bear the
    module's name among their parameters come first."""
    stem = Path(mutant.file).stem
    bearers = [name for name in reached if stem in name.partition("[")[2].rstrip("]").split("-")]
    for names in (bearers, *reaching(mutant, tree, reached)):
        found = in_child(partial(first_seen, mutant, tree, names), limit(names, reached)) if names else ""
        alone = partial(first_seen, None, tree, [found])
        if found is None or (found and in_child(alone, limit([found], reached)) == ""):
            return True
    return False


def first_seen(mutant: Mutant | None, tree: ast.Module, names: Sequence[str]) -> str:
    """The first of these tests that fails with a mutant, or without one."""
    if mutant is not None:
        original, path = SourceFileLoader.get_code, str(ROOT / mutant.file)
        mutant.swap()
        code = code_of(tree, mutant.file)
        SourceFileLoader.get_code = lambda self, name: code if self.path == path else original(self, name)  # pyright: ignore
    files = dict.fromkeys(name.partition("::")[0] for name in names)
    return with_tests(files, partial(first_failure, names=names))


class Sight:
    """Which collected test sees a change of functions?"""

    def __init__(self, session: pytest.Session, files: Sequence[str], reached: Reached) -> None:
        self._session, self._functions, self._reached = session, Functions(files), reached
        self._is_fair = dict[str, bool]()  # whether a test passes alone, without a change
        self._last = defaultdict[str, list[str]](list)  # the tests that saw changes of a function

    def sees(self, mutant: Mutant, changed: Changes, rounds: Sequence[Collection[str]]) -> bool:
        """Whether one of the tests does; first come those that saw changes of the same function."""
        known = self._last[mutant.where]
        first = [*dict.fromkeys(name for name in reversed(known) if any(name in names for names in rounds))]
        others = ([name for name in names if name not in first] for names in rounds)
        return any(self._sees(mutant, changed, names, known) for names in (first, *others))

    def _sees(self, mutant: Mutant, changed: Changes, names: list[str], known: list[str]) -> bool:
        while names:
            found = self._first_failure(names, mutant.file, changed)
            if not found:
                return found is None and self._first_failure(names, mutant.file, {}) is not None
            if found not in self._is_fair:
                self._is_fair[found] = self._first_failure([found], mutant.file, {}) == ""
            if self._is_fair[found]:
                known.append(found)
                return True
            names.remove(found)
        return False

    def _first_failure(self, names: Collection[str], file: str, changed: Changes) -> str | None:
        def work() -> str:
            self._functions.change(file, changed)
            return first_failure(self._session, names)

        return in_child(work, limit(names, self._reached))


# A run -------------------------------------------------------------------------------------------------------------


def named(trees: Mapping[str, ast.Module]) -> dict[str, Mutant]:
    """All mutants, by a name that only the same text of their file gives."""
    found = dict[str, Mutant]()
    for file, tree in trees.items():
        digest = hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:12]
        found |= {f"{file} {digest} {place}": mutant for place, mutant in enumerate(mutants(file, tree))}
    return found


def changes_of(mutant: Mutant, tree: ast.Module) -> Changes | None:
    """The functions that a mutant changes; None if it is seen anew alone."""
    old = code_of(tree, mutant.file)
    mutant.swap()
    new = code_of(tree, mutant.file)
    mutant.swap()
    return changed_code(old, new)


def verdicts(record: Path) -> dict[str, bool]:
    """Name -> whether a test saw it."""
    path = record / "verdicts"
    rows = path.read_text().splitlines() if path.exists() else []
    return {name: verdict == "seen" for name, _, verdict in (row.rpartition(" ") for row in rows)}


def note(record: Path, name: str, is_seen: bool) -> None:
    with (record / "verdicts").open("a") as file:
        file.write(f"{name} {'seen' if is_seen else 'left'}\n")


def look(
    share: Mapping[str, tuple[Mutant, Changes]], trees: Mapping[str, ast.Module], reached: Reached,
    tests: Sequence[str], record: Path,
) -> None:  # fmt: skip
    """Note of each change of functions whether a test sees it."""

    def work(session: pytest.Session) -> None:
        sight = Sight(session, [*trees], reached)
        for name, (mutant, changed) in share.items():
            note(record, name, sight.sees(mutant, changed, reaching(mutant, trees[mutant.file], reached)))

    with_tests(tests, work)


def known() -> Counter[str]:
    """Key -> how many of its mutants may survive."""
    rows = [line for line in KNOWN.read_text().splitlines() if line and not line.startswith("#")]
    return Counter(row.rpartition(" | ")[0] for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=FILES, help="product files or folders")
    parser.add_argument("--sample", type=int, help="so many mutants, drawn at random, not all")
    parser.add_argument("--seed", type=int, default=0, help="of that draw")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--record", type=Path, help="a folder from which a later run goes on")
    parser.add_argument("--short", action="store_true", help=f"{SHORT[1]} mutants of {' and '.join(SHORT[0])}")
    chosen = parser.parse_args()
    chosen_files, sample = SHORT[:2] if chosen.short else (chosen.files, chosen.sample)
    places = [ROOT / name for name in chosen_files]
    paths = [file for place in places for file in (sorted(place.glob("*.py")) if place.is_dir() else [place])]
    files = [path.relative_to(ROOT).as_posix() for path in paths]
    trees = {file: ast.parse((ROOT / file).read_text("utf-8"), file) for file in files}
    every, may_survive = named(trees), known()
    alike = Counter(mutant.key for mutant in every.values())
    names = [*every] if sample is None else random.Random(chosen.seed).sample([*every], min(sample, len(every)))
    for name in HEAVY:  # once, not in every child
        importlib.import_module(name)
    whole = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    tests = SHORT[2] if chosen.short else whole
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.jobs) as pool:
        record = Path(chosen.record or folder).absolute()
        record.mkdir(parents=True, exist_ok=True)
        reached = surveyed(trees, tests, record, pool)
        print(f"{len(names)} of {len(every)} mutants of {len(files)} files; {len(reached)} tests", flush=True)
        before = verdicts(record)
        asked = {name: every[name] for name in names if name not in before
                 and alike[every[name].key] > may_survive[every[name].key]}  # fmt: skip
        found = {name: changes_of(mutant, trees[mutant.file]) for name, mutant in asked.items()}
        changes = [(name, (asked[name], changed)) for name, changed in found.items() if changed is not None]
        shares = [dict(changes[i :: chosen.jobs]) for i in range(chosen.jobs)]
        seeing = (partial(look, share, trees, reached, tests, record) for share in shares)
        list(pool.map(lambda one: in_child(one, math.inf), seeing))
        anew = [name for name, changed in found.items() if changed is None]
        list(
            pool.map(lambda name: note(record, name, is_seen_anew(asked[name], trees[asked[name].file], reached)), anew)
        )
        after = verdicts(record)
    survivors = [every[name] for name in names if not after.get(name, False)]
    listed, left = Counter[str](), list[Mutant]()
    for mutant in survivors:
        if listed[mutant.key] < may_survive[mutant.key]:
            listed[mutant.key] += 1
        else:
            left.append(mutant)
    print("".join(f"{mutant.key}  (line {mutant.line})\n" for mutant in left), end="")
    stale = [key for key, rows in may_survive.items() if alike[key] < rows and key.partition(" | ")[0] in files]
    print("".join(f"no longer a mutant, strike it from {KNOWN.name}: {key}\n" for key in stale), end="")
    share = len(left) / max(len(names), 1)
    print(f"{len(names)} mutants, {listed.total()} listed with a reason, {len(left)} left ({share:.1%})")
    return int(share > MOST_LEFT or bool(stale))


if __name__ == "__main__":
    sys.exit(main())
