"""Predicts the cost of a study from a short calibration, and proposes the steps and seeds that fit a budget.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from ...reports.statistics import minimum_detectable_difference
from ..ground.files import read_json
from ..ground.inputs import digest
from ..ground.machine import usable_cores
from ..mirror import address as mlflow_address
from ..mirror.store import connect
from ..record.events import EVENTS, RunHistory, read_events
from ..spec.errors import SpecError
from ..spec.run import RunSpec
from ..spec.study import Arm, StudySpec, parse_study
from ..study.checks import check_study
from ..study.estimates import planned
from ..study.launchers.local import default_workers
from ..study.runner import run_study
from ..study.two_stage import on_test_split
from ..study.worker import EXECUTE
from .reporting import write_report
from .settings import runs_folder
from .study import Study

STEPS = 10  # steps of a calibration; the first is not timed
MOST_SEEDS = 200
FACTORS = (0.25, 0.5, 1.0, 2.0)  # fractions of the study's own steps
LEAST_SEEDS = 3  # with fewer seeds the spread is hardly known


@dataclass(frozen=True)
class Pace:
    """The cost of a training step of an arm and of one evaluated problem: seconds, and operations if known."""

    step: float
    problem: float
    flops_step: float
    flops_problem: float
    num_validation: int
    num_test: int

    def steps(self, spec: RunSpec, factor: float = 1.0) -> int:
        """Training steps of a run, which its limit of operations may end early."""
        steps = round(factor * spec.steps)
        if spec.max_flops is None or not self.flops_step:
            return steps
        return min(steps, math.ceil(spec.max_flops / self.flops_step))

    def problems(self, spec: RunSpec, factor: float = 1.0) -> int:
        """Number of problems that a run evaluates: validation at the start, at intervals and at the end, and the test
        split."""
        steps = self.steps(spec, factor)
        return (1 + math.ceil(steps / spec.evaluation.every)) * self.num_validation + self.num_test

    def seconds(self, spec: RunSpec, factor: float = 1.0) -> float:
        return self.steps(spec, factor) * self.step + self.problems(spec, factor) * self.problem

    def flops(self, spec: RunSpec, factor: float = 1.0) -> float:
        return self.steps(spec, factor) * self.flops_step + self.problems(spec, factor) * self.flops_problem


@dataclass(frozen=True)
class Calibration:
    """The measurements of a cut study: the pace of each arm, and the seconds besides training of a worker's first
    trial, of each further trial, and of the end (including the report)."""

    paces: Mapping[str, Pace]
    first: float
    further: float
    end: float
    seconds: float  # duration of the calibration itself
    workers: int


@dataclass(frozen=True)
class Option:
    """The cost of a number of seeds and steps. `units` are core- or GPU-seconds of trials; `detectable` is None if the
    spread is unknown."""

    factor: float
    steps: int | None  # None if the arms differ in it
    seeds: int
    trials: int
    seconds: float
    units: float
    flops: float | None
    detectable: float | None


@dataclass(frozen=True)
class Spread:
    """The standard deviation over seeds of the estimated quantity, and its source."""

    deviation: float
    source: str


@dataclass(frozen=True)
class Proposal:
    """The cost of a study as it is and, within the limit that was given, with other steps and seeds; `best` is None if
    the limit allows no study."""

    measured: Calibration
    spread: Spread | None
    as_it_is: Option
    options: Sequence[Option]
    best: Option | None

    def document(self) -> dict[str, Any]:
        return {
            "measured_seconds": self.measured.seconds, "workers": self.measured.workers,
            "spread": self.spread and asdict(self.spread), "as_it_is": asdict(self.as_it_is),
            "options": [asdict(one) for one in self.options], "proposed": self.best and asdict(self.best),
        }  # fmt: skip


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
    """Measure a few steps of a study, then predict its cost and propose steps and seeds.

    At most one limit: `hours` from start to report, `flops` of all trials, or the `power` to detect a difference with
    probability 0.8. `spread` is the standard deviation of a difference over seeds, by default that of complete trials.
    """
    limits = {"--hours": hours, "--flops": flops, "--power": power, "--spread": spread}
    for name, value in limits.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise SpecError(f"{name} must be a number above 0, got {value:g}")
    if len(given := [name for name in ("--hours", "--flops", "--power") if limits[name] is not None]) > 1:
        raise SpecError(
            f"only one of --hours, --flops and --power can be given, got {' and '.join(given)}; leave one out"
        )
    spec, folder = study.spec, runs_folder(runs).resolve()
    if given and spec.searches():
        raise SpecError(
            f"{given[0]} must be left out for a study that searches or tunes: its file sets the number of trials"
        )
    known = Spread(spread, "as given") if spread is not None else spread_of(spec, folder)
    if power is not None and known is None:
        raise SpecError(
            "--power needs the spread over seeds, but the runs folder has no two complete seeds of these arms; give "
            "--spread, such as 0.02"
        )
    measured = calibrate(spec, folder, workers)
    own = option(spec, measured, spec.most_seeds, 1.0, known)
    found = options_within(spec, measured, known, hours=hours, flops=flops, power=power) if given else []
    return Proposal(measured, known, own, found, proposed(found) if given else own)


def calibrate(study: StudySpec, runs: Path, workers: int | None) -> Calibration:
    """Measure a study. It trains the cold starts first, in the cache of the runs folder, where the study will find
    them.

    SpecError if an arm does not finish its few steps.
    """
    began, size = time.monotonic(), workers or default_workers(study.devices)
    arms = [arm for arm, _ in planned(study)]
    check_study(study, runs, workers, EXECUTE)
    _make_starts([arm.spec for arm in arms], runs / "cache", size)
    cut, name_of = _cut(study, arms, size)
    with _scratch(runs) as scratch:
        since = time.time()
        status = run_study(cut, scratch, workers=size, command="", together=False)
        if not status.finished:  # asked to stop
            raise KeyboardInterrupt
        bad = next((trial for trial in status.trials if trial.state != "complete"), None)
        if bad is not None:
            raise SpecError(
                f"arm '{bad.arm}' of study '{study.name}' must complete {STEPS} steps to be measured, got "
                f"{bad.state}: {bad.reason}"
            )
        write_report(cut.name, scratch)
        ended = time.time()
        specs = {arm.label: arm.spec for arm in cut.design_arms()}
        trials = [(trial.arm, *_measured(trial.directory, specs[trial.arm])) for trial in status.trials]
    trials.sort(key=lambda one: one[-1])
    first, further, last_of = [], [], {}
    for arm, pace, worker, end in trials:  # for each worker, its trials in order
        extra = end - last_of.get(worker, since) - pace.seconds(specs[arm])
        (further if worker in last_of else first).append(max(0.0, extra))
        last_of[worker] = end
    paces = {label: _mean([pace for arm, pace, *_ in trials if arm == name]) for label, name in name_of.items()}
    end = ended - trials[-1][-1]
    return Calibration(paces, fmean(first), fmean(further or first), end, time.monotonic() - began, size)


def predict(study: StudySpec, measured: Calibration, seeds: int, factor: float = 1.0) -> tuple[float, float, float]:
    """(seconds from start to report, seconds of all trials, operations) of a study with `num_seeds` seeds of each
    arm."""
    arms = list(planned(study))
    trials = [(arm.label, arm.spec) for arm, _ in arms] * seeds
    if study.searches():  # its file sets the number of trials
        trials = [(arm.label, arm.spec) for arm, count in arms for _ in range(count)]
    free = [0.0] * min(measured.workers, len(trials))
    taken = flops = 0.0
    for place, (label, spec) in enumerate(trials):
        pace = measured.paces[label]
        seconds = pace.seconds(spec, factor) + (measured.first if place < len(free) else measured.further)
        heapq.heapreplace(free, free[0] + seconds)
        taken += pace.seconds(spec, factor)
        flops += pace.flops(spec, factor)
    return max(free) + measured.end, taken, flops


def spread_of(study: StudySpec, runs: Path) -> Spread | None:
    """The largest spread of a difference to the baseline, over complete trials of the runs folder with the settings of
    the study's arms (except steps and seeds); None without two seeds of both arms. A single arm has its own spread."""
    scores: dict[str, dict[int, float]] = {}
    arms = [arm for arm in study.design_arms() if arm.spec.control is None]
    label_of = {_alike(arm.spec.model_dump(mode="json")): arm.label for arm in arms}
    for file in runs.glob("studies/*/trials/*/result.json"):
        try:
            result, spec = read_json(file), read_json(file.with_name("run.json"))["spec"]
            label = label_of.get(_alike(spec))
            metric = max((on_test_split(study.metric), study.metric), key=lambda name: name in result["metrics"])
            if label is not None and result["state"] == "complete":
                scores.setdefault(label, {})[spec["seed"]] = float(result["metrics"][metric])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half written or damaged: the plan does not need it
    baseline = study.baseline or next((arm.label for arm in arms), "")
    own, found = scores.get(baseline, {}), []
    for label in scores if len(arms) == 1 else scores.keys() - {baseline}:
        base = own if label != baseline else dict.fromkeys(own, 0.0)
        values = [value - base[seed] for seed, value in scores[label].items() if seed in base]
        found += [(float(np.std(values, ddof=1)), len(values))] if len(values) > 1 else []
    if not found:
        return None
    deviation, count = max(found)
    return Spread(deviation, f"{count} complete seeds in the runs folder")


def option(study: StudySpec, measured: Calibration, seeds: int, factor: float, spread: Spread | None) -> Option:
    """The cost of a study with that many seeds and steps, and the difference that it can detect."""
    seconds, taken, flops = predict(study, measured, seeds, factor)
    arms = [arm for arm, _ in planned(study)]
    steps = {round(factor * arm.spec.steps) for arm in arms}
    comparisons = max(1, len([arm for arm in arms if arm.spec.control is None]) - 1)
    found = None
    if spread is not None and seeds > 1 and not study.searches():
        found = minimum_detectable_difference(spread.deviation / math.sqrt(seeds), seeds - 1, 0.05 / comparisons)
    known = all(measured.paces[arm.label].flops_step for arm in arms)
    units = taken * _units(arms[0].spec, measured.workers)
    return Option(
        factor, steps.pop() if len(steps) == 1 else None, seeds, seeds * len(arms), seconds, units,
        flops if known else None, found,
    )  # fmt: skip


def options_within(
    study: StudySpec,
    measured: Calibration,
    spread: Spread | None,
    *,
    hours: float | None = None,
    flops: float | None = None,
    power: float | None = None,
) -> list[Option]:
    """For each number of steps, the most seeds within the hours or operations, or the fewest that detect a difference
    of `power` with probability 0.8; empty if no number does."""
    found = []
    for factor in FACTORS if power is None else (1.0,):
        best: Option | None = None
        for seeds in range(2, MOST_SEEDS + 1):
            one = option(study, measured, seeds, factor, spread)
            if power is not None:
                if one.detectable is not None and one.detectable <= power:
                    best = one
                    break
            elif one.seconds <= 3600 * (hours or math.inf) and (flops is None or (one.flops or math.inf) <= flops):
                best = one
            else:
                break
        found += [best] if best is not None else []
    return found


def proposed(options: Sequence[Option]) -> Option | None:
    """The proposal with the study's own steps if the budget allows enough seeds, else with the most steps for which it
    does."""
    enough = [one for one in options if one.seeds >= LEAST_SEEDS and one.factor <= 1]
    return max(enough or options, key=lambda one: one.factor if enough else one.seeds, default=None)


def _measured(directory: Path, spec: RunSpec) -> tuple[Pace, int, float]:
    """The pace of a trial, the process that ran it, and its end (seconds since 1970)."""
    history = RunHistory()
    for event in read_events(directory / EVENTS):
        history.add(event)
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


def _mean(paces: Sequence[Pace]) -> Pace:
    names = ("step", "problem", "flops_step", "flops_problem")
    return replace(paces[0], **{name: fmean(getattr(one, name) for one in paces) for name in names})


def _cut(study: StudySpec, arms: Sequence[Arm], workers: int) -> tuple[StudySpec, dict[str, str]]:
    """The study cut to a few steps, and for each arm the cut arm that represents it (arms that differ only in steps
    share one). Every worker gets two trials, so that the extra cost of a first trial is known."""
    names: dict[str, str] = {}  # digest -> arm of the cut study
    settings, name_of = {}, {}
    for arm in arms:
        cut = {**arm.overrides, "steps": min(arm.spec.steps, STEPS), "max_flops": None}
        alike = arm.spec.model_copy(update={"max_flops": None, "steps": 0}).digest()
        name_of[arm.label] = names.setdefault(alike, arm.label)
        settings.setdefault(name_of[arm.label], cut)
    plain = next(name_of[arm.label] for arm in arms if arm.spec.control is None)
    raw = {
        "name": "plan", "question": study.question, "run": study.run, "arms": settings, "baseline": plain,
        "seeds": list(range(math.ceil(2 * workers / len(settings)))), "metric": study.metric,
    }  # fmt: skip
    return parse_study(raw, f"study '{study.name}'"), name_of


@contextmanager
def _scratch(runs: Path) -> Iterator[Path]:
    """A temporary runs folder with the cache of this one, and with an MLflow store from the start if this one has a
    store."""
    (runs / "cache").mkdir(parents=True, exist_ok=True)
    known = os.environ.pop(mlflow_address.TRACKING_URI, None)  # nothing is sent to a server
    try:
        with tempfile.TemporaryDirectory(prefix="plan-", dir=runs / "cache") as folder:
            scratch = Path(folder)
            (scratch / "cache").symlink_to((runs / "cache").resolve())
            if known or (runs / "mlflow.db").exists():
                connect(scratch)
            yield scratch
    finally:
        if known:
            os.environ[mlflow_address.TRACKING_URI] = known


def _make_starts(specs: Iterable[RunSpec], cache: Path, workers: int) -> None:
    """Train the cold starts that the cache lacks, with a worker's number of threads, because the last bits depend on
    it."""
    import torch

    from ..policy.sources import start_name
    from ..run.cold_start import start_policy

    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, usable_cores() // workers))
    try:
        for spec in {start_name(spec, cache): spec for spec in specs if spec.cold_start.steps}.values():
            start_policy(spec, cache)
    finally:
        torch.set_num_threads(threads)


def _alike(spec: Mapping[str, Any]) -> str:
    """A hash of the settings that must agree to reuse a spread: all but seed, steps and devices."""
    return digest({key: value for key, value in spec.items() if key not in ("seed", "steps", "max_flops", "devices")})


def _units(spec: RunSpec, workers: int) -> int:
    """Number of GPUs of a trial, or else of cores."""
    from ..devices.device import resolve_device

    on_gpu = resolve_device(spec.device).type == "cuda"
    return spec.devices * (1 if on_gpu else max(1, usable_cores() // workers))
