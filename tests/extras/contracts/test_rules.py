"""Every plugin keeps the rules of its kind; a new one is found by its name. Worst texts cost grading little."""

import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from cohort.harness import plugins
from cohort.harness.extras.contracts import hostile
from cohort.harness.extras.contracts.plugins import CHECKS, hostile_text_gets_a_number, hostile_text_is_graded, make
from cohort.tasks import _latex, _numbers
from cohort.tasks._latex import Checker
from cohort.tasks._numbers import last_boxed, number

sys.path.insert(0, str(Path(__file__).parents[2] / "contracts"))

import test_tasks

NEEDS_A_MODEL = {"reward_model"}  # tested with one by its extra
HOSTILE = (hostile_text_gets_a_number, hostile_text_is_graded)
CASES = [
    pytest.param(
        kind, name, check.test, id=f"{name}-{check.test.__name__}",
        marks=[pytest.mark.attack("Hostile text in a completion")] * (check.test in HOSTILE)
        + [pytest.mark.slow] * (name == "wandb"),
    )
    for check in CHECKS
    for kind in check.kinds
    for name in (test_tasks.TASKS if kind == "task" else plugins.names(kind))
    if name not in NEEDS_A_MODEL
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "test"), CASES)
def test_a_plugin_keeps_the_rule(kind, name, test, monkeypatch, record_property):
    monkeypatch.setenv("WANDB_MODE", "offline")
    library = plugins.load(kind, name).package if kind == "mirror" else name if name == "vllm" else "torch"
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    record_property("tried", len(hostile.COMPLETIONS))
    test(test_tasks.make(name) if kind == "task" else make(kind, name))


@pytest.mark.long  # it kills some thirty processes; the contract of all tasks has the worst texts
@pytest.mark.attack("Hostile text in a completion")
def test_hostile_answers_stay_within_the_bounds(record_property):
    # None of them equals 7. A question has three stages of at most 0.25 s; without limits some would take hours.
    checker = Checker(cpu_seconds=0.25)
    record_property("tried", len(hostile.ANSWERS))
    for i, text in enumerate(hostile.ANSWERS):
        checker.compare("x", f"x+{i}")
        start = time.monotonic()
        assert checker.compare(text[: _latex.MAX_CHARS], "7") != "equal"
        assert time.monotonic() - start < 60.0
    assert checker.counts["unparsable"] > 0


@pytest.mark.attack("Hostile text in a completion")
def test_no_hostile_text_is_slow_to_read(record_property):
    texts = [*hostile.ANSWERS, *(c for c in hostile.COMPLETIONS if len(c) > 10_000)]
    record_property("tried", len(texts))
    for text in texts:
        start = time.process_time()
        for prose in (True, False):
            assert number(text, prose=prose) is None or len(text) <= _numbers.MAX_CHARS
        last_boxed(text)
        assert time.process_time() - start < 1.0, text[:60]
