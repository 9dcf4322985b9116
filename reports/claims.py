"""Decides published claims on GRPO from a study's results: supported, contradicted, undecided, or not tested here.

A claim is tested only between arms that differ in its subject and in nothing else (up to seeds). It is supported or
contradicted only by a contrast over seeds with a p-value below 0.05 after Holm's correction over the claims tested;
otherwise it stays undecided. A verdict holds for the model, task and machine of the study, which are rarely those of
the claim's source: the page says so.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..harness.record.study import TrialRecord
from . import statistics
from .analysis import Analysis, Contrast, contrast, outcome_contrast
from .prose import wording
from .statistics import ALPHA
from .trials import Trials, arm_specs, score, setting, usable_trials

Verdict = Literal["supported", "contradicted", "undecided", "not tested"]
Weights = dict[str, float]

MEMORY_RATIO = 1.7
TIME_SAVED = 0.35
STABLE_GROUP = 8
BETA_RANGE = (0.02, 0.06)


@dataclass(frozen=True)
class Claim:
    """A published claim beside what this study measured; `p_adjusted` is NaN for a claim that was not tested."""

    statement: str
    source: str
    measured: str
    verdict: Verdict
    p_adjusted: float = math.nan


@dataclass(frozen=True)
class _Evidence:
    """A measurement in words, and its verdict if the p-value stays below 0.05 after correction."""

    measured: str
    verdict: Verdict = "not tested"
    p: float = math.nan


def check_claims(analysis: Analysis) -> list[Claim]:
    """Every claim with its verdict, in a fixed order; p-values form one Holm family."""
    trials = usable_trials(analysis.record, analysis.outcome)
    evidence = [test(analysis, trials) for _, _, test in _CLAIMS]
    adjusted = statistics.holm([one.p for one in evidence])
    return [
        Claim(statement, source, one.measured, _decide(one.verdict, p), p)
        for (statement, source, _), one, p in zip(_CLAIMS, evidence, adjusted, strict=True)
    ]


def _decide(if_significant: Verdict, p_adjusted: float) -> Verdict:
    if if_significant == "not tested" or math.isnan(p_adjusted):
        return "not tested"
    return if_significant if p_adjusted < ALPHA else "undecided"


def _memory(analysis: Analysis, trials: Trials) -> _Evidence:
    """Peak memory of PPO over that of GRPO, against 1.7.

    Source: practitioners' guides; the reason, a critic as large as the policy, is given without a figure by
    DeepSeekMath (Shao et al. 2024, arXiv:2402.03300, section 4.1). Not tested with the built-in model `tiny`, because
    its peak is mostly the memory of the libraries.
    """
    weights = _ppo_minus_grpo(trials)
    found = _contrast(analysis, trials, weights, lambda trial: _log(trial.summary.get("peak_memory_bytes")))
    if found is None:
        return _Evidence("No seed shared by PPO and GRPO has a recorded peak memory." if weights else _NO_PAIR)
    text = f"PPO's peak is {_ratio(found)} times that of GRPO"
    if any(trial.spec.get("model") == "tiny" for (arm, _), trial in trials.items() if arm in weights):
        return _Evidence(f"{text}, but with the model tiny the libraries take most of the peak.")
    return _against(found, math.log(MEMORY_RATIO), text)


def _time(analysis: Analysis, trials: Trials) -> _Evidence:
    """Seconds of GRPO's training steps over those of PPO's, against 0.65.

    Source: practitioners' guides, which report 35 to 50 % less; DeepSeekMath (arXiv:2402.03300) gives no figure. PPO's
    critic is computed in the same way as the policy, so the ratio is due to the algorithms.
    """
    weights = _ppo_minus_grpo(trials)
    found = _contrast(analysis, trials, weights, _log_seconds)
    if found is None:
        return _Evidence("No seed shared by PPO and GRPO has timed steps." if weights else _NO_PAIR)
    text = f"A training step of GRPO takes {_ratio(found, inverse=True)} times as long as one of PPO"
    return _against(found, -math.log(1 - TIME_SAVED), text)


def _accuracy(analysis: Analysis, trials: Trials) -> _Evidence:
    """Accuracy of GRPO minus that of PPO.

    Source: stated widely since DeepSeek-R1 (2025, arXiv:2501.12948) was trained with GRPO. "At least as accurate"
    counts as supported if GRPO is detectably above: finding no difference does not show equality.
    """
    weights = {arm: -weight for arm, weight in _ppo_minus_grpo(trials).items()}
    found = outcome_contrast(analysis, weights) if weights else None
    if found is None or not found.differences:
        return _Evidence("PPO and GRPO share no complete seed." if weights else _NO_PAIR)
    verdict = "supported" if found.estimate >= 0 else "contradicted"
    return _tested(f"GRPO is {_points(found, analysis)} PPO", verdict, found.p, found)


def _group_size(analysis: Analysis, trials: Trials) -> _Evidence:
    """The drop from a run's best to its final validation accuracy, with G >= 8 against G < 8.

    Source: a rule of thumb of practitioners' guides, and the default of TRL's trainer. "Stable" is made measurable
    here: a run that collapses ends below its best. An invalid run with G >= 8 forbids support.
    """
    blocks = [
        ([arm for size, arm in found if size >= STABLE_GROUP], [arm for size, arm in found if size < STABLE_GROUP])
        for found in _levels(trials, "algorithm.group_size").values()
    ]
    weights = _block_weights(blocks)
    if not weights:
        return _Evidence(f"No arms with group sizes on both sides of {STABLE_GROUP} that differ in nothing else.")
    found = _contrast(analysis, trials, weights, lambda trial: _drawdown(trial, analysis.record.metric))
    if found is None:
        return _Evidence("No seed shared by such arms has a learning curve.")
    text = (
        f"Runs with G >= {STABLE_GROUP} end {wording.points(found.estimate, analysis.record.metric, found.interval)} "
        f"{'further' if found.estimate >= 0 else 'less far'} below their own best than those with G < {STABLE_GROUP}"
    )
    invalid = [trial for trial in analysis.record.trials if trial.state == "invalid"]
    broken = [trial for trial in invalid if (setting(trial.spec, "algorithm.group_size") or 0) >= STABLE_GROUP]
    if broken:
        text += f"; {wording.plural(len(broken), 'run')} with G >= {STABLE_GROUP} became invalid"
    supported = "undecided" if broken else "supported"
    return _tested(text, "contradicted" if found.estimate >= 0 else supported, found.p, found)


def _kl_weight(analysis: Analysis, trials: Trials) -> _Evidence:
    """The arms with beta from 0.02 to 0.06 against each other beta.

    Source: DeepSeekMath (arXiv:2402.03300, section 4.2) trains with 0.04; the range is that of practitioners' guides.
    Supported if the range is detectably above every other beta (the largest p, an intersection-union test, Berger
    1982), contradicted if one beta outside is detectably above it (the smallest p, Holm-adjusted).
    """
    low, high = BETA_RANGE
    blocks = list(_levels(trials, "algorithm.kl_beta").values())
    outside = sorted({beta for found in blocks for beta, _ in found if not low <= beta <= high})
    contrasts: dict[float, Contrast] = {}
    for level in outside:
        pairs = [([a for b, a in found if low <= b <= high], [a for b, a in found if b == level]) for found in blocks]
        if (weights := _block_weights(pairs)) and (found := outcome_contrast(analysis, weights)).differences:
            contrasts[level] = found
    if not contrasts:
        return _Evidence(f"No arms with beta inside and outside of {low} to {high} that differ in nothing else.")
    parts = [f"{_points(found, analysis)} beta = {level:g}" for level, found in contrasts.items()]
    text = f"Arms with beta from {low} to {high} are {'; '.join(parts)}"
    below = [level for level, found in contrasts.items() if found.estimate < 0]
    if not below:
        return _tested(text, "supported", float(np.max([found.p for found in contrasts.values()])))
    adjusted = dict(zip(contrasts, statistics.holm([found.p for found in contrasts.values()]), strict=True))
    return _tested(text, "contradicted", float(np.fmin.reduce([adjusted[level] for level in below])))


def _hard_tasks(analysis: Analysis, trials: Trials) -> _Evidence:
    """The gain of the largest group over the smallest on the hardest problems, minus that on the easiest.

    Source: practitioners' guides; the reason is that a group without any right answer teaches nothing (DAPO, Yu et al.
    2025, arXiv:2503.14476, section 3.2). Difficulty is a tag of the task; hardest is the tag with the lowest mean. If
    scores of single problems are known, the error includes the sampling of problems within the two tags.
    """
    pairs = []
    for found in _levels(trials, "algorithm.group_size").values():
        sizes = [size for size, _ in found]
        pairs.append(([a for s, a in found if s == max(sizes)], [a for s, a in found if s == min(sizes)]))
    weights = _block_weights([pair for pair in pairs if set(pair[0]).isdisjoint(pair[1])])
    if not weights:
        return _Evidence("No arms with two group sizes that differ in nothing else.")
    tags = _difficulty(trials, analysis.outcome.name)
    if tags is None:
        return _Evidence("The task has no difficulty tags.")
    easy, hard, shares = tags
    if analysis.outcome.per_problem and not shares:
        return _Evidence("The trials are too few, or the tags too overlapping, to tell how many problems are hard.")

    def gap(trial: TrialRecord) -> float | None:
        ends = [score(trial, metric) for metric in (hard, easy)]
        return None if ends[0] is None or ends[1] is None else ends[0] - ends[1]

    found = _contrast(analysis, trials, weights, gap)
    if found is None:
        return _Evidence("No seed shared by such arms has accuracy by difficulty.")
    found = _over_problems(analysis, found, weights, shares)
    names = [metric.rpartition("accuracy_")[2].replace("_", " ") for metric in (hard, easy)]
    text = (
        f"From the smallest to the largest group, accuracy on {names[0]} changes by "
        f"{wording.points(found.estimate, analysis.outcome.name, found.interval)} "
        f"{'more' if found.estimate >= 0 else 'less'} than on {names[1]}"
    )
    return _tested(text, "supported" if found.estimate >= 0 else "contradicted", found.p, found)


_NO_PAIR = "No arms of PPO and GRPO that differ in nothing else."
_GUIDES = "practitioners' guides"
_CLAIMS: tuple[tuple[str, str, Callable[[Analysis, Trials], _Evidence]], ...] = (
    ("GRPO needs 1.7 to 2 times less memory than PPO", f"{_GUIDES}; arXiv:2402.03300, section 4.1", _memory),
    ("GRPO takes 35 to 50 % less time than PPO", _GUIDES, _time),
    ("GRPO is at least as accurate as PPO", f"{_GUIDES}; arXiv:2501.12948", _accuracy),
    ("Groups of 8 or more train stably", _GUIDES, _group_size),
    ("A KL weight of 0.02 to 0.06 works best", f"{_GUIDES}; arXiv:2402.03300, section 4.2", _kl_weight),
    ("Harder tasks want larger groups", f"{_GUIDES}; arXiv:2503.14476, section 3.2", _hard_tasks),
)


def _ppo_minus_grpo(trials: Trials) -> Weights:
    """Arms named ppo and grpo whose runs differ in nothing but the algorithm and its settings."""
    blocks: dict[str, dict[str, list[str]]] = {}
    for arm, spec in arm_specs(trials.values()).items():
        name = setting(spec, "algorithm.name")
        if name in ("ppo", "grpo"):
            blocks.setdefault(_key(spec, "algorithm"), {"ppo": [], "grpo": []})[name].append(arm)
    return _block_weights([(block["ppo"], block["grpo"]) for block in blocks.values()])


def _levels(trials: Trials, dotted: str) -> dict[str, list[tuple[float, str]]]:
    """Settings of a run without the one at `dotted`, as text -> that setting's values and their arms."""
    blocks: dict[str, list[tuple[float, str]]] = {}
    for arm, spec in arm_specs(trials.values()).items():
        value = setting(spec, dotted)
        if isinstance(value, int | float):
            blocks.setdefault(_key(spec, dotted), []).append((value, arm))
    return blocks


def _block_weights(blocks: Iterable[tuple[Sequence[str], Sequence[str]]]) -> Weights:
    """Mean of the first arms minus mean of the second, averaged over the blocks that have both; else empty."""
    whole = [(first, second) for first, second in blocks if first and second]
    weights: Weights = {}
    for first, second in whole:
        weights |= {arm: 1 / len(first) / len(whole) for arm in first}
        weights |= {arm: -1 / len(second) / len(whole) for arm in second}
    return weights


def _key(spec: Mapping[str, Any], dotted: str) -> str:
    """A run's settings without its seed and the one at `dotted`, as text."""
    kept = json.loads(json.dumps({key: value for key, value in spec.items() if key != "seed"}, default=str))
    *parents, last = dotted.split(".")
    node = kept
    for parent in parents:
        node = node[parent]
    del node[last]
    return json.dumps(kept, sort_keys=True)


def _contrast(
    analysis: Analysis, trials: Trials, weights: Weights, value: Callable[[TrialRecord], float | None]
) -> Contrast | None:
    """The contrast of a value of every trial; None without weights, or if no seed has the value in all arms."""
    found: dict[str, dict[int, float]] = {arm: {} for arm, _ in trials}
    for (arm, seed), trial in trials.items():
        number = value(trial)
        if number is not None and math.isfinite(number):
            found[arm][seed] = number
    summed = contrast(analysis.record, found, weights) if weights else None
    return summed if summed is not None and summed.differences else None


def _difficulty(trials: Trials, outcome: str) -> tuple[str, str, tuple[float, ...]] | None:
    """The metrics of the easiest and the hardest tag that all trials share (`test/accuracy_level_5`), and the shares of
    the problems that carry them; no shares if the accuracy by tag does not determine them."""
    prefix = f"{outcome.partition('/')[0]}/accuracy_"
    shared = set.intersection(*({key for key in trial.history if key.startswith(prefix)} for trial in trials.values()))
    families: dict[str, list[str]] = {}
    for key in sorted(shared):
        families.setdefault(key.rpartition("_")[0], []).append(key)
    families = {name: keys for name, keys in families.items() if len(keys) > 1}
    if not families:
        return None
    keys = families[min(families)]
    tagged = np.array([[score(trial, key) or 0.0 for key in keys] for trial in trials.values()])
    whole = np.array([score(trial, outcome) or 0.0 for trial in trials.values()])
    easy, hard = int(tagged.mean(axis=0).argmax()), int(tagged.mean(axis=0).argmin())
    # accuracy is the mean over the tags, weighted by their shares: one equation per trial
    shares, _, rank, _ = np.linalg.lstsq(tagged, whole)
    is_known = rank == len(keys) and np.allclose(tagged @ shares, whole, atol=1e-9) and shares.min() > 0
    return keys[easy], keys[hard], (float(shares[easy]), float(shares[hard])) if is_known else ()


def _over_problems(analysis: Analysis, found: Contrast, weights: Weights, shares: Sequence[float]) -> Contrast:
    """A contrast between two tags with these shares of the problems, its error including that of new problems."""
    cells = [
        weight * rows
        for arm, weight in weights.items()
        if (rows := analysis.arm(arm).cells_of(found.differences)) is not None
    ]
    if found.interval is None or not shares or len(cells) < len(weights):
        return found
    summed = np.sum(cells, axis=0)
    num_problems = summed.shape[1]
    variance = statistics.crossed_variance(summed).problem * sum(1 / (share * num_problems) for share in shares)
    interval = statistics.with_variance(found.interval, variance, num_problems - 1)
    p = float(np.max([found.p, statistics.t_test(interval)]))
    return replace(found, interval=interval, p=p)


def _log_seconds(trial: TrialRecord) -> float | None:
    """Log of the mean seconds of a training step, without evaluations and without the first step, which warms up."""
    steps = [value for _, value in trial.history.get("seconds/step", ())][1:]
    return _log(float(np.mean(steps))) if steps else None


def _log(value: float | None) -> float | None:
    return math.log(value) if value is not None and value > 0 else None


def _drawdown(trial: TrialRecord, metric: str) -> float | None:
    values = [value for _, value in trial.history.get(metric, ()) if math.isfinite(value)]
    return max(values) - values[-1] if len(values) > 1 else None


def _against(found: Contrast, bound: float, text: str) -> _Evidence:
    """A contrast of logarithms against the bound of a claim, which a larger value supports."""
    if found.interval is None:
        return _tested(text, "undecided", math.nan, found)
    excess = replace(found.interval, estimate=found.interval.estimate - bound)
    return _tested(text, "supported" if excess.estimate >= 0 else "contradicted", statistics.t_test(excess), found)


def _tested(text: str, verdict: Verdict, p: float, found: Contrast | None = None) -> _Evidence:
    seeds = f" ({wording.plural(len(found.differences), 'seed')})" if found is not None else ""
    if math.isnan(p):
        few = found is None or len(found.differences) < 2
        why = "with one shared seed" if few else "without any spread over seeds"
        return _Evidence(f"{text}; {why} no test is possible.")
    return _Evidence(f"{text}{seeds}.", verdict, p)


def _ratio(found: Contrast, inverse: bool = False) -> str:
    """`1.52 [1.40, 1.65]`, from logarithms."""
    sign = -1 if inverse else 1
    text = f"{math.exp(sign * found.estimate):.2f}"
    if found.interval is None:
        return text
    low, high = sorted(math.exp(sign * end) for end in (found.interval.low, found.interval.high))
    return f"{text} [{low:.2f}, {high:.2f}]"


def _points(found: Contrast, analysis: Analysis) -> str:
    return wording.apart(found.estimate, analysis.outcome.name, found.interval)
