"""Writes a report: one self-contained HTML page, `results.csv`, Markdown and the figures.

The page needs no script and no network: styles and figures are inline, and its content security policy forbids the
rest. The template engine escapes all text of models, study files and error messages. Before that, characters that a
page must not carry (control characters, bidirectional overrides, lone surrogates) are written as visible escapes.
"""

import dataclasses
import math
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ..harness.data import SampleRow
from ..harness.record.study import ExploratoryArm, StudyRecord, TrialRecord
from .analysis import ACCURACIES, Analysis, accuracy_order, analyse
from .capability import capabilities, capability_csv
from .figures.style import FORMATS, color_of, write_files
from .join import JoinedStudy
from .page import FLOPS, page_drawings, page_values
from .prose import wording
from .scaling import scalings
from .tables import arm_means, comparison_table, csv_text
from .trials import score, setting

BOOTSTRAP_SEED = 0
CAPABILITY = "capability.csv"  # every k of every curve of pass@k
_REACHED = ("accuracy_initial", "accuracy_final", "test_accuracy")
_SPENT = ("rollouts", "generated_tokens", "optimizer_steps", "seconds", "peak_memory_bytes")
_LEDGER = (*(f"flops_{name}" for name in FLOPS), "core_seconds", "gpu_seconds")  # where known
COLUMNS = ("study", "trial", "arm", "seed", "state", "algorithm", "task", *_REACHED, *_SPENT)

_JINJA: dict[str, Any] = {
    "loader": FileSystemLoader(Path(__file__).parent / "templates"),
    "undefined": StrictUndefined,
    "trim_blocks": True,
    "lstrip_blocks": True,
}
_FILTERS: dict[str, Any] = {
    "p_value": wording.p_value,
    "factor_title": wording.factor_title,
    "number": lambda value, metric, signed=False: wording.number(math.nan if value is None else value, metric, signed),
    "limits": wording.limits,
    "estimate": lambda one, metric, signed=False: (
        wording.number(one.estimate if one is not None else math.nan, metric, signed),
        wording.limits(one, metric, signed),
    ),
    "quantity": wording.quantity,
    "duration": wording.duration,
    "size": wording.size,
    "cost": lambda value, key: (wording.operations if key.startswith("flops") else wording.hours)(value),
}
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
# An interval such as [0.1, 2.3] is left readable; without "](" and "]:" it cannot become a link.
_MARKDOWN = re.compile(r"[\\`*_{}#|!~$]|\[(?![-+.\d]+, [-+.\d]+\])|(?<=\])[(:\[]")


@dataclass(frozen=True)
class ReportFiles:
    """The files of a report, and its answer in one sentence."""

    html: Path
    csv: Path
    markdown: Path
    answer: str
    means: list[dict[str, Any]]  # of each arm and metric: arm, metric, seeds, mean, low, high
    colors: dict[str, str]  # of each arm in the figures


def write_report(record: StudyRecord, folder: Path, formats: Sequence[str] = FORMATS) -> ReportFiles:
    """Write the report of a study, finished or not, into `folder`, with its figures also as files of `formats`.

    Equal records give equal files.
    """
    record = visible(record)
    analysis = analysed(record)
    capable, scaled = capabilities(analysis), scalings(analysis)
    drawings = page_drawings(analysis, capable, scaled)
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {
        **page_values(analysis, drawings, capable, scaled),
        "bootstrap_seed": BOOTSTRAP_SEED,
        "comparison_csv": b64encode(csv_text(*comparison_table(analysis)).encode()).decode(),
        "tables": ["results.csv", *([CAPABILITY] if capable is not None else [])],
    }
    files = ReportFiles(
        folder / "index.html", folder / "results.csv", folder / "report.md", values["answer"], arm_means(analysis),
        {arm.label: color_of(analysis, arm.label) for arm in analysis.arms},
    )  # fmt: skip
    _replace(files.html, _html().get_template("report.html").render(values))
    _replace(files.markdown, _markdown().get_template("report.md").render(values))
    _replace(files.csv, results_csv(record))
    (folder / CAPABILITY).unlink(missing_ok=True)
    if capable is not None:
        _replace(folder / CAPABILITY, capability_csv(capable))
    write_files([drawing for group in drawings.values() for drawing in group], folder / "figures", formats)
    return files


def analysed(record: StudyRecord) -> Analysis:
    """The analysis of a study, its bootstrap drawn with the seed that the page states."""
    return analyse(record, np.random.default_rng(BOOTSTRAP_SEED))


def results_csv(record: StudyRecord) -> str:
    """`results_table` as a file; a text cell that a spreadsheet would run as a formula starts with an apostrophe."""
    return csv_text(*results_table(record))


def results_table(record: StudyRecord) -> tuple[list[str], list[list[Any]]]:
    """Columns, and one row per trial, whatever its state; a number that a trial did not reach is None.

    If the first seeds decide the number of seeds, each row has its stage, half_width and at_most.
    """
    staged = ("stage", "half_width", "at_most") if record.two_stage is not None else ()
    known = tuple(name for name in _LEDGER if any(name in trial.summary for trial in record.trials))
    columns = (*COLUMNS, *known, *staged)
    factors = list(dict.fromkeys(name for trial in record.trials for name in trial.factors if name not in columns))
    logged = {name for trial in record.trials for name in trial.history if ACCURACIES.fullmatch(name)}
    accuracies = sorted(logged - {"test/accuracy"}, key=accuracy_order)
    studies = record.studies if isinstance(record, JoinedStudy) else {}
    rows = []
    for trial in record.trials:
        fixed = {
            "study": studies.get(trial.arm, record.name),
            "trial": trial.trial,
            "arm": trial.arm,
            "seed": trial.seed,
            "state": trial.state,
            "algorithm": setting(trial.spec, "algorithm.name"),
            "task": setting(trial.spec, "task.name"),
        }
        if record.two_stage is not None:
            stage = 1 if trial.seed < record.two_stage["first"] else 2
            fixed |= {"stage": stage, **{name: record.two_stage[name] for name in staged[1:]}}
        values = [fixed.get(name, trial.summary.get(name)) for name in columns]
        values += [trial.factors.get(name) for name in factors]
        values += [score(trial, name) for name in accuracies]
        rows.append(values)
    return [*columns, *factors, *accuracies], rows


def visible(value: Any) -> Any:
    """The same text, mapping, sequence or record with unprintable characters written as escapes."""
    if isinstance(value, str):
        return _UNPRINTABLE.sub(lambda match: match.group().encode("unicode_escape").decode(), value)
    if isinstance(value, StudyRecord | TrialRecord | SampleRow | ExploratoryArm):
        names = [field.name for field in dataclasses.fields(value) if field.name != "history"]
        return dataclasses.replace(value, **{name: visible(getattr(value, name)) for name in names})
    if isinstance(value, Mapping):
        return {visible(key): visible(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [visible(item) for item in value]
    return value


def _replace(file: Path, text: str) -> None:
    """Write a file that a browser may be reading."""
    partial = file.with_name(f".{file.name}")
    partial.write_text(text, encoding="utf-8", newline="")
    partial.replace(file)


def _html() -> Environment:
    environment = Environment(autoescape=True, **_JINJA)
    environment.filters |= {**_FILTERS, "typeset": _typeset, "sentence": _mark_limits}
    return environment


def _typeset(text: str) -> str:
    """A real minus sign before numbers, a thin space that does not break before units."""
    text = re.sub(r"(?<![\w.,-])-(?=\d)", "\u2212", text)
    text = re.sub(r"\bp ([=<]) (?=\d)", "p\u00a0\\1\u00a0", text)
    return re.sub(r"(?<=\d) (%|MiB|GiB|s|min|h)(?!\w)", "\u202f\\1", text)


def _mark_limits(text: str) -> Markup:
    """An escaped sentence whose intervals do not break and are less prominent than their estimates."""
    safe = str(escape(_typeset(text)))
    return Markup(re.sub(r"\[[\d.\u2212, +]+\]", r'<span class="limits">\g<0></span>', safe))


def _markdown() -> Environment:
    """Every value is escaped for Markdown unless the template fences it as code."""
    environment = Environment(
        autoescape=False,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, _Raw) else _escape_markdown(str(value)),
        **_JINJA,
    )
    environment.filters |= {**_FILTERS, "fenced": _fenced, "raw": _Raw}
    return environment


class _Raw(str):
    """Markdown that needs no escaping."""


def _escape_markdown(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _MARKDOWN.sub(r"\\\g<0>", text)
    return " ".join(text.split("\n"))


def _fenced(text: str) -> _Raw:
    """A code block whose fence is longer than any run of backticks in the text."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return _Raw(f"{fence}text\n{text}\n{fence}")
