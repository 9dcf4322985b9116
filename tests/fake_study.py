"""A study record with a known truth, made without any training: what the tests of statistics and report read."""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cohort.harness.data import SampleRow, TrialState
from cohort.harness.record.study import StudyRecord, TrialRecord
from cohort.harness.settings.claim import Claim

HOSTILE = (
    "8+5=13</pre><script>alert(1)</script><img src=x onerror=alert(2)> $\\frac{1}{ ``` | <b>& \x00\x1b[31m \u202e"
    " [click](javascript:alert(3)) ]]>-->\ud800\n```\n<script>alert(7)</script>\n"
)
HOSTILE_ARM = "<script>alert(4)</script>|$x^{$=1"
HOSTILE_REASON = "policy/loss is NaN at step 17 <img src=x onerror=alert(5)> [1, 2](https://example.com)"


@dataclass(frozen=True)
class FakeArm:
    """`accuracy` is the expected final test accuracy over new seeds; `settings` are dotted overrides of its run."""

    label: str
    algorithm: str = "grpo"
    accuracy: float = 0.5
    settings: Mapping[str, Any] = field(default_factory=dict)
    factors: Mapping[str, Any] = field(default_factory=dict)


def arms_of(*accuracies: float, labels: Iterable[str] = "abcdef") -> list[FakeArm]:
    """Arms of GRPO with these accuracies and no settings of their own."""
    return [FakeArm(label, accuracy=value) for label, value in zip(labels, accuracies, strict=False)]


def three_algorithms() -> list[FakeArm]:
    return [
        FakeArm(name, name, accuracy, {"algorithm.name": name}, {"algorithm.name": name})
        for name, accuracy in (("ppo", 0.70), ("grpo", 0.80), ("grpo_self_consistency", 0.35))
    ]


def factor_grid(factors: Mapping[str, Sequence[Any]]) -> list[FakeArm]:
    """Arms of a grid whose accuracy rises with the level of the first factor only."""
    arms = []
    for levels in itertools.product(*factors.values()):
        point = dict(zip(factors, levels, strict=True))
        label = ", ".join(f"{path.rpartition('.')[2]}={level}" for path, level in point.items())
        accuracy = 0.6 + 0.08 * next(iter(factors.values())).index(levels[0])
        arms.append(FakeArm(label, "grpo", accuracy, point, point))
    return arms


def fake_study(
    arms: Sequence[FakeArm] | None = None, seeds: Sequence[int] = (0, 1, 2), *,
    states: Mapping[tuple[str, int], TrialState | None] | None = None, num_problems: int = 128,
    seed_deviation: float = 0.02, num_steps: int = 100, name: str = "fake", rng_seed: int = 0,
) -> StudyRecord:  # fmt: skip
    """A record of one trial per arm and seed; `states` changes a trial's state, None removes the trial."""
    arms = three_algorithms() if arms is None else arms
    rng = np.random.default_rng(rng_seed)
    difficulty = rng.normal(0, 1, num_problems)
    trials = []
    for arm, seed in itertools.product(arms, seeds):
        state = (states or {}).get((arm.label, seed), "complete")
        luck = rng.normal(0, seed_deviation)
        fractions = _fractions(arm.accuracy + luck, difficulty, rng)
        if state is not None:
            trials.append(_trial(arm, seed, state, fractions, num_steps, rng))
    factors: dict[str, list[Any]] = {}
    for one in arms:
        for path, level in one.factors.items():
            if level not in factors.setdefault(path, []):
                factors[path].append(level)
    spec = {
        "name": name, "question": "Which algorithm?", "run": {"task": {"name": "arithmetic"}, "steps": num_steps},
        "factors": factors, "arms": {}, "seeds": list(seeds), "design": "grid", "metric": "validation/accuracy",
        "baseline": None,
    }  # fmt: skip
    return StudyRecord(
        name=name, question="Which algorithm gains most on <arithmetic> at equal rollouts & one cold start?",
        metric="validation/accuracy", baseline=arms[0].label, arms=[arm.label for arm in arms], seeds=list(seeds),
        expected=len(arms) * len(seeds), spec=spec, trials=trials,
        command=f"cohort study run {name} --set 'steps={num_steps}' && echo '<done>'",
        versions={"python": "3.12.3", "torch": "2.13.0", "git_commit": "0123abc"},
    )  # fmt: skip


def with_trials(record: StudyRecord, change: Callable[[TrialRecord], Mapping[str, Any]]) -> StudyRecord:
    """The record with the fields of every trial that `change` gives for it replaced."""
    return dataclasses.replace(record, trials=[dataclasses.replace(t, **change(t)) for t in record.trials])


def with_claims(record: StudyRecord, *claims: Mapping[str, Any]) -> StudyRecord:
    """The record with these registered claims, which need say no more than their contrast."""
    levels = {arm: next((t.factors for t in record.trials if t.arm == arm), {}) for arm in record.arms}
    found = []
    for raw in claims:
        claim = Claim.model_validate({"sentence": "S.", "source": "a paper", "predicts": "above", **raw})
        region = [end if math.isfinite(end) else None for end in claim.region]
        own = {"contrasts": claim.contrasts(levels), "region": region, "time": 0, "digest": "0a1b"}
        found.append({**claim.model_dump(mode="json"), **own})
    return dataclasses.replace(record, claims=found)


def wanted_studies(purpose: str | None, default: int) -> int:
    """The number of simulated studies that `--studies` asks for."""
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--studies", type=int, default=default)
    return parser.parse_args().studies


def random_scores(
    rng: np.random.Generator, num_arms: int, num_seeds: int, num_problems: int = 512, *, arm_by_problem: float = 0.0,
    seed_deviations: Sequence[float] = (0.16,), families: Sequence[int] | None = None, arm_by_family: float = 0.0,
    logit: float = 1.2,
) -> np.ndarray:  # fmt: skip
    """Fractions right of arms that do not differ, arms by seeds by problems, 4 samples each; seeds differ between arms.

    Logits: `logit`, seeds N(0, 0.16), problems N(0, 1.2) shared by all, their interaction N(0, 0.4). `arm_by_problem`
    is the deviation of what an arm gains on one problem and loses on another, `arm_by_family` the deviation of what it
    gains on all problems with one number in `families`. Arms take `seed_deviations` in turn; the mean logit keeps their
    accuracy equal (Zeger et al. 1988: it is proportional to sqrt(1 + 0.346 variance)).
    """
    deviations = np.resize(np.asarray(seed_deviations, dtype=float), num_arms)[:, None, None]
    others = 1.2**2 + 0.4**2 + arm_by_problem**2
    centre = logit * np.sqrt((1 + 0.346 * (others + deviations**2)) / (1 + 0.346 * (others + 0.16**2)))
    seeds = rng.normal(0, 1, (num_arms, num_seeds, 1)) * deviations
    problems = rng.normal(0, 1.2, (1, 1, num_problems))
    interaction = rng.normal(0, 0.4, (num_arms, num_seeds, num_problems))
    logits = centre + seeds + problems + interaction
    if arm_by_problem:
        logits = logits + rng.normal(0, arm_by_problem, (num_arms, 1, num_problems))
    if families is not None:
        logits = logits + rng.normal(0, arm_by_family, (num_arms, 1, max(families) + 1))[:, :, list(families)]
    return rng.binomial(4, 1 / (1 + np.exp(-logits))) / 4


def random_scores_truth() -> float:
    """The expectation of `random_scores`, by Gauss-Hermite quadrature."""
    points, weights = np.polynomial.hermite_e.hermegauss(80)
    deviation = math.sqrt(0.16**2 + 1.2**2 + 0.4**2)
    return float((weights / (1 + np.exp(-(1.2 + deviation * points)))).sum() / weights.sum())


def _fractions(accuracy: float, difficulty: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Fraction of 4 samples right per problem: harder problems are right less often, the mean is `accuracy`."""
    if accuracy <= 0:
        return np.zeros(difficulty.size)
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.mean(1 / (1 + np.exp(-(middle + difficulty)))) < accuracy else (low, middle)
    return rng.binomial(4, 1 / (1 + np.exp(-(low + difficulty)))) / 4


def _trial(
    arm: FakeArm, seed: int, state: TrialState, fractions: np.ndarray, num_steps: int, rng: np.random.Generator
) -> TrialRecord:
    complete = state == "complete"
    last = num_steps if complete else num_steps // 2
    spec = _spec(arm, seed, num_steps)
    history = _history(arm, float(fractions.mean()), last, rng)
    summary = {
        "accuracy_initial": history["validation/accuracy"][0][1], "rollouts": 128.0 * last,
        "generated_tokens": history["train/generated_tokens"][-1][1], "optimizer_steps": float(last),
        "seconds": history["seconds/total"][-1][1], "peak_memory_bytes": 6.1e8 if arm.algorithm == "ppo" else 4.2e8,
    }  # fmt: skip
    if complete:
        summary |= {"accuracy_final": history["validation/accuracy"][-1][1], "test_accuracy": float(fractions.mean())}
        history["test/accuracy_level_1"] = [(last, min(1.0, float(fractions.mean()) + 0.1))]
        history["test/accuracy_level_2"] = [(last, max(0.0, float(fractions.mean()) - 0.1))]
        history["test/accuracy"] = [(last, float(fractions.mean()))]
    per_problem = {f"problem-{i:04d}": float(value) for i, value in enumerate(fractions)} if complete else {}
    return TrialRecord(
        trial=f"{arm.algorithm}-seed{seed}-0a1b2c3d", arm=arm.label, seed=seed, state=state,
        reason=HOSTILE_REASON if state in ("invalid", "failed") else None, spec=spec, factors=dict(arm.factors),
        history=history, summary=summary, per_problem=per_problem, samples=_samples(arm, last),
    )  # fmt: skip


def _spec(arm: FakeArm, seed: int, num_steps: int) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "model": "tiny", "task": {"name": "arithmetic"},
        "algorithm": {"name": arm.algorithm, "group_size": 8, "clip_epsilon": 0.2, "kl_beta": 0.01},
        "rewards": {"majority_vote" if "self_consistency" in arm.algorithm else "accuracy": {"weight": 1.0}},
        "cold_start": {"steps": 400, "learning_rate": 0.003},
        "optimizer": {"learning_rate": 0.0001, "num_inner_epochs": 1, "num_minibatches": 1},
        "evaluation": {"every": 10, "num_prompts": 256, "num_test_prompts": 512, "num_samples": 4, "temperature": 1.0},
        "rollouts_per_step": 128, "steps": num_steps, "seed": seed,
    }  # fmt: skip
    if arm.algorithm.startswith("grpo"):
        spec["algorithm"]["positive_weight"] = 1.0
    for dotted, value in arm.settings.items():
        node = spec
        *parents, key = dotted.split(".")
        for parent in parents:
            node = node[parent]
        node[key] = value
    return spec


def _history(arm: FakeArm, final: float, last: int, rng: np.random.Generator) -> dict[str, list[tuple[int, float]]]:
    """Curves that rise (or fall) from 0.4 to `final`, with noise, every step; evaluations every 10 steps."""

    def curve(start: float, end: float, noise: float) -> list[tuple[int, float]]:
        return [
            (step, end + (start - end) * math.exp(-4 * step / last) + noise * float(rng.normal()))
            for step in range(1, last + 1)
        ]

    length = 16 if "self" in arm.algorithm else 24
    tokens = np.cumsum([128 * (length + float(rng.normal())) for _ in range(last)])
    blind = "self_consistency" in arm.algorithm
    history = {
        "reward/mean": curve(0.4, 0.95 if blind else final, 0.02),
        "train/accuracy": curve(0.4, final, 0.02),
        "train/majority_accuracy": curve(0.55, final + 0.05, 0.02),
        "train/zero_variance_groups": curve(0.1, 0.8 if blind else 0.4, 0.02),
        "train/generated_tokens": [(step, float(total)) for step, total in enumerate(tokens, start=1)],
        "train/rollouts": [(step, 128.0 * step) for step in range(1, last + 1)],
        "seconds/step": [(step, 1.0 if arm.algorithm == "ppo" else 0.7) for step in range(1, last + 1)],
        "policy/entropy": curve(0.5, 0.15, 0.01),
        "policy/clip_fraction": [(step, 0.0) for step in range(1, last + 1)],
        "policy/grad_norm": curve(1.2, 0.5, 0.05),
        "kl/reference": curve(0.0, 0.08, 0.002),
        "completion/length": curve(20.0, float(length), 0.2),
        "seconds/total": [(step, (1.1 if arm.algorithm == "ppo" else 0.8) * step) for step in range(1, last + 1)],
        "validation/accuracy": [
            (step, final + (0.4 - final) * math.exp(-5 * step / last) + 0.01 * float(rng.normal()) * (step > 0))
            for step in range(0, last + 1, 10)
        ],
    }
    if blind:
        history["vote/label_accuracy"] = curve(0.55, final + 0.05, 0.02)
        history["vote/margin"] = curve(0.3, 0.7, 0.02)
        history["vote/false_positive_rate"] = curve(0.2, 0.6, 0.02)
        history["vote/answered"] = curve(0.9, 0.99, 0.001)
    if arm.algorithm == "ppo":
        history["critic/explained_variance"] = curve(0.0, 0.6, 0.03)
    return history


def _samples(arm: FakeArm, last: int) -> list[SampleRow]:
    right = SampleRow(
        step=last, split="test", prompt_id="p1", prompt="4+4+5+5-6=", completion="4+4=8;8+5=13;13+5=18;18-6=12#### 12",
        gold="12", answer="12", correct=True, reward=1.0, num_tokens=37, finish_reason="stop",
    )  # fmt: skip
    hostile = SampleRow(
        step=last, split="test", prompt_id="p2", prompt="3+5+5= <img src=x onerror=alert(6)>", completion=HOSTILE,
        gold="13", answer="<script>13" if arm.algorithm == "grpo" else None, correct=False, reward=-0.1,
        num_tokens=128, finish_reason="length",
    )  # fmt: skip
    return [right, hostile]
