"""Decides what the page's main table holds as a file, and how a cell of any table is written."""

import csv
import io
import math
from base64 import b64encode
from typing import Any

import numpy as np

from cohort.reports.analysis import Analysis
from cohort.reports.statistics import Interval, t_interval
from cohort.reports.trials import wanted_pairs

SPENT = ("accuracy_initial", "accuracy_final", "generated_tokens", "seconds", "peak_memory_bytes")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def cell(value: Any) -> Any:
    """A value for a table; text that a spreadsheet would run as a formula starts with an apostrophe."""
    if isinstance(value, float) and not math.isfinite(value):
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def comparison_csv(analysis: Analysis) -> str:
    """One row per arm of the comparison, its numbers in full; those that are not known are empty."""
    name, wanted = analysis.outcome.name, [label for label, _ in wanted_pairs(analysis.record)]
    compared = ("difference", "difference_low", "difference_high", "p", "p_holm")
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["arm", "complete_seeds", "seeds", name, f"{name}_low", f"{name}_high", *compared, *SPENT])
    for arm in analysis.arms:
        one = analysis.comparison(arm.label)
        tested = [one.estimate, *_limits(one.interval), one.p, one.p_adjusted] if one is not None else [None] * 5
        seeds = [len(arm.scores), max(wanted.count(arm.label), len(arm.scores))]
        costs = [arm.costs.get(key) for key in SPENT]
        writer.writerow(map(cell, [arm.label, *seeds, arm.mean, *_limits(arm.interval), *tested, *costs]))
    return table.getvalue()


def arm_means(analysis: Analysis) -> list[dict[str, Any]]:
    """Mean and interval of each arm: of the outcome as in the report, of the other numbers Student's over seeds."""
    rows = []
    for arm in analysis.arms:
        complete = [t for t in analysis.record.trials if t.arm == arm.label and t.seed in arm.scores]
        numbers = {key: [t.summary[key] for t in complete if key in t.summary] for key in SPENT}
        found = {analysis.outcome.name: (len(arm.scores), arm.mean, arm.interval)} if arm.scores else {}
        for key, values in numbers.items():
            if values:
                found[key] = (len(values), float(np.mean(values)), t_interval(values))
        for metric, (seeds, mean, interval) in found.items():
            low, high = _limits(interval)
            rows.append({"arm": arm.label, "metric": metric, "seeds": seeds, "mean": mean, "low": low, "high": high})
    return rows


def data_uri(table: str) -> str:
    """The table as an address that holds it, so that a page sent alone still has it."""
    return f"data:text/csv;charset=utf-8;base64,{b64encode(table.encode()).decode()}"


def _limits(interval: Interval | None) -> list[float | None]:
    return [None, None] if interval is None else [interval.low, interval.high]
