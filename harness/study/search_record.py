"""The findings of a search as plain data: its arms, the best arm, and the importance of each setting."""

from collections.abc import Sequence
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from ..spec.study import SearchPlan
from .attempts import Attempts
from .plan import Key

MIN_FOR_IMPORTANCE = 4  # complete arms; a forest on fewer says nothing


def search_record(study: optuna.Study, plan: SearchPlan, attempts: Attempts) -> dict[str, Any]:
    """The record of one search.

    objectives   metric -> direction
    importances  method and path -> share of the variance of the first objective between arms, in [0, 1], or no method
                 and why
    arms         label, parameters, state, reason, values (objective -> mean over seeds; only of complete arms) and
                 seeds (seed -> objective -> value, as far as they are complete)
    pareto, best labels of the arms that no other arm beats in all objectives; the best arm of a single objective
    refused      proposed points that are no valid run or repeat one, with the reason
    """
    objectives, trials = plan.objectives, study.get_trials(deepcopy=False)
    is_complete = any(trial.state == TrialState.COMPLETE for trial in trials)
    return {
        "sampler": plan.search.sampler,
        "pruner": plan.search.pruner,
        "trials": plan.search.trials,
        "objectives": dict(objectives),
        "importances": importances(study, list(plan.search.space)),
        "arms": [_arm_record(t, list(objectives), attempts) for t in trials if "arm" in t.user_attrs],
        "pareto": [t.user_attrs["arm"] for t in study.best_trials] if is_complete else [],
        "best": best_trial(study).user_attrs["arm"] if is_complete and len(objectives) == 1 else None,
        "refused": [
            {"parameters": t.params, "reason": t.user_attrs["refused"]} for t in trials if "refused" in t.user_attrs
        ],
    }


def keys_of(trial: FrozenTrial) -> list[Key]:
    """The (arm, seed) pairs of an arm that were handed out."""
    return [(trial.user_attrs.get("arm", ""), seed) for seed in trial.user_attrs.get("seeds", [])]


def best_trial(study: optuna.Study) -> FrozenTrial:
    """The complete arm with the best value of a single objective; the first of equal ones."""
    sign = -1 if study.direction == StudyDirection.MAXIMIZE else 1
    complete = [t for t in study.get_trials(deepcopy=False) if t.state == TrialState.COMPLETE]
    return min(complete, key=lambda t: (sign * t.values[0], t.number))


def importances(study: optuna.Study, paths: Sequence[str]) -> dict[str, Any]:
    """Shares of the variance of the first objective between complete arms that each setting explains (fANOVA).

    A random forest is fitted to the arms and its variance decomposed (Hutter et al. 2014, PMLR 32(1):754-762); only the
    effects of single settings are counted, scaled to the sum 1. Few arms make a rough guess.
    """
    complete = [t for t in study.get_trials(deepcopy=False) if t.state == TrialState.COMPLETE]
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


def _arm_record(trial: FrozenTrial, objectives: Sequence[str], attempts: Attempts) -> dict[str, Any]:
    states = {key: attempts.state(key) for key in keys_of(trial)}
    bad = next((key for key, state in states.items() if state in ("failed", "invalid")), None)
    state = {"COMPLETE": "complete", "PRUNED": "pruned"}.get(trial.state.name, states[bad] if bad else "running")
    complete = [key for key, state in states.items() if state == "complete"]
    return {
        "label": trial.user_attrs["arm"],
        "parameters": trial.params,
        "state": state,
        "reason": trial.user_attrs.get("reason") or (attempts.end(bad).get("reason") if bad else None),
        "values": dict(zip(objectives, trial.values, strict=True)) if state == "complete" else {},
        "seeds": {str(key[1]): attempts.end(key).get("values", {}) for key in complete},
        "num_seeds": len(keys_of(trial)),
    }
