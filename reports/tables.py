"""Decides the tables of a report, as text that a page and a Markdown file write each in their form."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from ..harness.base.words import duration
from .analysis import PLANNED_DIFFERENCES, Analysis, held_out_accuracies
from .capability import TAUS, Capabilities, table_sizes
from .claims import JudgedClaim
from .figures.style import color_of
from .findings import MEANINGS, ranked_components, verdicts
from .prose import wording
from .statistics import SIMULATED_COVERAGE, Interval
from .trials import is_imported, score, search_of, tuning_of, wanted_pairs

FLOPS = {  # part of a run's operations -> its column
    "train": "Training", "sampling": "Sampling", "scoring": "Scoring", "learning": "Learning",
    "evaluation": "Evaluation", "cold_start": "Cold start",
}  # fmt: skip
_ACCURACY = {"test/accuracy": "mean of samples", "test/greedy_accuracy": "greedy"}
LIMITS = ",\n95 % interval"  # at the end of a column's name
_HOLM = "p, Holm-adjusted"
Part = tuple[str, str]  # a text and its limits: 81.2 and [79.0, 83.4]


@dataclass(frozen=True)
class Cell:
    """Parts, one below the other; `look` is their CSS class."""

    parts: Sequence[Part]
    look: str = ""
    tag: str = ""
    color: str = ""


class Column(NamedTuple):
    name: str
    is_text: bool
    label: str  # names a cell where columns have no heads, as on a phone


@dataclass(frozen=True)
class Table:
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def __len__(self) -> int:
        return len(self.rows)


def table(names: Sequence[str], rows: Sequence[Sequence[str | int | Part | list[Part] | Cell]]) -> Table:
    """A table; one without rows counts as false. A name that begins with `<` names a column of words."""
    labels = [name.removeprefix("<").removesuffix(LIMITS).replace("\n", " ") for name in names]
    columns = [Column(n.removeprefix("<"), n.startswith("<"), label) for n, label in zip(names, labels, strict=True)]
    return Table(columns, [[_cell(value) for value in row] for row in rows])


def _cell(value: str | int | Part | list[Part] | Cell) -> Cell:
    if isinstance(value, Cell):
        return value
    return Cell([value] if isinstance(value, tuple) else value if isinstance(value, list) else [(str(value), "")])


def _pair(estimate: float | None, interval: Interval | None, metric: str, signed: bool = False) -> Part:
    return wording.number(estimate, metric, signed), wording.limits(interval, metric, signed)


def _outcome(analysis: Analysis) -> str:
    return f"{analysis.outcome.label.capitalize()}{_unit(analysis)}"


def _unit(analysis: Analysis) -> str:
    return " (%)" if analysis.outcome.is_fraction else ""


def comparison(analysis: Analysis, costs: bool = True) -> Table:
    """The main table: every arm with its comparison, and with its start and its costs."""
    metric, record, is_run = analysis.outcome.name, analysis.record, costs and not is_imported(analysis.record)
    names = ["Arm", "Seeds", *(["Validation accuracy,\nstart to end (%)"] if is_run else ())]
    names += [f"{_outcome(analysis)}{LIMITS}"]
    if analysis.comparisons:
        names += [f"Difference{'' if record.references else ' to baseline'}{LIMITS}", _HOLM]
    names += ["Tokens\nper run", "Time\nper run", "Peak memory,\nwith engine"] if is_run else []
    best, wanted, rows = (search_of(record) or {}).get("best"), [label for label, _ in wanted_pairs(record)], []
    for arm in analysis.arms:
        one, cost = analysis.comparison(arm.label), arm.costs.get
        against = f"minus {one.baseline.label}" if one is not None and not one.is_alone else ""
        tag = "baseline" if arm.is_baseline else "best of the search" if best == arm.label else against
        row: list[Any] = [Cell([(arm.label, "")], "arm", tag, color_of(analysis, arm.label))]
        row += [f"{len(arm.scores)}/{max(wanted.count(arm.label), len(arm.scores))}"]
        if is_run:
            row += [" to ".join(wording.number(cost(f"accuracy_{at}"), "accuracy") for at in ("initial", "final"))]
        row += [Cell([_pair(arm.mean, arm.interval, metric)], "strong")]
        if one is not None:
            look = "strong" if one.is_detected else ""
            row += [Cell([_pair(one.estimate, one.interval, metric, signed=True)], look)]
            row += [Cell([(wording.p_value(one.p_adjusted), "")], look)]
        elif analysis.comparisons:
            row += ["", ""]
        if is_run:
            row += [wording.quantity(cost("generated_tokens")), duration(cost("seconds"), "n/a")]
            row += [wording.size(cost("peak_memory_bytes"))]
        rows.append(row)
    return table(names, rows)


def accuracies(analysis: Analysis, capable: Capabilities | None) -> Table | None:
    """Every accuracy of the test split; None if the outcome, which stands in the comparison, is the only one. pass@k is
    in separate tables if there is a curve of it."""
    found = held_out_accuracies(analysis)
    if capable is not None:
        found = {name: arms for name, arms in found.items() if "/pass_at_" not in name}
    if list(found) in ([], [analysis.outcome.name]):
        return None
    names = [_ACCURACY.get(name) or name.rpartition("/")[2].replace("_at_", "@") for name in found]
    labels = [arm.label for arm in analysis.finished_arms]
    rows = [[a, *(_pair(*arms.get(a, (None, None)), name) for name, arms in found.items())] for a in labels]
    return table(["Arm", *names], rows)


def capability(capable: Capabilities | None) -> tuple[list[Table], Table | None]:
    """pass@k and Cover@tau, and where curves cross."""
    if capable is None:
        return [], None
    curves = [*((f"before training: {one.label}", one) for one in capable.before), *capable.after.items()]
    most = max(one.num_samples for one in capable.after.values())
    tables = []
    for names, read in (
        ({f"pass@{k}": k for k in table_sizes(most)}, lambda one, k: one.pass_at(k) if k <= one.num_samples else None),
        ({f"Cover@{tau:g}": tau for tau in TAUS}, lambda one, tau: one.cover_at(tau)),
    ):
        found = [(label, [read(one, x) for x in names.values()]) for label, one in curves]
        rows = [[label, *(_pair(one and one.estimate, one, "accuracy") for one in row)] for label, row in found]
        tables.append(table(["Arm", *(f"{name} (%)" for name in names)], rows))
    crossings = []
    for one in capable.crossovers:
        k, reading = ("none", ""), f"no crossing up to k = {one.most}"
        if one.k is not None:
            k = str(one.k), f"[{one.low or 1}, {one.high or f'> {one.most}'}]"
            unsure = [name for name, limit in ((one.leader, one.low), (one.other, one.high)) if limit is None]
            chance = f"not shown: it may be chance that leads {' and of '.join(unsure)}"
            reading = chance if unsure else "both leads are shown"
        crossings.append([one.leader, one.other, k, reading])
    return tables, table(["Leads at k = 1", "<Overtakes it", f"First at k{LIMITS}", "<Reading"], crossings)


def effects(analysis: Analysis) -> Table:
    """The effects of a grid's factors."""
    rows = [
        [wording.factor_title(one.factors), one.df, f"{one.f:.3g}", wording.p_value(one.p),
         wording.p_value(one.p_adjusted), f"{one.partial_omega_squared:.2f}"]
        for one in (analysis.grid.effects if analysis.grid is not None else ())
    ]  # fmt: skip
    return table(["Effect", "df", "F", "p", _HOLM, "Size"], rows)


def search(analysis: Analysis) -> dict[str, Any] | None:
    """A search: whether it tuned, its metric, and every arm with parameters, value and state."""
    found = analysis.record.search
    if found is None:
        return None
    tuning = tuning_of(analysis.record)
    searches = list(tuning.values()) or [found]
    metric, tag, rows = analysis.record.metric, "chosen" if tuning else "best", []
    for arm, best in [(arm, one["best"]) for one in searches for arm in one["arms"]]:
        value = wording.number(arm["values"].get(metric, math.nan), metric)
        label = Cell([(arm["label"], "")], tag=tag if arm["label"] == best else "")
        rows.append([label, wording.settings(arm["parameters"], short_names=False), value, arm["state"]])
    unit = f"{wording.spoken(metric)}{' (%)' if wording.is_fraction(metric) else ''}"
    return {"is_tuning": bool(tuning), "metric": unit, "table": table(["Arm", "<Setting", unit, "<State"], rows)}


def components(analysis: Analysis) -> Table:
    """The contribution of each component."""
    rows = []
    for one in ranked_components(analysis):
        look = "strong" if one.comparison.is_detected else ""
        effect = _pair(one.effect, one.interval, analysis.outcome.name, signed=True)
        rows.append([one.name, Cell([effect], look), Cell([(wording.p_value(one.comparison.p_adjusted), "")], look)])
    return table(["Component", f"Adds{_unit(analysis)}{LIMITS}", _HOLM], rows)


def controls(analysis: Analysis) -> tuple[Table, Table]:
    """The control arms and then the others with the reward of each, and the verdict of each control on each arm."""
    metric = analysis.outcome.name
    arms = [(MEANINGS.get(one.control, one.control), one.summary, len(one.gaps)) for one in analysis.controls]
    own = "the arm's own"
    arms += [(own, arm, sum(gap.arm == arm.label for gap in analysis.gaps)) for arm in analysis.arms if arms]
    rows = []
    for meaning, arm, missing in arms:
        gain = _pair(arm.gain and arm.gain.estimate, arm.gain if arm.gain and arm.gain.error else None, metric, True)
        seeds = f"{len(arm.scores)}/{len(arm.scores) + missing}"
        rows.append([arm.label, meaning, seeds, _pair(arm.mean, arm.interval, metric), gain])
    judged = []
    for one in verdicts(analysis):
        reading = Cell([(": ".join(filter(None, [one.reading, one.reason])), "")], "strong" if one.reason else "")
        difference = _pair(one.comparison.estimate, one.comparison.interval, metric, signed=True)
        judged.append([one.arm, one.control, difference, wording.p_value(one.comparison.p), reading])
    names = ["Arm", "<Reward", "Complete\nseeds", f"{_outcome(analysis)}{LIMITS}", f"Gain from the start{LIMITS}"]
    minus = f"Arm minus control{_unit(analysis)}{LIMITS}"
    return table(names, rows), table(["Arm", "<Control", minus, "p", "<The arm's effect"], judged)


def exploratory(analysis: Analysis) -> Table:
    """Each clone; no other part of the report includes clones."""
    metric, rows = analysis.outcome.name, []
    for arm in analysis.record.exploratory:
        scores = [value for one in arm.trials if one.state == "complete" and (value := score(one, metric)) is not None]
        last = [value for one in arm.trials if (value := score(one, analysis.record.metric)) is not None]
        steps = sorted(set(arm.left_at.values()))
        rows.append([
            f"{arm.label} (stopped)" if arm.label in analysis.record.stopped else arm.label,
            arm.parent,
            ", ".join(f"{path} = {value}" for path, value in arm.changes.items()) or "nothing",
            " to ".join(map(str, dict.fromkeys([steps[0], steps[-1]]))) if any(steps) else "the beginning",
            f"{sum(one.state == 'complete' for one in arm.trials)}/{len(arm.trials)}",
            wording.number(fmean(last) if last else math.nan, analysis.record.metric),
            wording.number(fmean(scores) if scores else math.nan, metric),
        ])  # fmt: skip
    known = {*analysis.record.arms, *(arm.label for arm in analysis.record.exploratory)}
    rows += [[f"{arm} (stopped before it began)", *["n/a"] * 6] for arm in analysis.record.stopped if arm not in known]
    names = ["Arm", "<Parent", "<Changes", "Left it\nat step", "Complete\nseeds"]
    return table([*names, f"Last\n{wording.spoken(analysis.record.metric)}", _outcome(analysis)], rows)


def costs(analysis: Analysis) -> Table:
    """Every cost that any arm has."""
    arms = [arm for arm in [*analysis.arms, *(control.summary for control in analysis.controls)] if arm.costs]
    columns = {f"flops_{name}": title for name, title in FLOPS.items()}
    columns |= {"core_seconds": "Core-hours", "gpu_seconds": "GPU-hours"}
    known = {key: name for key, name in columns.items() if any(key in arm.costs for arm in arms)}
    rows = [[arm.label, *(wording.cost(arm.costs.get(key), key) for key in known)] for arm in arms if known]
    return table(["Arm", *known.values()], rows)


def gaps(analysis: Analysis) -> Table:
    """The trials that are left out."""
    found = [*analysis.gaps, *(gap for control in analysis.controls for gap in control.gaps)]
    return table(["Arm", "Seed", "State", "<Reason"], [[gap.arm, gap.seed, gap.state, gap.reason] for gap in found])


def claims(found: Sequence[JudgedClaim]) -> Table:
    """Every claim with its verdict."""
    rows = []
    for one in found:
        sentence, look = [(one.sentence, ""), (f"{one.source}; {one.registered}", "")], one.verdict.replace(" ", "-")
        p, verdict = wording.p_value(one.p_adjusted), one.verdict
        if verdict == "not tested":
            p, verdict = "", f"{verdict} here"
        rows.append([sentence, one.predicted, one.measured, p, Cell([(verdict, "")], f"claim {look}")])
    return table(["Claim", "<Predicted", "<Measured here", _HOLM, "<Verdict"], rows)


def statistics(analysis: Analysis) -> Mapping[str, Table]:
    """The tables at the end: intervals by method, paired comparisons, run by run, planning, coverage."""
    metric, pairs = analysis.outcome.name, analysis.comparisons
    whole = [
        [one.label, wording.number(one.mean, metric),
         *(wording.limits(each, metric) or "n/a" for each in (one.interval, one.student, one.bootstrap))]
        for one in analysis.finished_arms
    ]  # fmt: skip
    paired = [
        [one.name, wording.number(one.estimate, metric, True),
         *(wording.limits(each, metric, True) or "n/a" for each in (one.student, one.bootstrap)),
         wording.p_value(one.p), wording.p_value(one.p_adjusted),
         ", ".join(wording.number(value, metric, True) for value in one.values)]
        for one in pairs
    ]  # fmt: skip
    shares = [(one.name, [100 * x for x in (p.estimate, p.low, p.high)]) for one in pairs for p in [one.improvement]]
    higher = [[name, f"{share:.0f}", f"[{low:.0f}, {high:.0f}]"] for name, (share, low, high) in shares]
    plans = []
    for one in pairs:
        detectable = "n/a" if math.isnan(one.detectable) else wording.points(one.detectable, one.outcome.name)
        seeds = [str(one.seeds_for.get(size, "n/a") or "> 200") for size in PLANNED_DIFFERENCES]
        plans.append([one.name, detectable, *seeds])
    sizes = [f"Seeds for\n{wording.plural(round(100 * size), 'point')}" for size in PLANNED_DIFFERENCES]
    by_method = ["Student t,\nseeds", "Bootstrap,\nseeds"]
    coverage = [[name, *map(str, shares.values())] for name, shares in SIMULATED_COVERAGE.items()]
    return {
        "intervals": table([_outcome(analysis), "Mean", "Stated\ninterval", *by_method], whole),
        "paired": table(["Arm", "Difference", *by_method, "p", _HOLM, "<Difference\nof each seed"], paired),
        "higher": table(["Arm", "P(a run of the arm\nis higher), %", "95 % interval"], higher),
        "plans": table(["Arm", "Detectable with\nthese seeds", *sizes], plans),
        "coverage": table(["Method", "3 seeds", "5 seeds", "10 seeds"], coverage),
    }
