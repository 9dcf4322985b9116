"""Decides published claims on GRPO from a study's results: supported, contradicted, undecided, or not tested here.

A claim is tested only between arms that differ in its subject and in nothing else (up to seeds). It is supported or
contradicted only by a contrast over seeds with a p-value below 0.05 after Holm's correction over the claims tested;
otherwise it stays undecided. A verdict holds for the model, task and machine of the study, which are rarely those of
the claim's source: the page says so.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..harness.record.study import TrialRecord
from . import statistics
from .analysis import Analysis, Contrast, contrast, outcome_contrast
from .prose import wording
from .statistics import ALPHA
from .trials import arm_specs, score, setting

Verdict = Literal["supported", "contradicted", "undecided", "not tested"]
Weights = dict[str, float]
Blocks = list[list[tuple[Any, str]]]  # (level of a setting, arm) of the arms that differ in nothing else
Evidence = tuple[str, Verdict, float]  # what was measured, the verdict if it is significant, and p; NaN without a test

MEMORY_RATIO, TIME_RATIO = 1.7, 0.65
STABLE_GROUP = 8
BETA_RANGE = (0.02, 0.06)


@dataclass(frozen=True)
class Claim:
    """A published claim beside what this study measured; `p_adjusted` is NaN for a claim that was not tested."""

    statement: str
    source: str
    measured: str
    verdict: Verdict
    p_adjusted: float


def check_claims(analysis: Analysis) -> list[Claim]:
    """Every claim with its verdict, in a fixed order; p-values form one Holm family."""
    evidence = [test(analysis) for _, _, test in _CLAIMS]
    adjusted = statistics.holm([p for _, _, p in evidence])
    found = []
    for (statement, source, _), (measured, verdict, _), p in zip(_CLAIMS, evidence, adjusted, strict=True):
        decided = "not tested" if math.isnan(p) else verdict if p < ALPHA else "undecided"
        found.append(Claim(statement, source, measured, decided, p))
    return found


def _memory(analysis: Analysis) -> Evidence:
    """Peak memory of PPO over that of GRPO. The reason, a critic as large as the policy, is that of section 4.1.

    Not tested with the built-in model `tiny`, because its peak is mostly the memory of the libraries.
    """
    weights = _apart(analysis, "ppo", "grpo")
    is_tiny = any(trial.spec.get("model") == "tiny" for (arm, _), trial in analysis.usable.items() if arm in weights)
    return _ratio(
        analysis, weights, lambda trial: trial.summary.get("peak_memory_bytes"), MEMORY_RATIO,
        "PPO's peak is {} times that of GRPO", "a recorded peak memory",
        ", but with the model tiny the libraries take most of the peak." if is_tiny else "",
    )  # fmt: skip


def _time(analysis: Analysis) -> Evidence:
    """Seconds of GRPO's training steps over those of PPO's, without evaluations and the first step, which warms up.

    PPO's critic is computed in the same way as the policy, so the ratio is due to the algorithms.
    """

    def seconds(trial: TrialRecord) -> float | None:
        steps = [value for _, value in trial.history.get("seconds/step", ())][1:]
        return float(np.mean(steps)) if steps else None

    weights = _apart(analysis, "grpo", "ppo")
    text = "A training step of GRPO takes {} times as long as one of PPO"
    return _ratio(analysis, weights, seconds, TIME_RATIO, text, "timed steps")


def _accuracy(analysis: Analysis) -> Evidence:
    """Accuracy of GRPO minus that of PPO. "At least as accurate" counts as supported if GRPO is detectably above:
    finding no difference does not show equality."""
    weights = _apart(analysis, "grpo", "ppo")
    found = outcome_contrast(analysis, weights) if weights else None
    if found is None or not found.differences:
        return _untested("PPO and GRPO share no complete seed." if weights else _NO_PAIR)
    return _tested(f"GRPO is {_points(found, analysis)} PPO", found.estimate >= 0, found.p, found)


def _group_size(analysis: Analysis) -> Evidence:
    """The drop from a run's best to its final validation accuracy, with G >= 8 (the default of TRL) against G < 8.

    "Stable" is made measurable here: a run that collapses ends below its best. An invalid run with G >= 8 forbids
    support.
    """

    def drawdown(trial: TrialRecord) -> float | None:
        values = [value for _, value in trial.history.get(metric, ()) if math.isfinite(value)]
        return max(values) - values[-1] if len(values) > 1 else None

    metric, blocks = analysis.record.metric, _blocks(analysis, "algorithm.group_size")
    weights = _weights(blocks, lambda size: size >= STABLE_GROUP, lambda size: size < STABLE_GROUP)
    if not weights:
        return _untested(f"No arms with group sizes on both sides of {STABLE_GROUP} that differ in nothing else.")
    found = _contrast(analysis, weights, drawdown)
    if found is None:
        return _untested("No seed shared by such arms has a learning curve.")
    text = (
        f"Runs with G >= {STABLE_GROUP} end {wording.points(found.estimate, metric, found.interval)} "
        f"{'further' if found.estimate >= 0 else 'less far'} below their own best than those with G < {STABLE_GROUP}"
    )
    invalid = [trial for trial in analysis.record.trials if trial.state == "invalid"]
    broken = [trial for trial in invalid if (setting(trial.spec, "algorithm.group_size") or 0) >= STABLE_GROUP]
    if broken:
        text += f"; {wording.plural(len(broken), 'run')} with G >= {STABLE_GROUP} became invalid"
    measured, verdict, p = _tested(text, found.estimate < 0, found.p, found)
    return measured, "undecided" if broken and verdict == "supported" else verdict, p


def _kl_weight(analysis: Analysis) -> Evidence:
    """The arms with beta from 0.02 to 0.06 against each other beta; the paper trains with 0.04.

    Supported if the range is detectably above every other beta (the largest p, an intersection-union test, Berger
    1982), contradicted if one beta outside is detectably above it (the smallest p, Holm-adjusted).
    """
    low, high = BETA_RANGE
    blocks = _blocks(analysis, "algorithm.kl_beta")
    contrasts: dict[float, Contrast] = {}
    for level in sorted({beta for found in blocks for beta, _ in found if not low <= beta <= high}):
        weights = _weights(blocks, lambda beta: low <= beta <= high, lambda beta, level=level: beta == level)
        if weights and (found := outcome_contrast(analysis, weights)).differences:
            contrasts[level] = found
    if not contrasts:
        return _untested(f"No arms with beta inside and outside of {low} to {high} that differ in nothing else.")
    parts = [f"{_points(found, analysis)} beta = {level:g}" for level, found in contrasts.items()]
    text, p_values = f"Arms with beta from {low} to {high} are {'; '.join(parts)}", [x.p for x in contrasts.values()]
    below = [p for p, found in zip(statistics.holm(p_values), contrasts.values(), strict=True) if found.estimate < 0]
    return _tested(text, not below, float(np.fmin.reduce(below) if below else np.max(p_values)))


def _hard_tasks(analysis: Analysis) -> Evidence:
    """The gain of the largest group over the smallest on the hardest problems, minus that on the easiest.

    The reason of the claim is that a group without any right answer teaches nothing. Difficulty is a tag of the task;
    hardest is the tag with the lowest mean. If scores of single problems are known, the error includes the sampling of
    problems within the two tags.
    """
    blocks: Blocks = []
    for found in _blocks(analysis, "algorithm.group_size"):
        ends = [choose(size for size, _ in found) for choose in (min, max)]
        blocks.append([(size == ends[1], arm) for size, arm in found if size in ends and ends[0] < ends[1]])
    weights = _weights(blocks, lambda is_largest: is_largest, lambda is_largest: not is_largest)
    if not weights:
        return _untested("No arms with two group sizes that differ in nothing else.")
    tags = _difficulty(analysis)
    if tags is None:
        return _untested("The task has no difficulty tags.")
    easy, hard, shares = tags
    if analysis.outcome.per_problem and not shares:
        return _untested("The trials are too few, or the tags too overlapping, to tell how many problems are hard.")

    def gap(trial: TrialRecord) -> float | None:
        ends = [score(trial, metric) for metric in (hard, easy)]
        return None if ends[0] is None or ends[1] is None else ends[0] - ends[1]

    found = _contrast(analysis, weights, gap)
    if found is None:
        return _untested("No seed shared by such arms has accuracy by difficulty.")
    p, interval = found.p, found.interval
    cells = [
        weight * rows
        for arm, weight in weights.items()
        if (rows := analysis.arm(arm).cells_of(found.differences)) is not None
    ]
    if interval is not None and shares and len(cells) == len(weights):
        summed = np.sum(cells, axis=0)
        count = summed.shape[1]
        variance = statistics.crossed_variance(summed).problem * sum(1 / (share * count) for share in shares)
        interval = statistics.with_variance(interval, variance, count - 1)
        p = float(np.max([p, statistics.t_test(interval)]))
    names = [metric.rpartition("accuracy_")[2].replace("_", " ") for metric in (hard, easy)]
    text = (
        f"From the smallest to the largest group, accuracy on {names[0]} changes by "
        f"{wording.points(found.estimate, analysis.outcome.name, interval)} "
        f"{'more' if found.estimate >= 0 else 'less'} than on {names[1]}"
    )
    return _tested(text, found.estimate >= 0, p, found)


_NO_PAIR = "No arms of PPO and GRPO that differ in nothing else."
_GUIDES = "practitioners' guides"
_CLAIMS: tuple[tuple[str, str, Callable[[Analysis], Evidence]], ...] = (
    ("GRPO needs 1.7 to 2 times less memory than PPO", f"{_GUIDES}; arXiv:2402.03300, section 4.1", _memory),
    ("GRPO takes 35 to 50 % less time than PPO", _GUIDES, _time),
    ("GRPO is at least as accurate as PPO", f"{_GUIDES}; arXiv:2501.12948", _accuracy),
    ("Groups of 8 or more train stably", _GUIDES, _group_size),
    ("A KL weight of 0.02 to 0.06 works best", f"{_GUIDES}; arXiv:2402.03300, section 4.2", _kl_weight),
    ("Harder tasks want larger groups", f"{_GUIDES}; arXiv:2503.14476, section 3.2", _hard_tasks),
)


def _untested(text: str) -> Evidence:
    return text, "not tested", math.nan


def _tested(text: str, is_supported: bool, p: float, found: Contrast | None = None) -> Evidence:
    if math.isnan(p):
        few = found is None or len(found.differences) < 2
        return _untested(
            f"{text}; {'with one shared seed' if few else 'without any spread over seeds'} no test is possible."
        )
    seeds = f" ({wording.plural(len(found.differences), 'seed')})" if found is not None else ""
    return f"{text}{seeds}.", "supported" if is_supported else "contradicted", p


def _ratio(
    analysis: Analysis,
    weights: Weights,
    value: Callable[[TrialRecord], float | None],
    bound: float,
    text: str,
    missing: str,
    caveat: str = "",
) -> Evidence:
    """A ratio of two algorithms against a bound that the claim says it exceeds or, below 1, stays under.

    `text` takes `1.52 [1.40, 1.65]`, `missing` is what no trial has, and a `caveat` is why the ratio is no test.
    """

    def log(trial: TrialRecord) -> float | None:
        number = value(trial)
        return math.log(number) if number is not None and number > 0 else None

    found = _contrast(analysis, weights, log)
    if found is None:
        return _untested(f"No seed shared by PPO and GRPO has {missing}." if weights else _NO_PAIR)
    interval, p = found.interval, math.nan
    limits = "" if interval is None else f" [{math.exp(interval.low):.2f}, {math.exp(interval.high):.2f}]"
    text = text.format(f"{math.exp(found.estimate):.2f}{limits}")
    excess = found.estimate - math.log(bound)
    if interval is not None:
        p = statistics.t_test(replace(interval, estimate=excess))
    return _untested(text + caveat) if caveat else _tested(text, (excess >= 0) == (bound > 1), p, found)


def _apart(analysis: Analysis, one: str, other: str) -> Weights:
    """One algorithm minus another, by arms whose runs differ in nothing but the algorithm and its settings."""
    return _weights(
        _blocks(analysis, "algorithm", "algorithm.name"), lambda name: name == one, lambda name: name == other
    )


def _blocks(analysis: Analysis, dotted: str, read: str = "") -> Blocks:
    """The arms whose settings agree apart from the seed and the setting at `dotted`, with that setting (or `read`)."""
    blocks: dict[str, list[tuple[Any, str]]] = {}
    *parents, last = dotted.split(".")
    for arm, spec in arm_specs(analysis.usable.values()).items():
        if (value := setting(spec, read or dotted)) is not None:
            node = kept = json.loads(json.dumps({key: v for key, v in spec.items() if key != "seed"}, default=str))
            for parent in parents:
                node = node[parent]
            del node[last]
            blocks.setdefault(json.dumps(kept, sort_keys=True), []).append((value, arm))
    return list(blocks.values())


def _weights(blocks: Blocks, first: Callable[[Any], bool], second: Callable[[Any], bool]) -> Weights:
    """Mean of the arms with a `first` level minus that of the `second`, over the blocks that have both; else empty."""
    pairs = [[[arm for level, arm in block if is_one(level)] for is_one in (first, second)] for block in blocks]
    whole = [pair for pair in pairs if all(pair)]
    weights: Weights = {}
    for ones, others in whole:
        weights |= {arm: 1 / len(ones) / len(whole) for arm in ones}
        weights |= {arm: -1 / len(others) / len(whole) for arm in others}
    return weights


def _contrast(analysis: Analysis, weights: Weights, value: Callable[[TrialRecord], float | None]) -> Contrast | None:
    """The contrast of a value of every trial; None without weights, or if no seed has the value in all arms."""
    found: dict[str, dict[int, float]] = {arm: {} for arm, _ in analysis.usable}
    for (arm, seed), trial in analysis.usable.items():
        if (number := value(trial)) is not None and math.isfinite(number):
            found[arm][seed] = number
    summed = contrast(analysis.record, found, weights) if weights else None
    return summed if summed is not None and summed.differences else None


def _difficulty(analysis: Analysis) -> tuple[str, str, Sequence[float]] | None:
    """The metrics of the easiest and the hardest tag that all trials share (`test/accuracy_level_5`), and the shares of
    the problems that carry them; no shares if the accuracy by tag does not determine them."""
    outcome, trials = analysis.outcome.name, analysis.usable
    prefix = f"{outcome.partition('/')[0]}/accuracy_"
    shared = set.intersection(*({key for key in trial.history if key.startswith(prefix)} for trial in trials.values()))
    families: dict[str, list[str]] = {}
    for key in sorted(shared):
        families.setdefault(key.rpartition("_")[0], []).append(key)
    keys = next((keys for _, keys in sorted(families.items()) if len(keys) > 1), None)
    if keys is None:
        return None
    tagged = np.array([[score(trial, key) or 0.0 for key in keys] for trial in trials.values()])
    whole = np.array([score(trial, outcome) or 0.0 for trial in trials.values()])
    easy, hard = int(tagged.mean(axis=0).argmax()), int(tagged.mean(axis=0).argmin())
    # accuracy is the mean over the tags, weighted by their shares: one equation per trial
    shares, _, rank, _ = np.linalg.lstsq(tagged, whole)
    is_known = rank == len(keys) and np.allclose(tagged @ shares, whole, atol=1e-9) and shares.min() > 0
    return keys[easy], keys[hard], [float(shares[easy]), float(shares[hard])] if is_known else []


def _points(found: Contrast, analysis: Analysis) -> str:
    return wording.apart(found.estimate, analysis.outcome.name, found.interval)
