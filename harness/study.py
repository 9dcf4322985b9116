"""Runs a study: every (arm, seed) exactly once, by worker processes that may die at any moment.

Optuna's journal file is the queue and the record: one Optuna trial is one attempt at an (arm, seed). Three things are
added to it. `ask()` invents a trial when the queue is empty and two processes may enqueue the same work, so queue
operations happen under one file lock. The journal knows no heartbeat, so a claimed trial has a lease: a file that its
worker touches; a trial whose worker is gone goes back to the queue and continues from its own folder's checkpoints.
And a killed writer may leave half a line, which the next writer cuts off.

An attempt ends COMPLETE with the study's metric as value, or FAIL with the attribute `result`: "invalid" (the result
must not be used; never repeated), "failed" (a crash; repeated when the study is started again), "stopped" (asked to
stop) or "lost" (its worker died), both repeated at once. This module is the only importer of optuna.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import RandomSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState

from harness import tracking
from harness._files import file_lock, read_json, write_json
from harness._lease import Lease, is_held
from harness._workers import WorkerPool, usable_cores, usable_gpus
from harness.plugins import nearest
from harness.spec import Arm, RunSpec, SpecError, StudySpec, parse_study
from harness.types import Split, TrialState

EXECUTE = "harness.train:train"
ORPHAN_SECONDS = 120.0  # how long a worker whose parent died may take to stop after its current step
POLL_SECONDS = 0.5
MAX_LOST = 10  # attempts at a trial that may lose their worker without a step's progress
_ENDED = ("complete", "invalid", "failed")

_Key = tuple[str, int]  # arm label, seed
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrialStatus:
    """What one (arm, seed) has reached: accuracy as a fraction, seconds of training, `done` of `total` in `phase`."""

    arm: str
    seed: int
    state: Literal["waiting"] | TrialState
    reason: str | None
    phase: str
    done: int
    total: int
    accuracy: float | None
    tokens_per_second: float | None
    seconds: float | None
    directory: Path


@dataclass(frozen=True)
class StudyStatus:
    """What a study has reached; trials in the order in which they run."""

    name: str
    question: str
    metric: str
    trials: tuple[TrialStatus, ...]

    def counts(self) -> dict[str, int]:
        """Number of trials in each state that occurs."""
        return dict(Counter(trial.state for trial in self.trials))

    @property
    def finished(self) -> bool:
        """Whether nothing is left to run (failed trials are tried again when the study is started again)."""
        return all(trial.state in _ENDED for trial in self.trials)

    @property
    def all_valid(self) -> bool:
        return all(trial.state == "complete" for trial in self.trials)


def run_study(
    study: StudySpec,
    runs: Path,
    *,
    workers: int | None,
    command: str,
    on_status: Callable[[StudyStatus], None] | None = None,
    report: bool = True,
    execute: str = EXECUTE,
) -> StudyStatus:
    """Run what the study still lacks with `workers` processes, write the report, and return what was reached.

    Ctrl-C (or SIGTERM) lets each worker finish its step and write a checkpoint; a second one stops at once. Bad input
    raises ValueError before anything is written. `execute` names the function that runs a trial (`module:function`,
    called as `harness.train.train`).
    """
    runs = runs.resolve()
    plan = _Plan(study, runs)
    _validate(study, plan, runs, workers, execute)
    digest = study.digest()
    _check_unchanged(study, digest, plan.folder)
    queue = _Queue(plan)
    with file_lock(plan.folder / "lock"):
        _check_unchanged(study, digest, plan.folder)
        parent_run_id = tracking.open_study(runs, study, command)
        write_json(plan.folder / "study.json", {"digest": digest, **study.model_dump(mode="json")})
        queue.enqueue_missing()
    arguments = [study.name, "--runs", str(runs), "--parent", str(os.getpid()), "--execute", execute]
    pool = WorkerPool("harness.study", arguments, workers or default_workers(), plan.folder / "logs")
    with pool.signals():
        _watch(pool, queue, on_status)
    status = queue.status()
    for trial in status.trials:
        if trial.state != "running":
            tracking.replay(runs, trial.directory, parent_run_id)
    tracking.close_study(runs, parent_run_id, "complete" if status.finished else "stopped")
    if report:
        _write_report(study.name, runs)
    return status


def study_status(name: str, runs: Path) -> StudyStatus:
    """What the study in the runs folder has reached. ValueError for an unknown one."""
    return _Queue(_Plan(_load(name, runs), runs.resolve())).status()


def worker_main(name: str, runs: Path, *, parent: int | None = None, execute: str = EXECUTE) -> int:
    """Run trials of a started study until none is left or the process is told to stop; the exit status.

    `parent` is the process id of the study's own process: when it dies, the worker stops after its current step.
    """
    runs = runs.resolve()
    stop = threading.Event()
    _stop_on_signal(stop)
    if parent is not None:
        threading.Thread(target=_watch_parent, args=(parent, stop), name="parent", daemon=True).start()
    plan = _Plan(_load(name, runs), runs)
    queue = _Queue(plan)
    run_trial = _resolve(execute) if queue.unfinished() else None
    while run_trial is not None and not stop.is_set():
        claim = queue.claim()
        if claim is not None:
            _run_claim(claim, queue, plan, run_trial, stop)
        elif not queue.unfinished():
            break
        else:
            stop.wait(2 * POLL_SECONDS)  # a trial that another worker runs may still come back to the queue
    return 0


def default_workers() -> int:
    """One worker per GPU, or else one per core."""
    return len(usable_gpus()) or usable_cores()


class _Plan:
    """The trials of a study in the order in which they run: all arms of the first seed, then of the next, so that a
    study that is stopped early is balanced."""

    def __init__(self, study: StudySpec, runs: Path) -> None:
        self.study, self.runs = study, runs
        self.folder = runs / "studies" / study.name
        self.arms: dict[str, Arm] = {arm.label: arm for arm in study.design_arms()}
        self.keys: list[_Key] = [(arm, seed) for seed in study.seeds for arm in self.arms]
        self.spec = lru_cache(maxsize=None)(self._spec)

    def _spec(self, key: _Key) -> RunSpec:
        return self.study.run_spec(self.arms[key[0]], key[1])

    def directory(self, key: _Key) -> Path:
        slug = re.sub(r"[^A-Za-z0-9._=-]+", "-", key[0])[:60].strip("-.")
        return self.folder / "trials" / f"{slug}-seed{key[1]}-{self.spec(key).digest()[:8]}"

    def parameters(self, key: _Key) -> dict[str, Any]:
        return {**self.arms[key[0]].levels, "seed": key[1]}

    def distributions(self) -> dict[str, BaseDistribution]:
        """Optuna's description of what varies: the levels of each factor, and the seed as a plain number, because
        seeds may be added later."""
        levels: dict[str, list[Any]] = {}
        for arm in self.arms.values():
            for path, level in arm.levels.items():
                if level not in levels.setdefault(path, []):
                    levels[path].append(level)
        factors = {path: CategoricalDistribution(found) for path, found in levels.items()}
        return {**factors, "seed": IntDistribution(0, 2**53)}


@dataclass(frozen=True)
class _Claim:
    key: _Key
    number: int  # of the Optuna trial
    lease: Lease


@dataclass(frozen=True)
class _Outcome:
    state: TrialState | Literal["lost"]
    reason: str | None = None
    summary: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class _Queue:
    """The Optuna study behind a plan. The last attempt at an (arm, seed) says where it stands."""

    def __init__(self, plan: _Plan) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.plan = plan
        self._journal = plan.folder / "optuna.journal"
        self._lock = plan.folder / "lock"
        self._distributions = plan.distributions()

    def enqueue_missing(self) -> None:
        """Put in the queue what is neither done, nor waiting, nor being run. The caller holds the lock."""
        attempts = self._attempts()
        self._requeue(attempts)
        for key in self.plan.keys:
            if key not in attempts or _state(attempts[key][-1]) == "failed":
                self._enqueue(key)

    def claim(self) -> _Claim | None:
        """The next waiting trial, ours alone from now on; None where none waits."""
        with file_lock(self._lock):
            if self._requeue(attempts := self._attempts()):
                attempts = self._attempts()
            waiting = {tried[-1].number: key for key, tried in attempts.items() if _state(tried[-1]) == "waiting"}
            if not waiting:
                return None
            key = waiting[min(waiting)]
            lease = Lease(self.plan.directory(key))  # before the claim: a running trial always has one
            trial = self._study.ask()
            if trial.number == min(waiting):
                return _Claim(key, trial.number, lease)
            lease.release()  # Optuna gave something else; it is lost, and comes back if it is ours
            self._study.tell(trial.number, state=OptunaState.FAIL)
            return None

    def finish(self, claim: _Claim, outcome: _Outcome) -> None:
        """Record how a claimed trial ended and give up its lease."""
        with file_lock(self._lock):
            trial = self._study.get_trials(deepcopy=False)[claim.number]
            if trial.state == OptunaState.RUNNING:
                self._tell(trial, outcome)
            else:
                log.warning("%s | seed %d: another worker has taken over, this result is dropped", *claim.key)
            claim.lease.release()

    def unfinished(self) -> bool:
        """Whether a trial waits, runs or has to be repeated."""
        attempts = self._attempts()
        return any(key not in attempts or _state(attempts[key][-1]) not in _ENDED for key in self.plan.keys)

    def num_claims(self) -> int:
        """Number of attempts that were ever begun."""
        return sum(t.state != OptunaState.WAITING for all_ in self._attempts().values() for t in all_)

    def status(self) -> StudyStatus:
        attempts = self._attempts()
        running = {key: tried[-1].number for key, tried in attempts.items() if _state(tried[-1]) == "running"}
        dead = {number for key, number in running.items() if not is_held(self.plan.directory(key))}
        if dead:  # or just ended: the lease is given up after the journal has it
            attempts = self._attempts()
        trials = [self._trial_status(key, attempts.get(key, []), dead) for key in self.plan.keys]
        study = self.plan.study
        return StudyStatus(study.name, study.question, study.metric, tuple(trials))

    @cached_property
    def _storage(self) -> JournalStorage:
        return JournalStorage(JournalFileBackend(str(self._journal), lock_obj=_JournalLock(self._journal)))

    @cached_property
    def _study(self) -> optuna.Study:
        return optuna.create_study(
            storage=self._storage,
            study_name=self.plan.study.name,
            direction="maximize",
            sampler=RandomSampler(seed=0),
            load_if_exists=True,
        )

    def _attempts(self) -> dict[_Key, list[FrozenTrial]]:
        """The attempts at each (arm, seed) of the plan that has any, in order."""
        found: dict[_Key, list[FrozenTrial]] = {}
        if not self._journal.exists():
            return found
        wanted = set(self.plan.keys)
        for trial in self._study.get_trials(deepcopy=False):
            key = _key(trial.user_attrs)
            if key in wanted:
                found.setdefault(key, []).append(trial)
        return found

    def _enqueue(self, key: _Key) -> None:
        trial = optuna.create_trial(
            state=OptunaState.WAITING,
            params=self.plan.parameters(key),
            distributions=self._distributions,
            user_attrs={"arm": key[0], "seed": key[1]},
        )
        self._study.add_trial(trial)

    def _requeue(self, attempts: Mapping[_Key, list[FrozenTrial]]) -> bool:
        """Put stopped trials and those whose worker died back in the queue; whether there were any."""
        again = []
        for key, tried in attempts.items():
            state = _state(tried[-1])
            if state == "running" and not is_held(self.plan.directory(key)):
                step = tracking.read_progress(self.plan.directory(key)).get("step", 0)
                lost = _lost_in_vain(tried[:-1], step) + 1
                if lost >= MAX_LOST:
                    reason = f"the worker died {lost} times at step {step}, the last time without saying why"
                    self._tell(tried[-1], _Outcome("failed", reason))
                    continue
                self._tell(tried[-1], _Outcome("lost", summary={"step": step}))
                state = "lost"
            if state in ("lost", "stopped"):
                again.append(key)
        for key in again:
            self._enqueue(key)
        return bool(again)

    def _tell(self, trial: FrozenTrial, outcome: _Outcome) -> None:
        result = {"state": outcome.state, "reason": outcome.reason, "summary": dict(outcome.summary)}
        study_id = self._storage.get_study_id_from_name(self.plan.study.name)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
        self._storage.set_trial_user_attr(trial_id, "result", result)
        if outcome.state == "complete":
            self._study.tell(trial.number, outcome.metrics[self.plan.study.metric])
        else:
            self._study.tell(trial.number, state=OptunaState.FAIL)

    def _trial_status(self, key: _Key, tried: Sequence[FrozenTrial], dead: set[int]) -> TrialStatus:
        directory = self.plan.directory(key)
        state = _state(tried[-1]) if tried else "waiting"
        result = tried[-1].user_attrs.get("result", {}) if tried else {}
        reason, summary = result.get("reason"), result.get("summary", {})
        if state == "lost" or (state == "running" and tried[-1].number in dead):
            state, reason = "stopped", "its worker died; the study continues it when it is started again"
        shown = {} if state in ("waiting", "complete") else tracking.read_progress(directory)
        return TrialStatus(
            arm=key[0],
            seed=key[1],
            state=state,  # pyright: ignore[reportArgumentType]
            reason=reason,
            phase=shown.get("phase", ""),
            done=shown.get("done", 0),
            total=shown.get("total", 0),
            accuracy=summary.get("accuracy_final", shown.get("accuracy")),
            tokens_per_second=shown.get("tokens_per_second"),
            seconds=summary.get("seconds", shown.get("seconds")),
            directory=directory,
        )


def _key(attributes: Mapping[str, Any]) -> _Key | None:
    return (attributes["arm"], attributes["seed"]) if "arm" in attributes else None


def _state(trial: FrozenTrial) -> str:
    """waiting, running, complete, or what `result` says of a FAIL."""
    if trial.state == OptunaState.FAIL:
        return trial.user_attrs.get("result", {"state": "lost"})["state"]
    return trial.state.name.lower()


def _lost_in_vain(tried: Sequence[FrozenTrial], step: int) -> int:
    """How many attempts before this one lost their worker without any of them, or this one, getting further."""
    steps = []
    for trial in reversed(tried):
        if _state(trial) != "lost":
            break
        steps.append(trial.user_attrs.get("result", {}).get("summary", {}).get("step", 0))
    return len(list(itertools.takewhile(lambda s: s >= step, steps)))


class _JournalLock(JournalFileOpenLock):
    """The journal's lock: freed by the operating system when its holder dies, and on taking it half a line that a
    killed writer left at the end is cut off."""

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal))
        self._journal = journal
        self._lock = file_lock(journal.with_name(journal.name + ".lock"))

    def acquire(self) -> bool:
        self._lock.acquire()
        with self._journal.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            if size and (file.seek(size - 1), file.read(1))[1] != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        self._lock.release()


def _run_claim(claim: _Claim, queue: _Queue, plan: _Plan, run_trial: Callable[..., Any], stop: threading.Event) -> None:
    """Run a claimed trial to its end, whatever that is, and record it."""
    directory, metric = plan.directory(claim.key), plan.study.metric
    ended = tracking.read_result(directory)  # a worker that died just before it could record the end
    if ended is not None and ended["state"] in ("complete", "invalid"):
        metrics = {key: float(value) for key, value in ended["metrics"].items()}
        outcome = _Outcome(ended["state"], ended["reason"], ended["summary"], metrics)
        queue.finish(claim, _with_metric(outcome, metric))
        return
    arm, seed = claim.key
    run_log = tracking.RunLog.open(
        plan.runs,
        directory,
        plan.spec(claim.key),
        experiment=plan.study.name,
        run_name=f"{arm} | seed {seed}",
        parent_run_id=tracking.study_run_id(plan.runs, plan.study.name),
        tags={
            "cohort.kind": "trial",
            "cohort.study": plan.study.name,
            "cohort.arm": arm,
            "cohort.seed": str(seed),
            "cohort.factors": json.dumps(plan.arms[arm].levels),
        },
    )
    try:
        result = run_trial(plan.spec(claim.key), directory, run_log, cache=plan.runs / "cache", should_stop=stop.is_set)
        outcome = _Outcome(result.state, result.reason, dict(result.summary), dict(run_log.latest))
    except Exception as error:
        traceback.print_exc()
        outcome = _Outcome("failed", traceback.format_exception_only(error)[-1].strip()[:500])
    outcome = _with_metric(outcome, metric)
    run_log.finish(outcome.state, outcome.reason, outcome.summary)  # pyright: ignore[reportArgumentType]
    queue.finish(claim, outcome)


def _with_metric(outcome: _Outcome, metric: str) -> _Outcome:
    """The same outcome, or a failure where a complete run lacks a finite value of the study's metric."""
    if outcome.state != "complete" or math.isfinite(outcome.metrics.get(metric, math.nan)):
        return outcome
    got = outcome.metrics.get(metric, "nothing")
    reason = f"metric must be a finite number that runs log, '{metric}' was {got}; logged: {', '.join(outcome.metrics)}"
    return _Outcome("failed", reason, outcome.summary, outcome.metrics)


def _watch(pool: WorkerPool, queue: _Queue, on_status: Callable[[StudyStatus], None] | None) -> None:
    """Keep workers at work and the caller informed until nothing is left to do."""
    while True:
        alive, status = pool.collect(queue.num_claims()), queue.status()
        unfinished = sum(trial.state not in _ENDED for trial in status.trials)
        if on_status is not None:
            on_status(status)
        if not alive and (pool.stopping or not unfinished):
            return
        pool.fill(unfinished)
        time.sleep(POLL_SECONDS)


def _validate(study: StudySpec, plan: _Plan, runs: Path, workers: int | None, execute: str) -> None:
    """ValueError for what cannot run; reads no weights and writes nothing."""
    if workers is not None and workers < 1:
        raise SpecError(f"the number of workers must be at least 1, got {workers}")
    tracking.check_runs(runs)
    specs = [plan.spec((arm, study.seeds[0])) for arm in plan.arms]
    splits = {spec.task.model_dump_json(): (spec.task, _splits(spec)) for spec in specs}
    for task, names in splits.values():
        for split in names:
            if not task.prompts(split):
                raise SpecError(f"task '{task.name}' must have problems in its {split} split, it has none")
    cold = {spec.task.model_dump_json(): spec.task for spec in specs if spec.cold_start.steps}
    for task in cold.values():
        if not task.demonstrations():
            raise SpecError(f"task '{task.name}' has no worked solutions; set cold_start.steps to 0")
    if execute == EXECUTE:
        from harness.evaluate import metric_names
        from harness.memory import check_memory
        from harness.model import check_model, resolve_device

        for spec in specs:
            known = [f"{split}/{name}" for split in ("validation", "test") for name in metric_names(spec.evaluation)]
            if study.metric not in known:
                near = nearest(study.metric, known)
                hint = f"did you mean '{near}'? " if near else ""
                raise SpecError(f"metric must be one of an evaluation, got '{study.metric}'; {hint}{', '.join(known)}")
        for device in dict.fromkeys(spec.device for spec in specs):
            resolve_device(device)
        for model in dict.fromkeys(spec.model for spec in specs):
            check_model(model)
        for spec in specs:
            spec.engine.check(spec.sampling_with_limit())
            for reward in spec.rewards.values():
                reward.check()
            if spec.steps:  # without a GPU for each worker all of them share the machine's memory
                trials = len(specs) * len(study.seeds)
                on_gpu = resolve_device(spec.device).type == "cuda"
                check_memory(spec, copies=1 if on_gpu else min(workers or default_workers(), trials))


def _splits(spec: RunSpec) -> Sequence[Split]:
    return ("train", "validation", "test") if spec.steps else ("validation", "test")


def _check_unchanged(study: StudySpec, digest: str, folder: Path) -> None:
    """SpecError where the study was started with other settings, or with seeds that are missing now."""
    file = folder / "study.json"
    if not file.exists():
        return
    started = read_json(file)
    if started["digest"] != digest:
        raise SpecError(
            f"a started study cannot change, for its results would mix: '{study.name}' was started with other settings "
            f"or by another version of Cohort; restore the settings ({file} holds those it was started with), choose "
            f"another name (--name NAME), or delete '{folder}' to start anew"
        )
    missing = sorted(set(started["seeds"]) - set(study.seeds))
    if missing:
        raise SpecError(
            f"seeds of a started study may be added, not removed: study '{study.name}' has {started['seeds']}, got "
            f"{study.seeds}; add {missing}, or give this one another name (--name NAME)"
        )


def _load(name: str, runs: Path) -> StudySpec:
    folder = runs / "studies"
    if not (folder / name / "study.json").exists():
        known = sorted(file.parent.name for file in folder.glob("*/study.json"))
        near = nearest(name, known)
        hint = f"did you mean '{near}'? " if near else ""
        raise SpecError(
            f"no study '{name}' was started in '{runs}'; {hint}"
            + (f"there are: {', '.join(known)}" if known else "start one with: cohort study run NAME")
        )
    file = folder / name / "study.json"
    fields = read_json(file)
    return parse_study({key: fields[key] for key in fields if key not in ("format", "digest")}, where=str(file))


def _write_report(name: str, runs: Path) -> None:
    record = tracking.read_study(runs, name)
    if record.trials:
        folder = runs / "studies" / name / "report"
        files = importlib.import_module("reports.render").write_report(record, folder)
        tracking.log_report(runs, name, folder, files.answer)


def _resolve(execute: str) -> Callable[..., Any]:
    module, _, function = execute.partition(":")
    return getattr(importlib.import_module(module), function)


def _stop_on_signal(stop: threading.Event) -> None:
    def handle(number: int, _: object) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)


def _watch_parent(parent: int, stop: threading.Event) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    stop.set()
    time.sleep(ORPHAN_SECONDS)
    os._exit(4)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m harness.study", description="A worker of a started study.")
    parser.add_argument("name")
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--parent", type=int, help="process id of the study's own process")
    parser.add_argument("--execute", default=EXECUTE, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.exit(worker_main(arguments.name, arguments.runs, parent=arguments.parent, execute=arguments.execute))
