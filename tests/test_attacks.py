"""The pages about attacks tell of tests that exist, and of all of them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = {file: file.read_text() for file in sorted((ROOT / "tests").rglob("test_*.py"))}
NAMED = r"`([\w/]+\.py)::(\w+)`"


def test_the_table_of_attacks_has_a_row_for_every_marked_test_and_no_other_and_all_survived():
    page = (ROOT / "docs/attacks.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| ") and "Tried" not in line]
    marked = (re.findall(r'pytest\.mark\.attack\(\s*"([^"]+)"', text) for text in TESTS.values())
    assert {line.split(" | ")[0].removeprefix("| ") for line in lines} == set().union(*marked)
    numbers = re.findall(r"\| ([\d,]+) \| ([\d,]+) \|", page)
    assert len(numbers) >= 20
    assert [tried for tried, survived in numbers if tried != survived] == []


@pytest.mark.parametrize(("file", "test"), re.findall(NAMED, (ROOT / "docs/threat-model.md").read_text()))
def test_the_threat_model_names_tests_that_exist(file, test):
    assert [text for path, text in TESTS.items() if path.name == file and f"\ndef {test}(" in text]


def test_every_line_of_the_threat_model_names_a_test():
    text = (ROOT / "docs/threat-model.md").read_text()
    lines = [line for line in text.splitlines() if re.match(r"\| (?!Wh(at|o) \|)", line)]
    assert len(lines) >= 20
    assert [line for line in lines if not re.search(NAMED, line)] == []
