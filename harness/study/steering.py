"""Handles a user's requests to the arms of a running study: stop, resume, clone, drop.

A request is stored in the queue's record, so it reaches every worker within a step, survives any worker, and still
holds when the study is started again. Everything is checked before anything is written.
"""

import itertools
import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.words import quoted
from ..checks.preflight import check_runs
from ..data import FINAL
from ..mirror.studies import forget_study
from ..record.run import read_result
from ..settings.effect import identical
from ..settings.errors import SpecError, did_you_mean
from ..settings.run import RunSpec
from .plan import Clone
from .preflight import check_metrics
from .queue import Queue, open_queue
from .worker import EXECUTE

NO_CHECKPOINT = "`warm` starts from a checkpoint, and '{}' has none for seed {}; {}, or leave `warm` out"
START = ("model", "prompt", "dtype", "lora", "cold_start", "stages")  # settings that decide the start of a run


def hold_arm(name: str, runs: Path, arm: str, held: bool, storage: str | None = None) -> bool:
    """Ask an arm to stop, or let it continue; returns whether this changed anything."""
    return _queue(name, runs, arm, storage).hold(arm, held)


def drop_arm(name: str, runs: Path, arm: str, storage: str | None = None) -> bool:
    """Take back an arm or a clone that has not begun, which the study's document records as an amendment; returns
    whether this changed anything. SpecError for an arm that others need or that has results."""
    queue = open_queue(name, runs.resolve(), storage)
    if queue.plan.study.searches() or arm not in queue.dropped():
        queue = _queue(name, runs, arm, storage)
    study = queue.plan.study
    with queue.storage.lock():
        is_new = arm not in queue.dropped()
        if is_new and arm in queue.begun():
            raise SpecError(f"only an arm that has not begun can be taken back, and '{arm}' has: its results count; "
                            f"stop it instead: cohort study stop {shlex.quote(name)} {shlex.quote(arm)}")  # fmt: skip
        if arm == (study.baseline or study.arm_labels()[0]):
            raise SpecError(f"the other arms are compared with '{arm}', so it stays; stop it, or start a study with "
                            "another baseline under another name")  # fmt: skip
        if is_new:  # the queue first, so that no worker takes what the document calls dropped
            queue.drop(arm)
            _clear({seed: queue.plan.directory((label, seed)) for label, seed in queue.plan.keys if label == arm})
        queue.keep(queue.storage.read_document() or {})
    return is_new


def remove_study(name: str, runs: Path, storage: str | None = None) -> None:
    """Delete a started study: its queue, its folder, and its runs in MLflow. SpecError while a worker runs a trial."""
    runs = runs.resolve()
    queue = open_queue(name, runs, storage)
    with queue.storage.lock():
        if running := [trial.arm for trial in queue.status().trials if trial.state == "running"]:
            raise SpecError(f"a study that runs cannot be deleted, and '{name}' has {len(running)} trials at work; "
                            "stop its command with Ctrl-C first")  # fmt: skip
        forget_study(runs, queue.plan.folder)
        gone = runs / f".{name}.removed"  # moved first: a kill leaves no half of a study
        shutil.rmtree(gone, ignore_errors=True)
        if queue.plan.folder.exists():
            queue.plan.folder.rename(gone)
        queue.remove()  # last: until then the study is there for the next command
    shutil.rmtree(gone, ignore_errors=True)


def clone_arm(
    name: str,
    runs: Path,
    parent: str,
    changes: Mapping[str, Any],
    *,
    warm: bool = False,
    storage: str | None = None,
    execute: str = EXECUTE,
) -> Clone:
    """Add an exploratory arm: an existing arm with other settings, and all its seeds. The same request again, perhaps
    of a user who got no answer, returns the clone that is there.

    `warm`: each trial starts from its parent's newest intact checkpoint instead of the beginning, if the parent has
    written one; a warning names each that is passed over.
    """
    if "seed" in changes:
        raise SpecError("a clone has the seeds of its parent, so 'seed' cannot be set; leave it out")
    queue = _queue(name, runs, parent, storage)
    plan = queue.plan
    with queue.storage.lock():
        clones, arms = queue.clones(), " ".join(plan.arms)
        number = next(n for n in itertools.count(len(clones) + 1) if f"clone {n} of " not in arms)
        shown = ", ".join(f"{path}={json.dumps(value)}" for path, value in changes.items()) or "unchanged"
        label = f"clone {number} of {parent}: {shown}"
        seeds = [seed for arm, seed in plan.keys if arm == parent]
        spec = plan.study.changed(plan.arms[parent], label, changes).spec
        _check_differs(queue, parent, changes, spec, warm)
        if spec.devices > plan.study.devices:
            rule = f"devices of a clone must be at most {plan.study.devices}, which each worker of the study has"
            raise SpecError(f"{rule}, got {spec.devices}; lower devices")
        check_runs([spec], plan.runs, models=execute == EXECUTE)
        if execute == EXECUTE:
            check_metrics(plan.study, [spec])
        clone = Clone(label, parent, dict(changes), seeds, [0] * len(seeds))
        plan.add_clones([clone])
        targets = {seed: plan.directory((label, seed)) for seed in seeds}
        _clear(targets)  # left by a command that was killed
        if warm:
            clone = replace(clone, steps=_forked(queue, clone, spec, targets))
        there = (one for one in clones if replace(one, label=label) == clone and one.label not in queue.dropped())
        if (known := next(there, None)) is None:
            queue.add_clone(clone)
        else:
            _clear(targets)
    return known or clone


def _check_differs(queue: Queue, parent: str, changes: Mapping[str, Any], spec: RunSpec, warm: bool) -> None:
    """SpecError if a clone would repeat an arm; a warm one has its parent's past, so it repeats that one alone."""
    ours = spec.model_dump(mode="json")
    for label, arm in queue.plan.arms.items():
        other = queue.plan.clones.get(label)
        is_asked_again = other is not None and (other.parent, dict(other.changes)) == (parent, dict(changes))
        if label in queue.dropped() or is_asked_again or ((warm or (other and any(other.steps))) and label != parent):
            continue
        theirs = arm.spec.model_dump(mode="json")
        same = identical({label: theirs, "the clone": ours})
        if same or theirs | {"seed": 0} == ours | {"seed": 0}:
            why = f" ({same[0][1]})" if same else ""
            raise SpecError(f"a clone must differ from every arm in a setting that has an effect, and this one would "
                            f"repeat '{label}'{why}; change another setting")  # fmt: skip


def _clear(targets: Mapping[int, Path]) -> None:
    for target in targets.values():
        shutil.rmtree(target, ignore_errors=True)


def _queue(name: str, runs: Path, arm: str, storage: str | None) -> Queue:
    """The queue of a started study that has this arm. SpecError otherwise."""
    queue = open_queue(name, runs.resolve(), storage)
    if queue.plan.study.searches():
        raise SpecError(f"arms can be stopped and cloned only if a design names them; '{name}' is a search, whose "
                        "sampler and pruner choose them; stop all with Ctrl-C, or give it a pruner")  # fmt: skip
    arms = list(dict.fromkeys(trial.arm for trial in queue.status().trials))
    if arm not in arms:
        hint = did_you_mean(arm, arms)
        raise SpecError(f"ARM must be an arm of study '{name}', got '{arm}'; {hint}it has: {quoted(arms)}")
    return queue


def _forked(queue: Queue, clone: Clone, spec: RunSpec, targets: Mapping[int, Path]) -> list[int]:
    """The step of each trial's first checkpoint, which is now copied from its parent; 0 if the parent has none yet.

    SpecError if a checkpoint is missing, torn without an older one, or does not fit; then nothing is left behind.
    """
    from ..run.checkpoint import fork_run, say_passed  # loads torch

    plan, parent = queue.plan, queue.plan.arms[clone.parent].spec
    fixed = [path for path in START if getattr(spec, path) != getattr(parent, path)]
    if spec.algorithm.needs_critic != parent.algorithm.needs_critic:
        fixed.append("algorithm.name")
    if fixed:
        raise SpecError(f"a warm clone must fit its parent's checkpoint, so it cannot change {fixed[0]}; leave `warm` "
                        "out to start from the beginning")  # fmt: skip
    trials = {trial.seed: trial for trial in queue.status().trials if trial.arm == clone.parent}
    steps: list[int] = []
    try:
        for seed, target in targets.items():
            source = plan.directory((clone.parent, seed))
            step, passed = fork_run(source, target, plan.spec((clone.label, seed)), parent)
            why = " and ".join(passed) + ": wait for the next one" if passed else ""
            if trials[seed].state in FINAL or read_result(source) is not None:
                why = "a trial that has ended keeps none: stop an arm before its end to keep its checkpoints"
            elif trials[seed].state != "waiting" and not source.exists():
                why = "they are on another host: clone it there"
            if why and not step:
                raise SpecError(NO_CHECKPOINT.format(clone.parent, seed, why))
            if step >= spec.steps:
                raise SpecError(f"steps of a warm clone must be above its parent's step, {step}, got "
                                f"{spec.steps}; raise steps")  # fmt: skip
            say_passed(passed, f"starts from step {step}")
            steps.append(step)
        if not any(steps):
            why = "a trial writes one every checkpoints.every steps and when it is stopped"
            raise SpecError(NO_CHECKPOINT.format(clone.parent, clone.seeds[0], why))
    except BaseException:
        _clear(targets)
        raise
    return steps
