"""Computes the results of a study on its other tests, `evaluation.tests`: a table of arms by tests.

Each test is analysed as the run's own test problems are, over seeds and problems. All differences from the baseline in
the table are one Holm family of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import statistics
from .analysis import Analysis, analysed
from .prose import wording
from .tables import table
from .trials import setting


@dataclass(frozen=True)
class Suite:
    """Test -> its numbers; (arm, test) -> the Holm-adjusted p of its difference from the baseline (may be NaN)."""

    tests: Mapping[str, Analysis]
    adjusted: Mapping[tuple[str, str], float]


def suite(analysis: Analysis) -> Suite | None:
    """The tests that every usable trial has in its record, with equal settings; None without any."""
    trials = list(analysis.usable.values())
    asked = [{one["name"]: one for one in setting(trial.spec, "evaluation.tests", ())} for trial in trials]
    tests = {}
    for name, task in asked[0].items() if asked else ():
        area, scored = f"test_{name}", []  # the study's trials as if this test had their test problems
        for own, trial in zip(asked, trials, strict=True):
            if own.get(name) == task and area in trial.tests:
                areas = ((key.partition("/"), series) for key, series in trial.history.items())
                history = {f"test/{metric}": series for (of, _, metric), series in areas if of == area}
                summary = {**trial.summary, "test_accuracy": history["test/accuracy"][-1][1]}
                scored.append(replace(trial, per_problem=trial.tests[area], history=history, summary=summary))
        if len(scored) == len(trials):
            tests[name] = analysed(replace(analysis.record, metric="validation/accuracy", trials=scored))
    compared = [(one.arm, name, one.p) for name, found in tests.items() for one in found.comparisons]
    adjusted = statistics.holm([p for *_, p in compared])
    return Suite(tests, {(a, t): p for (a, t, _), p in zip(compared, adjusted, strict=True)}) if tests else None


def suite_table(found: Suite | None, analysis: Analysis) -> dict[str, Any] | None:
    """`table`, with a column for each test and its number of problems, and an arm's mean and its difference from the
    baseline with its p in a cell, both with limits; and `reading`, the table in words. None without tests."""
    if found is None:
        return None
    names = {name: f"{name} ({one.arms[0].num_problems} problems)" for name, one in found.tests.items()}
    rows = []
    for label in (arm.label for arm in analysis.finished_arms):
        cells = []
        for name, one in found.tests.items():
            arm, compared, metric = one.arm(label), one.comparison(label), one.outcome.name
            texts = [(wording.number(arm.mean, metric), wording.limits(arm.interval, metric))]
            if compared is not None:
                p = wording.p_equals(found.adjusted[label, name])
                difference = wording.number(compared.estimate, metric, signed=True)
                texts.append((f"{difference} ({p})", wording.limits(compared.interval, metric, signed=True)))
            cells.append(texts)
        rows.append([label, *cells])
    reading = "Mean over seeds, scored once at the end; intervals are over seeds and problems."
    if found.adjusted:
        reading += (
            f" Below it the difference from {analysis.record.baseline}; all {len(found.adjusted)} differences of this "
            "table are one Holm family, apart from the comparison above."
        )
    return {"table": table(["Arm", *names.values()], rows), "reading": reading}
