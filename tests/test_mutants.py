"""The script behind `make mutants`: what it changes, what it leaves alone, and that the names it goes by are there."""

import ast

import pytest
from mutants import FILES, KNOWN, ROOT, SHORT, known, mutants


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
        ("x = a <= b", {"x = a < b"}), ("x = a - b", {"x = a + b"}), ("x = a * mask", {"x = a / mask", "x = a"}),
        ("x = a & b", {"x = a | b", "x = a"}), ("x += a", {"x -= a", "x = a"}), ("x = 4", {"x = 5"}),
        ("x = 0.5", {"x = 1.0"}), ("x = not a", {"x = a"}), ("x = a if b else c", {"x = a", "x = c"}),
        ("x = min(a, key=b)", {"x = max(a, key=b)", "x = min(a)"}), ("x = a.clamp(b)", {"x = a"}),
        ("x = np.abs(b)", set()), ("x = [a for a in b if a.c]", {"x = [a for a in b if True]"}), ("f(a)", {"pass"}),
        ("assert a < 2", set()), ("raise ValueError(3)", set()), ("x: Literal[3] = a", set()),
        ("x = 'a' + b", set()), ("x = zip(a, strict=True)", set()),
    ],
)  # fmt: skip
def test_a_mutant_is_one_change_of_one_expression(source, expected):
    assert changed(source) == expected


def test_all_files_and_tests_that_mutants_go_by_exist():
    left_out = {file for file in FILES if file.startswith("harness/extras/") and not (ROOT / file).parent.exists()}
    assert all((ROOT / file).exists() for file in {*FILES, SHORT[0], *SHORT[2]} - left_out)
    rows = [line for line in KNOWN.read_text().splitlines() if line and not line.startswith("#")]
    assert len(known()) == len(rows) and all(key.count(" | ") >= 2 and reason for key, reason in known().items())
