"""Checks a study before it writes or runs anything."""

import ast
import logging
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from ..base.inputs import Inputs
from ..base.machine import default_workers, usable_gpus
from ..base.words import quoted
from ..checks.preflight import check_runs
from ..data import FINAL
from ..record.study import study_settings
from ..settings.errors import SpecError, did_you_mean
from ..settings.raw import differences
from ..settings.run import RunSpec
from ..settings.study import StudySpec, parse_study
from .queue import Queue
from .storage.base import Storage
from .storage.files import LocalStorage
from .worker import EXECUTE

log = logging.getLogger(__name__)
_SUMMARY = (
    "accuracy_initial", "accuracy_final", "test_accuracy", "rollouts", "generated_tokens", "optimizer_steps", "seconds",
    "peak_memory_bytes", "learner_peak_bytes", "core_seconds", "gpu_seconds",
)  # fmt: skip


def check_study(study: StudySpec, runs: Path, workers: int | None, execute: str, *, here: bool = True) -> None:
    """ValueError for a study that cannot run; reads no weights and writes nothing.

    `here`: the workers share this machine, and are not placed by a cluster.
    """
    if workers is not None and workers < 1:
        raise SpecError(f"the number of workers must be at least 1, got {workers}")
    specs = [arm.spec for arm in study.checked_arms()]
    for labels, reason in study.identical_arms():
        log.warning("arms %s are identical by construction: %s", quoted(labels, len(labels)), reason)
    if execute == EXECUTE:
        check_metrics(study, specs)
        check_claimed(study, specs)
    copies = partial(num_copies, study, workers=workers, trials=len(specs) * len(study.seeds)) if here else None
    check_runs(specs, runs, models=execute == EXECUTE, copies=copies)


def auto_workers(study: StudySpec) -> int:
    """The workers of `auto`: one per GPU, or else per core, but on a CPU no more than fit into memory, which a warning
    says."""
    from ..checks.memory import decided, estimate_run, gib, peak_bytes
    from ..devices.device import device_bytes, resolve_device

    most, specs = default_workers(study.devices), [arm.spec for arm in study.checked_arms()]
    on_cpu = [spec for spec in specs if spec.steps and resolve_device(spec.device).type == "cpu"]
    at_once = min(most, len(specs) * len(study.seeds))
    if at_once == 1 or not on_cpu:
        return most
    each = max(peak_bytes(found) if (found := estimate_run(decided(spec))[0]) else 1 for spec in on_cpu)
    free = device_bytes(resolve_device("cpu"))
    if (fit := max(1, free // each)) >= at_once:
        return most
    told = "workers=auto is %d, not %d, because a trial needs about %s of memory and %s are free"
    log.warning(told, fit, most, gib(each), gib(free))
    return fit


def num_copies(study: StudySpec, spec: RunSpec, workers: int | None, trials: int) -> int:
    """Number of workers of this machine that share a device when they run this spec."""
    from ..devices.device import resolve_device

    at_once = min(workers or default_workers(study.devices), trials)
    on_gpu = resolve_device(spec.device).type == "cuda"
    groups = max(1, len(usable_gpus()) // study.devices) if on_gpu else 1  # else all share one memory
    return -(-at_once // groups)


def check_room(queue: Queue, workers: int | None, *, here: bool = True) -> dict[str, int] | None:
    """The bytes of disk that the trials still need for this study's workers, and the free ones; None if unknown.

    SpecError if it is not free. Without `here`, the cluster decides how many trials run at a time. Hosts that share a
    database share the trials too, so this host counts only the trials that it runs at a time.
    """
    from ..checks.disk import check_disk

    plan, trials = queue.plan, queue.status().trials
    left = [(plan.arms[t.arm].spec, t.directory) for t in trials if t.state not in FINAL]
    for arm, count in queue.coming():
        left += [(arm.spec, plan.folder / "trials" / "to come")] * count
    most = workers or (default_workers(plan.study.devices) if here else 1)
    at_once = max(1, min(most, len(left)))
    mine = left if isinstance(queue.storage, LocalStorage) else left[:at_once]
    return check_disk(plan.runs, mine, at_once, "nothing")


def check_metrics(study: StudySpec, specs: Sequence[RunSpec]) -> None:
    """SpecError for a metric that no evaluation computes."""
    from ..run.evaluate import metric_names

    for spec in specs:
        names = metric_names(spec.evaluation, spec.task.partial_credit)
        known = [f"{split}/{name}" for split in ("validation", "test") for name in names]
        if study.metric not in known:
            near = f"validation/{study.metric.rpartition('/')[2]}"  # the split that a study may look at
            hint = f"did you mean '{near}'? " if near in known else did_you_mean(study.metric, known)
            raise SpecError(f"metric must be one of an evaluation, got '{study.metric}'; {hint}{', '.join(known)}")


def check_claimed(study: StudySpec, specs: Sequence[RunSpec]) -> None:
    """SpecError for a claim on a metric that no arm has, unless a plugin of somebody else may log it."""
    from ..run.evaluate import metric_names

    known = {*_SUMMARY}
    for spec in specs:
        tested = spec.evaluation.model_copy(update={"num_samples": spec.evaluation.samples_of("test")})
        areas = {"validation": spec.evaluation, "test": tested, "start": tested}
        areas |= {f"{when}_{name}": tested for when in ("test", "start") for name in spec.tests}
        for area, settings in areas.items():
            known |= {f"{area}/{name}" for name in metric_names(settings, spec.task.partial_credit)}
        known |= {f"reward/{name}" for stage in spec.staged() for name in stage.spec.rewards}
    plugins = [one for spec in specs for one in (spec.algorithm, spec.task, *spec.rewards.values())]
    plugins += [stage.does for spec in specs for stage in spec.staged() if stage.does is not None]
    if not all(type(one).__module__.startswith("cohort.") for one in plugins):
        return
    for claim in study.claim:
        by_tag = re.fullmatch(r"(validation|test|start)\w*/accuracy_.+", claim.metric)
        if claim.metric not in {"", *known} and not by_tag and not is_logged(claim.metric):
            known |= {text for text in texts_of_runs() if re.fullmatch("[a-z_]+/[a-z_]+", text)}
            fix = f"{did_you_mean(claim.metric, sorted(known))}others are policy/entropy, seconds/step, train/accuracy"
            raise SpecError(f"the metric of a claim must be one that runs log, got '{claim.metric}'; {fix}")


@cache
def texts_of_runs() -> set[str]:
    """The strings in the code of runs, rewards, extras and algorithms, parts of f-strings among them."""
    home, rooms = Path(__file__).parents[2], ("harness/run", "harness/rewards", "harness/extras", "algorithms")
    trees = (ast.parse(file.read_text("utf-8")) for room in rooms for file in (home / room).rglob("*.py"))
    constants = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


def is_logged(metric: str) -> bool:
    """Whether the code of runs has a metric as "area/quantity", f"area/{...}", f"{...}/quantity" or f"flops_{...}"."""
    area, slash, quantity = metric.replace("flops_", "flops/", 1).partition("/")
    start = "flops_" if area == "flops" else f"{area}/"
    ways = ({f"{area}/{quantity}"}, {f"{area}_{quantity}"}, {start, quantity}, {area, f"/{quantity}"})
    return bool(slash) and any(way <= texts_of_runs() for way in ways)


def check_unchanged(study: StudySpec, storage: Storage) -> Inputs:
    """The recorded inputs of a started study; none if it was not started.

    SpecError if it was started with other settings, or with seeds that it no longer has.
    """
    started = storage.read_document()
    if started is None:
        return {}
    if lost := {"digest", "seeds", "inputs"} - started.keys():
        rule = f"the record of a started study must keep its settings and inputs, {storage.document_place} has no "
        fix = "restore it from a copy, or choose another `name`"
        raise SpecError(f"{rule}{' and no '.join(sorted(lost))}; {fix}")
    if started["digest"] != study.digest() and not _only_adds_arms(started, study):
        now, then = study.model_dump(mode="json"), study_settings(started)
        changes = list(differences(then, {key: now[key] for key in now if key in then or now[key]}))
        what = "\n".join(f"  {path}: then {old}, now {new}" for path, old, new in changes[:12])
        what += f"\n  and {len(changes) - 12} more" * (len(changes) > 12)
        name = shlex.quote(study.name)
        raise SpecError(
            f"a started study cannot change, or its results would mix: study '{study.name}' was started with other "
            f"settings{f':{chr(10)}{what}' if changes else ', by another version of Cohort'}\n"
            f"To continue it, restore the settings (they are in {storage.document_place}); arms and seeds may be "
            f"added. To change one arm beside the others: cohort study clone {name} ARM --set ... To run the new "
            f"settings: choose another `name`, then compare both: cohort report {name} NAME"
        )
    missing = sorted(set(started["seeds"]) - set(study.seeds))
    if missing:
        rule = f"seeds of a started study may be added, not removed: study '{study.name}' has {started['seeds']}"
        raise SpecError(f"{rule}, got {study.seeds}; add {missing}, or give this one another `name`")
    return started["inputs"]


def _only_adds_arms(started: Mapping[str, Any], study: StudySpec) -> bool:
    """Whether a study differs from the started one only in further arms, with the same baseline."""
    try:
        before = parse_study(study_settings(started), "")
    except SpecError:  # of another version of Cohort
        return False
    if before.digest() != started["digest"] or before.search or study.search:
        return False
    then, now = ({arm.label: arm.digest for arm in one.design_arms()} for one in (before, study))
    baselines = {before.baseline or next(iter(then)), study.baseline or next(iter(now))}
    return then.items() <= now.items() and len(baselines) == 1 and before.claim == study.claim
