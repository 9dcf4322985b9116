"""Writes the page's main table as a file or for a paper, and the cells of any table."""

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .analysis import Analysis
from .prose import wording
from .statistics import Interval, t_interval
from .trials import wanted_pairs

SPENT = ("accuracy_initial", "accuracy_final", "generated_tokens", "seconds", "peak_memory_bytes")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$",
    "|": "$|$", **{character: f"\\{character}" for character in "&%$#_{}"},
}  # fmt: skip


def cell(value: Any) -> Any:
    """A value for a table; text that a spreadsheet would run as a formula starts with an apostrophe."""
    if isinstance(value, float) and not math.isfinite(value):
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def csv_text(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table as a CSV file."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    for row in (columns, *rows):
        writer.writerow(map(cell, row))
    return table.getvalue()


def comparison_table(analysis: Analysis) -> tuple[list[str], list[list[Any]]]:
    """Columns, and one row per arm of the comparison, its numbers in full; those that are not known are NaN or None."""
    name, wanted = analysis.outcome.name, [label for label, _ in wanted_pairs(analysis.record)]
    compared = ("difference", "difference_low", "difference_high", "p", "p_holm")
    columns = ["arm", "complete_seeds", "seeds", name, f"{name}_low", f"{name}_high", *compared, *SPENT]
    rows = []
    for arm in analysis.arms:
        one = analysis.comparison(arm.label)
        tested = [one.estimate, *_limits(one.interval), one.p, one.p_adjusted] if one is not None else [None] * 5
        seeds = [len(arm.scores), max(wanted.count(arm.label), len(arm.scores))]
        costs = [arm.costs.get(key) for key in SPENT]
        rows.append([arm.label, *seeds, arm.mean, *_limits(arm.interval), *tested, *costs])
    return columns, rows


def comparison_latex(analysis: Analysis) -> str:
    """The page's main table as LaTeX for a paper, rounded as on the page; it needs the package booktabs."""
    metric, compared = analysis.outcome.name, bool(analysis.comparisons)
    outcome = f"{wording.capitalised(analysis.outcome.label)}{' (%)' if analysis.outcome.is_fraction else ''}"
    rows = [["Arm", "Seeds", outcome, *(("Difference", "p (Holm)") if compared else ())]]
    for arm in analysis.arms:
        cells = [arm.label, str(len(arm.scores)), _with_limits(arm.mean, arm.interval, metric)]
        if (one := analysis.comparison(arm.label)) is not None:
            cells += [_with_limits(one.estimate, one.interval, metric, signed=True), wording.p_value(one.p_adjusted)]
        elif compared:
            cells += ["baseline" if arm.is_baseline else "", ""]
        rows.append(cells)
    head, *body = (" & ".join(map(latex, cells)) + r" \\" for cells in rows)
    lines = [
        "% Mean over seeds [95 % interval]; difference to the baseline, seed by seed. Needs \\usepackage{booktabs}.",
        f"\\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}",
        "\\toprule",
        head,
        "\\midrule",
        *body,
        "\\bottomrule",
        "\\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def latex(text: str) -> str:
    """A text that LaTeX sets as it is: no character of it is a command. A minus before a number is a real one."""
    one_line = " ".join(text.split())
    escaped = "".join(_LATEX.get(character, character) for character in one_line)
    opening = "{}" if escaped.startswith(("[", "*")) else ""  # which the end of the row before would take for its own
    return opening + re.sub(r"(?<![\w.,-])-(?=\d)", "$-$", escaped)


def _with_limits(value: float, interval: Interval | None, metric: str, signed: bool = False) -> str:
    return f"{wording.number(value, metric, signed)} {wording.limits(interval, metric, signed)}".strip()


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


def _limits(interval: Interval | None) -> list[float | None]:
    return [None, None] if interval is None else [interval.low, interval.high]
