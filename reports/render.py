"""Writes a report: one self-contained HTML page, Markdown, tables as CSV and LaTeX, and the figures.

The page needs no script and no network: styles and figures are inline, and its content security policy forbids the
rest. The template engine escapes all text of models, study files and error messages. Before that, characters that a
page must not carry (control characters, bidirectional overrides, lone surrogates) are written as visible escapes.
"""

import csv
import dataclasses
import io
import math
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ..harness.base.files import write_text
from ..harness.base.words import in_markdown
from ..harness.data import SampleRow
from ..harness.record.study import ExploratoryArm, StudyRecord, TrialRecord
from .analysis import ACCURACIES, BOOTSTRAP_SEED, Analysis, accuracy_order, analysed
from .capability import Capabilities, capabilities
from .claims import check_claims
from .figures.style import FORMATS, color_of, write_files
from .join import JoinedStudy
from .page import page_drawings, page_values
from .prose.wording import shorten
from .section import sections
from .statistics import Interval
from .tables import FLOPS, comparison, table
from .trials import score, setting, wanted_pairs

CAPABILITY = "capability.csv"  # every k of every curve of pass@k
_REACHED = ("accuracy_initial", "accuracy_final", "test_accuracy")
_SPENT = ("rollouts", "generated_tokens", "optimizer_steps", "seconds", "peak_memory_bytes")
_PER_ARM = ("accuracy_initial", "accuracy_final", "generated_tokens", "seconds", "peak_memory_bytes")
_LEDGER = (*(f"flops_{name}" for name in FLOPS), "learner_peak_bytes", "core_seconds", "gpu_seconds")  # where known
COLUMNS = ("study", "trial", "arm", "seed", "state", "algorithm", "task", *_REACHED, *_SPENT)

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$",
    "|": "$|$", **{character: f"\\{character}" for character in "&%$#_{}"},
}  # fmt: skip

_TEMPLATES = Path(__file__).parent / "templates"
_JINJA: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


@dataclass(frozen=True)
class ReportFiles:
    """The files of a report, and its answer in one sentence."""

    html: Path
    csv: Path
    markdown: Path
    answer: str
    colors: dict[str, str]  # of each arm in the figures


def write_report(record: StudyRecord, folder: Path, formats: Sequence[str] = FORMATS) -> ReportFiles:
    """Write the report of a study, finished or not, into `folder`, with its figures also as files of `formats`.

    Equal records give equal files.
    """
    record = visible(record)
    analysis = analysed(record)
    folder.mkdir(parents=True, exist_ok=True)
    capable, extra, claims = capabilities(analysis), sections(analysis), check_claims(analysis)
    drawings = page_drawings(analysis, capable, extra, claims)
    values: dict[str, Any] = {
        **page_values(analysis, drawings, capable, extra, claims),
        "bootstrap_seed": BOOTSTRAP_SEED,
        "comparison_csv": b64encode(csv_text(*comparison_table(analysis)).encode()).decode(),
        "files": ["results.csv", *([CAPABILITY] if capable is not None else [])],
    }
    files = ReportFiles(
        folder / "index.html", folder / "results.csv", folder / "report.md", values["answer"],
        {arm.label: color_of(analysis, arm.label) for arm in analysis.arms},
    )  # fmt: skip
    markdown = Environment(
        autoescape=False, keep_trailing_newline=True, loader=FileSystemLoader(_TEMPLATES), **_JINJA,
        finalize=lambda value: value if isinstance(value, _Raw) else in_markdown(value),
    )  # fmt: skip
    markdown.filters |= {"shorten": shorten, "fenced": _fenced, "raw": _Raw, "sentence": str}
    write_text(files.html, _formed(html_environment(), "parts.html", Markup, values), sync=False)
    write_text(files.markdown, _formed(markdown, "parts.md", _Raw, values), sync=False)
    write_text(files.csv, results_csv(record), sync=False)
    (folder / CAPABILITY).unlink(missing_ok=True)
    if capable is not None:
        write_text(folder / CAPABILITY, capability_csv(capable), sync=False)
    for one in extra:
        if one.write is not None:
            one.write(folder)
    write_files([drawing for group in drawings.values() for drawing in group], folder / "figures", formats)
    return files


def _formed(environment: Environment, parts: str, kind: type[str], values: Mapping[str, Any]) -> str:
    """The content of a report in the form that the macros of `parts` give it."""
    values = {**values, "contents": {}}  # id -> title of each section, in order, as they are written
    macros = vars(environment.get_template(parts).make_module(values)).items()
    own = {name: lambda *a, m=m, **named: kind(m(*a, **named)) for name, m in macros if not name.startswith("_")}
    return environment.get_template("report.jinja").render({**values, **own, "own": own})


@cache
def html_environment(*folders: Path) -> Environment:
    """The templates of pages, which escape all text: of these folders, then of reports."""
    html = Environment(autoescape=True, loader=FileSystemLoader([*folders, _TEMPLATES]), **_JINJA)
    html.filters |= {"shorten": shorten, "typeset": _typeset, "sentence": _mark_limits, "raw": escape}
    html.globals["table_of"] = table
    return html


def results_csv(record: StudyRecord) -> str:
    """`results_table` as a file; a text cell that a spreadsheet would run as a formula starts with an apostrophe."""
    return csv_text(*results_table(record))


def results_table(record: StudyRecord) -> tuple[list[str], list[list[Any]]]:
    """Columns, and one row per trial, whatever its state; a number that a trial did not reach is None."""
    known = tuple(name for name in _LEDGER if any(name in trial.summary for trial in record.trials))
    columns = (*COLUMNS, *known)
    of_arms = [path for overrides in (record.spec.get("arms") or {}).values() for path in overrides]
    named = [*(name for trial in record.trials for name in trial.factors), *of_arms]
    factors = [name for name in dict.fromkeys(named) if name not in columns]
    logged = {name for trial in record.trials for name in trial.history if ACCURACIES.fullmatch(name)}
    accuracies = sorted(logged - {"test/accuracy"}, key=accuracy_order)
    studies = record.studies if isinstance(record, JoinedStudy) else {}
    rows = []
    for trial in record.trials:
        fixed = {"study": studies.get(trial.arm, record.name)}
        fixed |= {name: getattr(trial, name) for name in ("trial", "arm", "seed", "state")}
        fixed |= {part: setting(trial.spec, f"{part}.name") for part in ("algorithm", "task")}
        values = [fixed.get(name, trial.summary.get(name)) for name in columns]
        values += [trial.factors.get(name, _varied(trial, name)) for name in factors]
        values += [score(trial, name) for name in accuracies]
        rows.append(values)
    return [*columns, *factors, *accuracies], rows


def _varied(trial: TrialRecord, path: str) -> Any:
    """The value of a setting that arms vary; a reward's is its weight, a plugin's its name."""
    value = setting(trial.spec, path)
    return value.get("weight", value.get("name")) if isinstance(value, Mapping) else value


def comparison_table(analysis: Analysis) -> tuple[list[str], list[list[Any]]]:
    """Columns, and one row per arm of the comparison, its numbers in full; unknown ones are NaN or None."""
    name, wanted = analysis.outcome.name, [label for label, _ in wanted_pairs(analysis.record)]
    compared = ("difference", "difference_low", "difference_high", "p", "p_holm")
    columns = ["arm", "complete_seeds", "seeds", name, f"{name}_low", f"{name}_high", *compared, *_PER_ARM]
    rows = []
    for arm in analysis.arms:
        one = analysis.comparison(arm.label)
        tested = [one.estimate, *_limits(one.interval), one.p, one.p_adjusted] if one is not None else [None] * 5
        seeds = [len(arm.scores), max(wanted.count(arm.label), len(arm.scores))]
        costs = [arm.costs.get(key) for key in _PER_ARM]
        rows.append([arm.label, *seeds, arm.mean, *_limits(arm.interval), *tested, *costs])
        if analysis.record.references:
            rows[-1].append(one and one.baseline.label)
    return [*columns, *(["minus"] if analysis.record.references else [])], rows


def comparison_latex(analysis: Analysis) -> str:
    """The page's main table without costs as LaTeX for a paper; it needs the package booktabs."""
    found = comparison(analysis, costs=False)
    rows = [[column.label for column in found.columns]]
    for row in found.rows:
        rows.append([" ".join(filter(None, [*cell.parts[0], cell.tag and f"({cell.tag})"])) for cell in row])
    lines = [" & ".join(map(latex, cells)) + r" \\" for cells in rows]
    return "\n".join([
        "% Mean over seeds [95 % interval]; difference to the baseline. Needs \\usepackage{booktabs}.",
        f"\\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}",
        *("\\toprule", lines[0], "\\midrule", *lines[1:], "\\bottomrule", "\\end{tabular}\n"),
    ])  # fmt: skip


def latex(text: str) -> str:
    """A text that LaTeX sets as it is: no character of it is a command. A minus before a number is a real one."""
    escaped = "".join(_LATEX.get(character, character) for character in " ".join(text.split()))
    opening = "{}" if escaped.startswith(("[", "*")) else ""  # which the end of the row before would take for its own
    return opening + re.sub(r"(?<![\w.,-])-(?=\d)", "$-$", escaped)


def capability_csv(found: Capabilities) -> str:
    """Every k of every curve, as a file."""
    rows = []
    for when, one in [*(("before", one) for one in found.before), *(("after", one) for one in found.after.values())]:
        seeds, problems = one.counts_SN.shape
        for k in range(1, one.num_samples + 1):
            interval = one.pass_at(k)
            limits = (math.nan, math.nan) if interval is None else (interval.low, interval.high)
            numbers = [float(f"{value:.6g}") for value in (float(one.passes(k).mean()), *limits)]
            rows.append([one.label, when, seeds, problems, k, *numbers])
    return csv_text(["policy", "when", "seeds", "problems", "k", "pass_at_k", "low", "high"], rows)


def cell(value: Any) -> Any:
    """A value for a table; text that a spreadsheet would run as a formula starts with an apostrophe."""
    if isinstance(value, float) and not math.isfinite(value):
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def csv_text(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table as a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(cell, row) for row in (columns, *rows))
    return text.getvalue()


def _limits(interval: Interval | None) -> list[float | None]:
    return [None, None] if interval is None else [interval.low, interval.high]


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


def _typeset(text: str) -> str:
    """A real minus sign before numbers, a thin space that does not break before units."""
    text = re.sub(r"(?<![\w.,-])-(?=\d)", "\u2212", text)
    text = re.sub(r"\bp ([=<]) (?=\d)", "p\u00a0\\1\u00a0", text)
    return re.sub(r"(?<=\d) (%|MiB|GiB|s|min|h)(?!\w)", "\u202f\\1", text)


def _mark_limits(text: str) -> Markup:
    """An escaped sentence whose intervals do not break and are less prominent than their estimates."""
    return Markup(re.sub(r"\[[\d.\u2212, +]+\]", r'<span class="limits">\g<0></span>', str(escape(_typeset(text)))))


class _Raw(str):
    """Markdown that needs no escaping."""


def _fenced(text: str) -> _Raw:
    """A code block whose fence is longer than any run of backticks in the text."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return _Raw(f"{fence}text\n{text}\n{fence}")
