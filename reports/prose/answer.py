"""Decides how a study's answer reads: one sentence with its uncertainty and what is missing from it."""

import math

from harness.types import short_path
from reports.analysis import Analysis, ArmSummary, Comparison, level_means
from reports.prose import wording
from reports.statistics import ALPHA

NEAR_ZERO = 0.02


def answer(analysis: Analysis) -> str:
    """The study's answer in one sentence."""
    if not analysis.finished_arms:
        states = [gap.state for gap in analysis.gaps]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        return f"No answer yet: {progress(analysis)}{f' ({counts})' if counts else ''}."
    factors = _grid_finding(analysis)
    candidates = (factors, _finding(analysis), "" if factors else _detectable(analysis), _left_out(analysis))
    parts = [part for part in candidates if part]
    opening = _caveat(analysis) + _near_zero(analysis)
    for number, part in enumerate(parts):
        if (opening or number) and part.startswith(("No ", "Over ")):
            parts[number] = part[0].lower() + part[1:]
    return f"{opening}{'; '.join(parts)}."


def progress(analysis: Analysis) -> str:
    """`7 of 9 trials complete`."""
    return f"{analysis.num_complete} of {analysis.num_expected} trials complete"


def _near_zero(analysis: Analysis) -> str:
    highest = max(arm.mean for arm in analysis.finished_arms)
    if not analysis.outcome.is_fraction or highest >= NEAR_ZERO:
        return ""
    return "Every arm stays near zero: " if len(analysis.finished_arms) > 1 else "Near zero: "


def _finding(analysis: Analysis) -> str:
    best = max(analysis.finished_arms, key=lambda arm: arm.mean)
    baseline = analysis.baseline
    if len(analysis.arms) == 1:
        seeds = wording.plural(len(best.scores), "seed")
        return f"{_reaches(best, analysis)} ({seeds}); there is no arm to compare it with"
    if baseline is None or not baseline.scores:
        return (
            f"{_reaches(best, analysis)}, the highest of {wording.plural(len(analysis.finished_arms), 'arm')} with a "
            f"result; the baseline {analysis.record.baseline} has none, so no difference to it can be stated"
        )
    if not analysis.comparisons:
        return f"{_reaches(best, analysis)}; no arm shares a complete seed with the baseline {baseline.label} yet"
    if all(comparison.interval is None for comparison in analysis.comparisons):
        return _single_seed_finding(analysis, baseline)
    if not any(comparison.is_detected for comparison in analysis.comparisons):
        return _nothing_detected(analysis, baseline)
    top = analysis.comparison(best.label)
    if top is not None and top.is_detected:
        return f"{_reaches(best, analysis)}, {_apart(top, analysis)} {baseline.label} ({_evidence(top)})"
    return _baseline_stands(analysis, baseline)


def _grid_finding(analysis: Analysis) -> str:
    """What each factor does over the whole grid, which has more seeds behind it than any one arm."""
    metric = analysis.outcome.name
    found = []
    for effect in analysis.grid.effects if analysis.grid else ():
        factor, *others = effect.factors
        means = level_means(analysis, factor)
        if others or not effect.p_adjusted < ALPHA or not means:
            continue
        low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        found.append(
            f"{short_path(factor)} matters: {wording.with_unit(means[low], metric)} at {low} and "
            f"{wording.with_unit(means[high], metric)} at {high} ({_holm(effect.p_adjusted)})"
        )
    if not found:
        return ""
    return f"Over the whole grid {', and '.join(found)}{_interaction_finding(analysis)}"


def _interaction_finding(analysis: Analysis) -> str:
    """Which factors depend on each other; nothing for a grid of one factor."""
    effects = [effect for effect in (analysis.grid.effects if analysis.grid else ()) if len(effect.factors) > 1]
    detected = [effect for effect in effects if effect.p_adjusted < ALPHA]
    if detected:
        each = [f"{wording.factor_title(effect.factors)} ({_holm(effect.p_adjusted)})" for effect in detected]
        return f", and factors interact: {', '.join(each)}"
    return ", and no interaction of factors is detected" if effects else ""


def _single_seed_finding(analysis: Analysis, baseline: ArmSummary) -> str:
    top = max(analysis.comparisons, key=lambda comparison: comparison.estimate)
    metric = analysis.outcome.name
    return (
        f"{_reaches(analysis.arm(top.arm), analysis)}, {wording.apart(top.estimate, metric)} {baseline.label} "
        f"({wording.with_unit(baseline.mean, metric)}); with one shared seed no interval or test over seeds is "
        "possible, so this does not show a difference between the arms"
    )


def _nothing_detected(analysis: Analysis, baseline: ArmSummary) -> str:
    largest = max((c for c in analysis.comparisons if c.interval), key=lambda c: abs(c.estimate))
    arm = analysis.arm(largest.arm)
    if len(analysis.comparisons) > 1:
        text = f"{_reaches(baseline, analysis)}, and no arm differs detectably from it: the furthest, {arm.label},"
    else:
        text = f"No difference between {arm.label} and {baseline.label} could be detected: {arm.label}"
    return (
        f"{text} reaches {_value(arm, analysis)}, {_apart(largest, analysis)} {baseline.label} ({_evidence(largest)})"
    )


def _detectable(analysis: Analysis) -> str:
    """After a study that detected nothing: what it could have detected."""
    sizes = [comparison.detectable for comparison in analysis.comparisons if not math.isnan(comparison.detectable)]
    if not sizes or any(comparison.is_detected for comparison in analysis.comparisons):
        return ""
    if analysis.outcome.is_fraction and max(sizes) >= 1:
        return "with so few seeds no difference, however large, would reliably be found"
    size = wording.points(max(sizes), analysis.outcome.name)
    return f"a difference of about {size} would be found in 4 of 5 such studies"


def _baseline_stands(analysis: Analysis, baseline: ArmSummary) -> str:
    """The highest arm is the baseline or not detectably above it, but some arm differs detectably."""
    detected = [c for c in analysis.comparisons if c.is_detected]
    undecided = [c for c in analysis.comparisons if not c.is_detected]
    if undecided:
        top = max(undecided, key=lambda c: c.estimate)
        worst = min(detected, key=lambda c: c.estimate)
        return (
            f"No arm is detectably above {baseline.label} ({_value(baseline, analysis)}): the closest, {top.arm}, is "
            f"{_apart(top, analysis)} it ({_evidence(top)}), while {worst.arm} is {_apart(worst, analysis)} it "
            f"({_p(worst)})"
        )
    reach = _reaches(baseline, analysis)
    top = max(detected, key=lambda c: c.estimate)
    if len(detected) == 1:
        return f"{reach}; {top.arm} is {_apart(top, analysis)} it ({_evidence(top)})"
    return f"{reach}, above every other arm; the closest, {top.arm}, is {_apart(top, analysis)} it ({_evidence(top)})"


def _reaches(arm: ArmSummary, analysis: Analysis) -> str:
    return f"{arm.label} reaches {_value(arm, analysis)}"


def _value(arm: ArmSummary, analysis: Analysis) -> str:
    """`81.2 % test accuracy [79.0, 83.4]`."""
    metric = analysis.outcome.name
    bounds = wording.limits(arm.interval, metric)
    return f"{wording.with_unit(arm.mean, metric)} {analysis.outcome.label}{' ' + bounds if bounds else ''}"


def _apart(comparison: Comparison, analysis: Analysis) -> str:
    return wording.apart(comparison.estimate, analysis.outcome.name, comparison.interval)


def _evidence(comparison: Comparison) -> str:
    return f"{wording.plural(len(comparison.seeds), 'seed')}, {_p(comparison)}"


def _p(comparison: Comparison) -> str:
    return "no test possible" if math.isnan(comparison.p_adjusted) else _holm(comparison.p_adjusted)


def _holm(p: float) -> str:
    return f"Holm-adjusted {wording.p_equals(p)}"


def _caveat(analysis: Analysis) -> str:
    unfinished = [gap for gap in analysis.gaps if gap.state not in ("invalid", "no value", "pruned")]
    return f"Preliminary ({progress(analysis)}): " if unfinished else ""


def _left_out(analysis: Analysis) -> str:
    states = [gap.state for gap in analysis.gaps]
    kinds = {"invalid": states.count("invalid") + states.count("no value"), "pruned": states.count("pruned")}
    counts = [wording.plural(count, f"{kind} trial") for kind, count in kinds.items() if count]
    return f"{' and '.join(counts)} {'is' if sum(kinds.values()) == 1 else 'are'} left out" if counts else ""
