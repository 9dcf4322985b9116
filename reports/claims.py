"""Decides the claims that a study registered before it began: supported, contradicted, undecided, or not tested.

A claim says in which region its contrasts of arms lie. It is supported if all of them are shown inside, contradicted if
one is shown outside, by the error of any comparison (seeds, and problems where single scores are known) and by a p
below 0.05 after Holm's correction over the study's claims; otherwise it is undecided. The verdict holds for the model,
task and machine of the study, which are rarely the same as in the claim's source: the page says so.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np

from ..harness.record.study import TrialRecord
from . import statistics
from .analysis import Analysis, Contrast, contrast, outcome_contrast
from .prose import wording
from .statistics import ALPHA
from .trials import score, share_at

ClaimVerdict = Literal["supported", "contradicted", "undecided", "not tested"]
Weights = Mapping[str, float]


@dataclass(frozen=True)
class JudgedClaim:
    """A registered claim beside what this study measured; `p_adjusted` is NaN for a claim that was not tested.

    found   (the contrast in words, its values), on a logarithmic scale for ratios
    region  the ends between which they should lie, on that scale
    """

    sentence: str
    source: str
    registered: str
    predicted: str
    measured: str
    verdict: ClaimVerdict
    p_adjusted: float
    metric: str
    is_ratio: bool
    found: Sequence[tuple[str, Contrast]]
    region: tuple[float, float]


def check_claims(analysis: Analysis) -> list[JudgedClaim]:
    """Every registered claim with its verdict, in the study's order; p-values form one Holm family."""
    given = analysis.record.claims
    regions = [(-math.inf if low is None else low, math.inf if high is None else high)
               for low, high in (one["region"] for one in given)]  # fmt: skip
    found = [[(_name(one, w), _measured(analysis, one, w)) for w in one["contrasts"]] for one in given]
    tested = [_tested([each for _, each in some], region) for some, region in zip(found, regions, strict=True)]
    adjusted = statistics.holm([min(ps) for ps in tested])
    alone = [_tested([replace(each, tests=each.tests[:1]) for _, each in some], region)
             for some, region in zip(found, regions, strict=True)]  # fmt: skip
    alone_adjusted = statistics.holm([min(ps) for ps in alone])
    family = max(sum(not math.isnan(p) for p in adjusted), 1)
    claims = []
    by_claim = zip(given, found, regions, tested, adjusted, alone, alone_adjusted, strict=True)
    for one, some, region, ps, p, own, own_p in by_claim:
        verdict, other = _verdict(ps, p), _verdict(own, own_p)
        metric, is_ratio = _metric(analysis, one), bool(one["ratio"])
        shown = "; ".join(f"{name} {_value(each, metric, is_ratio)}" for name, each in some)
        seeds = min(len(each.differences) for _, each in some)
        measured = f"{wording.capitalised(wording.spoken(metric))}: {shown} ({wording.plural(seeds, 'seed')})."
        if verdict == "not tested":
            waits = any(not each.tests for _, each in some)
            why = "before all planned seeds have ended" if waits else "without any spread over seeds"
            measured += f" No test is possible {why if seeds > 1 else 'with fewer than two seeds'}."
        if verdict == "undecided":
            measured += _seeds_to_decide([each for _, each in some], region, ALPHA / family)
        if other != verdict != "not tested" and own != ps:  # else the same test would have two verdicts
            measured += f" For these test problems alone it would be {other}."
        arms = {arm for weights in one["contrasts"] for arm in weights}
        if lost := sum(gap.arm in arms and gap.state in ("invalid", "no value") for gap in analysis.gaps):
            measured += f" {wording.plural(lost, 'invalid trial')} left out."
        day = datetime.fromtimestamp(one["time"] / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
        claims.append(JudgedClaim(
            one["sentence"], one["source"], f"registered {day}, digest {one['digest']}",
            _predicted(one, metric, region), measured, verdict, p, metric, is_ratio, some, region,
        ))  # fmt: skip
    return claims


def _verdict(ps: tuple[float, float], p: float) -> ClaimVerdict:
    if math.isnan(p):
        return "not tested"
    return "undecided" if p >= ALPHA else "supported" if ps[0] <= ps[1] else "contradicted"


def _tested(found: Sequence[Contrast], region: tuple[float, float]) -> tuple[float, float]:
    """(p of the claim being wrong, p of it being right). All contrasts must lie inside (an intersection-union test,
    Berger 1982); one outside contradicts (Holm)."""
    ps = [statistics.region_test(each.tests, *region, each.resolution) for each in found]
    if any(math.isnan(p) for pair in ps for p in pair):
        return math.nan, math.nan
    return max(inside for inside, _ in ps), min(statistics.holm([outside for _, outside in ps]))


def _seeds_to_decide(found: Sequence[Contrast], region: tuple[float, float], alpha: float) -> str:
    """A sentence on the seeds that would decide the claim if the true values were the measured ones."""
    most = 0
    for each in found:
        distance = min(abs(each.estimate - end) for end in region)
        assert each.variance is not None
        needed = statistics.seeds_needed(distance, each.variance, each.num_problems, alpha, share_at(each.share))
        if needed is None:
            return " More than 200 seeds would be needed, or more problems, were the true value the measured one."
        most = max(most, needed, len(each.differences) + 1)
    return f" {most} seeds would decide it in 4 of 5 studies, were the true value the measured one."


def _metric(analysis: Analysis, claim: Mapping[str, Any]) -> str:
    """The claim's metric; the last value of the study's own metric comes from the test split, as all over the page."""
    metric = claim["metric"] or analysis.record.metric
    return analysis.outcome.name if metric == analysis.record.metric and claim["value"] == "last" else metric


def _measured(analysis: Analysis, claim: Mapping[str, Any], weights: Weights) -> Contrast:
    metric = _metric(analysis, claim)
    if metric == analysis.outcome.name and claim["value"] == "last" and not claim["ratio"]:
        return outcome_contrast(analysis, weights)
    values: dict[str, dict[int, float]] = {arm: {} for arm in weights}
    for (arm, seed), trial in analysis.usable.items():
        number = _number(trial, metric, claim["value"])
        if arm in values and number is not None and (number > 0 or not claim["ratio"]):
            values[arm][seed] = math.log(number) if claim["ratio"] else number
    return contrast(analysis.record, values, weights)


def _number(trial: TrialRecord, metric: str, kind: str) -> float | None:
    """The value of a metric in a trial, or of one of its costs; None if it is not known."""
    series = [value for _, value in trial.history.get(metric, ()) if math.isfinite(value)]
    if kind == "last":
        found = score(trial, metric)
        return trial.summary.get(metric) if found is None else found
    if len(series) < 2:
        return None
    # the first step of a timing warms up
    means = series[1:] if metric.startswith("seconds/") else series
    return {"mean": float(np.mean(means)), "gain": series[-1] - series[0], "fall": max(series) - series[-1]}[kind]


def _name(claim: Mapping[str, Any], weights: Weights) -> str:
    """`a - b`, `mean of 'a' and 'b' - c`, `('a' + 'b') - ('c' + 'd')`."""
    sides = []
    for sign in (1, -1):
        side = {arm: sign * weight for arm, weight in weights.items() if sign * weight > 0}
        if len(set(side.values())) == 1 and abs(sum(side.values()) - 1) < 1e-9:
            sides.append(f"mean of {wording.quoted(list(side), len(side))}" if len(side) > 1 else next(iter(side)))
        else:
            quote = "'" if len(side) > 1 else ""
            terms = [f"{'' if weight == 1 else f'{weight:g} x '}{quote}{arm}{quote}" for arm, weight in side.items()]
            sides.append(f"({' + '.join(terms)})" if quote else "".join(terms))
    return f" {'over' if claim['ratio'] else '-'} ".join(filter(None, sides))


def _value(found: Contrast, metric: str, is_ratio: bool) -> str:
    if not found.differences:
        return "n/a"
    if is_ratio:
        limits = f" [{math.exp(found.interval.low):.2f}, {math.exp(found.interval.high):.2f}]" if found.interval else ""
        return f"{math.exp(found.estimate):.2f}{limits}"
    unit = " points" if wording.is_fraction(metric) else ""
    return f"{wording.with_limits(found.estimate, found.interval, metric, signed=True)}{unit}"


def _predicted(claim: Mapping[str, Any], metric: str, region: tuple[float, float]) -> str:
    """`between -5.0 and +5.0 points`; the ends of ratios are factors."""
    is_ratio, unit = claim["ratio"], " points" if wording.is_fraction(metric) and not claim["ratio"] else ""
    low, high = (f"{math.exp(end):.3g}" if is_ratio else wording.number(end, metric, signed=True) for end in region)
    text = f"above {low}" if math.isinf(region[1]) else f"below {high}"
    text = f"between {low} and {high}" if math.isfinite(region[0]) and math.isfinite(region[1]) else text
    return f"{'each ' if len(claim['contrasts']) > 1 else ''}{'a ratio ' if is_ratio else ''}{text}{unit}"
