"""The queue of a study: every (arm, seed) is handed to exactly one worker, and handed on when that one dies.

Optuna's storage is the record: one Optuna trial is one attempt at an (arm, seed), made when a worker claims it. What
waits follows from the plan and the record, so nothing is put in a queue. Operations happen under one lock, and a
claimed trial has a lease that its worker renews (`_storage.py`): Optuna's own `ask()` may hand one trial to two
workers, and its journal knows no heartbeat. A trial whose worker is gone is claimed again and continues from its own
folder's checkpoints.

An attempt ends COMPLETE with the study's metric as value, or FAIL with the attribute `result`: "invalid" (the result
must not be used; never repeated), "failed" (a crash; repeated when the study is started again), "stopped" (asked to
stop) or "lost" (its worker died), both repeated at once; or PRUNED, given up with its arm. `_search.py` says which arms
a search runs; it, this module and the storages alone import optuna.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import optuna
from optuna.samplers import RandomSampler
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState

from harness.plugins import nearest
from harness.spec.errors import SpecError
from harness.spec.study import parse_study
from harness.study.plan import Key, Plan
from harness.study.processes import usable_gpus
from harness.study.search import Result, Searches
from harness.study.status import StudyStatus, TrialStatus
from harness.study.storage.base import Lease, Storage
from harness.study.storage.files import LocalStorage
from harness.study.storage.open import open_storage
from harness.types import ENDED, TrialState

MAX_LOST = 10  # attempts at a trial that may lose their worker without a step's progress
RETRY_BELOW = "retry_failed_below"  # attribute of the Optuna study: failed attempts with lower numbers are repeated
P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger(__name__)


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


def _translated(method: Callable[Concatenate[Queue, P], R]) -> Callable[Concatenate[Queue, P], R]:
    """The method with the storage's own errors of connection as StorageUnavailable."""

    @functools.wraps(method)
    def run(queue: Queue, *args: P.args, **kwargs: P.kwargs) -> R:
        with queue.storage.errors():
            return method(queue, *args, **kwargs)

    return run


class Queue:
    """The Optuna study behind a plan. The last attempt at an (arm, seed) says where it stands.

    Operations raise StorageUnavailable while the storage cannot be reached; they can be called again then.
    """

    def __init__(self, plan: Plan, storage: Storage | None = None) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.plan = plan
        self.storage = storage or LocalStorage(plan.folder)
        self._record = _Record()
        self._distributions = lru_cache(maxsize=1)(lambda num_arms: plan.distributions())  # a plan may gain arms

    @_translated
    def retry_failed(self) -> None:
        """Let the trials that have failed so far be claimed again. The caller holds the lock."""
        self._searches.create()
        self._study.set_user_attr(RETRY_BELOW, len(self._study.get_trials(deepcopy=False)))

    @_translated
    def claim(self) -> Claim | None:
        """The next waiting trial, ours alone from now on; None where none waits."""
        with self.storage.lock():
            record = self._read()
            self._end_lost(record)
            self._advance(record)
            key = self._next(record) or self._ask()
            lease = self.storage.take_lease(self.plan.directory(key)) if key else None
            if key is None or lease is None:
                return None
            try:
                return Claim(key, self._begin(key), lease)
            except BaseException:
                lease.release()
                raise

    @_translated
    def finish(self, claim: Claim, outcome: Outcome) -> None:
        """Record how a claimed trial ended and give up its lease."""
        with self.storage.lock():
            trial = self._study.get_trials(deepcopy=False)[claim.number]
            if trial.state == OptunaState.RUNNING:
                self._tell(trial, outcome)
            else:
                log.warning("%s | seed %d: another worker has taken over, this result is dropped", *claim.key)
            claim.lease.release()
            self._advance(self._read())

    def report(self, key: Key, step: int, value: float) -> str | None:
        """Note a validation of a running trial; why a search gives its arm up now, or None."""
        with self.storage.lock():
            return self._searches.report(key[0], key[1], step, value)

    @property
    def prunes(self) -> bool:
        """Whether `report` may ever give an arm up."""
        return self._searches.prunes()

    def search_record(self) -> dict[str, Any]:
        """What the study's searches have found so far: see `_search.py`."""
        return self._searches.record(self._results(self._read()))

    @_translated
    def unfinished(self) -> bool:
        """Whether a trial waits, runs or has to be repeated, or a search has another to come."""
        record = self._read()
        return any(record.state(key) not in ENDED for key in self.plan.keys) or self._to_come(record) > 0

    @_translated
    def num_claims(self) -> int:
        """Number of attempts that were ever begun."""
        return self._read().size

    @_translated
    def status(self) -> StudyStatus:
        record = self._read()
        dead = self._dead(record)
        if dead:  # or just ended: the lease is given up after the record has it
            record = self._read()
        states = {key: record.state(key) for key in self.plan.keys}
        shown = self.storage.progress(
            [self.plan.directory(key) for key, state in states.items() if state not in ("waiting", "complete")]
        )
        trials = [self._trial_status(key, record, dead, shown) for key in self.plan.keys]
        study = self.plan.study
        return StudyStatus(study.name, study.question, study.metric, tuple(trials), self._to_come(record))

    @cached_property
    def _searches(self) -> Searches:
        return Searches(self.plan.study, self.storage.optuna)

    def _advance(self, record: _Record) -> None:
        """Let the searches go on: arms that have ended are recorded, more of their seeds join the plan."""
        if self.plan.study.searches():
            self._searches.advance(self._results(record))
            self.plan.add(self._searches.arms())

    def _ask(self) -> Key | None:
        """The first trial of a new arm of a search; None where no arm is due."""
        asked = self._searches.ask()
        self.plan.add(self._searches.arms() if asked else [])
        return asked[0] if asked else None

    def _to_come(self, record: _Record) -> int:
        if not self.plan.study.searches() or not self.storage.exists():
            return 0
        return self._searches.to_come(self._results(record))

    def _results(self, record: _Record) -> dict[Key, Result]:
        """Where each (arm, seed) stands that was ever begun, for the searches."""
        found = {}
        for key, tried in record.attempts.items():
            said = tried[-1].user_attrs.get("result", {})
            found[key] = Result(record.state(key), said.get("reason"), said.get("values", {}))
        return found

    @cached_property
    def _study(self) -> optuna.Study:
        storage, name, sampler = self.storage.optuna, self.plan.study.name, RandomSampler(seed=0)
        try:
            return optuna.load_study(study_name=name, storage=storage, sampler=sampler)
        except KeyError:
            return optuna.create_study(
                storage=storage, study_name=name, direction="maximize", sampler=sampler, load_if_exists=True
            )

    def _read(self) -> _Record:
        """The record of all attempts, brought up to date."""
        if "_study" in self.__dict__ or self.storage.exists():
            trials = self._study.get_trials(deepcopy=False)
            self._record.update(trials, self._study.user_attrs.get(RETRY_BELOW, 0))
            if self.plan.study.searches():
                self.plan.add(self._searches.arms())
        return self._record

    def _next(self, record: _Record) -> Key | None:
        """The trial to run next: the first of the plan that was never begun, then what was begun longest ago."""
        again = []
        for key in self.plan.keys:
            if key not in record.attempts:
                return key
            if record.state(key) in ("waiting", "lost", "stopped"):
                again.append(key)
        return min(again, key=lambda key: record.attempts[key][-1].number, default=None)

    def _begin(self, key: Key) -> int:
        """The number of a new attempt at a trial. The caller holds the lock."""
        on_gpu = self.plan.spec(key).device != "cpu" and bool(usable_gpus())
        trial = optuna.create_trial(
            state=OptunaState.RUNNING,
            params=self.plan.parameters(key),
            distributions=self._distributions(len(self.plan.arms)),
            user_attrs={"arm": key[0], "seed": key[1], "gpu": on_gpu},
        )
        storage, study = self._study._storage, self._study._study_id
        return storage.get_trial_number_from_id(storage.create_new_trial(study, template_trial=trial))

    def _dead(self, record: _Record) -> set[int]:
        """Numbers of the running attempts at the plan's trials whose worker is gone."""
        directories = {self.plan.directory(key): number for key, number in record.running().items() if key in self.plan}
        held = self.storage.held(directories)
        return {number for directory, number in directories.items() if directory not in held}

    def _end_lost(self, record: _Record) -> None:
        """Record the end of attempts whose worker died, so that they are repeated, or failed where that is vain."""
        dead = self._dead(record)
        for key in [key for key, number in record.running().items() if number in dead]:
            directory, tried = self.plan.directory(key), record.attempts[key]
            step = self.storage.progress([directory]).get(directory, {}).get("step", 0)
            lost = _lost_in_vain(tried[:-1], step) + 1
            outcome = Outcome("lost", summary={"step": step})
            if lost >= MAX_LOST:
                reason = f"the worker died {lost} times at step {step}, the last time without saying why"
                outcome = Outcome("failed", reason)
            self._tell(tried[-1], outcome)
        if dead:
            self._read()

    def _tell(self, trial: FrozenTrial, outcome: Outcome) -> None:
        result: dict[str, Any] = {"state": outcome.state, "reason": outcome.reason, "summary": dict(outcome.summary)}
        if outcome.state == "complete":
            result["values"] = {name: outcome.metrics[name] for name in self.plan.study.objectives()}
        self._study._storage.set_trial_user_attr(trial._trial_id, "result", result)
        if outcome.state == "complete":
            self._study.tell(trial.number, outcome.metrics[self.plan.study.metric])
        else:
            ending = OptunaState.PRUNED if outcome.state == "pruned" else OptunaState.FAIL
            self._study.tell(trial.number, state=ending)

    def _trial_status(
        self, key: Key, record: _Record, dead: set[int], progress: Mapping[Path, Mapping[str, Any]]
    ) -> TrialStatus:
        directory, state, tried = self.plan.directory(key), record.state(key), record.attempts.get(key)
        result = tried[-1].user_attrs.get("result", {}) if tried and state != "waiting" else {}
        reason, summary = result.get("reason"), result.get("summary", {})
        if state == "lost" or (state == "running" and tried and tried[-1].number in dead):
            state, reason = "stopped", "its worker died; the study continues it when it is started again"
        shown = progress.get(directory, {})
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
            generated_tokens=summary.get("generated_tokens"),
            on_gpu=bool(tried and tried[-1].user_attrs.get("gpu")),
        )


class _Record:
    """The attempts at each (arm, seed), kept between reads: only new trials and those that ran are looked at again."""

    def __init__(self) -> None:
        self.attempts: dict[Key, list[FrozenTrial]] = {}
        self.size = 0  # trials seen
        self._places: dict[int, tuple[Key, int]] = {}  # of unfinished attempts: number -> key, position in its list
        self._retry_below = 0

    def update(self, trials: Sequence[FrozenTrial], retry_below: int) -> None:
        """Take in all trials of the Optuna study, in their order."""
        self._retry_below = retry_below
        for number, (key, position) in list(self._places.items()):
            self.attempts[key][position] = trials[number]
            if trials[number].state.is_finished():
                del self._places[number]
        for trial in itertools.islice(trials, self.size, None):
            key = _key(trial.user_attrs)
            if key is None:
                continue
            tried = self.attempts.setdefault(key, [])
            tried.append(trial)
            if not trial.state.is_finished():
                self._places[trial.number] = (key, len(tried) - 1)
        self.size = len(trials)

    def state(self, key: Key) -> str:
        """waiting, running, complete, invalid, failed, lost or stopped: what the last attempt says."""
        if key not in self.attempts:
            return "waiting"
        last = self.attempts[key][-1]
        state = _state(last)
        return "waiting" if state == "failed" and last.number < self._retry_below else state

    def running(self) -> dict[Key, int]:
        """The number of the last attempt at each trial where that one runs."""
        keys = (key for key, _ in self._places.values() if self.state(key) == "running")
        return {key: self.attempts[key][-1].number for key in keys}


def _key(attributes: Mapping[str, Any]) -> Key | None:
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


def open_queue(name: str, runs: Path, url: str | None) -> Queue:
    """The queue of a started study. SpecError for an unknown one."""
    folder = runs / "studies"
    storage = open_storage(folder / name, name, url)
    document = storage.read_document()
    if document is None and url:
        raise SpecError(f"no study '{name}' was started in {storage.place}; start it with: cohort study run {name}")
    if document is None:
        known = sorted(file.parent.name for file in folder.glob("*/study.json"))
        near = nearest(name, known)
        hint = f"did you mean '{near}'? " if near else ""
        raise SpecError(
            f"no study '{name}' was started in '{runs}'; {hint}"
            + (f"there are: {', '.join(known)}" if known else "start one with: cohort study run NAME")
        )
    fields = {key: value for key, value in document.items() if key not in ("format", "digest")}
    return Queue(Plan(parse_study(fields, where=storage.document_place), runs), storage)
