"""Decides the content of a report: the numbers of every section as text, and its rollouts and figures."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import yaml

from ..harness.data import SampleRow
from ..harness.record.study import StudyRecord
from . import contamination
from .analysis import PLANNED_DIFFERENCES, Analysis, held_out_accuracies
from .capability import TAUS, Capabilities, table_sizes
from .claims import check_claims
from .figures import curves, outcome
from .figures.style import Drawing, color_of, roles
from .findings import MEANINGS, ranked_components, verdicts
from .prose import wording
from .prose.answer import answer, progress
from .prose.methods import methods
from .prose.notes import accuracies_reading, interval_method, interval_reading, notes
from .scaling import Scalings
from .statistics import SIMULATED_COVERAGE, Interval
from .suites import suite, suite_rows
from .trials import ArmSummary, is_imported, score, search_of, setting, tuning_of, wanted_pairs

_MOST_PROMPTS, _MOST_ARMS = 4, 4
FLOPS = {  # part of a run's operations -> its column
    "train": "Training", "sampling": "Sampling", "scoring": "Scoring", "learning": "Learning",
    "evaluation": "Evaluation", "cold_start": "Cold start",
}  # fmt: skip
_ACCURACY = {"test/accuracy": "mean of samples", "test/greedy_accuracy": "greedy"}


def page_drawings(
    analysis: Analysis, capable: Capabilities | None, scaled: Scalings | None
) -> dict[str, list[Drawing]]:
    """Section of the page -> its figures, only those that the record can fill."""
    outcomes = outcome.estimates(analysis)
    maps = outcome.heat_maps(analysis) + outcome.importances(analysis)
    num_top = max(2 - len(maps), 0)  # of the outcome beside the heat maps or the importances
    return {
        "top": [*maps, *outcomes[:num_top]],
        "outcome": outcomes[num_top:] + outcome.difficulty_maps(analysis),
        "curves": curves.learning_curves(analysis),
        "capability": curves.capability_curves(analysis, capable),
        "scaling": curves.scaling_curves(analysis, scaled),
        "slices": outcome.slices(analysis),
        "interactions": outcome.interactions(analysis),
        "dynamics": curves.dynamics(analysis),
        "claims": outcome.claims(check_claims(analysis)),
    }


def page_values(
    analysis: Analysis,
    drawings: Mapping[str, Sequence[Drawing]],
    capable: Capabilities | None,
    scaled: Scalings | None,
) -> dict[str, Any]:
    """The values that the templates read."""
    record = analysis.record
    seeds = f"{'seed' if len(record.seeds) == 1 else 'seeds'} {', '.join(map(str, record.seeds))}"
    facts = [progress(analysis), wording.plural(len(analysis.arms), "arm"), seeds]
    if analysis.controls:
        facts.append(wording.plural(len(analysis.controls), "control arm"))
    for name, path in (("task", "task.name"), ("model", "model")) if record.trials else ():
        facts.append(f"{name} {', '.join(dict.fromkeys(str(setting(t.spec, path, 'unknown')) for t in record.trials))}")
    plans = {}  # arm -> its detectable difference, and the seeds needed for each planned one
    for one in analysis.comparisons:
        found = "n/a" if math.isnan(one.detectable) else wording.points(one.detectable, one.outcome.name)
        plans[one.arm] = [found, *(str(one.seeds_for.get(size, "n/a") or "> 200") for size in PLANNED_DIFFERENCES)]
    spec = json.loads(json.dumps(record.spec, default=str))  # only the types that YAML writes without tags
    return {
        "record": record,
        "answer": answer(analysis),
        "facts": facts,
        "drawings": drawings,
        "rows": [_row(arm, analysis) for arm in analysis.arms],
        "effects": analysis.grid.effects if analysis.grid is not None else [],
        "outcome": analysis.outcome.label,
        "scored": analysis.outcome.name,
        "plans": plans,
        "metric": wording.spoken(record.metric),
        "search": _search(analysis),
        "components": ranked_components(analysis),
        "controls": {"rows": _control_rows(analysis), "verdicts": verdicts(analysis)},
        "gaps": [*analysis.gaps, *(gap for control in analysis.controls for gap in control.gaps)],
        "exploratory": _exploratory(analysis),
        "probes": [contamination.summary(one) for one in record.probes],
        "probe_level": contamination.LEVEL,
        "costs": _costs(analysis),
        "accuracies": _accuracies(analysis, capable),
        "capability": _capability(capable),
        "scaling": _scaling(analysis, scaled),
        "accuracies_reading": accuracies_reading(analysis),
        "suite": suite_rows(suite(analysis), analysis),
        "claims": check_claims(analysis),
        "planned": [wording.plural(round(100 * size), "point") for size in PLANNED_DIFFERENCES],
        "unit": " (%)" if analysis.outcome.is_fraction else "",
        "method": interval_method(analysis),
        "reading": interval_reading(analysis),
        "notes": notes(analysis),
        "methods": methods(analysis),
        "is_imported": is_imported(record),
        "coverage": SIMULATED_COVERAGE,
        "rollouts": sampled_rollouts(analysis),
        "analysis": analysis,
        "threads": _threads(record),
        "spec_yaml": yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=100).strip(),
    }


def _threads(record: StudyRecord) -> str:
    """The trials' numbers of threads, needed to repeat them exactly; empty if unknown."""
    known = sorted({number for trial in record.trials for number in trial.threads})
    count = f"{' or '.join(known)} {'thread' if known == ['1'] else 'threads'}"
    changed = " (the number of workers changed)" if len(known) > 1 else ""
    return f"A trial had {count}{changed}; with another number its last bits differ." if known else ""


def _search(analysis: Analysis) -> dict[str, Any] | None:
    """A search as text: its objectives, and every arm with parameters, values and state."""
    search = analysis.record.search
    if search is None:
        return None
    tuning = tuning_of(analysis.record)
    searches = list(tuning.values()) or [search]
    objectives = list(searches[0]["objectives"])
    tag = "chosen" if tuning else "best" if len(objectives) == 1 else "front"
    rows = [
        {
            "label": arm["label"],
            "parameters": wording.settings(arm["parameters"], short_names=False),
            "values": [wording.number(arm["values"].get(name, math.nan), name) for name in objectives],
            "state": arm["state"],
            "tag": tag if arm["label"] in (one["pareto"] if tag == "front" else [one["best"]]) else "",
        }
        for one in searches
        for arm in one["arms"]
    ]
    units = [f"{wording.spoken(name)}{' (%)' if wording.is_fraction(name) else ''}" for name in objectives]
    return {"is_tuning": bool(tuning), "objectives": units, "rows": rows}


def _control_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """The control arms and then the others, each with its meaning and its complete seeds; empty without controls."""
    arms = [(MEANINGS.get(one.control, one.control), one.summary, len(one.gaps)) for one in analysis.controls]
    arms += [("", arm, sum(gap.arm == arm.label for gap in analysis.gaps)) for arm in analysis.arms if arms]
    return [
        {"arm": arm, "meaning": meaning, "seeds": f"{len(arm.scores)}/{len(arm.scores) + missing}"}
        for meaning, arm, missing in arms
    ]


def _exploratory(analysis: Analysis) -> list[dict[str, str]]:
    """Each clone as text; no other part of the report includes clones."""
    metric, rows = analysis.outcome.name, []
    for arm in analysis.record.exploratory:
        scores = [value for one in arm.trials if one.state == "complete" and (value := score(one, metric)) is not None]
        last = [value for one in arm.trials if (value := score(one, analysis.record.metric)) is not None]
        steps = sorted(set(arm.left_at.values()))
        rows.append({
            "label": f"{arm.label} (stopped)" if arm.label in analysis.record.stopped else arm.label,
            "parent": arm.parent,
            "changes": ", ".join(f"{path} = {value}" for path, value in arm.changes.items()) or "nothing",
            "left": " to ".join(map(str, dict.fromkeys([steps[0], steps[-1]]))) if any(steps) else "the beginning",
            "seeds": f"{sum(one.state == 'complete' for one in arm.trials)}/{len(arm.trials)}",
            "last": wording.number(fmean(last) if last else math.nan, analysis.record.metric),
            "outcome": wording.number(fmean(scores) if scores else math.nan, metric),
        })  # fmt: skip
    known = {*analysis.record.arms, *(arm.label for arm in analysis.record.exploratory)}
    nothing = dict.fromkeys(("parent", "changes", "left", "seeds", "last", "outcome"), "n/a")
    rows += [{**nothing, "label": f"{arm} (stopped before it began)"}
             for arm in analysis.record.stopped if arm not in known]  # fmt: skip
    return rows


def _costs(analysis: Analysis) -> dict[str, Any]:
    """The columns of costs that any arm has, key -> name, and the arms."""
    arms = [arm for arm in [*analysis.arms, *(control.summary for control in analysis.controls)] if arm.costs]
    columns = {f"flops_{name}": title for name, title in FLOPS.items()}
    columns |= {"core_seconds": "Core-hours", "gpu_seconds": "GPU-hours"}
    known = {key: name for key, name in columns.items() if any(key in arm.costs for arm in arms)}
    return {"names": known, "arms": arms if known else []}


def _capability(capable: Capabilities | None) -> dict[str, Any] | None:
    """pass@k, Cover@tau and crossings as text."""
    if capable is None:
        return None
    curves = [*((f"before training: {one.label}", one) for one in capable.before), *capable.after.items()]
    most = max(one.num_samples for one in capable.after.values())
    tables = []
    for names, read in (
        ({f"pass@{k}": k for k in table_sizes(most)}, lambda one, k: one.pass_at(k) if k <= one.num_samples else None),
        ({f"Cover@{tau:g}": tau for tau in TAUS}, lambda one, tau: one.cover_at(tau)),
    ):
        rows = [(label, [_texts(read(one, x), "accuracy") for x in names.values()]) for label, one in curves]
        tables.append({"names": list(names), "rows": rows})
    crossings = []
    for one in capable.crossovers:
        k, limits, reading = "none", "", f"no crossing up to k = {one.most}"
        if one.k is not None:
            k, limits = str(one.k), f"[{one.low or 1}, {one.high or f'> {one.most}'}]"
            unsure = [name for name, limit in ((one.leader, one.low), (one.other, one.high)) if limit is None]
            chance = f"not shown: it may be chance that leads {' and of '.join(unsure)}"
            reading = chance if unsure else "both leads are shown"
        crossings.append({"leader": one.leader, "other": one.other, "k": k, "limits": limits, "reading": reading})
    return {"tables": tables, "crossings": crossings, "has_start": bool(capable.before)}


def _scaling(analysis: Analysis, scaled: Scalings | None) -> dict[str, Any] | None:
    """The fitted curves as text: each arm's, its difference from the baseline's, and refusals."""
    if scaled is None:
        return None
    metric, shifts = analysis.record.metric, {shift.arm: shift for shift in scaled.shifts}
    rows = []
    for one in scaled.fits:
        shift, check = shifts.get(one.arm), ("the first half identifies no curve", "")
        if (error := one.prediction) is not None:
            number, limits = _texts(error, metric, signed=True)
            check = f"{'holds' if error.low <= 0 <= error.high else 'fails'}: {number}", limits
        rows.append({
            "label": one.arm,
            "ceiling": _texts(one.ceiling, metric),
            "midpoint": _range(one.midpoint, wording.quantity),
            "exponent": _range(one.exponent, "{:.2g}".format),
            "reached": f"{100 * one.reached:.0f} %",
            "higher": _texts(shift.ceiling, metric, signed=True) if shift and shift.ceiling else ("", ""),
            "later": _range(shift.midpoint, "{:.2f}".format) if shift and shift.midpoint else ("", ""),
            "check": check,
        })  # fmt: skip
    reasons: dict[str, list[str]] = {}
    for arm, reason in scaled.refused.items():
        reasons.setdefault(reason, []).append(arm)
    refused = [(wording.quoted(arms, len(arms)), reason) for reason, arms in reasons.items()]
    return {"rows": rows, "refused": refused, "has_shifts": bool(shifts)}


def _range(interval: Interval, write: Callable[[float], str]) -> tuple[str, str]:
    return write(interval.estimate), f"[{write(interval.low)}, {write(interval.high)}]"


def _texts(interval: Interval | None, metric: str, signed: bool = False) -> tuple[str, str]:
    """An estimate and its limits; `n/a` without one."""
    estimate = math.nan if interval is None else interval.estimate
    return wording.number(estimate, metric, signed), wording.limits(interval, metric, signed)


def _accuracies(analysis: Analysis, capable: Capabilities | None) -> dict[str, Any]:
    """Every accuracy of the test split: metric -> its name, and metric -> arm -> (mean, interval).

    Empty if there is none but the outcome. pass@k is in separate tables if there is a curve of it.
    """
    found = held_out_accuracies(analysis)
    if capable is not None:
        found = {name: arms for name, arms in found.items() if "/pass_at_" not in name}
    if list(found) == [analysis.outcome.name]:  # which stands in the comparison
        found = {}
    names = {name: _ACCURACY.get(name) or name.rpartition("/")[2].replace("_at_", "@") for name in found}
    return {"names": names, "found": found}


def _row(arm: ArmSummary, analysis: Analysis) -> dict[str, Any]:
    """An arm with its comparison, colour and tag; its seeds with a result, of those that the study asks for."""
    is_best = (search_of(analysis.record) or {}).get("best") == arm.label
    compared = analysis.comparison(arm.label)
    against = f"minus {compared.baseline.label}" if compared is not None and not compared.is_alone else ""
    wanted = [seed for label, seed in wanted_pairs(analysis.record) if label == arm.label]
    return {
        "arm": arm,
        "comparison": compared,
        "color": color_of(analysis, arm.label),
        "tag": "baseline" if arm.is_baseline else "best of the search" if is_best else against,
        "seeds": f"{len(arm.scores)}/{max(len(wanted), len(arm.scores))}",
    }


def sampled_rollouts(analysis: Analysis) -> dict[str, Any]:
    """The same few prompts answered by the arms side by side, from each arm's first seed with samples."""
    trials = sorted(analysis.record.trials, key=lambda trial: (trial.state != "complete", trial.seed), reverse=True)
    known = {trial.arm: trial for trial in trials if trial.samples}  # complete ones last, by falling seed
    sources = {arm.label: known[arm.label] for arm in analysis.arms if arm.label in known}
    wanted = [*roles(analysis), *sources] if len(sources) > _MOST_ARMS else sources
    chosen = [label for label in dict.fromkeys(wanted) if label in sources][:_MOST_ARMS]
    latest: dict[str, dict[tuple[str, str], SampleRow]] = {label: {} for label in chosen}
    for label, rows in latest.items():
        for row in sources[label].samples:
            key = row.split, row.prompt_id
            rows[key] = max(rows.get(key, row), row, key=lambda one: one.step)
    order = {"test": 0, "validation": 1, "train": 2}

    def interest(key: tuple[str, str]) -> tuple[int, int, bool]:
        shown = [rows[key] for rows in latest.values() if key in rows]
        return (-len(shown), order[key[0]], len({row.correct for row in shown}) == 1)

    groups = []
    for key in sorted(dict.fromkeys(key for rows in latest.values() for key in rows), key=interest)[:_MOST_PROMPTS]:
        answers = [_answer(label, rows.get(key), analysis) for label, rows in latest.items()]
        first = next(rows[key] for rows in latest.values() if key in rows)
        groups.append({"prompt": first.prompt, "gold": first.gold, "split": key[0], "answers": answers})
    return {
        "groups": groups,
        "omitted_arms": len(sources) - len(chosen),
        "seeds": ", ".join(f"'{label}': seed {sources[label].seed}" for label in chosen),
    }


def _answer(label: str, row: SampleRow | None, analysis: Analysis) -> dict[str, Any]:
    facts = []
    if row is not None:
        facts = [
            f"answer {row.answer}" if row.answer is not None else "no answer found",
            *([f"reward {row.reward:.3g}"] if row.reward is not None else []),
            wording.plural(row.num_tokens, "token"),
            "cut off by the token limit" if row.finish_reason == "length" else "stopped by itself",
            f"step {row.step}",
        ]
    return {"label": label, "color": color_of(analysis, label), "row": row, "facts": facts}
