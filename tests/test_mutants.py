"""The script behind `make mutants`: what it changes, what it leaves alone, and that the names it goes by are there."""

import ast
import importlib
from collections.abc import Callable, Generator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from mutants import FILES, KNOWN, ROOT, SHIPPED_TESTS, SHORT, Reached, known, mutants, replace_code


def changed(source: str) -> set[str]:
    tree = ast.parse(source)
    before, found = ast.unparse(tree), set()
    for mutant in mutants("f.py", tree):
        mutant.swap()
        found.add(ast.unparse(tree))
        mutant.swap()
        assert ast.unparse(tree) == before
    return found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a <= b", {"x = a < b"}),
        ("x = a - b", {"x = a + b"}),
        ("x = a * mask", {"x = a / mask", "x = a"}),
        ("x = a & b", {"x = a | b", "x = a"}),
        ("x += a", {"x -= a", "x = a"}),
        ("x = 4", {"x = 5"}),
        ("x = 0.5", {"x = 1.0"}),
        ("x = not a", {"x = a"}),
        ("x = a if b else c", {"x = a", "x = c"}),
        ("x = min(a, key=b)", {"x = max(a, key=b)", "x = min(a)"}),
        ("x = a.clamp(b)", {"x = a"}),
        ("x = np.abs(b)", set()),
        ("x = [a for a in b if a.c]", {"x = [a for a in b if True]"}),
        ("f(a)", {"pass"}),
        ("assert a < 2", set()),
        ("raise ValueError(3)", set()),
        ("x: Literal[3] = a", set()),
        ("x = 'a' + b", set()),
        ("x = zip(a, strict=True)", set()),
    ],
)
def test_a_mutant_is_one_change_of_one_expression(source, expected):
    assert changed(source) == expected


def test_a_loaded_function_gets_the_code_of_a_mutant_and_a_change_outside_of_functions_does_not_count(
    tmp_path, monkeypatch
):
    file = tmp_path / "loaded_and_changed.py"
    file.write_text("SIZE = 4\n\n\ndef two():\n    return 2\n\n\nHELD = [lambda: two() + SIZE]\n")
    monkeypatch.syspath_prepend(tmp_path)
    module, tree, seen = importlib.import_module(file.stem), ast.parse(file.read_text()), {}
    loaded = [module.two, *module.HELD]
    for mutant in mutants(file.name, tree):
        key = mutant.key.partition(" | ")[2]
        mutant.swap()
        is_changed = replace_code(tree, str(file), loaded)
        seen[key] = module.HELD[0]() if is_changed else None
        mutant.swap()
        replace_code(tree, str(file), loaded)
    assert module.HELD[0]() == 6
    assert seen == {"module | 4 -> 5": None, "two | 2 -> 3": 7, "module | two() + SIZE -> two() - SIZE": -2}


def test_all_files_and_tests_that_mutants_go_by_exist():
    assert all((ROOT / file).exists() for file in (*FILES, *SHIPPED_TESTS, SHORT[0], *SHORT[2]))
    rows = [line for line in KNOWN.read_text().splitlines() if line and not line.startswith("#")]
    assert len(known()) == len(rows) and all(key.count(" | ") >= 2 and reason for key, reason in known().items())


def test_what_a_shared_fixture_reaches_is_reached_by_every_test_that_asks_for_it():
    plugin: Any = Reached({}, {})
    plugin.now = {"f.py": set()}

    def during(hook: Generator[None, Any, Any], *inside: Callable[[], object]) -> None:
        next(hook)
        for one in inside:
            one()
        with suppress(StopIteration):
            hook.send(None)

    def test(name: str, fixtures: list[str], *inside: Callable[[], object]) -> None:
        during(plugin.pytest_runtest_protocol(SimpleNamespace(nodeid=name, fixturenames=fixtures)), *inside)

    def reach(line: int) -> Callable[[], object]:
        return lambda: plugin.now["f.py"].add(line)

    def fixture(name: str, scope: str, *inside: Callable[[], object]) -> Callable[[], object]:
        return lambda: during(plugin.pytest_fixture_setup(SimpleNamespace(argname=name, scope=scope)), *inside)

    both = ["model", "run"]
    run = fixture("run", "module", fixture("model", "session", reach(1)), reach(2))
    test("first", both, run, fixture("own", "function", reach(3)), reach(4))
    test("second", both, reach(5))
    test("third", ["model", "own"], reach(6))
    test("alone", [], reach(7))
    lines = {name: found["f.py"] for name, found in plugin.lines.items()}
    assert lines == {"first": [1, 2, 3, 4], "second": [1, 2, 5], "third": [1, 6], "alone": [7]}
    assert plugin.seconds["second"] >= plugin.shared["run"][0]
