"""Predicts the cost of a study from a short calibration, and how many seeds, for how small a difference, a budget buys.

The calibration is the study itself, cut to a few steps of each arm, with the same numbers of workers and threads, in a
runs folder of its own. `study/estimates.py` then predicts the study as it predicts any: from the runs of its folder.
"""

import bisect
import math
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....reports.statistics import minimum_detectable_difference
from ...api.settings import runs_folder
from ...api.study import Study
from ...base.inputs import digest
from ...base.machine import default_workers, usable_cores
from ...mirror.address import MIRROR, TRACKING_URI
from ...policy.sources import start_name
from ...run.cold_start import start_policy
from ...settings.errors import SpecError
from ...settings.run import RunSpec, parse_run
from ...settings.study import StudySpec, parse_study
from ...study.estimates import budget, complete_runs, planned
from ...study.plan import Plan
from ...study.preflight import check_study
from ...study.queue import Queue
from ...study.runner import run_study
from ...study.worker import EXECUTE

STEPS = 10  # steps of a calibration
MOST_SEEDS = 200


@dataclass(frozen=True)
class Option:
    """The cost of a number of seeds: seconds from start to report, seconds and operations of all trials (None if they
    cannot be counted); and the difference that they detect with probability 0.8, None if the spread is unknown."""

    seeds: int
    trials: int
    seconds: float
    trial_seconds: float
    flops: float | None
    detectable: float | None


@dataclass(frozen=True)
class Proposal:
    """The cost of a study as it is, and with the seeds that the limit allows: None if it does not allow two.

    `spread` is the standard deviation over seeds of the estimated quantity, None if it is unknown.
    """

    measured_seconds: float
    workers: int
    spread: float | None
    as_it_is: Option
    proposed: Option | None


def plan(
    study: Study,
    *,
    hours: float | None = None,
    flops: float | None = None,
    power: float | None = None,
    spread: float | None = None,
    workers: int | None = None,
    runs: str | Path | None = None,
) -> Proposal:
    """Measure a few steps of a study, then predict its cost and propose a number of seeds.

    At most one limit: `hours` from start to report, `flops` of all trials, or the `power` to detect a difference with
    probability 0.8. `spread` is the standard deviation of a difference over seeds, by default among complete trials.
    """
    limits = {"`hours`": hours, "`flops`": flops, "`power`": power, "`spread`": spread}
    for name, value in limits.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise SpecError(f"{name} must be a number above 0, got {value:g}")
    if len(given := [name for name in ("`hours`", "`flops`", "`power`") if limits[name] is not None]) > 1:
        rule = "only one of `hours`, `flops` and `power` can be given"
        raise SpecError(f"{rule}, got {' and '.join(given)}; leave one out")
    spec, folder = study.spec, runs_folder(runs).resolve()
    if given and spec.searches():
        why = "its file sets the number of trials"
        raise SpecError(f"{given[0]} must be left out for a study that searches or tunes: {why}")
    spread = spread_of(spec, folder) if spread is None else spread
    if power is not None and spread is None:
        rule = "`power` needs the spread over seeds, but the runs folder has no two complete seeds of these arms"
        raise SpecError(f"{rule}; give `spread`, such as 0.02")
    began, workers = time.monotonic(), workers or default_workers(spec.devices)
    check_study(spec, folder, workers, EXECUTE)
    (folder / "cache").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="plan-", dir=folder / "cache") as scratch:
        calibrate(spec, folder, Path(scratch), workers)
        seconds = time.monotonic() - began
        cost = cache(lambda seeds: option(spec, seeds, Path(scratch), workers, spread))
        own = cost(len(spec.seeds))
        return Proposal(seconds, workers, spread, own, within(cost, hours, flops, power) if given else own)


def calibrate(study: StudySpec, runs: Path, scratch: Path, workers: int) -> None:
    """Run a study, cut to a few steps, in the runs folder `scratch`; one trial for each worker at least.

    It first trains the cold starts in the cache of `runs`, where the study finds them. SpecError if an arm does not
    finish its few steps.
    """
    arms = [arm for arm, _ in planned(study)]
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, usable_cores() // workers))  # as in a worker, because the last bits depend on it
    for spec in {start_name(arm.spec, runs / "cache"): arm.spec for arm in arms if arm.spec.cold_start.steps}.values():
        start_policy(spec, runs / "cache")
    torch.set_num_threads(threads)

    kinds = {_alike(arm.spec.model_dump(mode="json")): arm for arm in reversed(arms)}  # each is measured once
    cut_arms = list(kinds.values())[::-1]
    raw = {
        "name": "plan", "question": study.question, "run": study.run, "metric": study.metric,
        "arms": {a.label: {**a.overrides, "steps": min(a.spec.steps, STEPS), "max_flops": None} for a in cut_arms},
        "baseline": next(arm.label for arm in cut_arms if arm.spec.control is None),
        "seeds": list(range(math.ceil(workers / len(cut_arms)))),
    }  # fmt: skip
    (scratch / "cache").symlink_to((runs / "cache").resolve())
    with ExitStack() as after:
        for name in os.environ.keys() & {TRACKING_URI, MIRROR}:  # nothing of a calibration is sent anywhere
            after.callback(os.environ.__setitem__, name, os.environ.pop(name))
        cut = parse_study(raw, f"study '{study.name}'")
        status = run_study(cut, scratch, workers=workers, command="")
    if not status.finished:  # asked to stop
        raise KeyboardInterrupt
    if bad := next((trial for trial in status.trials if trial.state != "complete"), None):
        rule = f"arm '{bad.arm}' of study '{study.name}' must complete {STEPS} steps to be measured"
        raise SpecError(f"{rule}, got {bad.state}: {bad.reason}")


def option(study: StudySpec, seeds: int, runs: Path, workers: int, spread: float | None) -> Option:
    """The cost of a study with that many seeds of each arm, by the complete runs of a runs folder without the study,
    and the difference that it can detect."""
    arms, listed = list(planned(study)), study.seeds if seeds == len(study.seeds) else list(range(seeds))
    queue = Queue(Plan(study.model_copy(update={"name": "whole", "seeds": listed}), runs))
    cost = budget(queue.plan, queue.status(workers), queue.coming())
    measured = {_alike(spec): (spec, result["summary"]) for spec, result in complete_runs(runs)}
    each = [operations(arm.spec, *measured[_alike(arm.spec.model_dump(mode="json"))]) for arm, _ in arms]
    counts = [count if study.searches() else seeds for _, count in arms]  # a search's file sets the number of trials
    detectable = None
    if spread is not None and seeds > 1 and not study.searches():
        comparisons = max(1, sum(arm.spec.control is None for arm, _ in arms) - 1)
        detectable = minimum_detectable_difference(spread / math.sqrt(seeds), seeds - 1, 0.05 / comparisons)
    flops = sum(number * count for number, count in zip(each, counts, strict=True)) if all(each) else None
    return Option(seeds, cost["trials"], cost["seconds"], cost["trial_seconds"], flops, detectable)


def operations(spec: RunSpec, settings: Mapping[str, Any], summary: Mapping[str, float]) -> float:
    """The operations of a run, scaled from a shorter one that is like it; 0 if that one did not count them."""
    short = parse_run(settings, "a measured run")
    learning = summary.get("flops_train", 0.0) / max(1, short.steps) * spec.steps
    evaluation = summary.get("flops_evaluation", 0.0) * _evaluated(spec) / _evaluated(short)
    return min(learning, spec.max_flops or math.inf) + evaluation


def _evaluated(spec: RunSpec) -> int:
    """The completions of all evaluations of a run."""
    one = spec.evaluation
    tests = (one.test_at_start + one.test_last) * (1 + len(one.tests))
    validations = 1 + math.ceil(spec.steps / one.every)
    sampled = one.num_prompts * (1 + one.num_samples), one.num_test_prompts * (1 + one.samples_of("test"))
    return validations * sampled[0] + tests * sampled[1]


def within(
    cost: Callable[[int], Option], hours: float | None, flops: float | None, power: float | None
) -> Option | None:
    """The most seeds within the hours or operations, or the fewest that detect a difference of `power` with probability
    0.8; None if not even two seeds fit, or MOST_SEEDS are too few."""

    def is_enough(seeds: int) -> bool:
        one = cost(seeds)
        if power is not None:
            return one.detectable is not None and one.detectable <= power
        return one.seconds > 3600 * (hours or math.inf) or (one.flops or math.inf) > (flops or math.inf)

    counts = range(2, MOST_SEEDS + 1)
    place = bisect.bisect_left(counts, True, key=is_enough) - (power is None)
    return cost(counts[place]) if 0 <= place < len(counts) else None


def spread_of(study: StudySpec, runs: Path) -> float | None:
    """The largest spread of a difference to the baseline, over complete trials of the runs folder with the settings of
    the study's arms (except steps and seeds); None without two seeds of both arms. A single arm has its own spread."""
    scores: dict[str, dict[int, float]] = defaultdict(dict)
    arms = [arm for arm in study.design_arms() if arm.spec.control is None]
    label_of = {_alike(arm.spec.model_dump(mode="json")): arm.label for arm in arms}
    for spec, result in complete_runs(runs):
        label, metrics = label_of.get(_alike(spec)), result.get("metrics", {})
        of_test = study.metric.replace("validation/", "test/", 1)  # which counts where both were measured
        for metric in (study.metric, of_test):
            if label is not None and metric in metrics:
                scores[label][spec["seed"]] = float(metrics[metric])
    baseline = study.baseline or next((arm.label for arm in arms), "")
    own, found = scores.pop(baseline, {}), []
    if len(arms) == 1:
        scores, own = {baseline: own}, dict.fromkeys(own, 0.0)
    for values in scores.values():
        differences = [value - own[seed] for seed, value in values.items() if seed in own]
        found += [float(np.std(differences, ddof=1))] if len(differences) > 1 else []
    return max(found, default=None)


def _alike(spec: Mapping[str, Any]) -> str:
    """Equal for settings that have the same pace and spread: all but the seed and the steps agree."""
    return digest({key: value for key, value in spec.items() if key not in ("seed", "steps", "max_flops")})
