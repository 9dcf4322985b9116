"""Writes a study's answer: one sentence with its uncertainty and its gaps."""

import math
from collections.abc import Sequence
from statistics import fmean

from ...harness.base.arms import short_path
from ..analysis import Analysis, Comparison, marginal
from ..claims import JudgedClaim
from ..findings import ranked_components, verdicts
from ..statistics import ALPHA, holm, t_interval
from ..trials import ArmSummary, search_of, tuning_of
from . import wording

NEAR_ZERO = 0.02
_AGAIN = "run it again with other seeds before believing it"


def answer(analysis: Analysis, claims: Sequence[JudgedClaim] = ()) -> str:
    """The study's answer in one sentence, first of all on its `claims`, which were checked."""
    if not analysis.finished_arms:
        states = [gap.state for gap in analysis.gaps]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        return f"No answer yet: {progress(analysis)}{f' ({counts})' if counts else ''}."
    found = (
        _from_start, _learnt, _grid_finding, _finding, _untested, _detectable, _components, _unexplained, _twins,
        _tuned, _left_out, _added,
    ) if search_of(analysis.record) is None else (_search_finding, _left_out)  # fmt: skip
    told = [] if search_of(analysis.record) is not None else [_verdicts([claim.verdict for claim in claims])]
    parts = [part for part in [*told, *(each(analysis) for each in found)] if part]
    unfinished = [gap for gap in analysis.gaps if gap.state not in ("invalid", "no value", "pruned")]
    opening = f"Preliminary ({progress(analysis)}): " if unfinished else ""
    if analysis.outcome.is_fraction and max(arm.mean for arm in analysis.finished_arms) < NEAR_ZERO:
        parts = [part for part in parts if part != _learnt(analysis)]
        opening += "Every arm stays near zero: " if len(analysis.finished_arms) > 1 else "Near zero: "
    for number, part in enumerate(parts):
        if (opening or number) and part.startswith(("No ", "Of ", "Only ", "Over ", "The ")):
            parts[number] = part[0].lower() + part[1:]
    return f"{opening}{'; '.join(parts)}."


def progress(analysis: Analysis) -> str:
    """`7 of 9 trials complete`."""
    expected = max(analysis.record.expected, analysis.num_complete)
    return f"{analysis.num_complete} of {wording.plural(expected, 'trial')} complete"


def _search_finding(analysis: Analysis) -> str:
    """The findings of a search; its best arm is not compared with the others, because the selection is biased."""
    search = search_of(analysis.record) or {}
    complete = [arm for arm in search["arms"] if arm["state"] == "complete"]
    if not complete:
        return "No arm of the search is complete"
    count = wording.plural(len(complete), "complete arm")
    metric, found = analysis.record.metric, search["importances"]
    best = next(arm for arm in complete if arm["label"] == search["best"])
    value = f"{wording.with_unit(best['values'][metric], metric)} {wording.spoken(metric)}"
    scored = [arm for arm in analysis.finished_arms if arm.label == best["label"]]
    tested = f" and {_value(scored[0], analysis)}" if scored and analysis.outcome.name != metric else ""
    ranked = sorted(found["values"].items(), key=lambda item: -item[1])
    shares = ", ".join(f"{short_path(path)} {100 * share:.0f} %" for path, share in ranked)
    known = f"importance by {found['method']}: {shares}"
    unknown = f"the importance of each setting is unknown ({found['reason']})"
    return (
        f"The best of {count} has {wording.settings(best['parameters'])}: {value}{tested} "
        f"({wording.plural(len(analysis.record.seeds), 'seed')}); "
        f"{known if ranked else unknown}; the best of many is overestimated, so {_AGAIN}"
    )


def _tuned(analysis: Analysis) -> str:
    """The settings that tuning chose for each arm of a comparison."""
    tried = ((cell, arm, found["best"]) for cell, found in tuning_of(analysis.record).items() for arm in found["arms"])
    chosen = [f"'{cell}' ({wording.settings(arm['parameters'])})" for cell, arm, best in tried if arm["label"] == best]
    return f"tuning chose the settings of {wording.listed(chosen, len(chosen))}" if chosen else ""


def _components(analysis: Analysis) -> str:
    """The contribution of each component, the largest first; empty for other designs."""
    ranked = [
        f"'{one.name}' {wording.number(one.effect, analysis.outcome.name, signed=True)} "
        f"({wording.p_equals(one.comparison.p_adjusted)})"
        for one in ranked_components(analysis)
    ]
    unit = "points, " if analysis.outcome.is_fraction else ""
    return f"components ranked by contribution ({unit}Holm-adjusted p): {', '.join(ranked)}" if ranked else ""


def _unexplained(analysis: Analysis) -> str:
    """The arms whose effect a control reproduces; empty if there are none."""
    found: dict[str, list[str]] = {}
    for one in verdicts(analysis):
        if one.reading == "unexplained":
            found.setdefault(one.arm, []).append(one.control)
    arms = [f"'{arm}' (by {wording.quoted(controls)})" for arm, controls in found.items()]
    return f"the effect of {wording.listed(arms, len(arms))} is unexplained, as a control reproduces it" if arms else ""


def _twins(analysis: Analysis) -> str:
    """A clause on arms that are the same run by their settings, without a test; empty if there are none."""
    found = [f"{wording.quoted(labels, len(labels))} are identical by construction ({reason})"
             for labels, reason in analysis.record.identical]  # fmt: skip
    return "; ".join(found)


def _verdicts(verdicts: Sequence[str]) -> str:
    """The verdicts on the study's claims."""
    if len(verdicts) == 1:
        return f"The claim is {verdicts[0]}"
    counts = [f"{verdicts.count(one)} {one}" for one in dict.fromkeys(verdicts)]
    return f"Of {len(verdicts)} claims {wording.listed(counts, len(counts))}" if verdicts else ""


def _from_start(analysis: Analysis) -> str:
    """The accuracy on the test problems from before the first step to the end, of the arms that have both."""
    found = []
    for arm in analysis.finished_arms:
        trials = [t for t in analysis.record.trials if t.arm == arm.label and t.seed in arm.scores]
        ends = [(fmean(t.start_per_problem.values()), fmean(t.per_problem.values())) for t in trials
                if t.start_per_problem and t.per_problem]  # fmt: skip
        if ends and len(ends) == len(trials):
            start, end = (100 * fmean(column) for column in zip(*ends, strict=True))
            gain = t_interval([last - first for first, last in ends])
            told = wording.points((end - start) / 100, "test/accuracy", gain) if gain else "one seed, no interval"
            found.append(f"'{arm.label}' from {start:.1f} to {end:.1f} % ({told})")
    return f"Accuracy on the test problems, start to end: {', '.join(found)}" if found else ""


def _learnt(analysis: Analysis) -> str:
    """The arms that end above their start, in a Holm family of their own; empty if all do, or if none can be tested."""
    known = [arm for arm in analysis.finished_arms if not math.isnan(arm.gain_p)]
    adjusted = holm([arm.gain_p for arm in known])
    above = [a.label for a, p in zip(known, adjusted, strict=True) if p < ALPHA and a.gain and a.gain.estimate > 0]
    if len(known) < len(analysis.finished_arms) or len(above) == len(known):
        return ""
    if not above:
        return f"{'No arm ends' if len(known) > 1 else 'It does not end'} detectably above its start"
    verb = "ends" if len(above) == 1 else "end"
    return f"Only {wording.quoted(above, len(above))} {verb} detectably above the start"


def _finding(analysis: Analysis) -> str:
    best, baseline = max(analysis.finished_arms, key=lambda arm: arm.mean), analysis.baseline
    reaches = f"{best.label} reaches {_value(best, analysis)}"
    if analysis.record.references:
        return f"{reaches}; {_pairs(analysis)}"
    if len(analysis.arms) == 1:
        return f"{reaches} ({wording.plural(len(best.scores), 'seed')}); no other arm to compare it with"
    if baseline is None or not baseline.scores:
        return (
            f"{reaches}, the highest of {wording.plural(len(analysis.finished_arms), 'arm')} with a result; the "
            f"baseline {analysis.record.baseline} has none, so no difference to it can be stated"
        )
    same = analysis.same
    compared = [one for one in analysis.comparisons if one.arm not in same]
    if same and not compared:
        verb = "is" if len(same) == 1 else "are"
        return f"{wording.quoted(same, len(same))} {verb} identical by construction to {baseline.label}: {reaches}"
    if not compared:
        return f"{reaches}; no arm shares a complete seed with the baseline {baseline.label} yet"
    if all(comparison.interval is None for comparison in compared):
        top, metric = max(compared, key=lambda comparison: comparison.estimate), analysis.outcome.name
        return (
            f"{top.arm} reaches {_value(top.summary, analysis)}, {_apart(top)} {baseline.label} "
            f"({wording.with_unit(baseline.mean, metric)}); with {_single(top)} no interval or test over seeds is "
            "possible, so this does not show a difference between the arms"
        )
    detected = [comparison for comparison in compared if comparison.is_detected]
    if not detected:
        largest = max((c for c in compared if c.interval), key=lambda c: abs(c.estimate))
        who = largest.arm if len(compared) == 1 else f"the furthest, {largest.arm},"
        return (
            f"No difference to {baseline.label} ({_value(baseline, analysis)}) could be detected: {who} reaches "
            f"{_value(largest.summary, analysis)}, {_apart(largest)} it ({_evidence(largest)})"
        )
    top = analysis.comparison(best.label)
    if top is not None and top.is_detected:
        return f"{reaches}, {_apart(top)} {baseline.label} ({_evidence(top)})"
    surest, worst = max(detected, key=lambda c: c.estimate), min(detected, key=lambda c: c.estimate)
    if surest.estimate > 0:  # and another arm has the highest mean
        apart = f"{_apart(top)} it ({_evidence(top)})" if top is not None else "without a shared seed"
        return (
            f"{surest.arm} reaches {_value(surest.summary, analysis)}, {_apart(surest)} {baseline.label} "
            f"({_evidence(surest)}); {reaches}, the highest mean, but its difference to {baseline.label} is not "
            f"detected: {apart}"
        )
    closest = max(compared, key=lambda c: c.estimate)
    lowest = f", while {worst.arm} is {_apart(worst)} it ({_holm(worst.p_adjusted)})" if worst is not closest else ""
    return (
        f"No arm is detectably above {baseline.label} ({_value(baseline, analysis)}): the closest, {closest.arm}, is "
        f"{_apart(closest)} it ({_evidence(closest)}){lowest}"
    )


def _untested(analysis: Analysis) -> str:
    """The arms that have ended and that no test reaches, beside others that one does; empty if there are none."""
    compared = {one.arm: one for one in analysis.comparisons}
    if not any(one.interval for one in compared.values()):
        return ""
    open_ = {gap.arm for gap in analysis.gaps if gap.state not in ("invalid", "no value")}
    found = []
    for label in (arm.label for arm in analysis.arms if not arm.is_baseline):
        one = compared.get(label)
        if one is not None and one.interval is None:
            found.append(f"'{label}' ({_apart(one)} {one.baseline.label} with {_single(one)})")
        elif one is None and label not in open_:
            has_run = bool(analysis.arm(label).scores)
            found.append(f"'{label}' ({'no seed shared' if has_run else 'no valid trial'})")
    return f"no test reaches {wording.plural(len(found), 'arm')}: {wording.listed(found, len(found))}" if found else ""


def _single(one: Comparison) -> str:
    return "one shared seed" if one.is_paired else "one run"


def _pairs(analysis: Analysis) -> str:
    """The differences of arms that are compared with others than one baseline, the surest first."""
    compared = sorted((c for c in analysis.comparisons if c.interval and not math.isnan(c.p)), key=lambda c: c.p)
    if not compared:
        return "no test is possible yet of the arms that are to be compared"
    found = [one for one in compared if one.is_detected]
    each = [f"{one.arm} is {_apart(one)} {one.baseline.label} ({_evidence(one)})" for one in found or compared[:1]]
    others = len(compared) - len(found)
    if not found:
        return f"no arm could be told from the one that it is compared with: the surest, {each[0]}"
    each += [f"{wording.plural(others, 'other difference')} could not be detected"] if others else []
    return "; ".join(each)


def _grid_finding(analysis: Analysis) -> str:
    """The effect of each factor over the whole grid, which averages over more runs than any one arm."""
    metric, grid = analysis.outcome.name, analysis.grid
    effects = [one for one in (grid.effects if grid is not None else ()) if not math.isnan(one.p_adjusted)]
    if grid is None or not effects:
        return ""
    single = [effect for effect in effects if len(effect.factors) == 1]
    if not grid.is_any_detected:
        least = min(effects, key=lambda effect: effect.p)
        factors = [short_path(effect.factors[0]) for effect in single]
        text = f"Over the whole grid no effect of {wording.listed(factors, len(factors))} is detected"
        if len(factors) == 1:
            return f"{text} ({_holm(least.p_adjusted)})"
        smallest = f"the smallest p belongs to {wording.factor_title(least.factors)}"
        return f"{text}, alone or together ({smallest}: {_holm(least.p_adjusted)})"
    found = []
    for effect in single:
        if effect.is_detected:
            factor, levels = effect.factors[0], grid.levels[grid.factors.index(effect.factors[0])]
            found_at = {level: marginal(analysis, {factor: level}) for level in levels}
            means = {level: one.estimate for level, one in found_at.items() if one is not None}
            low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
            found.append(
                f"{short_path(factor)} matters: {wording.with_unit(means[low], metric)} at {low} and "
                f"{wording.with_unit(means[high], metric)} at {high} ({_holm(effect.p_adjusted)})"
            )
    joint = [effect for effect in effects if len(effect.factors) > 1]
    each = [f"{wording.factor_title(one.factors)} ({_holm(one.p_adjusted)})" for one in joint if one.is_detected]
    interacting = f"factors interact: {', '.join(each)}" if each else "no interaction of factors is detected"
    parts = [*(found or ["no factor matters by itself"]), *([interacting] if joint else [])]
    return f"Over the whole grid {', and '.join(parts)}"


def _detectable(analysis: Analysis) -> str:
    """The smallest difference that a study without detections could have detected."""
    compared = [one for one in analysis.comparisons if one.arm not in analysis.same]
    sizes = [comparison.detectable for comparison in compared if not math.isnan(comparison.detectable)]
    is_effect_detected = analysis.grid is not None and analysis.grid.is_any_detected
    if not sizes or is_effect_detected or any(comparison.is_detected for comparison in analysis.comparisons):
        return ""
    if analysis.outcome.is_fraction and max(sizes) >= 1:
        few = "seeds or families of problems" if analysis.outcome.families else "seeds"
        return f"with so few {few} no difference, however large, would reliably be found"
    size = wording.points(max(sizes), analysis.outcome.name)
    return f"a difference of about {size} would be found in 4 of 5 such studies"


def _value(arm: ArmSummary, analysis: Analysis) -> str:
    """`81.2 % test accuracy [79.0, 83.4]`."""
    metric = analysis.outcome.name
    limits = wording.limits(arm.interval, metric)
    return f"{wording.with_unit(arm.mean, metric)} {analysis.outcome.label} {limits}".rstrip()


def _apart(comparison: Comparison) -> str:
    return wording.apart(comparison.estimate, comparison.outcome.name, comparison.interval)


def _evidence(comparison: Comparison) -> str:
    yet = " yet" if math.isnan(comparison.p) and comparison.share < 1 else ""
    return f"{wording.plural(len(comparison.differences), 'seed')}, {_holm(comparison.p_adjusted)}{yet}"


def _holm(p: float) -> str:
    return "no test possible" if math.isnan(p) else f"Holm-adjusted {wording.p_equals(p)}"


def _left_out(analysis: Analysis) -> str:
    invalid = len([gap for gap in analysis.gaps if gap.state in ("invalid", "no value")])
    pruned = len({gap.arm for gap in analysis.gaps if gap.state == "pruned"})  # a search gives up whole arms
    counts = [wording.plural(count, kind) for count, kind in ((invalid, "invalid trial"), (pruned, "pruned arm"))]
    shown = [text for text in counts if not text.startswith("0 ")]
    return f"{' and '.join(shown)} {'is' if invalid + pruned == 1 else 'are'} left out" if shown else ""


def _added(analysis: Analysis) -> str:
    """A clause that says that the number of seeds may follow from results; empty if it cannot."""
    read = wording.listed([str(count) for count in analysis.record.looks], len(analysis.record.looks))
    return f"seeds were added after a report over {read} of them, which makes intervals and p larger" if read else ""
