"""Decides how a study's numbers are put into words: the answer in one sentence, and what to know before comparing.

Sentences are plain text (arm labels included, nothing escaped); whoever writes them into a page escapes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.types import TrialRecord, short_path
from reports.analysis import ALPHA, Analysis, ArmSummary, Comparison, is_fraction, level_means, setting
from reports.join import JoinedStudy
from reports.statistics import Interval

NEAR_ZERO = 0.02


def answer(analysis: Analysis) -> str:
    """The study's answer in one sentence, with its uncertainty and what is missing from it."""
    if not analysis.finished_arms:
        return f"No answer yet: {_progress(analysis)}."
    factors = _grid_finding(analysis)
    candidates = (factors, _finding(analysis), "" if factors else _detectable(analysis), _left_out(analysis))
    parts = [part for part in candidates if part]
    opening = _caveat(analysis) + _near_zero(analysis)
    for number, part in enumerate(parts):
        if (opening or number) and part.startswith(("No ", "Over ")):
            parts[number] = part[0].lower() + part[1:]
    return f"{opening}{'; '.join(parts)}."


def number(value: float, metric: str, signed: bool = False) -> str:
    """A value of a metric without unit: percent with one decimal (two below 1 %) for a fraction."""
    sign = "+" if signed else ""
    if math.isnan(value):
        return "n/a"
    if not is_fraction(metric):
        return f"{value:{sign}.4g}"
    percent = 100 * value
    decimals = 2 if 0 < abs(percent) < 1 and not signed else 1
    text = f"{percent:{sign}.{decimals}f}"
    return text.lstrip("+-") if float(text) == 0 else text


def with_unit(value: float, metric: str) -> str:
    """`81.2 %` for a fraction, the bare number otherwise."""
    return f"{number(value, metric)} %" if is_fraction(metric) else number(value, metric)


def limits(interval: Interval | None, metric: str, signed: bool = False) -> str:
    """`[79.0, 83.4]`, or an empty string without an interval."""
    if interval is None:
        return ""
    return f"[{number(interval.low, metric, signed)}, {number(interval.high, metric, signed)}]"


def points(value: float, metric: str) -> str:
    """A difference's size: `5.1 points` for fractions, the bare number otherwise."""
    if not is_fraction(metric):
        return f"{abs(value):.4g}"
    return f"{number(abs(value), metric, signed=True).lstrip('+')} points"


def p_value(p: float) -> str:
    """`0.031`, `< 0.001`, or n/a; never rounded across the threshold of 0.05."""
    if math.isnan(p):
        return "n/a"
    if p < 0.001:
        return "< 0.001"
    text = f"{p:.2f}" if p >= 0.1 else f"{p:.3f}"
    return f"{p:.5f}" if (float(text) < ALPHA) != (p < ALPHA) else text


def quantity(count: float | None) -> str:
    """A count as a reader takes it in: 812, 12.3k, 4.56M."""
    if count is None or math.isnan(count):
        return "n/a"
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if count >= size:
            return f"{count / (1e3 if suffix == 'k' else size):.3g}{suffix}"
    return f"{count:.0f}"


def duration(seconds: float | None) -> str:
    """Seconds as `48 s`, `3 min 20 s` or `2 h 05 min`."""
    if seconds is None or math.isnan(seconds):
        return "n/a"
    whole = round(seconds)
    if whole < 120:
        return f"{seconds:.3g} s" if seconds < 10 else f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(num_bytes: float | None) -> str:
    """Bytes in MiB or GiB."""
    if num_bytes is None or math.isnan(num_bytes):
        return "n/a"
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def interval_method(analysis: Analysis) -> str:
    """Which interval the report states, in a sentence or two."""
    most = max((len(arm.scores) for arm in analysis.finished_arms), default=0)
    if most < 2:
        return (
            "No arm has two complete seeds, so no interval and no test over seeds is possible: nothing here says how "
            "another seed would come out."
        )
    reach = "seeds and test problems" if analysis.outcome.per_problem else "seeds, for these very problems"
    text = f"Intervals cover {reach} at 95 %; each stands for itself, and only p is corrected for the number of arms."
    if min(len(arm.scores) for arm in analysis.finished_arms) < 2:
        text += " An arm with one complete seed has none."
    if most < 5:
        text += f" With {plural(most, 'seed')} they are wide and lean on normality: add seeds before a close call."
    return text


def interval_reading(analysis: Analysis) -> str:
    """How the stated interval is made, and what it does not cover."""
    if analysis.outcome.per_problem:
        return (
            "The stated interval is the wider of two: the two-way t interval, in which seeds and problems are both "
            "random (Satterthwaite degrees of freedom), and Student's t interval over seeds. It speaks about new seeds "
            "and new problems of the same kind, not about other tasks, models or cold starts. Student's interval and "
            "the bootstrap over seeds speak about new seeds on these very problems only."
        )
    return (
        "The stated interval is Student's t interval over seeds. Scores of single problems are not known for this "
        "metric, so it speaks about new seeds on these very problems, and is too narrow for new problems."
    )


def notes(analysis: Analysis) -> list[tuple[str, str]]:
    """(topic, what makes the comparison readable or limits it), derived from the specs that ran."""
    specs = _specs(analysis)
    if not specs:
        return [("Nothing has run", "The notes on comparability appear with the first trial.")]
    found = [
        _join_note(analysis),
        *_clip_notes(analysis, specs),
        *_reward_notes(specs),
        _cold_start_note(specs),
        _budget_note(specs),
        _token_note(analysis),
        _evaluation_note(analysis, specs),
        _selection_note(analysis),
        _gap_note(analysis),
    ]
    return [note for note in found if note is not None]


def _near_zero(analysis: Analysis) -> str:
    highest = max(arm.mean for arm in analysis.finished_arms)
    if not analysis.outcome.is_fraction or highest >= NEAR_ZERO:
        return ""
    return "Every arm stays near zero: " if len(analysis.finished_arms) > 1 else "Near zero: "


def _finding(analysis: Analysis) -> str:
    best = max(analysis.finished_arms, key=lambda arm: arm.mean)
    baseline = analysis.baseline
    if len(analysis.arms) == 1:
        return f"{_reaches(best, analysis)} ({_seeds(len(best.scores))}); there is no arm to compare it with"
    if baseline is None or not baseline.scores:
        return (
            f"{_reaches(best, analysis)}, the highest of {plural(len(analysis.finished_arms), 'arm')} with a result; "
            f"the baseline {analysis.record.baseline} has none, so no difference to it can be stated"
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
    main = {
        effect.factors[0]: effect
        for effect in (analysis.grid.effects if analysis.grid else ())
        if len(effect.factors) == 1
    }
    found = []
    for factor, effect in main.items():
        means = level_means(analysis, factor)
        if not effect.p_adjusted < ALPHA or not means:
            continue
        low, high = min(means, key=lambda level: means[level]), max(means, key=lambda level: means[level])
        metric = analysis.outcome.name
        found.append(
            f"{short_path(factor)} matters: {with_unit(means[low], metric)} at {low} and "
            f"{with_unit(means[high], metric)} at {high} ({_holm(effect.p_adjusted)})"
        )
    if not found:
        return ""
    return f"Over the whole grid {', and '.join(found)}{_interaction_finding(analysis)}"


def _interaction_finding(analysis: Analysis) -> str:
    """Which factors depend on each other; nothing where a grid has one factor."""
    effects = [effect for effect in (analysis.grid.effects if analysis.grid else ()) if len(effect.factors) > 1]
    detected = [effect for effect in effects if effect.p_adjusted < ALPHA]
    if detected:
        each = [f"{factor_title(effect.factors)} ({_holm(effect.p_adjusted)})" for effect in detected]
        return f", and factors interact: {', '.join(each)}"
    return ", and no interaction of factors is detected" if effects else ""


def _single_seed_finding(analysis: Analysis, baseline: ArmSummary) -> str:
    top = max(analysis.comparisons, key=lambda comparison: comparison.estimate)
    side = "above" if top.estimate >= 0 else "below"
    return (
        f"{_reaches(analysis.arm(top.arm), analysis)}, {points(top.estimate, analysis.outcome.name)} {side} "
        f"{baseline.label} ({with_unit(baseline.mean, analysis.outcome.name)}); with one shared seed no interval or "
        "test over seeds is possible, so this does not show a difference between the arms"
    )


def _nothing_detected(analysis: Analysis, baseline: ArmSummary) -> str:
    largest = max((c for c in analysis.comparisons if c.interval), key=lambda c: abs(c.estimate))
    arm = analysis.arm(largest.arm)
    if len(analysis.comparisons) > 1:
        text = (
            f"{_reaches(baseline, analysis)}, and no arm differs detectably from it: "
            f"the furthest, {arm.label}, reaches "
        )
    else:
        text = f"No difference between {arm.label} and {baseline.label} could be detected: {arm.label} reaches "
    return f"{text}{_value(arm, analysis)}, {_apart(largest, analysis)} {baseline.label} ({_evidence(largest)})"


def _detectable(analysis: Analysis) -> str:
    """After a study that detected nothing: what it could have detected."""
    sizes = [comparison.detectable for comparison in analysis.comparisons if not math.isnan(comparison.detectable)]
    if not sizes or any(comparison.is_detected for comparison in analysis.comparisons):
        return ""
    if analysis.outcome.is_fraction and max(sizes) >= 1:
        return "with so few seeds no difference, however large, would reliably be found"
    size = points(max(sizes), analysis.outcome.name)
    return f"a difference of about {size} would be found in 4 of 5 such studies"


def _baseline_stands(analysis: Analysis, baseline: ArmSummary) -> str:
    """Some arm is detectably below the baseline, none above."""
    below = [c for c in analysis.comparisons if c.is_detected]
    open_arms = [c for c in analysis.comparisons if not c.is_detected]
    if open_arms:
        top = max(open_arms, key=lambda c: c.estimate)
        worst = min(below, key=lambda c: c.estimate)
        return (
            f"No arm is detectably above {baseline.label} ({_value(baseline, analysis)}): the closest, {top.arm}, is "
            f"{_apart(top, analysis)} it ({_evidence(top)}), while {worst.arm} is {_apart(worst, analysis)} it "
            f"({_p(worst)})"
        )
    reach = _reaches(baseline, analysis)
    top = max(below, key=lambda c: c.estimate)
    if len(below) == 1:
        return f"{reach}; {top.arm} is {_apart(top, analysis)} it ({_evidence(top)})"
    return f"{reach}, above every other arm; the closest, {top.arm}, is {_apart(top, analysis)} it ({_evidence(top)})"


def _reaches(arm: ArmSummary, analysis: Analysis) -> str:
    return f"{arm.label} reaches {_value(arm, analysis)}"


def _value(arm: ArmSummary, analysis: Analysis) -> str:
    """`81.2 % test accuracy [79.0, 83.4]`."""
    metric = analysis.outcome.name
    bounds = limits(arm.interval, metric)
    return f"{with_unit(arm.mean, metric)} {analysis.outcome.label}{' ' + bounds if bounds else ''}"


def _apart(comparison: Comparison, analysis: Analysis) -> str:
    """`5.1 points [0.8, 9.4] above`: the interval has the sign of the stated direction."""
    metric = analysis.outcome.name
    side, sign = ("above", 1.0) if comparison.estimate >= 0 else ("below", -1.0)
    interval = comparison.interval
    bounds = ""
    if interval is not None:
        low, high = sorted((sign * interval.low, sign * interval.high))
        bounds = f" {limits(Interval(sign * interval.estimate, low, high), metric, signed=True).replace('+', '')}"
    return f"{points(comparison.estimate, metric)}{bounds} {side}"


def _evidence(comparison: Comparison) -> str:
    return f"{_seeds(len(comparison.seeds))}, {_p(comparison)}"


def _p(comparison: Comparison) -> str:
    return "no test possible" if math.isnan(comparison.p_adjusted) else _holm(comparison.p_adjusted)


def _holm(p: float) -> str:
    text = p_value(p)
    return f"Holm-adjusted p {text}" if text.startswith("<") else f"Holm-adjusted p = {text}"


def _seeds(count: int) -> str:
    return plural(count, "seed")


def _caveat(analysis: Analysis) -> str:
    unfinished = [gap for gap in analysis.gaps if gap.state not in ("invalid", "no value", "pruned")]
    done = f"{analysis.num_complete} of {_expected(analysis)} trials complete"
    return f"Preliminary ({done}): " if unfinished else ""


def _left_out(analysis: Analysis) -> str:
    invalid = sum(gap.state in ("invalid", "no value") for gap in analysis.gaps)
    pruned = sum(gap.state == "pruned" for gap in analysis.gaps)
    counts = [plural(count, f"{kind} trial") for count, kind in ((invalid, "invalid"), (pruned, "pruned")) if count]
    return f"{' and '.join(counts)} {'is' if invalid + pruned == 1 else 'are'} left out" if counts else ""


def _progress(analysis: Analysis) -> str:
    states = [gap.state for gap in analysis.gaps]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return f"0 of {_expected(analysis)} trials complete" + (f" ({counts})" if counts else "")


def _expected(analysis: Analysis) -> int:
    return max(analysis.record.expected, analysis.num_complete)


def _specs(analysis: Analysis) -> dict[str, TrialRecord]:
    """Arm label -> one of its trials."""
    return {trial.arm: trial for trial in analysis.record.trials if trial.spec}


def _values(trials: dict[str, TrialRecord], dotted: str, default: object = None) -> dict[str, object]:
    return {arm: setting(trial.spec, dotted, default) for arm, trial in trials.items()}


def _updates(trial: TrialRecord) -> int:
    epochs = int(setting(trial.spec, "optimizer.num_inner_epochs", 1))
    return epochs * int(setting(trial.spec, "optimizer.num_minibatches", 1))


def _join_note(analysis: Analysis) -> tuple[str, str] | None:
    """What differs between the studies besides their arms, for a page of several."""
    record = analysis.record
    if not isinstance(record, JoinedStudy):
        return None
    studies = _listed(list(dict.fromkeys(record.studies.values())))
    if not record.warnings:
        return (
            "Studies that share all but their arms",
            f"{studies} have the same task, test problems, base run and versions, so their arms differ as those of one "
            "study do. They were not planned together: p is corrected over all arms of this page.",
        )
    shown = [
        f"{key} ({', '.join(f'{name}: {value}' for name, value in values.items())})"
        for key, values in list(record.warnings.items())[:6]
    ]
    more = f", and {len(record.warnings) - 6} more" if len(record.warnings) > 6 else ""
    return (
        "Base runs differ between the studies",
        f"A difference between arms of {studies} is also one of: {'; '.join(shown)}{more}.",
    )


def _clip_notes(analysis: Analysis, trials: dict[str, TrialRecord]) -> list[tuple[str, str]]:
    single = [arm for arm, trial in trials.items() if _updates(trial) == 1]
    if not single:
        lowest = min(_updates(trial) for trial in trials.values())
        text = (
            f"Each batch receives {lowest} or more optimiser steps, so ratios leave 1 and clipping can bind; see the "
        )
        return [("Clipping is active", text + "clip fraction under training dynamics.")]
    who = "Every arm" if len(single) == len(trials) else _listed(single)
    verb = "gives" if len(single) == 1 or who == "Every arm" else "give"
    text = (
        f"{who} {verb} each batch one optimiser step (num_inner_epochs x num_minibatches = 1): the ratio is exactly 1, "
        "so clip_epsilon cannot bind."
    )
    same = _same_but_for_clipping({arm: trials[arm] for arm in single})
    if same:
        shown = [_listed(arms) for arms in same[:2]] + ([f"{len(same) - 2} more such sets"] if len(same) > 2 else [])
        text += f" Arms that differ only in it are identical by construction: {'; '.join(shown)}."
    return [("The clip range has no effect" if len(single) == len(trials) else "Clipping in some arms only", text)]


def _same_but_for_clipping(trials: dict[str, TrialRecord]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for arm, trial in trials.items():
        spec = {key: value for key, value in trial.spec.items() if key not in ("seed", "algorithm")}
        algorithm = setting(trial.spec, "algorithm", {})
        kept = {key: value for key, value in algorithm.items() if not key.startswith("clip_epsilon")}
        groups.setdefault(repr((sorted(spec.items()), sorted(kept.items()))), []).append(arm)
    return [arms for arms in groups.values() if len(arms) > 1]


def _reward_notes(trials: dict[str, TrialRecord]) -> list[tuple[str, str]]:
    found = []
    if any(floor is not None for floor in _values(trials, "algorithm.std_floor").values()):
        found.append(
            (
                "Reward scale cancels",
                "Group standardisation subtracts the group's mean reward and divides by its standard deviation, so "
                "rewards of 1 / -0.1 and 1 / 0 give the same advantages (up to the floor on the deviation), and a "
                "group of equal rewards teaches nothing.",
            )
        )
    paid = {arm: _paid(rewards) for arm, rewards in _values(trials, "rewards", {}).items()}
    blind = [arm for arm, names in paid.items() if "majority_vote" in names and "accuracy" not in names]
    if blind:
        found.append(
            (
                "Rewards that are not accuracy",
                f"{_listed(blind)} {'is' if len(blind) == 1 else 'are'} rewarded for agreeing with the majority, "
                "never for being right: a rising reward beside a falling accuracy is collapse. Mean reward cannot be "
                "compared between arms with different rewards.",
            )
        )
    elif len({repr(names) for names in paid.values()}) > 1:
        each = "; ".join(
            f"{arm}: {', '.join(f'{w:g} {name}' for name, w in names.items())}" for arm, names in paid.items()
        )
        found.append(("Different rewards", f"Mean reward cannot be compared between arms ({each}); accuracy can."))
    return found


def _paid(rewards: object) -> dict[str, float]:
    """Name -> weight of the rewards that a run is paid by; none where its record does not say."""
    if not isinstance(rewards, dict):
        return {}
    return {name: settings["weight"] for name, settings in rewards.items() if settings.get("weight")}


def _cold_start_note(trials: dict[str, TrialRecord]) -> tuple[str, str] | None:
    starts = _values(trials, "cold_start", {})
    if len({repr(start) for start in starts.values()}) > 1:
        return (
            "Arms start from different cold starts",
            "cold_start differs between arms, and each was made once: its own luck is part of the difference and is "
            "not in the intervals.",
        )
    first = next(iter(trials.values())).spec
    steps, seed = setting(first, "cold_start.steps", 0), setting(first, "cold_start.seed", 0)
    origin = f"one cold start ({steps} steps, cold_start.seed {seed})" if steps else "the same initial model"
    return (
        "One starting point",
        f"All arms and seeds start from {origin}. Intervals therefore cover the seeds of reinforcement learning only, "
        "not the luck of the starting point.",
    )


def _budget_note(trials: dict[str, TrialRecord]) -> tuple[str, str]:
    rollouts = set(_values(trials, "rollouts_per_step").values())
    steps = set(_values(trials, "steps").values())
    if len(rollouts) == 1 and len(steps) == 1:
        groups = {value for value in _values(trials, "algorithm.group_size").values() if value is not None}
        text = f"All arms draw {rollouts.pop()} rollouts per step for {steps.pop()} steps."
        if len(groups) > 1:
            text += " A larger group means fewer prompts per step, never more samples."
        return "Equal budgets", text
    differing = [name for name, values in (("rollouts_per_step", rollouts), ("steps", steps)) if len(values) > 1]
    return (
        "Budgets differ",
        f"Arms differ in {' and '.join(differing)}: read the curves against rollouts or tokens, not against steps.",
    )


def _token_note(analysis: Analysis) -> tuple[str, str] | None:
    tokens = {arm.label: arm.costs["generated_tokens"] for arm in analysis.arms if "generated_tokens" in arm.costs}
    if len(tokens) < 2 or max(tokens.values()) < 1.1 * min(tokens.values()):
        return None
    least, most = min(tokens, key=lambda arm: tokens[arm]), max(tokens, key=lambda arm: tokens[arm])
    return (
        "Equal rollouts are not equal tokens",
        f"Completions differ in length: {least} generated {quantity(tokens[least])} tokens per run, {most} "
        f"{quantity(tokens[most])}.",
    )


def _evaluation_note(analysis: Analysis, trials: dict[str, TrialRecord]) -> tuple[str, str]:
    spec = next(iter(trials.values())).spec
    samples, temperature = setting(spec, "evaluation.num_samples", "?"), setting(spec, "evaluation.temperature", "?")
    text = f"Accuracy is the mean over problems of {samples} samples each at temperature {temperature}."
    if analysis.outcome.name.startswith("test/"):
        cells = next((arm.cells for arm in analysis.arms if arm.cells is not None), None)
        problems = f"the same {cells.shape[1]} test problems" if cells is not None else "the test split"
        text += f" Curves use the validation split; {problems} are scored once, at the end of each run."
        if cells is None:
            text = text.replace("the test split are", "the test split is")
    return "What accuracy means", text


def _selection_note(analysis: Analysis) -> tuple[str, str] | None:
    if len(analysis.finished_arms) < 3:
        return None
    return (
        "The best of several looks better than it is",
        f"Picking the highest of {len(analysis.finished_arms)} arms favours luck. Holm's correction keeps the chance "
        f"of any false difference to the baseline below {100 * ALPHA:g} %; the winner's own estimate stays a little "
        "high.",
    )


def _gap_note(analysis: Analysis) -> tuple[str, str] | None:
    broken = [gap for gap in analysis.gaps if gap.state in ("invalid", "failed", "no value")]
    if not broken:
        return None
    arms = list(dict.fromkeys(gap.arm for gap in broken))
    return (
        "Trials are left out",
        f"{plural(len(broken), 'trial')} of {_listed(arms)} gave no usable result and "
        f"{'is' if len(broken) == 1 else 'are'} never averaged in. If an arm breaks on the seeds where it would do "
        "badly, the seeds that remain flatter it.",
    )


def factor_title(factors: Sequence[str]) -> str:
    """`group_size x kl_beta`."""
    return " x ".join(short_path(factor) for factor in factors)


def _listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and 3 more`."""
    shown = list(names[:3])
    if len(names) > 3:
        return f"{', '.join(shown)} and {len(names) - 3} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
