"""Which changes of the product does no test see? Changes one node of a file at a time and runs the tests that reach it.

    python tests/mutants.py [FILE or FOLDER ...] [--sample N [--seed S]] [--tests FILE ...] [--short]

A first run of all tests notes which lines each of them reaches. A mutant is a process of its own, so the checkout stays
as it is: it gives the loaded functions of the file their changed code, or, where a change is outside of functions,
loads the changed file. It is killed once a test fails, hangs, or takes three times as long as it should.
Survivors are printed. `tests/mutants.txt` lists those that change nothing that matters, each with its reason: they
count as known. With more than `MOST_LEFT` of the mutants left, the exit status is 1.

mutmut 3 and cosmic-ray 8 do not fit: the first names a mutant by another module path than the package's, the second
rewrites files of the checkout.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import gc
import hashlib
import importlib
import io
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import psutil
import pytest

Survey = tuple[dict[str, float], dict[str, dict[str, set[int]]]]

ROOT = Path(__file__).resolve().parents[1]
KNOWN = Path(__file__).with_suffix(".txt")
MOST_LEFT = 0.03
NOTES = "_reached_lines"  # the global name by which functions know where to note
STALLED = 60.0  # seconds in which a test that has not come to a standstill takes some time of the processor
SLOW = 5.0  # seconds of processor; a slower test is asked only about lines that no quicker one reaches
SHORT = ("algorithms/_functional.py", 12, ("tests/test_objectives.py",))
FILES = ("algorithms", "harness/rewards", "harness/run", "reports/statistics.py", "harness/extras/scaling/fits.py",
         "reports/capability.py", "reports/analysis.py", "reports/anova.py")  # fmt: skip
SHIPPED_TESTS = ("harness/extras/contracts/plugins.py", "harness/extras/contracts/hostile.py")  # no mutants of tests
HEAVY = ("torch", "numpy", "scipy.stats", "scipy.optimize", "pandas", "pydantic", "transformers", "matplotlib.pyplot",
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
    return any(
        isinstance(s, ast.JoinedStr) or (isinstance(s, ast.Constant) and isinstance(s.value, str)) for s in sides
    )


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
            if skipped or (isinstance(child, ast.keyword) and child.arg in UNTOUCHED) or _only_for_checkers(child):
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


def _only_for_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


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
    try:
        return json.loads(answer)
    except ValueError:
        return None


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


class Killed(Exception):
    """A test sees the mutant: nobody reads a report of how."""


class Collected:
    """Does `work` instead of the tests that pytest has collected."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        gc.unfreeze()
        self.functions = defaultdict[str, list[FunctionType]](list)  # by the path of their file
        for one in gc.get_objects():
            if type(one) is FunctionType:
                self.functions[one.__code__.co_filename].append(one)
        gc.freeze()  # so that what a child does not change it shares with this process
        self.work()
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.excinfo and not call.excinfo.errisinstance(pytest.skip.Exception):
            raise Killed

    def run(self, tests: Mapping[str, float]) -> str:
        """The first of these tests that fails; empty if none does. The process ends if one takes three times as long
        as it should, in seconds of processor."""
        items = [self.items[test] for test in tests]
        for item, following in zip(items, [*items[1:], None], strict=True):
            signal.setitimer(signal.ITIMER_PROF, 5 + 3 * tests[item.nodeid])
            try:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            except Killed:
                return item.nodeid
        return ""


def noting(source: str, file: str) -> ast.Module:
    """The tree of a file whose functions note the first line of each of their statements."""
    tree = ast.parse(source, file)
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            within = getattr(node, field, None)
            if isinstance(within, list) and not isinstance(node, ast.Module | ast.ClassDef):
                notes = [ast.parse(f"{NOTES}.add({one.lineno})").body[0] for one in within]
                setattr(node, field, [one for pair in zip(notes, within, strict=True) for one in pair])
    return tree


class Reached:
    """Notes the seconds and the lines of product files that each test takes, given trees of `noting`; what a fixture of
    several tests takes counts for each of them."""

    def __init__(self, trees: Mapping[str, ast.Module], loaded: Mapping[str, Sequence[FunctionType]]) -> None:
        self.now: dict[str, set[int]] = {file: set() for file in trees}
        self.lines: dict[str, dict[str, list[int]]] = {}
        self.shared: dict[str, tuple[float, dict[str, set[int]]]] = {}  # by fixtures of several tests
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        for file, tree in trees.items():
            own = loaded[str(ROOT / file)]
            for function in own:
                function.__globals__[NOTES] = self.now[file]
            replace_code(tree, str(ROOT / file), own)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        for lines in self.now.values():
            lines.clear()
        there, since = {*self.shared}, time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.process_time() - since
            for name in there.intersection(getattr(item, "fixturenames", ())):
                took, reached = self.shared[name]
                self.seconds[item.nodeid] += took
                for file, lines in reached.items():
                    self.now[file] |= lines
            self.lines[item.nodeid] = {file: sorted(lines) for file, lines in self.now.items() if lines}

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        before, since = {file: {*lines} for file, lines in self.now.items()}, time.process_time()
        for lines in self.now.values():
            lines.clear()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                reached = {file: {*lines} for file, lines in self.now.items()}
                self.shared[fixturedef.argname] = time.process_time() - since, reached
            for file, lines in self.now.items():
                lines |= before[file]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def run_tests(names: Sequence[str], *plugins: Any, stop: str = "-x") -> int:
    os.chdir(ROOT)
    options = [stop, "-qs", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", "--tb=no"]
    return int(pytest.main([*options, *names], plugins=list(plugins)))


def survey(files: Sequence[str], names: Sequence[str], loaded: Mapping[str, Sequence[FunctionType]]) -> Survey:
    """(test -> seconds, test -> file -> lines), each test file in a process of its own. What one reached is kept until
    it or one of these files changes."""
    seconds: dict[str, float] = {}
    lines: dict[str, dict[str, set[int]]] = {}

    trees = {file: noting((ROOT / file).read_text("utf-8"), file) for file in files}

    def one(name: str) -> Any:
        plugin = Reached(trees, loaded)
        run_tests([name], plugin, stop="--maxfail=99")
        return plugin.seconds, plugin.lines, plugin.failed

    for name in names:
        kept = ROOT / ".cache/mutants" / f"{name.replace('/', '-')}.json"
        found = json.loads(kept.read_text()) if kept.exists() else {}
        is_same = set(files) <= set(found.get("files", ())) and all(
            _digest(file) == digest for file, digest in found["sources"].items()
        )
        answer = found["answer"] if is_same else in_child(lambda name=name: one(name), 1200)
        if not answer:
            print(f"left out, because it cannot be run: {name}")
            continue
        if not is_same:
            reached = {file for by in answer[1].values() for file in by}
            sources = {file: _digest(file) for file in (name, "tests/mutants.py", *reached)}
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps({"files": files, "sources": sources, "answer": answer}))
        if answer[2]:
            print(f"left out, because they fail without a mutant: {', '.join(answer[2])}")
        for test, took in answer[0].items():
            if test not in answer[2]:
                seconds[test] = took
                lines[test] = {file: set(at) for file, at in answer[1].get(test, {}).items()}
    return seconds, lines


def _digest(file: str) -> str:
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest() if (ROOT / file).exists() else ""


def seen_by(mutant: Mutant, tree: ast.Module, collected: Collected, tests: Mapping[str, float]) -> str:
    """The first of these tests that sees a mutant, or how it ends otherwise; empty if it survives. Each with the
    seconds that it takes."""
    path, original = str(ROOT / mutant.file), SourceFileLoader.get_code

    def work() -> str:
        mutant.swap()
        if replace_code(tree, path, collected.functions[path]):
            return collected.run(tests)
        for name, module in [*sys.modules.items()]:
            file = getattr(module, "__file__", None) or ""
            if name.partition(".")[0] == "cohort" or Path(file).is_relative_to(ROOT / "tests"):
                del sys.modules[name]

        def get_code(loader: SourceFileLoader, name: str) -> Any:
            return compile(tree, path, "exec", dont_inherit=True) if loader.path == path else original(loader, name)

        SourceFileLoader.get_code = get_code  # pyright: ignore
        return "one of several" if run_tests([*tests]) else ""

    seen = in_child(work, 20 + 3 * sum(tests.values())) if tests else ""
    return "it does not end" if seen is None else seen


def replace_code(tree: ast.Module, path: str, loaded: Sequence[FunctionType]) -> bool:
    """Give the loaded functions of a file the code of its changed tree. Whether that makes the change: not if it is
    outside of functions, if the file is not loaded, or if two functions cannot be told apart."""
    found: dict[tuple[str, int], CodeType | None] = {}
    left = [compile(tree, path, "exec", dont_inherit=True)]
    while left:
        code = left.pop()
        place = code.co_qualname, code.co_firstlineno
        found[place] = None if found.get(place, code) != code else code
        left += [one for one in code.co_consts if isinstance(one, CodeType)]
    changed = False
    for function in loaded:
        place = function.__code__.co_qualname, function.__code__.co_firstlineno
        if place in found:
            code = found[place]
            if code is None or code.co_freevars != function.__code__.co_freevars:
                return False
            changed |= code != function.__code__
            function.__code__ = code
    return changed


def tests_of(mutant: Mutant, tree: ast.Module, lines: dict[str, dict[str, set[int]]]) -> list[str]:
    """The tests that reach a mutant's line; of a line that runs once, at import, all that reach its file or are of
    the plugin by name, or stand beside such tests and reach no line at all, for they may read its values alone."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    is_inside = any(f.body[0].lineno <= mutant.line <= (f.end_lineno or 0) for f in functions)
    spans = [range(n.lineno, _last(n) + 1) for n in ast.walk(tree) if isinstance(n, ast.stmt)]
    own = set(min((span for span in spans if mutant.line in span), key=len))
    if is_inside:
        return [test for test, by in lines.items() if own & by.get(mutant.file, set())]
    named = re.compile(rf"\[(.*-)?{Path(mutant.file).stem}(-.*)?\]")
    beside = {test.partition("::")[0] for test, by in lines.items() if by.get(mutant.file)}
    return [
        test
        for test, by in lines.items()
        if by.get(mutant.file) or named.search(test) or (not by and test.partition("::")[0] in beside)
    ]


def _last(node: Any) -> int:
    """The last line of a statement, or of its head if it holds others."""
    return node.body[0].lineno - 1 if isinstance(getattr(node, "body", None), list) else node.end_lineno


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
    parser.add_argument("--short", action="store_true", help=f"{SHORT[1]} mutants of {SHORT[0]} alone")
    chosen = parser.parse_args()
    chosen_files, sample = ([SHORT[0]], SHORT[1]) if chosen.short else (chosen.files, chosen.sample)
    places = [ROOT / name for name in chosen_files]
    paths = [file for place in places for file in (sorted(place.glob("*.py")) if place.is_dir() else [place])]
    named = [path.relative_to(ROOT).as_posix() for path in paths]
    files = [file for file in named if file not in SHIPPED_TESTS]
    trees = {file: ast.parse((ROOT / file).read_text("utf-8"), file) for file in files}
    every = [mutant for file, tree in trees.items() for mutant in mutants(file, tree)]
    drawn = every if sample is None else random.Random(chosen.seed).sample(every, min(sample, len(every)))
    for name in (*HEAVY, *(f"cohort.{file[:-3].replace('/', '.')}" for file in files)):  # once, not in every child
        importlib.import_module(name)
    whole = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    asked = SHORT[2] if chosen.short else chosen.tests or whole
    reasons, listed, left, since = known(), 0, 0, time.perf_counter()
    by_room = defaultdict[str, list[int]](lambda: [0, 0, 0])  # tried, listed, left
    seeing: Counter[tuple[str, str]] = Counter()  # (function, test): how many of its mutants the test has seen
    out = sys.stdout

    @Collected
    def collected() -> None:
        with contextlib.redirect_stdout(out):
            try_all()

    def try_all() -> None:
        nonlocal listed, left
        seconds, lines = survey(files, asked, collected.functions)
        print(f"{len(drawn)} of {len(every)} mutants of {len(files)} files; {len(seconds)} tests", flush=True)
        for number, mutant in enumerate(drawn, 1):
            # one module after the other as long as they are quick, so that their fixtures are made once; but those
            # that have seen mutants of the function first
            reached = sorted(
                tests_of(mutant, trees[mutant.file], lines),
                key=lambda test: (
                    -seeing[mutant.where, test],
                    round(seconds[test], 1),
                    test.partition("::")[0],
                    seconds[test],
                ),
            )
            tests = [test for test in reached if seconds[test] <= SLOW] or reached
            room = by_room[mutant.file.rpartition("/")[0]]
            room[0] += 1
            if number % 20 == 0:
                took = time.perf_counter() - since
                state = f"# {number} mutants, {took:.0f} s; tried, listed, left: {dict(by_room)}"
                print(state, file=sys.stderr, flush=True)
            is_listed = mutant.key in reasons
            listed += is_listed
            room[1] += is_listed
            taking = {test: seconds[test] for test in tests}
            seen = "" if is_listed else seen_by(mutant, trees[mutant.file], collected, taking)
            seeing[mutant.where, seen] += 1
            if is_listed or seen:
                continue
            left += 1
            room[2] += 1
            print(f"{mutant.key}  (line {mutant.line}, {len(tests)} tests)", flush=True)
        for test in sorted({test for _, test in seeing} & seconds.keys()):
            if in_child(lambda test=test: collected.run({test: seconds[test]}), 20 + 3 * seconds[test]) != "":
                print(f"fails without a mutant, so its mutants are not tried: {test}", flush=True)

    with contextlib.redirect_stdout(io.StringIO()):
        run_tests(asked, collected)
    keys = {mutant.key for mutant in every}
    stale = [key for key in reasons if key not in keys and key.partition(" | ")[0] in files]
    print("".join(f"no longer a mutant, strike it from {KNOWN.name}: {key}\n" for key in stale), end="")
    share, took = left / max(len(drawn), 1), time.perf_counter() - since
    for folder, (tried, with_reason, open_) in by_room.items():
        print(f"{folder}: {tried} mutants, {with_reason} listed with a reason, {open_} left")
    print(f"{len(drawn)} mutants, {listed} listed with a reason, {left} left ({share:.1%}), {took:.0f} s")
    return int(share > MOST_LEFT or bool(stale))


if __name__ == "__main__":
    sys.exit(main())
