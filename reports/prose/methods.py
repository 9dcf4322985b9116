"""Answers the questions of reviewers about a comparison; the answers together are a paragraph for a paper.

The answers come from the record, or say that it does not know. The questions are, in our words, from
the NeurIPS paper checklist on experiments and from Eimer et al. (2023, arXiv:2306.01324) on tuning in reinforcement
learning.
"""

import math
from statistics import fmean

from ...harness.base.words import duration
from ..analysis import Analysis
from ..trials import arm_specs, is_imported, search_of, test_last, tuning_of
from . import wording
from .notes import budget_note, cold_start_note, evaluation_note, interval_method

_UNKNOWN = "not known, because scores were imported"


def methods(analysis: Analysis) -> list[tuple[str, str]]:
    """Each question with its answer in whole sentences; nothing before the first run."""
    record, specs = analysis.record, arm_specs(analysis.record.trials)
    if not specs:
        return []
    names, seeds = wording.quoted([arm.label for arm in analysis.arms], 8), wording.plural(len(record.seeds), "seed")
    if is_imported(record):
        tokens = {arm.label: arm.costs.get("generated_tokens") for arm in analysis.arms}
        each = [f"'{arm}' {wording.quantity(count)}" for arm, count in tokens.items() if count is not None]
        planned = f"Which other runs were made is {_UNKNOWN}."
        start = f"The starting points, and whether runs with equal seeds share one, are {_UNKNOWN}."
        budget = f"Generated tokens of a run: {wording.listed(each, 8)}." if each else f"The budgets are {_UNKNOWN}."
        tuning = f"How the settings of the arms were found is {_UNKNOWN}."
        test = f"What was chosen by these scores, and by whom, is {_UNKNOWN}."
        compute = f"Hardware and time are {_UNKNOWN}."
    else:
        later = record.added or record.amendments
        planned = "Not all of them were" if later else "They were"
        planned += f" fixed before the first run{', as the notes say' if later else ''}."
        start, budget = cold_start_note(specs)[1], budget_note(analysis, specs)[1]
        tuning, test = _tuning(analysis), evaluation_note(analysis, specs)[1]
        test += " They were scored before the first step, too." * any(one.start_per_problem for one in record.trials)
        compute = _compute(analysis)
    last = max(map(test_last, specs.values()))
    counts = f"mean over the policies of each run's last {last} evaluations" if last > 1 else "last step of each run"
    lost = [f"'{gap.arm}', seed {gap.seed} ({gap.state}: {wording.shorten(gap.reason, 100)})" for gap in analysis.gaps]
    return [
        ("What was compared, over how many seeds?", f"We compare {names}, with {seeds}. {planned}"),
        ("Where do the arms start?", start),
        ("Are the budgets equal?", budget),
        ("How were the settings found?", tuning),
        ("What was the test used for?", test),
        ("Which checkpoint counts?", f"The {counts} counts. {best_checkpoint(analysis)}".strip()),
        ("What do intervals and tests cover?", interval_method(analysis)),
        ("What was left out?", f"Left out: {wording.listed(lost) or 'no run'}."),
        ("How much compute, on what?", compute),
    ]


def best_checkpoint(analysis: Analysis) -> str:
    """A sentence on the gain if the problems that judge a run also chose its best step; empty if unknown."""
    metric, found = analysis.record.metric, dict[str, float]()
    for arm in analysis.finished_arms if wording.is_fraction(metric) else ():
        series = [analysis.usable[arm.label, seed].history.get(metric, ()) for seed in arm.scores]
        known = [[value for step, value in one if step and math.isfinite(value)] for one in series]
        if all(len(one) > 1 for one in known):
            found[arm.label] = fmean(max(one) - one[-1] for one in known)
    ranked = sorted(found.items(), key=lambda one: -one[1])
    each = [f"{wording.points(gain, metric)} to '{arm}'" for arm, gain in ranked]
    by = f"Choosing each run's best step by the {wording.spoken(metric)} that judges it, as some do on a test,"
    return f"{by} would have added {wording.listed(each, 4)}." if each else ""


def _tuning(analysis: Analysis) -> str:
    if (search := search_of(analysis.record)) is not None:
        goal = wording.spoken(analysis.record.metric)
        return f"A search tried {wording.plural(len(search['arms']), 'setting')}, judged by {goal}."
    if tries := [f"'{name}' ({len(found['arms'])})" for name, found in tuning_of(analysis.record).items()]:
        return f"Searches with seeds of their own chose the settings of (number tried) {wording.listed(tries, 8)}."
    return "Nothing was tuned in this study; how its settings were found before is not recorded."


def _compute(analysis: Analysis) -> str:
    trials, units = analysis.record.trials, {"core_seconds": " core-hours", "gpu_seconds": " GPU-hours"}
    spent = {key: sum(trial.summary.get(key, 0.0) for trial in trials) for key in ("seconds", *units)}
    kinds = ("processor", "gpu") if spent["gpu_seconds"] else ("processor",)
    names = sorted({trial.versions[kind] for trial in trials for kind in kinds if kind in trial.versions})
    hours = [f", {spent[key] / 3600:.3g}{unit}" for key, unit in units.items() if spent[key]]
    peak = wording.size(max((trial.summary.get("peak_memory_bytes", 0.0) for trial in trials), default=0.0))
    where = wording.listed(names) or "hardware that is not recorded"
    spent_on = f"{duration(spent['seconds'])}{''.join(hours)}, at most {peak} of memory with the engine"
    return f"All runs took {spent_on}, on {where}."
