"""Predicts the cost of a study from a short calibration, and how many seeds, for how small a difference, a budget buys.

The calibration is the study itself, cut to a few steps of each arm, with the same numbers of workers and threads, in
its own folder. So the costs of workers, models, evaluations and report are measured, not assumed. A trial then takes

    steps x (seconds of a step) + problems evaluated x (seconds of one) + rest

and trials go in order to the first free worker (Graham 1969, doi:10.1137/0117039).
"""

import heapq
import itertools
import math
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from ....reports.statistics import minimum_detectable_difference
from ...api.reporting import write_report
from ...api.settings import runs_folder
from ...api.study import Study
from ...base.inputs import digest
from ...base.machine import default_workers, usable_cores
from ...mirror.address import MIRROR, TRACKING_URI
from ...policy.sources import start_name
from ...record.events import EVENTS, read_history
from ...run.cold_start import start_policy
from ...settings.errors import SpecError
from ...settings.run import RunSpec
from ...settings.study import StudySpec, parse_study
from ...study.estimates import complete_runs, planned
from ...study.preflight import check_study
from ...study.runner import run_study
from ...study.worker import EXECUTE

STEPS = 10  # steps of a calibration; the first is not timed
MOST_SEEDS = 200


@dataclass(frozen=True)
class Pace:
    """The cost of a training step of an arm and of one evaluated problem: seconds, and operations if known."""

    step: float
    problem: float
    flops_step: float
    flops_problem: float
    num_validation: int
    num_test: int

    def steps(self, spec: RunSpec) -> int:
        """Training steps of a run, which its limit of operations may end early."""
        if spec.max_flops is None or not self.flops_step:
            return spec.steps
        return min(spec.steps, math.ceil(spec.max_flops / self.flops_step))

    def problems(self, spec: RunSpec) -> int:
        """The problems that a run evaluates: validation at the start, at intervals and at the end, and the test."""
        return (1 + math.ceil(self.steps(spec) / spec.evaluation.every)) * self.num_validation + self.num_test

    def seconds(self, spec: RunSpec) -> float:
        return self.steps(spec) * self.step + self.problems(spec) * self.problem


@dataclass(frozen=True)
class Calibration:
    """The measurements of a cut study: the pace of each arm, and the seconds besides training of a worker's first
    trial, of each further trial, and of the end (including the report)."""

    paces: Mapping[str, Pace]
    first: float
    further: float
    end: float
    workers: int


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
    probability 0.8. `spread` is the standard deviation of a difference over seeds, by default that of complete trials.
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
    began = time.monotonic()
    measured = calibrate(spec, folder, workers or default_workers(spec.devices))
    seconds, own = time.monotonic() - began, option(spec, measured, len(spec.seeds), spread)
    options = (option(spec, measured, count, spread) for count in range(2, MOST_SEEDS + 1))
    best = within(options, hours, flops, power) if given else own
    return Proposal(seconds, measured.workers, spread, own, best)


def calibrate(study: StudySpec, runs: Path, workers: int) -> Calibration:
    """Measure a study. It first trains the cold starts in the cache of the runs folder, where the study finds them.

    SpecError if an arm does not finish its few steps.
    """
    arms = [arm for arm, _ in planned(study)]
    check_study(study, runs, workers, EXECUTE)
    (runs / "cache").mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, usable_cores() // workers))  # as in a worker, because the last bits depend on it
    for spec in {start_name(arm.spec, runs / "cache"): arm.spec for arm in arms if arm.spec.cold_start.steps}.values():
        start_policy(spec, runs / "cache")
    torch.set_num_threads(threads)

    kinds = {arm.label: _alike(arm.spec.model_dump(mode="json")) for arm in arms}  # each kind is measured once
    cut_arms = list({kinds[arm.label]: arm for arm in reversed(arms)}.values())[::-1]
    raw = {
        "name": "plan", "question": study.question, "run": study.run, "metric": study.metric,
        "arms": {a.label: {**a.overrides, "steps": min(a.spec.steps, STEPS), "max_flops": None} for a in cut_arms},
        "baseline": next(arm.label for arm in cut_arms if arm.spec.control is None),
        "seeds": list(range(math.ceil(2 * workers / len(cut_arms)))),  # two trials per worker: the first one costs more
    }  # fmt: skip
    cut = parse_study(raw, f"study '{study.name}'")
    with tempfile.TemporaryDirectory(prefix="plan-", dir=runs / "cache") as folder, ExitStack() as after:
        for name in os.environ.keys() & {TRACKING_URI, MIRROR}:  # nothing of a calibration is sent anywhere
            after.callback(os.environ.__setitem__, name, os.environ.pop(name))
        scratch, since = Path(folder), time.time()
        (scratch / "cache").symlink_to((runs / "cache").resolve())
        status = run_study(cut, scratch, workers=workers, command="")
        if not status.finished:  # asked to stop
            raise KeyboardInterrupt
        bad = next((trial for trial in status.trials if trial.state != "complete"), None)
        if bad is not None:
            rule = f"arm '{bad.arm}' of study '{study.name}' must complete {STEPS} steps to be measured"
            raise SpecError(f"{rule}, got {bad.state}: {bad.reason}")
        write_report(cut.name, scratch)
        ended = time.time()
        specs = {arm.label: arm.spec for arm in cut.design_arms()}
        trials = [(trial.arm, *measured_trial(trial.directory, specs[trial.arm])) for trial in status.trials]
    trials.sort(key=lambda one: one[-1])
    first, further, last_of = [], [], {}
    of_arm: dict[str, list[Pace]] = defaultdict(list)
    for arm, pace, worker, end in trials:  # for each worker, its trials in order
        extra = end - last_of.get(worker, since) - pace.seconds(specs[arm])
        (further if worker in last_of else first).append(max(0.0, extra))
        last_of[worker] = end
        of_arm[arm].append(pace)
    averaged = ("step", "problem", "flops_step", "flops_problem")
    measured = {
        kinds[arm]: replace(found[0], **{name: fmean(getattr(one, name) for one in found) for name in averaged})
        for arm, found in of_arm.items()
    }
    paces = {arm.label: measured[kinds[arm.label]] for arm in arms}
    return Calibration(paces, fmean(first), fmean(further or first), ended - trials[-1][-1], workers)


def option(study: StudySpec, measured: Calibration, seeds: int, spread: float | None) -> Option:
    """The cost of a study with that many seeds of each arm, and the difference that it can detect."""
    arms = list(planned(study))
    trials = [(arm.label, arm.spec) for arm, _ in arms] * seeds
    if study.searches():  # its file sets the number of trials
        trials = [(arm.label, arm.spec) for arm, count in arms for _ in range(count)]
    paces = [(measured.paces[label], spec) for label, spec in trials]
    free = [measured.first - measured.further] * min(measured.workers, len(trials))
    for pace, spec in paces:
        heapq.heapreplace(free, free[0] + pace.seconds(spec) + measured.further)
    taken = sum(pace.seconds(spec) for pace, spec in paces)
    flops = sum(pace.steps(spec) * pace.flops_step + pace.problems(spec) * pace.flops_problem for pace, spec in paces)
    detectable = None
    if spread is not None and seeds > 1 and not study.searches():
        comparisons = max(1, sum(arm.spec.control is None for arm, _ in arms) - 1)
        detectable = minimum_detectable_difference(spread / math.sqrt(seeds), seeds - 1, 0.05 / comparisons)
    known = all(pace.flops_step for pace in measured.paces.values())
    return Option(seeds, len(trials), max(free) + measured.end, taken, flops if known else None, detectable)


def within(options: Iterable[Option], hours: float | None, flops: float | None, power: float | None) -> Option | None:
    """Of options with ever more seeds, the last within the hours or operations, or the first that detects a difference
    of `power` with probability 0.8; None if not even the first fits, or the last has too few."""
    if power is not None:
        return next((one for one in options if one.detectable is not None and one.detectable <= power), None)
    longest, most = 3600 * (hours or math.inf), flops or math.inf
    fit = itertools.takewhile(lambda one: one.seconds <= longest and (one.flops or math.inf) <= most, options)
    return max(fit, key=lambda one: one.seeds, default=None)


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


def measured_trial(directory: Path, spec: RunSpec) -> tuple[Pace, int, float]:
    """The pace of a trial, the process that ran it, and its end (seconds since 1970)."""
    history = read_history(directory / EVENTS)
    found, summary = history.latest(), history.finish[0]["summary"]
    steps = history.history.get("seconds/step", {})
    logged = sorted((step, time / 1000) for step, (_, time) in steps.items())
    apart = [b - a for (step, a), (_, b) in itertools.pairwise(logged) if step % spec.evaluation.every]
    in_steps = sum(seconds for seconds, _ in steps.values())
    pace = Pace(
        step=fmean(apart or [in_steps / max(1, len(steps))]),
        problem=0.0,
        flops_step=summary.get("flops_train", 0.0) / max(1, len(steps)),
        flops_problem=0.0,
        num_validation=int(found["validation/num_prompts"]),
        num_test=int(found["test/num_prompts"]),
    )
    problems = pace.problems(spec)
    each = (summary["seconds"] - in_steps) / problems
    pace = replace(pace, problem=each, flops_problem=summary.get("flops_evaluation", 0.0) / problems)
    return pace, history.attempts[-1]["pid"], history.finish[0]["time"] / 1000


def _alike(spec: Mapping[str, Any]) -> str:
    """Equal for settings that have the same pace and spread: all but the seed and the steps agree."""
    return digest({key: value for key, value in spec.items() if key not in ("seed", "steps", "max_flops")})
