"""Decides what a report shows and writes it: one self-contained HTML page, `results.csv`, Markdown and the figures.

The page needs no script and no network: styles and figures are inline, and its content security policy forbids the
rest. Everything that a model, a study file or an error message wrote is escaped by the template engine, after
characters that a page must not carry (control characters, bidirectional overrides, lone surrogates) were made visible.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from harness.types import SampleRow, StudyRecord, TrialRecord
from reports import figures, prose
from reports.analysis import PLANNED_DIFFERENCES, Analysis, ArmSummary, analyse, setting, wanted_pairs
from reports.claims import check_claims
from reports.figures import Drawing
from reports.join import JoinedStudy
from reports.statistics import SIMULATED_COVERAGE, Interval

BOOTSTRAP_SEED = 0
COLUMNS = (
    "study",
    "trial",
    "arm",
    "seed",
    "state",
    "algorithm",
    "task",
    "accuracy_initial",
    "accuracy_final",
    "test_accuracy",
    "rollouts",
    "generated_tokens",
    "optimizer_steps",
    "seconds",
    "peak_memory_bytes",
)

_TEMPLATES = Path(__file__).parent / "templates"
_MOST_PROMPTS, _MOST_ARMS, _MOST_CHARACTERS = 4, 4, 1600
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
# An interval such as [0.1, 2.3] is left readable; without "](" and "]:" it cannot become a link.
_MARKDOWN = re.compile(r"[\\`*_{}#|!~$]|\[(?![-+.\d]+, [-+.\d]+\])|(?<=\])[(:\[]")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class ReportFiles:
    """Where a report was written, and its answer in one sentence."""

    html: Path
    csv: Path
    markdown: Path
    answer: str


def write_report(record: StudyRecord, folder: Path, formats: Sequence[str] = figures.FORMATS) -> ReportFiles:
    """The report of a study, finished or not, in `folder`, its figures as files of `formats` besides those in the page.

    Equal records give equal files.
    """
    record = visible(record)
    analysis = analyse(record, np.random.default_rng(BOOTSTRAP_SEED))
    drawings = _drawings(analysis)
    folder.mkdir(parents=True, exist_ok=True)
    context = _context(analysis, drawings)
    files = ReportFiles(folder / "index.html", folder / "results.csv", folder / "report.md", context["answer"])
    files.html.write_text(_html().get_template("report.html").render(context), encoding="utf-8")
    files.markdown.write_text(_markdown().get_template("report.md").render(context), encoding="utf-8")
    files.csv.write_text(results_csv(record), encoding="utf-8", newline="")
    figures.write_files([drawing for group in drawings.values() for drawing in group], folder / "figures", formats)
    return files


def results_csv(record: StudyRecord) -> str:
    """One row per trial, whatever its state; numbers that a trial did not reach are empty.

    A text cell that a spreadsheet would run as a formula starts with an apostrophe.
    """
    factors = list(dict.fromkeys(name for trial in record.trials for name in trial.factors if name not in COLUMNS))
    studies = record.studies if isinstance(record, JoinedStudy) else {}
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow([*COLUMNS, *map(_cell, factors)])
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
        row = [
            *(fixed.get(name, trial.summary.get(name)) for name in COLUMNS),
            *(trial.factors.get(f) for f in factors),
        ]
        writer.writerow([_cell(value) for value in row])
    return table.getvalue()


def visible(value: Any) -> Any:
    """The same text, mapping, sequence or record with unprintable characters written as escapes.

    Mappings and sequences of numbers are returned as they are.
    """
    if isinstance(value, str):
        return _UNPRINTABLE.sub(lambda match: match.group().encode("unicode_escape").decode(), value)
    if isinstance(value, StudyRecord | TrialRecord | SampleRow):
        names = [field.name for field in dataclasses.fields(value) if field.name != "history"]
        return dataclasses.replace(value, **{name: visible(getattr(value, name)) for name in names})
    if isinstance(value, Mapping):
        return {visible(key): visible(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [visible(item) for item in value]
    return value


def _cell(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _drawings(analysis: Analysis) -> dict[str, list[Drawing]]:
    """Section of the page -> its figures, only those that the record can fill."""
    outcome = [figures.final_accuracy(analysis), figures.differences(analysis)]
    outcome = [drawing for drawing in outcome if drawing is not None]
    maps = figures.heat_maps(analysis)
    num_top = 2 if not maps else 1 if len(maps) == 1 else 0  # of the outcome beside the heat maps
    return {
        "top": [*maps, *outcome[:num_top]],
        "outcome": outcome[num_top:],
        "curves": figures.learning_curves(analysis),
        "interactions": figures.interactions(analysis),
        "importance": figures.importances(analysis),
        "cost": figures.cost_against_accuracy(analysis),
        "labels": figures.label_quality(analysis),
        "dynamics": figures.dynamics(analysis),
    }


def _context(analysis: Analysis, drawings: Mapping[str, Sequence[Drawing]]) -> dict[str, Any]:
    record = analysis.record
    return {
        "record": record,
        "analysis": analysis,
        "answer": prose.answer(analysis),
        "facts": _facts(analysis),
        "drawings": {name: [_shown(drawing) for drawing in group] for name, group in drawings.items()},
        "rows": [_row(arm, analysis) for arm in analysis.arms],
        "details": [_detail(arm, analysis) for arm in analysis.arms if arm.scores],
        "effects": _effects(analysis),
        "outcome": analysis.outcome.label,
        "search": _search(analysis),
        "claims": check_claims(analysis),
        "planned": [f"{100 * size:g}" for size in PLANNED_DIFFERENCES],
        "unit": " (%)" if analysis.outcome.is_fraction else "",
        "method": prose.interval_method(analysis),
        "reading": prose.interval_reading(analysis),
        "notes": prose.notes(analysis),
        "coverage": SIMULATED_COVERAGE,
        "rollouts": _rollouts(analysis),
        "gaps": analysis.gaps,
        "complete": analysis.num_complete,
        "expected": max(record.expected, analysis.num_complete),
        "spec_yaml": yaml.safe_dump(_plain(record.spec), sort_keys=False, allow_unicode=True, width=100).strip(),
        "bootstrap_seed": BOOTSTRAP_SEED,
    }


def _facts(analysis: Analysis) -> list[str]:
    """The study at a glance: progress, arms, seeds, task and model."""
    record = analysis.record
    specs = [trial.spec for trial in record.trials]
    tasks = dict.fromkeys(str(setting(spec, "task.name", "?")) for spec in specs)
    models = dict.fromkeys(str(setting(spec, "model", "?")) for spec in specs)
    facts = [
        f"{analysis.num_complete} of {max(record.expected, analysis.num_complete)} trials complete",
        prose.plural(len(analysis.arms), "arm"),
        f"seeds {', '.join(map(str, record.seeds))}",
    ]
    facts += [f"task {', '.join(tasks)}"] if tasks else []
    return facts + ([f"model {', '.join(models)}"] if models else [])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _search(analysis: Analysis) -> dict[str, Any] | None:
    """What a search did, as text: its objectives, and every arm with parameters, values and state."""
    search = analysis.record.search
    if search is None:
        return None
    if "tuning" in search:  # a comparison tuned each algorithm by a search of its own; the page does not list them
        return {"objectives": [analysis.record.metric], "rows": [], "several": False}
    objectives = list(search["objectives"])
    rows = [
        {
            "label": arm["label"],
            "parameters": ", ".join(f"{key} = {_short(value)}" for key, value in arm["parameters"].items()),
            "values": [prose.number(arm["values"].get(name, math.nan), name) for name in objectives],
            "state": arm["state"],
            "is_pareto": arm["label"] in search["pareto"],
        }
        for arm in search["arms"]
    ]
    return {"objectives": objectives, "rows": rows, "several": len(objectives) > 1}


def _shown(drawing: Drawing) -> dict[str, Any]:
    return {"name": drawing.name, "title": drawing.title, "caption": drawing.caption, "svg": Markup(drawing.svg)}


def _row(arm: ArmSummary, analysis: Analysis) -> dict[str, Any]:
    """One row of the comparison table, as text."""
    metric = analysis.outcome.name
    comparison = analysis.comparison(arm.label)
    costs = arm.costs
    wanted = sum(label == arm.label for label, _ in wanted_pairs(analysis.record))
    return {
        "label": arm.label,
        "color": figures.arm_colors(analysis)[arm.label],
        "is_baseline": arm.is_baseline,
        "seeds": f"{len(arm.scores)}/{max(wanted, len(arm.scores))}",
        "initial": prose.number(costs.get("accuracy_initial", math.nan), "accuracy"),
        "final": prose.number(costs.get("accuracy_final", math.nan), "accuracy"),
        "outcome": prose.number(arm.mean, metric),
        "limits": prose.limits(arm.interval, metric),
        "bootstrap": prose.limits(arm.bootstrap, metric),
        "difference": prose.number(comparison.estimate, metric, signed=True) if comparison else "",
        "difference_limits": prose.limits(comparison.interval, metric, signed=True) if comparison else "",
        "p": prose.p_value(comparison.p_adjusted) if comparison else "",
        "is_detected": comparison is not None and comparison.is_detected,
        "tokens": prose.quantity(costs.get("generated_tokens")),
        "seconds": prose.duration(costs.get("seconds")),
        "memory": prose.size(costs.get("peak_memory_bytes")),
    }


def _detail(arm: ArmSummary, analysis: Analysis) -> dict[str, Any]:
    """Every interval of an arm and everything known of its comparison, as text."""
    metric = analysis.outcome.name
    comparison = analysis.comparison(arm.label)

    def limits(interval: Interval | None, signed: bool = False) -> str:
        return prose.limits(interval, metric, signed) or "n/a"

    shown: dict[str, Any] = {
        "label": arm.label,
        "mean": prose.number(arm.mean, metric),
        "interquartile_mean": prose.number(arm.interquartile_mean, metric),
        "crossed": limits(arm.interval),
        "student": limits(arm.student),
        "bootstrap": limits(arm.bootstrap),
        "crossed_bootstrap": limits(arm.crossed_bootstrap),
        "comparison": None,
    }
    if comparison is not None:
        needed = comparison.seeds_needed
        testable = not math.isnan(comparison.detectable)
        shown["comparison"] = {
            "difference": prose.number(comparison.estimate, metric, signed=True),
            "student": limits(comparison.student, True),
            "bootstrap": limits(comparison.bootstrap, True),
            "crossed_bootstrap": limits(comparison.crossed_bootstrap, True),
            "p": prose.p_value(comparison.p),
            "p_adjusted": prose.p_value(comparison.p_adjusted),
            "sign_flip_p": prose.p_value(comparison.sign_flip_p),
            "improvement": f"{100 * comparison.improvement.estimate:.0f}",
            "improvement_limits": f"[{100 * comparison.improvement.low:.0f}, {100 * comparison.improvement.high:.0f}]",
            "mcnemar": f"{comparison.mcnemar.only_arm} / {comparison.mcnemar.only_baseline}"
            if comparison.mcnemar
            else "n/a",
            "mcnemar_p": prose.p_value(comparison.mcnemar.p if comparison.mcnemar else math.nan),
            "detectable": prose.points(comparison.detectable, metric) if testable else "n/a",
            "seeds_needed": _seeds(needed) if testable else "n/a",
            "seeds_for": [_seeds(count) for count in comparison.seeds_for.values()]
            or ["n/a"] * len(PLANNED_DIFFERENCES),
        }
    return shown


def _seeds(count: int | None) -> str:
    return "> 200" if count is None else str(count)


def _effects(analysis: Analysis) -> list[dict[str, str]]:
    if analysis.grid is None:
        return []
    return [
        {
            "name": prose.factor_title(effect.factors),
            "df": str(effect.df),
            "f": f"{effect.f:.3g}",
            "p": prose.p_value(effect.p),
            "p_adjusted": prose.p_value(effect.p_adjusted),
            "size": f"{effect.partial_omega_squared:.2f}",
        }
        for effect in analysis.grid.effects
    ]


def _rollouts(analysis: Analysis) -> dict[str, Any]:
    """The same few prompts answered by the arms side by side, from each arm's first seed with samples."""
    sources = {arm.label: trial for arm in analysis.arms if (trial := _sampled_trial(analysis.record, arm.label))}
    chosen = _chosen_arms(analysis, list(sources))
    latest = {label: _latest(sources[label].samples) for label in chosen}
    prompts = dict.fromkeys(key for rows in latest.values() for key in rows)
    order = {"test": 0, "validation": 1, "train": 2}

    def interest(key: tuple[str, str]) -> tuple[int, int, bool]:
        shown = [rows[key] for rows in latest.values() if key in rows]
        return (-len(shown), order[key[0]], len({row.correct for row in shown}) == 1)

    groups = []
    for key in sorted(prompts, key=interest)[:_MOST_PROMPTS]:
        answers = [_answer(label, rows.get(key), analysis) for label, rows in latest.items()]
        first = next(rows[key] for rows in latest.values() if key in rows)
        groups.append({"prompt": _shorten(first.prompt), "gold": first.gold, "split": key[0], "answers": answers})
    return {
        "groups": groups,
        "omitted_arms": len(sources) - len(chosen),
        "seeds": ", ".join(f"{label}: seed {sources[label].seed}" for label in chosen),
    }


def _sampled_trial(record: StudyRecord, label: str) -> TrialRecord | None:
    trials = [trial for trial in record.trials if trial.arm == label and trial.samples]
    trials.sort(key=lambda trial: (trial.state != "complete", trial.seed))
    return trials[0] if trials else None


def _chosen_arms(analysis: Analysis, labels: list[str]) -> list[str]:
    """At most four arms: the baseline, the highest, the lowest, then the study's order."""
    if len(labels) <= _MOST_ARMS:
        return labels
    ranked = [arm.label for arm in sorted(analysis.finished_arms, key=lambda arm: arm.mean, reverse=True)]
    wanted = [analysis.record.baseline, *ranked[:1], *ranked[-1:], *labels]
    return [label for label in dict.fromkeys(wanted) if label in labels][:_MOST_ARMS]


def _latest(samples: Sequence[SampleRow]) -> dict[tuple[str, str], SampleRow]:
    """(split, prompt id) -> the first rollout of the last step at which it was sampled."""
    found: dict[tuple[str, str], SampleRow] = {}
    for row in samples:
        key = (row.split, row.prompt_id)
        if key not in found or row.step > found[key].step:
            found[key] = row
    return found


def _answer(label: str, row: SampleRow | None, analysis: Analysis) -> dict[str, Any]:
    color = figures.arm_colors(analysis)[label]
    if row is None:
        return {"label": label, "color": color, "row": None}
    facts = [
        f"answer {row.answer}" if row.answer is not None else "no answer found",
        prose.plural(row.num_tokens, "token"),
        "cut off by the token limit" if row.finish_reason == "length" else "stopped by itself",
        f"step {row.step}",
    ]
    if row.reward is not None:
        facts.insert(1, f"reward {row.reward:.3g}")
    return {"label": label, "color": color, "row": row, "text": _shorten(row.completion), "facts": facts}


def _shorten(text: str) -> str:
    rest = len(text) - _MOST_CHARACTERS
    return text if rest <= 0 else f"{text[:_MOST_CHARACTERS]} ... ({rest} more characters)"


def _plain(value: Any) -> Any:
    """Only the types that YAML writes without tags."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _html() -> Environment:
    loader = FileSystemLoader(_TEMPLATES)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"typeset": _typeset, "sentence": _mark_limits, "p_value": prose.p_value}
    return environment


def _typeset(text: str) -> str:
    """A real minus sign before numbers, a thin space that does not break before units."""
    text = re.sub(r"(?<![\w.,-])-(?=\d)", "\u2212", text)
    text = re.sub(r"\bp ([=<]) (?=\d)", "p\u00a0\\1\u00a0", text)
    return re.sub(r"(?<=\d) (%|MiB|GiB|s|min|h)(?!\w)", "\u202f\\1", text)


def _mark_limits(text: str) -> Markup:
    """A sentence, escaped, whose intervals do not break and stand back behind their estimates."""
    safe = str(escape(_typeset(text)))
    return Markup(re.sub(r"\[[\d.\u2212, +]+\]", r'<span class="limits">\g<0></span>', safe))


def _markdown() -> Environment:
    """Every value is escaped for Markdown unless the template fences it as code."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, _Raw) else _escape_markdown(str(value)),
    )
    environment.filters |= {"fenced": _fenced, "raw": _Raw, "p_value": prose.p_value}
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
