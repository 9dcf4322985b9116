"""The queue of a study: every (arm, seed) is handed to exactly one worker, and handed on when that one dies.

Optuna's journal file is the queue and the record: one Optuna trial is one attempt at an (arm, seed). Three things are
added to it. `ask()` invents a trial when the queue is empty and two processes may enqueue the same work, so queue
operations happen under one file lock. The journal knows no heartbeat, so a claimed trial has a lease: a file that its
worker touches; a trial whose worker is gone goes back to the queue and continues from its own folder's checkpoints.
And a killed writer may leave half a line, which the next writer cuts off.

An attempt ends COMPLETE with the study's metric as value, or FAIL with the attribute `result`: "invalid" (the result
must not be used; never repeated), "failed" (a crash; repeated when the study is started again), "stopped" (asked to
stop) or "lost" (its worker died), both repeated at once; or PRUNED, given up with its arm. `_search.py` says which arms
a search runs; it and this module are the only importers of optuna.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
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
from harness._files import file_lock
from harness._lease import Lease, is_held
from harness._search import Result, Searches
from harness.spec import Arm, RunSpec, StudySpec
from harness.types import TrialState

MAX_LOST = 10  # attempts at a trial that may lose their worker without a step's progress
ENDED = ("complete", "invalid", "failed", "pruned")

Key = tuple[str, int]  # arm label, seed
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
    """What a study has reached; trials in the order in which they run.

    `to_come` is the number of trials, at most, that a search has not thought of yet.
    """

    name: str
    question: str
    metric: str
    trials: tuple[TrialStatus, ...]
    to_come: int = 0

    def counts(self) -> dict[str, int]:
        """Number of trials in each state that occurs."""
        return dict(Counter(trial.state for trial in self.trials))

    @property
    def finished(self) -> bool:
        """Whether nothing is left to run (failed trials are tried again when the study is started again)."""
        return not self.to_come and all(trial.state in ENDED for trial in self.trials)

    @property
    def all_valid(self) -> bool:
        return all(trial.state in ("complete", "pruned") for trial in self.trials)


class Plan:
    """The trials of a study in the order in which they run: all arms of the first seed, then of the next, so that a
    study that is stopped early is balanced. The arms of a search come later, one by one, each with all its seeds."""

    def __init__(self, study: StudySpec, runs: Path) -> None:
        self.study, self.runs = study, runs
        self.folder = runs / "studies" / study.name
        self.arms: dict[str, Arm] = {arm.label: arm for arm in study.design_arms()}
        self.keys: list[Key] = [(arm, seed) for seed in study.seeds for arm in self.arms]
        self._searched: dict[str, list[int]] = {}  # arm label -> seeds
        self.spec = lru_cache(maxsize=None)(self._spec)

    def add(self, searched: Sequence[tuple[Arm, Sequence[int]]]) -> None:
        """Take over the arms that searches have found, with the seeds that they may run."""
        for arm, seeds in searched:
            known = self._searched.setdefault(arm.label, [])
            self.arms[arm.label] = arm
            self.keys += [(arm.label, seed) for seed in seeds if seed not in known]
            known += [seed for seed in seeds if seed not in known]

    def _spec(self, key: Key) -> RunSpec:
        return self.study.run_spec(self.arms[key[0]], key[1])

    def directory(self, key: Key) -> Path:
        slug = re.sub(r"[^A-Za-z0-9._=-]+", "-", key[0])[:60].strip("-.")
        return self.folder / "trials" / f"{slug}-seed{key[1]}-{self.spec(key).digest()[:8]}"

    def parameters(self, key: Key) -> dict[str, Any]:
        levels = {} if key[0] in self._searched else self.arms[key[0]].levels  # a search's study has them
        return {**levels, "seed": key[1]}

    def distributions(self) -> dict[str, BaseDistribution]:
        """Optuna's description of what varies: the levels of each factor, and the seed as a plain number, because
        seeds may be added later."""
        levels: dict[str, list[Any]] = {}
        for arm in (arm for label, arm in self.arms.items() if label not in self._searched):
            for path, level in arm.levels.items():
                if level not in levels.setdefault(path, []):
                    levels[path].append(level)
        factors = {path: CategoricalDistribution(found) for path, found in levels.items()}
        return {**factors, "seed": IntDistribution(0, 2**53)}


@dataclass(frozen=True)
class Claim:
    key: Key
    number: int  # of the Optuna trial
    lease: Lease


@dataclass(frozen=True)
class Outcome:
    state: TrialState | Literal["lost"]
    reason: str | None = None
    summary: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class Queue:
    """The Optuna study behind a plan. The last attempt at an (arm, seed) says where it stands."""

    def __init__(self, plan: Plan) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.plan = plan
        self._journal = plan.folder / "optuna.journal"
        self._lock = plan.folder / "lock"
        self._distributions = plan.distributions()

    def enqueue_missing(self) -> None:
        """Put in the queue what is neither done, nor waiting, nor being run. The caller holds the lock."""
        self._searches.create()
        attempts = self._attempts()
        self._requeue(attempts)
        for key in self.plan.keys:
            if key not in attempts or _state(attempts[key][-1]) == "failed":
                self._enqueue(key)

    def claim(self) -> Claim | None:
        """The next waiting trial, ours alone from now on; None where none waits."""
        with file_lock(self._lock):
            if self._requeue(attempts := self._attempts()) or self._advance(attempts):
                attempts = self._attempts()
            waiting = {tried[-1].number: key for key, tried in attempts.items() if _state(tried[-1]) == "waiting"}
            if not waiting and (asked := self._searches.ask()):
                self.plan.add(self._searches.arms())
                for key in asked:
                    self._enqueue(key)
                attempts = self._attempts()
                waiting = {attempts[key][-1].number: key for key in asked}
            if not waiting:
                return None
            key = waiting[min(waiting)]
            lease = Lease(self.plan.directory(key))  # before the claim: a running trial always has one
            trial = self._study.ask()
            if trial.number == min(waiting):
                return Claim(key, trial.number, lease)
            lease.release()  # Optuna gave something else; it is lost, and comes back if it is ours
            self._study.tell(trial.number, state=OptunaState.FAIL)
            return None

    def finish(self, claim: Claim, outcome: Outcome) -> None:
        """Record how a claimed trial ended and give up its lease."""
        with file_lock(self._lock):
            trial = self._study.get_trials(deepcopy=False)[claim.number]
            if trial.state == OptunaState.RUNNING:
                self._tell(trial, outcome)
            else:
                log.warning("%s | seed %d: another worker has taken over, this result is dropped", *claim.key)
            claim.lease.release()
            self._advance(self._attempts())

    def report(self, key: Key, step: int, value: float) -> str | None:
        """Note a validation of a running trial; why a search gives its arm up now, or None."""
        with file_lock(self._lock):
            return self._searches.report(key[0], key[1], step, value)

    @property
    def prunes(self) -> bool:
        """Whether `report` may ever give an arm up."""
        return self._searches.prunes()

    def search_record(self) -> dict[str, Any]:
        """What the study's searches have found so far: see `_search.py`."""
        return self._searches.record(_results(self._attempts()))

    def unfinished(self) -> bool:
        """Whether a trial waits, runs or has to be repeated, or a search has another to come."""
        attempts = self._attempts()
        if any(key not in attempts or _state(attempts[key][-1]) not in ENDED for key in self.plan.keys):
            return True
        return self._searches.to_come(_results(attempts)) > 0

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
        to_come = self._searches.to_come(_results(attempts)) if self._journal.exists() else 0
        return StudyStatus(study.name, study.question, study.metric, tuple(trials), to_come)

    @cached_property
    def _searches(self) -> Searches:
        return Searches(self.plan.study, self._storage)

    def _advance(self, attempts: Mapping[Key, list[FrozenTrial]]) -> bool:
        """Queue what the searches need next; whether there was anything. The caller holds the lock."""
        keys = self._searches.advance(_results(attempts))
        self.plan.add(self._searches.arms())
        for key in keys:
            self._enqueue(key)
        return bool(keys)

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

    def _attempts(self) -> dict[Key, list[FrozenTrial]]:
        """The attempts at each (arm, seed) of the plan that has any, in order."""
        found: dict[Key, list[FrozenTrial]] = {}
        if not self._journal.exists():
            return found
        self.plan.add(self._searches.arms())
        wanted = set(self.plan.keys)
        for trial in self._study.get_trials(deepcopy=False):
            key = _key(trial.user_attrs)
            if key in wanted:
                found.setdefault(key, []).append(trial)
        return found

    def _enqueue(self, key: Key) -> None:
        trial = optuna.create_trial(
            state=OptunaState.WAITING,
            params=self.plan.parameters(key),
            distributions=self._distributions,
            user_attrs={"arm": key[0], "seed": key[1]},
        )
        self._study.add_trial(trial)

    def _requeue(self, attempts: Mapping[Key, list[FrozenTrial]]) -> bool:
        """Put stopped trials and those whose worker died back in the queue; whether there were any."""
        again = []
        for key, tried in attempts.items():
            state = _state(tried[-1])
            if state == "running" and not is_held(self.plan.directory(key)):
                step = tracking.read_progress(self.plan.directory(key)).get("step", 0)
                lost = _lost_in_vain(tried[:-1], step) + 1
                if lost >= MAX_LOST:
                    reason = f"the worker died {lost} times at step {step}, the last time without saying why"
                    self._tell(tried[-1], Outcome("failed", reason))
                    continue
                self._tell(tried[-1], Outcome("lost", summary={"step": step}))
                state = "lost"
            if state in ("lost", "stopped"):
                again.append(key)
        for key in again:
            self._enqueue(key)
        return bool(again)

    def _tell(self, trial: FrozenTrial, outcome: Outcome) -> None:
        result = {"state": outcome.state, "reason": outcome.reason, "summary": dict(outcome.summary)}
        if outcome.state == "complete":
            result["values"] = {name: outcome.metrics[name] for name in self.plan.study.objectives()}
        study_id = self._storage.get_study_id_from_name(self.plan.study.name)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
        self._storage.set_trial_user_attr(trial_id, "result", result)
        if outcome.state == "complete":
            self._study.tell(trial.number, outcome.metrics[self.plan.study.metric])
        else:
            ending = OptunaState.PRUNED if outcome.state == "pruned" else OptunaState.FAIL
            self._study.tell(trial.number, state=ending)

    def _trial_status(self, key: Key, tried: Sequence[FrozenTrial], dead: set[int]) -> TrialStatus:
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


def _key(attributes: Mapping[str, Any]) -> Key | None:
    return (attributes["arm"], attributes["seed"]) if "arm" in attributes else None


def _state(trial: FrozenTrial) -> str:
    """waiting, running, complete, or what `result` says of a FAIL."""
    if trial.state == OptunaState.FAIL:
        return trial.user_attrs.get("result", {"state": "lost"})["state"]
    return trial.state.name.lower()


def _results(attempts: Mapping[Key, Sequence[FrozenTrial]]) -> dict[Key, Result]:
    """Where each (arm, seed) stands, for the searches."""
    found = {}
    for key, tried in attempts.items():
        said = tried[-1].user_attrs.get("result", {})
        found[key] = Result(_state(tried[-1]), said.get("reason"), said.get("values", {}))
    return found


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
