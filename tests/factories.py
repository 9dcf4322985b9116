"""Makes the values that many tests begin with: a run's settings and a study's. One factory each; tests change parts."""

from collections.abc import Mapping
from typing import Any

from cohort.harness.spec.raw import with_overrides
from cohort.harness.spec.run import RunSpec, parse_run
from cohort.harness.spec.study import StudySpec, parse_study

# The smallest run that trains: seconds on one core. `make_spec(**{**FEW, "steps": 2})`
FEW: Mapping[str, Any] = {
    "task": {"name": "arithmetic", "min_operands": 2, "max_operands": 2, "num_train": 64},
    "algorithm": {"name": "grpo", "group_size": 4, "kl_beta": 0.0},
    "sampling": {"max_tokens": 8},
    "evaluation": {"every": 9, "num_prompts": 4, "num_test_prompts": 4, "num_samples": 1},
    "rollouts_per_step": 8,
    "steps": 3,
}


def make_spec(algorithm: Any = "grpo", /, **changes: Any) -> RunSpec:
    """A run of the built-in task. `changes` are settings of a run, whole (`task={...}`) or by dotted path
    (`**{"algorithm.group_size": 4}`), applied in their order."""
    return parse_run(with_overrides({"task": "arithmetic", "algorithm": algorithm}, changes), "test")


def make_study(**changes: Any) -> StudySpec:
    """A study of the built-in task: two KL weights, seeds 0 and 1. `changes` are fields of a study, whole or by dotted
    path (`**{"run.steps": 2}`); other arms replace the factors."""
    raw = {
        "name": "toy",
        "question": "Does it help?",
        "run": {"task": "arithmetic", "algorithm": "grpo"},
        "seeds": [0, 1],
    }
    if not changes.keys() & {"factors", "arms", "components", "search", "compare"}:
        raw["factors"] = {"algorithm.kl_beta": [0.0, 0.1]}
    whole = {key: value for key, value in changes.items() if "." not in key}
    return parse_study(with_overrides(raw | whole, {k: v for k, v in changes.items() if "." in k}), "test")
