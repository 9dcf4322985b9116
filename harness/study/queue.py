"""The queue of a study: it gives every (arm, seed) to exactly one worker, and to another one if that worker dies.

Optuna's storage is the record: one Optuna trial is one attempt at an (arm, seed), made when a worker claims it
(`attempts.py`). The waiting trials follow from the plan and the record, so nothing is enqueued. Operations run under
one lock, and the worker of a claimed trial renews its lease (`storage/`), because Optuna's own `ask()` may give one
trial to two workers and its journal has no heartbeat. A trial whose worker is gone is claimed again and continues from
the checkpoints in its folder.

An attempt ends COMPLETE with the study's metric as value, or PRUNED with its arm, or FAIL. The attribute `result` of a
FAIL says more: "invalid" (the result must not be used; never repeated), "failed" (a crash; repeated when the study is
started again), "stopped" (asked to stop) or "lost" (its worker died); the last two are repeated at once. `search.py`
decides the arms of a search, `steering.py` handles users' requests.
"""

import logging
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.samplers import RandomSampler
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState

from .. import extras
from ..base.addresses import shown
from ..base.files import sweep
from ..base.machine import usable_gpus
from ..data import ENDED, TrialState
from ..record.status import StudyStatus, TrialStatus
from ..record.study import keep_document, study_settings, with_dropped
from ..settings.errors import SpecError, did_you_mean
from ..settings.study import Arm, parse_study
from .attempts import RETRY_BELOW, STOPPED, Attempts
from .estimates import planned, with_time_left
from .plan import Clone, Key, Plan
from .search import ArmSearch
from .storage.base import Lease, Storage
from .storage.files import LocalStorage

MAX_LOST = 10  # how many attempts in a row may lose their worker without progress
CLONES, DROPPED = "clones", "dropped"  # attributes too: clones as mappings, labels of arms taken back before they began
HELD = "stopped on request; `cohort study resume` continues it"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClaimedTrial:
    key: Key
    number: int  # of the Optuna trial
    lease: Lease


@dataclass(frozen=True)
class TrialOutcome:
    state: TrialState | Literal["lost"]
    reason: str | None = None
    summary: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class Queue:
    """The Optuna study behind a plan. The last attempt at an (arm, seed) decides its state.

    Operations raise StorageUnavailable while the storage cannot be reached, and can be called again.
    """

    def __init__(self, plan: Plan, storage: Storage | None = None) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.plan = plan
        self.storage = storage or LocalStorage(plan.folder)

    def retry_failed(self) -> None:
        """Let the trials that have failed so far be claimed again. The caller holds the lock."""
        for search in self._searches:
            search.create()
        self._study.set_user_attr(RETRY_BELOW, len(self._study.get_trials(deepcopy=False)))

    def claim(self) -> ClaimedTrial | None:
        """Claim and return the next waiting trial; None if none waits."""
        with self.storage.lock():
            attempts = self._end_lost(self._read())
            self._advance(attempts)
            key = self._next(attempts)
            if key is None:  # the first trial of a new arm, of the search with the fewest arms
                searches = sorted(self._searches, key=lambda search: len(search.handed_out()))
                key = next(filter(None, (search.ask() for search in searches)), None)
                self._add_searched()
            lease = self.storage.take_lease(self.plan.directory(key)) if key else None
            if key is None or lease is None:
                return None
            return self._taken(key, lease, attempts)

    def finish(self, claim: ClaimedTrial, outcome: TrialOutcome) -> None:
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
        """Record a validation of a running trial for searches that prune; returns why one gives its arm up now, or
        None."""
        pruning = [search for search in self._searches if search.plan.search.pruner != "none"]
        with self.storage.lock() if pruning else nullcontext():
            return next(filter(None, (search.report(key, step, value) for search in pruning)), None)

    def is_held(self, arm: str) -> bool:
        """Whether an arm was asked to stop; cheap enough for every step."""
        return arm in self._attributes().get(STOPPED, ())

    def hold(self, arm: str, held: bool) -> bool:
        """Ask an arm to stop, or let it continue; returns whether this changed anything."""
        with self.storage.lock():
            before = set(self._attributes().get(STOPPED, ()))
            self._study.set_user_attr(STOPPED, sorted(before | {arm} if held else before - {arm}))
            return held != (arm in before)

    def clones(self) -> list[Clone]:
        return [Clone(**fields) for fields in self._attributes().get(CLONES, ())]

    def add_clone(self, clone: Clone) -> None:
        """Let a clone's trials be claimed. The caller holds the lock."""
        self._study.set_user_attr(CLONES, [*self._attributes().get(CLONES, ()), asdict(clone)])
        self._read()

    def dropped(self) -> list[str]:
        return list(self._attributes().get(DROPPED, ()))

    def begun(self) -> set[str]:
        """Labels of the arms with a trial that was ever claimed."""
        return {label for label, _ in self._read().by_key}

    def drop(self, arm: str) -> None:
        """Take an arm that has not begun back. The caller holds the lock."""
        self._study.set_user_attr(DROPPED, [*self.dropped(), arm])

    def keep(self, document: Mapping[str, Any]) -> None:
        """Write the study's document, and what the queue has dropped. The caller holds the lock."""
        document = with_dropped(document, self.dropped() if self.storage.exists() else ())
        self.storage.write_document(document)
        keep_document(self.plan.folder, document)

    def remove(self) -> None:
        """Delete what lies outside of the study's folder. The caller holds the lock."""
        self.storage.remove([self.plan.study.name, *(search.name for search in self._searches)])

    def search_record(self) -> dict[str, Any]:
        """The content of `search.json` (see `ArmSearch.record`); of a tuned comparison `{"tuning": {cell: record}}`."""
        attempts = self._read()
        found = {search.plan.name: search.record(attempts) for search in self._searches}
        return found.get("", {"tuning": found})

    def unfinished(self) -> bool:
        """Whether a trial waits, runs or has to be repeated, or a search has another to come."""
        attempts = self._read()
        still = (attempts.state(key) == "running" or self._waits(key, attempts) for key in self.plan.keys)
        return any(still) or bool(self.coming(attempts))

    def num_claims(self) -> int:
        """Number of attempts that were ever begun."""
        return self._read().size

    def coming(self, attempts: Attempts | None = None) -> list[tuple[Arm, int]]:
        """The trials of each search, as its base, that are not handed out yet, at most."""
        study, attempts = self.plan.study, attempts or self._read()
        if study.search is None:
            return []
        with self.storage.errors():
            if not self.storage.exists():
                return list(planned(study))
            counts = [search.to_come(attempts) for search in self._searches]
            return [(arm, count) for (arm, _), count in zip(planned(study), counts, strict=True) if count]

    def status(self, workers: int | None = None) -> StudyStatus:
        """The progress, and the time that is left with so many workers, by default as many as work now."""
        attempts = self._read()
        dead = {trial.number for trial in self._dead(attempts).values()}
        if dead:  # or just ended: a worker records the end before it gives up its lease
            attempts = self._read()
        reporting = [self.plan.directory(k) for k in self.plan.keys if attempts.state(k) not in ("waiting", "complete")]
        progress = self.storage.progress(reporting)
        trials = []
        for key in self.plan.keys:
            state, last = attempts.state(key), attempts.last(key)
            reason, summary = attempts.end(key).get("reason"), attempts.end(key).get("summary", {})
            if state == "lost" or (state == "running" and last is not None and last.number in dead):
                state, reason = "stopped", "its worker died; starting the study again continues this trial"
            held = key[0] in attempts.held and state not in ENDED
            if held and state != "running":
                state, reason = "stopped", HELD
            directory = self.plan.directory(key)
            shown = progress.get(directory, {})
            trials.append(TrialStatus(
                *key,
                state=state,  # pyright: ignore[reportArgumentType]
                reason=reason,
                phase=shown.get("phase", ""),
                done=shown.get("done", 0),
                total=shown.get("total", 0),
                step=shown.get("step", 0),
                steps=self.plan.arms[key[0]].spec.steps,
                accuracy=summary.get("accuracy_final", shown.get("accuracy")),
                tokens_per_second=shown.get("tokens_per_second"),
                seconds=summary.get("seconds", shown.get("seconds")),
                directory=directory,
                generated_tokens=summary.get("generated_tokens"),
                on_gpu=last is not None and bool(last.user_attrs.get("gpu")),
                held=held,
            ))  # fmt: skip
        study, coming = self.plan.study, self.coming(attempts)
        status = StudyStatus(study.name, study.question, tuple(trials), sum(count for _, count in coming), study.metric)
        return with_time_left(status, self.plan, coming, workers)

    @cached_property
    def _searches(self) -> list[ArmSearch]:
        return [ArmSearch(self.plan.study, plan, self.storage.optuna) for plan in self.plan.study.searches()]

    def _add_searched(self) -> None:
        for search in self._searches:
            self.plan.add(search.arms())

    def _advance(self, attempts: Attempts) -> None:
        """Advance the searches: record ended arms, and add more of their seeds to the plan."""
        for search in self._searches:
            search.advance(attempts)
        self._add_searched()

    @cached_property
    def _study(self) -> optuna.Study:
        place: Any = {"study_name": self.plan.study.name, "storage": self.storage.optuna}
        try:
            return optuna.load_study(**place, sampler=RandomSampler(0))
        except KeyError:
            return optuna.create_study(**place, sampler=RandomSampler(0), direction="maximize", load_if_exists=True)

    def _read(self) -> Attempts:
        """The up-to-date record of all attempts."""
        with self.storage.errors():
            if "_study" not in self.__dict__ and not self.storage.exists():
                return Attempts()
            trials, attributes = self._study.get_trials(deepcopy=False), self._attributes()
            attempts = Attempts(trials, attributes)
            self._add_searched()
            self.plan.add_clones([Clone(**fields) for fields in attributes.get(CLONES, ())])
            self.plan.dropped = attributes.get(DROPPED, ())
        return attempts

    def _attributes(self) -> Mapping[str, Any]:
        """The attributes of the Optuna study; from a journal it reads only new entries."""
        with self.storage.errors():
            return self._study._storage.get_study_user_attrs(self._study._study_id)

    def _waits(self, key: Key, attempts: Attempts) -> bool:
        """Whether a trial may be claimed."""
        return key[0] not in attempts.held and attempts.state(key) not in ("running", *ENDED)

    def _next(self, attempts: Attempts) -> Key | None:
        """The trial to run next: one in progress, or else the first one of the plan that was never begun, or else one
        that failed or loses its workers without progress. Among several, the one begun longest ago.
        """

        def turn(key: Key) -> tuple[int, int]:
            if key not in attempts.by_key:
                return 1, 0
            begun, state = attempts.by_key[key][-1].number, attempts.state(key)
            if state == "waiting" or (state == "lost" and attempts.num_stuck(key, attempts.step(key)) > 1):
                return 3, begun
            return 0, begun

        return min((key for key in self.plan.keys if self._waits(key, attempts)), key=turn, default=None)

    def _taken(self, key: Key, lease: Lease, attempts: Attempts) -> ClaimedTrial:
        """The claim of a new attempt at a trial. The caller holds the lock."""
        sweep(self.plan.directory(key))
        try:
            on_gpu = self.plan.spec(key).device != "cpu" and bool(usable_gpus())
            attributes = {"arm": key[0], "seed": key[1], "gpu": on_gpu}
            trial = optuna.create_trial(state=OptunaState.RUNNING, user_attrs=attributes)
            storage, study = self._study._storage, self._study._study_id
            number = storage.get_trial_number_from_id(storage.create_new_trial(study, template_trial=trial))
            return ClaimedTrial(key, number, lease)
        except BaseException:
            lease.release()
            raise

    def _dead(self, attempts: Attempts) -> dict[Key, FrozenTrial]:
        """The running attempts at the plan's trials whose worker is gone."""
        folders = {key: self.plan.directory(key) for key in self.plan.keys if attempts.state(key) == "running"}
        held = self.storage.held(folders.values())
        return {key: attempts.by_key[key][-1] for key, folder in folders.items() if folder not in held}

    def _end_lost(self, attempts: Attempts) -> Attempts:
        """Record which attempts have lost their worker; returns them anew. They are repeated, unless too many made no
        progress."""
        dead = self._dead(attempts)
        for key, last in dead.items():
            directory = self.plan.directory(key)
            step = self.storage.progress([directory])[directory].get("step", 0)
            outcome = TrialOutcome("lost", summary={"step": step})
            if (lost := attempts.num_stuck(key, step)) >= MAX_LOST:
                reason = f"the worker died {lost} times at step {step}, the last time without an error"
                outcome = TrialOutcome("failed", reason)
            self._tell(last, outcome)
        return self._read() if dead else attempts

    def _tell(self, trial: FrozenTrial, outcome: TrialOutcome) -> None:
        """Record an attempt's end. The attribute is set first, because a COMPLETE trial accepts none."""
        result: dict[str, Any] = {"state": outcome.state, "reason": outcome.reason, "summary": dict(outcome.summary)}
        value, ending = None, OptunaState.PRUNED if outcome.state == "pruned" else OptunaState.FAIL
        if outcome.state == "complete":
            value, ending = outcome.metrics[self.plan.study.metric], OptunaState.COMPLETE
            result["values"] = {self.plan.study.metric: value}
        self._study._storage.set_trial_user_attr(trial._trial_id, "result", result)
        self._study.tell(trial.number, value, ending)


def open_storage(folder: Path, name: str, url: str | None = None) -> Storage:
    """The storage of the study `name`, whose folder on this host is `folder`; connects to nothing yet.

    ValueError for a URL that no extra's storage has, or if its driver is missing.
    """
    if not url:
        return LocalStorage(folder)
    kinds = extras.modules("storage").values()
    found = next(filter(None, (kind.open_storage(name, url) for kind in kinds)), None)
    if found is None:
        forms = " or ".join(kind.FORM for kind in kinds) or "an extra brings, and none is here"
        rule = f"`storage` must be a URL as {forms}"
        raise SpecError(f"{rule}, got '{shown(url)}'; write '@' in user and password as %40")
    return found


def open_queue(name: str, runs: Path, url: str | None, hint: str = "") -> Queue:
    """The queue of a started study. SpecError, which ends with `hint`, for an unknown study."""
    folder = runs / "studies"
    storage = open_storage(folder / name, name, url)
    document = storage.read_document()
    if document is None:
        shutil.rmtree(runs / f".{name}.removed", ignore_errors=True)  # of a deletion that was killed
        place, known, fix = storage.place, [], f"start it with: cohort study run {name}"
        if not url:
            place, known = f"'{runs}'", sorted(file.parent.name for file in folder.glob("*/study.json"))
            fix = f"there are: {', '.join(known)}" if known else "start one with: cohort study run NAME"
        raise SpecError(f"no study '{name}' was started in {place}; {did_you_mean(name, known)}{fix}{hint}")
    study = parse_study(study_settings(document), where=storage.document_place)
    return Queue(Plan(study, runs, document.get("inputs", {})), storage)


def study_status(name: str, runs: Path, storage: str | None = None) -> StudyStatus:
    """The progress of the study in the runs folder or in the storage. ValueError for an unknown one."""
    return open_queue(name, runs.resolve(), storage).status()
