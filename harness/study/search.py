"""Searches of a study: which arm comes next, when an arm is given up, and what is known of the settings afterwards.

Each search is an Optuna study in the storage of the queue, beside the queue's own; one Optuna trial is one arm, and its
value is the mean over all seeds of the arm, so that seeds are replicates and never searched. A new arm is asked for
when a worker has nothing else to do. The sampler is made afresh for every arm, with a seed from the search's name and
the arm's number: what it proposes depends on the recorded arms alone, so that a search with one worker is reproducible
and one that was killed goes on as if it had not been. A point that is no valid run, or the same run as an earlier arm,
is refused and counts for nothing.

An arm ends COMPLETE when all its seeds are, FAIL when one is invalid, PRUNED when it is behind. While one of its seeds
has crashed it stays RUNNING, because crashed trials are tried again when the study is started again. Pruning follows
the running mean over the seeds of an arm at equal steps: seeds run in order, and the value at step s of the third is
the mean of three values at step s. Every function here is called under the lock of the queue or only reads.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState

from harness.spec.errors import SpecError
from harness.spec.study import Arm, Dimension, SearchPlan, StudySpec
from harness.types import ENDED, short_path

MIN_FOR_IMPORTANCE = 4  # complete arms; a forest on fewer says nothing
MAX_LISTED = 100_000  # points of a space that are listed to find one that was not tried
LIVE = ("waiting", "running", "stopped", "lost")
ENDED_BADLY = tuple(state for state in ENDED if state != "complete")
Key = tuple[str, int]  # arm label, seed


@dataclass(frozen=True)
class Result:
    """Where an (arm, seed) stands, as the queue says it, with the objectives of a complete one."""

    state: str
    reason: str | None = None
    values: Mapping[str, float] = field(default_factory=dict)


class Searches:
    """All searches of a study: none, one, or one for each algorithm and task of a tuned comparison."""

    def __init__(self, study: StudySpec, storage: BaseStorage) -> None:
        self._searches = [ArmSearch(study, plan, storage) for plan in study.searches()]

    def create(self) -> None:
        """Make the Optuna studies that are not there yet."""
        for search in self._searches:
            search.create()

    def arms(self) -> list[tuple[Arm, list[int]]]:
        """Every arm that was handed out, in order, with the seeds that it may run."""
        return [found for search in self._searches for found in search.arms()]

    def advance(self, results: Mapping[Key, Result]) -> list[Key]:
        """Record the arms that have ended, and return what must be queued next. Repeating it changes nothing."""
        return [key for search in self._searches for key in search.advance(results)]

    def ask(self) -> list[Key]:
        """The seeds of a new arm to be queued, of the search with the fewest arms; empty where no arm is due."""
        for search in sorted(self._searches, key=lambda search: search.num_arms):
            keys = search.ask()
            if keys:
                return keys
        return []

    def to_come(self, results: Mapping[Key, Result]) -> int:
        """Number of (arm, seed) pairs, at most, that are not handed out yet."""
        return sum(search.to_come(results) for search in self._searches)

    def report(self, label: str, seed: int, step: int, value: float) -> str | None:
        """Note a validation of an arm; why the arm is given up now, or None."""
        for search in self._searches:
            if (trial := search.running(label)) is not None:
                return search.report(trial, seed, step, value)
        return None

    def prunes(self) -> bool:
        return any(search.plan.search.pruner != "none" for search in self._searches)

    def record(self, results: Mapping[Key, Result]) -> dict[str, Any]:
        """What `search.json` holds: see `ArmSearch.record`; of a tuned comparison `{"tuning": {cell: record}}`."""
        if len(self._searches) == 1 and not self._searches[0].plan.final_seeds:
            return self._searches[0].record(results)
        return {"tuning": {search.plan.name: search.record(results) for search in self._searches}}


class ArmSearch:
    """One search. The attributes of its Optuna trials are `arm` (label), `seeds` handed out so far, `reason`, `behind`
    (why the pruner gives it up) and `seed i` (step -> value of the validations of its i-th seed)."""

    def __init__(self, study: StudySpec, plan: SearchPlan, storage: BaseStorage) -> None:
        self.study, self.plan, self.search, self.storage = study, plan, plan.search, storage
        self.name = "/".join(filter(None, [study.name, "search", plan.name]))
        self.objectives = study.objectives()
        self._digests: dict[int, str] = {}  # of the arms, by the number of their trial
        self.distributions = {path: distribution(dimension) for path, dimension in self.search.space.items()}
        self.steps = study.run_spec(plan.base, 0).steps
        self.every = study.run_spec(plan.base, 0).evaluation.every

    def create(self) -> None:
        try:
            self._load()
        except KeyError:
            directions = list(self.objectives.values())
            optuna.create_study(storage=self.storage, study_name=self.name, directions=directions)

    @property
    def num_arms(self) -> int:
        return sum("arm" in trial.user_attrs for trial in self._trials())

    def arms(self) -> list[tuple[Arm, list[int]]]:
        found = [(self._arm(t), list(t.user_attrs["seeds"])) for t in self._trials() if "arm" in t.user_attrs]
        final = self._final_arm()
        return [*found, *([(final, list(self.plan.final_seeds))] if final else [])]

    def running(self, label: str) -> FrozenTrial | None:
        """The arm's trial while it has not ended."""
        return next((t for t in self._unended() if t.user_attrs.get("arm") == label), None)

    def advance(self, results: Mapping[Key, Result]) -> list[Key]:
        queued = [key for trial in self._unended() for key in self._advance(trial, results)]
        if not queued and self.plan.final_seeds and self._final_arm() is None and self._settled(results):
            complete = [t for t in self._trials() if t.state == OptunaState.COMPLETE]
            if complete:
                self._load().set_user_attr("best", _best(self._load()).user_attrs["arm"])
        if (final := self._final_arm()) is not None:
            queued += [(final.label, s) for s in self.plan.final_seeds if (final.label, s) not in results]
        return queued

    def ask(self) -> list[Key]:
        while self._open():
            trials = self._trials()
            number = sum("arm" in t.user_attrs or "refused" in t.user_attrs for t in trials)
            seed = int.from_bytes(hashlib.sha256(f"{self.name}/{number}".encode()).digest()[:4], "big")
            if trials and trials[-1].user_attrs.get("refused", "").startswith("the same run"):
                trial_id, params = self._add_untried(random.Random(seed))
            else:
                study = self._load(self._sampler(seed), self._pruner())
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                    trial = study.ask(self.distributions)
                trial_id, params = trial._trial_id, trial.params
            problem = self._problem(params)
            if problem is not None:
                self._set(trial_id, "refused", problem)
                self._tell(self.storage.get_trial(trial_id), OptunaState.FAIL)
                continue
            label = self._label(self.num_arms + 1, params)
            seeds = list(self.plan.seeds[:1] if self.search.pruner != "none" else self.plan.seeds)
            self._set(trial_id, "seeds", seeds)
            self._set(trial_id, "arm", label)  # last: without it the trial counts for nothing
            return [(label, seed) for seed in seeds]
        return []

    def to_come(self, results: Mapping[Key, Result]) -> int:
        count = (self.search.trials - self.num_arms) * len(self.plan.seeds) if self._open() else 0
        for trial in self._unended():
            keys = self._keys(trial)
            if not any(key in results and results[key].state in ENDED_BADLY for key in keys):
                count += len(self.plan.seeds) - len(keys)
        if self._final_arm() is None and not self._hopeless(results):
            count += len(self.plan.final_seeds)
        return count

    def report(self, trial: FrozenTrial, seed: int, step: int, value: float) -> str | None:
        if self.search.pruner == "none" or "behind" in trial.user_attrs:
            return trial.user_attrs.get("behind")
        position = trial.user_attrs["seeds"].index(seed)
        values = [trial.user_attrs[f"seed {i}"][str(step)] for i in range(position)] + [value]
        known = trial.user_attrs.get(f"seed {position}", {})
        self._set(trial._trial_id, f"seed {position}", {**known, str(step): value})
        at = position * self.steps + step
        self.storage.set_trial_intermediate_value(trial._trial_id, at, statistics.fmean(values))
        if at >= len(self.plan.seeds) * self.steps:
            return None  # all of the arm is paid for
        if not self._pruner().prune(self._load(pruner=self._pruner()), self.storage.get_trial(trial._trial_id)):
            return None
        of = f" of seed {position + 1} of {len(self.plan.seeds)}" if len(self.plan.seeds) > 1 else ""
        mean = statistics.fmean(values)
        reason = f"behind the other arms with {self.study.metric} {mean:.4g} at step {step}{of} ({self.search.pruner})"
        self._set(trial._trial_id, "behind", reason)
        return reason

    def record(self, results: Mapping[Key, Result]) -> dict[str, Any]:
        """What the search found, as plain data.

        objectives   metric -> direction
        importances  method and path -> share of the variance of the first objective between arms, in [0, 1], or
                     no method and why
        arms         label, parameters, state, reason, values (objective -> mean over seeds; only of complete arms)
                     and seeds (seed -> objective -> value, as far as they are complete)
        pareto, best labels of the arms that no other arm beats in all objectives; the best one of a single objective
        refused      points that the sampler proposed and that were no new valid run, with the reason
        """
        study, trials = self._load(), self._trials()
        complete = [t for t in trials if t.state == OptunaState.COMPLETE]
        pareto = [t.user_attrs["arm"] for t in study.best_trials] if complete else []
        single = len(self.objectives) == 1
        return {
            "sampler": self.search.sampler,
            "pruner": self.search.pruner,
            "trials": self.search.trials,
            "objectives": dict(self.objectives),
            "importances": importances(study, list(self.distributions)),
            "arms": [self._arm_record(t, results) for t in trials if "arm" in t.user_attrs],
            "pareto": pareto,
            "best": _best(study).user_attrs["arm"] if complete and single else None,
            "refused": [
                {"parameters": t.params, "reason": t.user_attrs["refused"]} for t in trials if "refused" in t.user_attrs
            ],
        }

    def _arm_record(self, trial: FrozenTrial, results: Mapping[Key, Result]) -> dict[str, Any]:
        found = {key[1]: results[key] for key in self._keys(trial) if key in results}
        bad = next((result for result in found.values() if result.state in ("failed", "invalid")), None)
        state = {"COMPLETE": "complete", "PRUNED": "pruned"}.get(trial.state.name, bad.state if bad else "running")
        values = dict(zip(self.objectives, trial.values or (), strict=True)) if state == "complete" else {}
        return {
            "label": trial.user_attrs["arm"],
            "parameters": trial.params,
            "state": state,
            "reason": trial.user_attrs.get("reason") or (bad.reason if bad else None),
            "values": values,
            "seeds": {str(seed): dict(r.values) for seed, r in found.items() if r.state == "complete"},
            "num_seeds": len(self._keys(trial)),
        }

    def _advance(self, trial: FrozenTrial, results: Mapping[Key, Result]) -> list[Key]:
        """Record an unended arm's end where it has come; what must be queued for it."""
        if "arm" not in trial.user_attrs:
            self._end(trial, OptunaState.FAIL, "its worker died before it was handed out")
            return []
        keys = self._keys(trial)
        missing = [key for key in keys if key not in results]
        if missing:
            return missing
        found = {key: results[key] for key in keys}
        states = {result.state for result in found.values()}
        if states & {*LIVE, "failed"}:
            return []
        for state, ending in (("pruned", OptunaState.PRUNED), ("invalid", OptunaState.FAIL)):
            for (_, seed), result in found.items():
                if result.state == state:
                    self._end(trial, ending, f"seed {seed}: {result.reason}")
                    return []
        if len(keys) < len(self.plan.seeds):
            if "behind" in trial.user_attrs:
                self._end(trial, OptunaState.PRUNED, trial.user_attrs["behind"])
                return []
            seeds = list(self.plan.seeds[: len(keys) + 1])
            self._set(trial._trial_id, "seeds", seeds)
            return [(trial.user_attrs["arm"], seeds[-1])]
        means = [statistics.fmean(r.values[name] for r in found.values()) for name in self.objectives]
        self._tell(trial, OptunaState.COMPLETE, means)
        return []

    def _settled(self, results: Mapping[Key, Result]) -> bool:
        """Whether no arm is due, and none runs or could go on without the study being started again."""
        return not self._open() and all(
            any(key in results and results[key].state == "failed" for key in self._keys(trial))
            and not any(key not in results or results[key].state in LIVE for key in self._keys(trial))
            for trial in self._unended()
        )

    def _hopeless(self, results: Mapping[Key, Result]) -> bool:
        """Whether the search is over and no arm of it is complete, so that no final arm will come."""
        return self._settled(results) and not any(t.state == OptunaState.COMPLETE for t in self._trials())

    def _open(self) -> bool:
        """Whether another arm is due: fewer than `trials` were handed out, and not too many points were refused."""
        trials = self._trials()
        refused = sum("refused" in t.user_attrs for t in trials)
        if self.num_arms >= self.search.trials or refused >= 2 * self.search.trials:
            return False
        return not refused or next(self._untried(), None) is not None

    def _untried(self) -> Iterator[dict[str, Any]]:
        """Points that were not proposed yet; of a space without end, or too large to list, no more than one."""
        points = [dimension.points() for dimension in self.search.space.values()]
        size = math.prod(math.inf if found is None else len(found) for found in points)
        if size > MAX_LISTED:
            yield {}
            return
        tried = [trial.params for trial in self._trials()]
        for values in itertools.product(*(found or [] for found in points)):
            point = dict(zip(self.search.space, values, strict=True))
            if point not in tried:
                yield point

    def _add_untried(self, rng: random.Random) -> tuple[int, dict[str, Any]]:
        """A trial at a random point that was not proposed yet: (trial id, params)."""
        params = rng.choice(list(self._untried()))
        if not params:
            params = dict(self._load(RandomSampler(rng.randrange(2**32))).ask(self.distributions).params)
            return self._trials()[-1]._trial_id, params
        self._load().add_trial(
            optuna.create_trial(state=OptunaState.RUNNING, params=params, distributions=self.distributions)
        )
        return self._trials()[-1]._trial_id, params

    def _problem(self, params: Mapping[str, Any]) -> str | None:
        """Why a point is no arm: not a valid run, or the same as an earlier arm's."""
        try:
            digest = self._digest(params)
        except SpecError as error:
            return str(error)
        for trial in self._trials():
            if "arm" in trial.user_attrs:
                if trial.number not in self._digests:
                    self._digests[trial.number] = self._digest(trial.params)
                if self._digests[trial.number] == digest:
                    return f"the same run as arm '{trial.user_attrs['arm']}'"
        return None

    def _digest(self, params: Mapping[str, Any]) -> str:
        return self.study.run_spec(Arm("", {**self.plan.base.overrides, **params}, {}), 0).digest()

    def _label(self, number: int, params: Mapping[str, Any]) -> str:
        shown = [
            f"{short_path(k)}={v:.3g}" if isinstance(v, float) else f"{short_path(k)}={v}" for k, v in params.items()
        ]
        return " ".join(filter(None, [self.plan.name, f"{number:03d}:", ", ".join(shown)]))

    def _arm(self, trial: FrozenTrial) -> Arm:
        base = self.plan.base
        return Arm(
            trial.user_attrs["arm"],
            {**base.overrides, **trial.params},
            {**base.levels, **trial.params},
            phase="tuning" if self.plan.final_seeds else "final",
        )

    def _final_arm(self) -> Arm | None:
        """The best arm of a search that is over, under the name of its cell. Once chosen it never changes."""
        trials = self._trials() if self.plan.final_seeds else []
        label = self._load().user_attrs.get("best") if trials else None
        if label is None:
            return None
        best = next(t for t in trials if t.user_attrs.get("arm") == label)
        return Arm(self.plan.name, {**self.plan.base.overrides, **best.params}, self.plan.base.levels)

    def _keys(self, trial: FrozenTrial) -> list[Key]:
        return [(trial.user_attrs.get("arm", ""), seed) for seed in trial.user_attrs.get("seeds", [])]

    def _unended(self) -> list[FrozenTrial]:
        return [trial for trial in self._trials() if trial.state == OptunaState.RUNNING]

    def _trials(self) -> list[FrozenTrial]:
        try:
            return self._load().get_trials(deepcopy=False)
        except KeyError:  # not created yet
            return []

    def _end(self, trial: FrozenTrial, state: OptunaState, reason: str) -> None:
        self._set(trial._trial_id, "reason", reason)
        self._tell(trial, state)

    def _tell(self, trial: FrozenTrial, state: OptunaState, values: Sequence[float] | None = None) -> None:
        self._load(RandomSampler(0)).tell(trial.number, values, state)

    def _set(self, trial_id: int, key: str, value: Any) -> None:
        self.storage.set_trial_user_attr(trial_id, key, value)

    def _load(self, sampler: BaseSampler | None = None, pruner: BasePruner | None = None) -> optuna.Study:
        sampler = sampler or RandomSampler(0)
        return optuna.load_study(study_name=self.name, storage=self.storage, sampler=sampler, pruner=pruner)

    def _sampler(self, seed: int) -> BaseSampler:
        startup = self.search.startup
        match self.search.sampler:
            case "tpe":
                return TPESampler(n_startup_trials=startup, seed=seed)
            case "gp":
                return GPSampler(n_startup_trials=startup, seed=seed)
            case "nsga2":
                return NSGAIISampler(population_size=self.search.population, seed=seed)
            case "random":
                return RandomSampler(seed)

    def _pruner(self) -> BasePruner:
        """Steps of the pruner are training steps, counted on from one seed of the arm to the next."""
        match self.search.pruner:
            case "none":
                return NopPruner()
            case "median":
                return MedianPruner(n_startup_trials=self.search.startup)
            case "hyperband":
                return HyperbandPruner(self.every, len(self.plan.seeds) * self.steps)


def distribution(dimension: Dimension) -> BaseDistribution:
    """Optuna's description of a dimension."""
    if dimension.choices is not None:
        return CategoricalDistribution(dimension.choices)
    assert dimension.low is not None
    assert dimension.high is not None
    if dimension.whole:
        return IntDistribution(int(dimension.low), int(dimension.high), dimension.log, int(dimension.step or 1))
    return FloatDistribution(float(dimension.low), float(dimension.high), dimension.log, dimension.step)


def importances(study: optuna.Study, paths: Sequence[str]) -> dict[str, Any]:
    """Shares of the variance of the first objective between complete arms that each setting explains (fANOVA).

    A random forest is fitted to the arms and its variance decomposed (Hutter et al. 2014, PMLR 32(1):754-762); only the
    effects of single settings are counted, scaled to the sum 1. Few arms make a rough guess.
    """
    complete = [t for t in study.get_trials(deepcopy=False) if t.state == OptunaState.COMPLETE]
    if len(complete) < MIN_FOR_IMPORTANCE:
        reason = f"needs {MIN_FOR_IMPORTANCE} complete arms, there are {len(complete)}"
        return {"method": None, "values": {}, "reason": reason}
    if len({t.values[0] for t in complete}) == 1:
        return {"method": None, "values": {}, "reason": "all complete arms have the same value"}
    values = optuna.importance.get_param_importances(
        study,
        evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0),
        params=list(paths),
        target=lambda trial: trial.values[0],
    )
    return {"method": "fANOVA", "values": {path: float(value) for path, value in values.items()}, "reason": None}


def _best(study: optuna.Study) -> FrozenTrial:
    """The complete arm with the best value of a single objective; of equal ones the first."""
    sign = -1 if study.direction == optuna.study.StudyDirection.MAXIMIZE else 1
    complete = [t for t in study.get_trials(deepcopy=False) if t.state == OptunaState.COMPLETE]
    return min(complete, key=lambda t: (sign * t.values[0], t.number))
