"""Decides the searches of a study: which arm comes next, when an arm is given up, and which arm is the best.

Each search is an Optuna study in the storage of the queue, beside the queue's own. One Optuna trial is one arm, and its
value is the mean over all seeds of the arm: seeds are replicates and never searched. An idle worker asks for a new arm.
Every arm gets a new sampler, with a seed from the search's name and the arm's number, so its proposal depends only on
the recorded arms: a search with one worker is reproducible, and a killed search continues unchanged. A point that is
not a valid run, or repeats an earlier arm's run, is refused and does not count.

An arm ends COMPLETE when all its seeds are complete, FAIL when one is invalid, PRUNED when it falls behind. It stays
RUNNING if one of its seeds has crashed, because a restart of the study repeats crashed trials. Pruning follows the
running mean over the seeds of an arm at equal steps: seeds run in order, and the value at step s of the third is the
mean of three values at step s. The queue holds its lock for every function here that writes.
"""

import hashlib
import math
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from ..data import ENDED
from ..settings.errors import SpecError
from ..settings.search import Search
from ..settings.study import Arm, SearchPlan, StudySpec, arm_label
from .attempts import Attempts
from .plan import Key

STARTUP = 5  # random arms before a sampler learns, and complete ones before a pruner judges
LIVE = ("waiting", "running", "stopped", "lost")
ENDED_BADLY = tuple(state for state in ENDED if state != "complete")
MIN_FOR_IMPORTANCE = 4  # complete arms; a forest on fewer says nothing
REPEATED = "the same run as arm"  # how the reason for refusing a repeated point begins


class ArmSearch:
    """One search. The attributes of its Optuna trials are `arm` (label), `seeds` handed out so far, `reason`, `behind`
    (why the pruner gives it up), `seed i` (step -> value of the validations of its i-th seed) and `refused`."""

    def __init__(self, study: StudySpec, plan: SearchPlan, storage: BaseStorage) -> None:
        self.study, self.plan = study, plan
        self.storage = storage
        self.name = "/".join(filter(None, [study.name, "search", plan.name]))
        ranges: Any = {True: IntDistribution, False: FloatDistribution}  # by whether both ends are whole numbers
        self._distributions: dict[str, BaseDistribution] = {
            path: CategoricalDistribution(one.choices) if one.choices else ranges[one.whole](one.low, one.high, one.log)
            for path, one in plan.search.space.items()
        }
        self._arms: dict[str, Arm] = {}  # by label; a trial keeps its point

    def create(self) -> None:
        """Create the Optuna study if it is missing."""
        optuna.create_study(storage=self.storage, study_name=self.name, direction="maximize", load_if_exists=True)

    def handed_out(self) -> list[FrozenTrial]:
        """The trials of all arms so far, in order."""
        return [trial for trial in self._trials() if "arm" in trial.user_attrs]

    def arms(self) -> list[tuple[Arm, list[int]]]:
        """Every arm that was handed out, in order, with the seeds that it may run."""
        found = [(self._arm(trial), list(trial.user_attrs["seeds"])) for trial in self.handed_out()]
        final = self._final_arm()
        return [*found, *([(final, list(self.plan.final_seeds))] if final else [])]

    def advance(self, attempts: Attempts) -> None:
        """Record ended arms and hand out the next seeds of the others. Idempotent."""
        for trial in self._trials(TrialState.RUNNING):
            self._advance(trial, attempts)
        if self.plan.final_seeds and self._final_arm() is None and self._settled(attempts) and (best := self._best()):
            self._load().set_user_attr("best", best)

    def ask(self) -> Key | None:
        """The first trial of a new arm; None if no arm is due."""
        while self._is_due():
            trial = self._propose()
            earlier = self.handed_out()
            shown = arm_label(trial.params, digits=3)  # the number before it tells equal ones apart
            label = " ".join(filter(None, [self.plan.name, f"{len(earlier) + 1:03d}:", shown]))
            try:
                arm = self._arm_at(label, trial.params)
                for other in map(self._arm, earlier):
                    if other.digest == arm.digest:
                        raise SpecError(f"{REPEATED} '{other.label}'")
            except SpecError as error:
                self._set(trial, "refused", str(error))
                self._load().tell(trial.number, state=TrialState.FAIL)
                continue
            seeds = list(self.plan.seeds[:1] if self.plan.search.pruner != "none" else self.plan.seeds)
            self._set(trial, "seeds", seeds)
            self._set(trial, "arm", label)  # set last: without it the trial does not count
            self._arms[label] = arm
            return label, seeds[0]
        return None

    def to_come(self, attempts: Attempts) -> int:
        """Number of (arm, seed) pairs, at most, that are not handed out yet."""
        seeds = len(self.plan.seeds)
        count = (self.plan.search.trials - len(self.handed_out())) * seeds if self._is_due() else 0
        for trial in self._trials(TrialState.RUNNING):
            keys = _keys(trial)
            if not any(attempts.state(key) in ENDED_BADLY for key in keys):
                count += seeds - len(keys)
        hopeless = self._settled(attempts) and not self._trials(TrialState.COMPLETE)  # no final arm will come
        if self._final_arm() is None and not hopeless:
            count += len(self.plan.final_seeds)
        return count

    def report(self, key: Key, step: int, value: float) -> str | None:
        """Record a validation of an arm; returns why the arm is given up now, or None."""
        trial = next((t for t in self._trials(TrialState.RUNNING) if t.user_attrs.get("arm") == key[0]), None)
        if trial is None or "behind" in trial.user_attrs:
            return trial and trial.user_attrs.get("behind")
        position = trial.user_attrs["seeds"].index(key[1])
        mean = statistics.fmean([*(trial.user_attrs[f"seed {i}"][str(step)] for i in range(position)), value])
        self._set(trial, f"seed {position}", {**trial.user_attrs.get(f"seed {position}", {}), str(step): value})
        num_seeds, num_steps = len(self.plan.seeds), self.plan.base.spec.steps
        at = position * num_steps + step
        self.storage.set_trial_intermediate_value(trial._trial_id, at, mean)
        if at >= num_seeds * num_steps:
            return None  # the whole arm has been computed
        pruner = _PRUNERS[self.plan.search.pruner](self.plan)
        if not pruner.prune(self._load(pruner=pruner), self.storage.get_trial(trial._trial_id)):
            return None
        of = f" of seed {position + 1} of {num_seeds}" if num_seeds > 1 else ""
        found = f"{self.study.metric} {mean:.4g} at step {step}{of}"
        reason = f"behind the other arms with {found} ({self.plan.search.pruner})"
        self._set(trial, "behind", reason)
        return reason

    def record(self, attempts: Attempts) -> dict[str, Any]:
        """The findings of the search as plain data.

        importances  method and path -> share of the metric's variance between arms, in [0, 1], or no method and why
        arms         label, parameters, state, reason, values (metric -> mean over seeds; only of complete arms) and
                     seeds (seed -> metric -> value, as far as they are complete)
        best         label of the best arm; None without a complete one
        refused      proposed points that are no valid run or repeat one, with the reason
        """
        search, trials = self.plan.search, self._trials()
        return {
            "sampler": search.sampler, "pruner": search.pruner, "trials": search.trials,
            "importances": self._importances(),
            "arms": [self._arm_record(trial, attempts) for trial in self.handed_out()], "best": self._best(),
            "refused": [
                {"parameters": t.params, "reason": t.user_attrs["refused"]} for t in trials if "refused" in t.user_attrs
            ],
        }  # fmt: skip

    def _advance(self, trial: FrozenTrial, attempts: Attempts) -> None:
        """If all its seeds have ended, record the end of an arm or hand out its next seed."""
        if "arm" not in trial.user_attrs:
            self._end(trial, TrialState.FAIL, "its worker died before it was handed out")
            return
        keys = _keys(trial)
        if any(attempts.state(key) in (*LIVE, "failed") for key in keys):
            return
        for state, ending in (("pruned", TrialState.PRUNED), ("invalid", TrialState.FAIL)):
            for key in keys:
                if attempts.state(key) == state:
                    self._end(trial, ending, f"seed {key[1]}: {attempts.end(key).get('reason')}")
                    return
        if len(keys) == len(self.plan.seeds):
            values = [attempts.end(key)["values"][self.study.metric] for key in dict.fromkeys(keys)]
            self._load().tell(trial.number, statistics.fmean(values), TrialState.COMPLETE)
        elif "behind" in trial.user_attrs:
            self._end(trial, TrialState.PRUNED, trial.user_attrs["behind"])
        else:
            self._set(trial, "seeds", list(self.plan.seeds[: len(keys) + 1]))

    def _arm_record(self, trial: FrozenTrial, attempts: Attempts) -> dict[str, Any]:
        states = {key: attempts.state(key) for key in _keys(trial)}
        bad = next((key for key, state in states.items() if state in ("failed", "invalid")), None)
        state = {"COMPLETE": "complete", "PRUNED": "pruned"}.get(trial.state.name, states[bad] if bad else "running")
        complete = [key for key, state in states.items() if state == "complete"]
        return {
            "label": trial.user_attrs["arm"],
            "parameters": trial.params,
            "state": state,
            "reason": trial.user_attrs.get("reason") or (attempts.end(bad).get("reason") if bad else None),
            "values": {self.study.metric: trial.value} if state == "complete" else {},
            "seeds": {str(key[1]): attempts.end(key).get("values", {}) for key in complete},
            "num_seeds": len(states),
        }

    def _settled(self, attempts: Attempts) -> bool:
        """Whether no arm is due, running, or able to continue before the study is started again."""
        for trial in self._trials(TrialState.RUNNING):
            states = {attempts.state(key) for key in _keys(trial)}
            if "failed" not in states or not states.isdisjoint(LIVE):
                return False
        return not self._is_due()

    def _is_due(self) -> bool:
        """Whether another arm is due: the search may run more, has refused few points, and has untried ones."""
        tried, num_arms, limit = self._tried(), len(self.handed_out()), self.plan.search.trials
        distinct = {tuple(sorted(point.items())) for point in tried}
        has_more = len(distinct) < math.prod(dimension.size for dimension in self.plan.search.space.values())
        return has_more and num_arms < limit and len(tried) - num_arms < 2 * limit

    def _propose(self) -> FrozenTrial:
        """A new trial at the sampler's point, or at a random untried point if the sampler has just repeated itself."""
        tried, last = self._tried(), self._trials()[-1:]
        seed = int.from_bytes(hashlib.sha256(f"{self.name}/{len(tried)}".encode()).digest()[:4], "big")
        if not any(trial.user_attrs.get("refused", "").startswith(REPEATED) for trial in last):
            search = self.plan.search
            study = self._load(_SAMPLERS[search.sampler](search, seed), _PRUNERS[search.pruner](self.plan))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                return self.storage.get_trial(study.ask(self._distributions)._trial_id)
        study, sampler, point = self._load(), RandomSampler(seed), tried[0]
        while point in tried:  # `_is_due`: not all are
            draws = self._distributions.items()
            point = {path: sampler.sample_independent(study, last[0], path, kind) for path, kind in draws}
        study.add_trial(optuna.create_trial(state=TrialState.RUNNING, params=point, distributions=self._distributions))
        return self._trials()[-1]

    def _tried(self) -> list[dict[str, Any]]:
        """The points that were handed out or refused, in order."""
        return [trial.params for trial in self._trials() if trial.user_attrs.keys() & {"arm", "refused"}]

    def _arm(self, trial: FrozenTrial) -> Arm:
        label = trial.user_attrs["arm"]
        if label not in self._arms:
            self._arms[label] = self._arm_at(label, trial.params)
        return self._arms[label]

    def _arm_at(self, label: str, params: Mapping[str, Any]) -> Arm:
        arm = self.study.changed(self.plan.base, label, params)
        return replace(arm, phase="tuning") if self.plan.final_seeds else arm

    def _final_arm(self) -> Arm | None:
        """The best arm of a search that is over, under the name of its cell. Once chosen it never changes."""
        trials = self.handed_out() if self.plan.final_seeds else []
        label = self._load().user_attrs.get("best") if trials else None
        if label is None:
            return None
        best = next(self._arm(trial) for trial in trials if trial.user_attrs["arm"] == label)
        return replace(best, label=self.plan.name, levels=self.plan.base.levels, phase="final")

    def _best(self) -> str | None:
        """Label of the best complete arm, the first of equal ones; None without one."""
        complete = self._trials(TrialState.COMPLETE)
        return max(complete, key=lambda trial: trial.value or 0.0).user_attrs["arm"] if complete else None

    def _importances(self) -> dict[str, Any]:
        """Shares of the metric's variance between complete arms that each setting explains (fANOVA).

        A random forest is fitted to the arms and its variance decomposed (Hutter et al. 2014, PMLR 32(1):754-762); only
        the effects of single settings are counted, scaled to the sum 1. Few arms make a rough guess.
        """
        complete = self._trials(TrialState.COMPLETE)
        if len(complete) < MIN_FOR_IMPORTANCE:
            reason = f"needs {MIN_FOR_IMPORTANCE} complete arms, there are {len(complete)}"
            return {"method": None, "values": {}, "reason": reason}
        if len({trial.value for trial in complete}) == 1:
            return {"method": None, "values": {}, "reason": "all complete arms have the same value"}
        values = optuna.importance.get_param_importances(
            self._load(),
            evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0),
            params=list(self.plan.search.space),
        )
        return {"method": "fANOVA", "values": {path: float(value) for path, value in values.items()}, "reason": None}

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        """The trials in these states, by default all."""
        try:
            return self._load().get_trials(deepcopy=False, states=states or None)
        except KeyError:  # not created yet
            return []

    def _end(self, trial: FrozenTrial, state: TrialState, reason: str) -> None:
        self._set(trial, "reason", reason)
        self._load().tell(trial.number, state=state)

    def _set(self, trial: FrozenTrial, key: str, value: Any) -> None:
        self.storage.set_trial_user_attr(trial._trial_id, key, value)

    def _load(self, sampler: BaseSampler | None = None, pruner: BasePruner | None = None) -> optuna.Study:
        sampler = sampler or RandomSampler(0)
        return optuna.load_study(study_name=self.name, storage=self.storage, sampler=sampler, pruner=pruner)


def _keys(trial: FrozenTrial) -> list[Key]:
    """The (arm, seed) pairs of an arm that were handed out."""
    return [(trial.user_attrs.get("arm", ""), seed) for seed in trial.user_attrs.get("seeds", [])]


_SAMPLERS: dict[str, Callable[[Search, int], BaseSampler]] = {
    "tpe": lambda search, seed: TPESampler(n_startup_trials=STARTUP, seed=seed),
    "gp": lambda search, seed: GPSampler(n_startup_trials=STARTUP, seed=seed),
    "random": lambda search, seed: RandomSampler(seed),
}
# Their steps are training steps, counted on from one seed of an arm to the next.
_PRUNERS: dict[str, Callable[[SearchPlan], BasePruner]] = {
    "none": lambda plan: NopPruner(),
    "median": lambda plan: MedianPruner(n_startup_trials=STARTUP),
    "hyperband": lambda plan: HyperbandPruner(plan.base.spec.evaluation.every, len(plan.seeds) * plan.base.spec.steps),
}
