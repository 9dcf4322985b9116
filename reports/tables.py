"""Decides what the page's main table holds as a file, and how a cell of any table is written."""

import csv
import io
import math
from base64 import b64encode
from typing import Any

from cohort.reports.analysis import Analysis
from cohort.reports.statistics import Interval
from cohort.reports.trials import wanted_pairs

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
    spent = ("accuracy_initial", "accuracy_final", "generated_tokens", "seconds", "peak_memory_bytes")
    compared = ("difference", "difference_low", "difference_high", "p", "p_holm")
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["arm", "complete_seeds", "seeds", name, f"{name}_low", f"{name}_high", *compared, *spent])
    for arm in analysis.arms:
        one = analysis.comparison(arm.label)
        tested = [one.estimate, *_limits(one.interval), one.p, one.p_adjusted] if one is not None else [None] * 5
        seeds = [len(arm.scores), max(wanted.count(arm.label), len(arm.scores))]
        costs = [arm.costs.get(key) for key in spent]
        writer.writerow(map(cell, [arm.label, *seeds, arm.mean, *_limits(arm.interval), *tested, *costs]))
    return table.getvalue()


def data_uri(table: str) -> str:
    """The table as an address that holds it, so that a page sent alone still has it."""
    return f"data:text/csv;charset=utf-8;base64,{b64encode(table.encode()).decode()}"


def _limits(interval: Interval | None) -> list[float | None]:
    return [None, None] if interval is None else [interval.low, interval.high]
