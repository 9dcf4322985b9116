"""Held-out accuracy: greedy, mean over samples, pass@k and maj@k, on a fixed set of problems, overall and by tag."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from harness.interfaces import RolloutEngine, RunLogger, Task
from harness.policy.device import mixed_precision, resolve_device
from harness.rewards.majority_vote import majority_correct
from harness.spec.run import Evaluation, RunSpec
from harness.training import ranks
from harness.training.flops import Lengths, lengths
from harness.training.grading import completion_rows, grade, groups_of, sample_rows
from harness.training.kept import completions_file, keep_rows
from harness.types import EvaluationResult, GradedGroup, Group, Prompt, Sampling, Split

NO_LIMIT = 0  # of tokens, for completions that were cut long ago: only rewards ask for it
PROMPTS_AT_ONCE = 64  # for an engine that holds a whole batch in memory; progress is told after each


def evaluate_run(
    spec: RunSpec,
    engine: RolloutEngine,
    split: Split,
    step: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    num_shown: int = 16,
) -> EvaluationResult:
    """Accuracy on the first problems of a split: one greedy completion and k samples for each.

    The same problems every time, so that arms and steps can be compared problem by problem. `num_shown` rollouts at
    most come with it for the reader.
    """
    task, settings = spec.task, spec.evaluation
    prompts = task.prompts(split)[: settings.num_test_prompts if split == "test" else settings.num_prompts]
    sampled = Sampling(temperature=settings.temperature, max_tokens=spec.max_tokens, stop=spec.sampling.stop)
    greedy = sampled.model_copy(update={"temperature": 0.0})
    groups: list[Group] = []
    greedy_groups: list[Group] = []
    at_once = len(prompts) if engine.plans_batches else PROMPTS_AT_ONCE * ranks.world_size()
    key = {"seed": spec.seed, "step": step}
    sample = partial(engine.generate, group_size=settings.num_samples, sampling=sampled, **key)
    answer = partial(engine.generate, group_size=1, sampling=greedy, **key)
    for start in range(0, len(prompts), at_once):
        part = prompts[start : start + at_once]
        with mixed_precision(resolve_device(spec.device), spec.autocast):
            groups += ranks.shared(part, sample)
            greedy_groups += ranks.shared(part, answer)
        on_progress(min(start + at_once, len(prompts)), len(prompts))
    graded = ranks.shared(groups, lambda part: grade(task, part, spec.max_tokens))
    greedy_graded = ranks.shared(greedy_groups, lambda part: grade(task, part, spec.max_tokens))
    return replace(
        _result(split, prompts, graded, greedy_graded),
        samples=sample_rows(groups, graded, step=step, split=split, limit=num_shown),
        completions=completion_rows(groups, greedy_groups),
        drawn=[*lengths(groups), *lengths(greedy_groups)],
    )


def evaluate_again(task: Task, rows: Sequence[Mapping[str, Any]], split: Split) -> EvaluationResult:
    """What `evaluate_run` found, from the completions that it kept, graded anew; without samples."""
    groups, greedy_groups = groups_of(rows, "samples"), groups_of(rows, "greedy")
    graded, greedy_graded = (grade(task, part, NO_LIMIT) for part in (groups, greedy_groups))
    return _result(split, [group.prompt for group in groups], graded, greedy_graded)


def _result(
    split: Split, prompts: Sequence[Prompt], graded: Sequence[GradedGroup], greedy: Sequence[GradedGroup]
) -> EvaluationResult:
    metrics = sample_metrics(graded)
    metrics["greedy_accuracy"] = float(np.mean([bool(g.correct and g.correct[0]) for g in greedy]))
    counts = {g.prompt_id: sum(g.correct or ()) for g in graded}
    return EvaluationResult(split, metrics, counts, [], breakdown(prompts, graded, greedy))


def breakdown(
    prompts: Sequence[Prompt], graded: Sequence[GradedGroup], greedy: Sequence[GradedGroup]
) -> dict[str, dict[str, dict[str, float]]]:
    """Tag name -> tag value -> accuracy, greedy_accuracy and num_prompts of the problems that carry it, sorted."""
    places: dict[tuple[str, str], list[int]] = defaultdict(list)
    for place, prompt in enumerate(prompts):
        for tag in prompt.tags:
            places[tag].append(place)
    result: dict[str, dict[str, dict[str, float]]] = {}
    for (name, value), members in sorted(places.items()):
        correct, first = ([g[i].correct or () for i in members] for g in (graded, greedy))
        result.setdefault(name, {})[value] = {
            "accuracy": float(np.mean(correct)),
            "greedy_accuracy": float(np.mean(first)),
            "num_prompts": float(len(members)),
        }
    return result


def metric_names(settings: Evaluation) -> list[str]:
    """The names of the metrics that `evaluate_run` gives with these settings."""
    k = settings.num_samples
    counts = ("answered", "truncated", "format", "num_tokens", "num_prompts", "num_samples")
    return ["accuracy", *(f"pass_at_{j}" for j in pass_sizes(k)), f"maj_at_{k}", *counts, "greedy_accuracy"]


def pass_sizes(num_samples: int) -> list[int]:
    """The k for which pass@k is reported: powers of two from 2 on, and the number of samples itself."""
    return sorted({num_samples, *(2**j for j in range(1, num_samples.bit_length()) if 2**j <= num_samples)})


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased pass@k of a problem from n samples with c correct: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, eq. 1)."""
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def sample_metrics(graded: Sequence[GradedGroup]) -> dict[str, float]:
    """Metrics of n samples per problem, pass@k for several k <= n among them."""
    k = len(graded[0].completions)
    correct = np.array([g.correct for g in graded], dtype=float)
    counts = [sum(g.correct or ()) for g in graded]
    return {
        "accuracy": float(correct.mean()),
        **{f"pass_at_{j}": float(np.mean([pass_at_k(k, c, j) for c in counts])) for j in pass_sizes(k)},
        f"maj_at_{k}": float(np.mean([majority_correct(g) for g in graded])),
        "answered": float(np.mean([a is not None for g in graded for a in g.answers])),
        "truncated": float(np.mean([t for g in graded for t in g.truncated])),
        "format": float(np.mean([f for g in graded for f in g.format_scores])),
        "num_tokens": float(np.mean([n for g in graded for n in g.num_tokens])),
        "num_prompts": float(len(graded)),
        "num_samples": float(k),
    }


def intervals(result: EvaluationResult) -> dict[str, tuple[float, float]]:
    """The 95 % interval of each accuracy of an evaluation; its problems are the sample."""
    keys = ["greedy_accuracy", "accuracy", *(key for key in result.metrics if "_at_" in key)]
    count = int(result.metrics["num_prompts"])
    return {key: wilson_interval(result.metrics[key], count) for key in keys}


def wilson_interval(fraction: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a proportion observed on `count` problems (Wilson 1927, eq. for the score interval).

    For a mean of values in [0, 1] that are not all 0 or 1 it is wider than needed, never narrower. SciPy's takes whole
    numbers of successes only.
    """
    z2 = NormalDist().inv_cdf(0.975) ** 2
    centre = (fraction + z2 / (2 * count)) / (1 + z2 / count)
    spread = math.sqrt(z2 * (fraction * (1 - fraction) / count + z2 / (4 * count**2))) / (1 + z2 / count)
    return max(0.0, centre - spread), min(1.0, centre + spread)


def evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    """The logged metrics of an evaluation: `<split>/<metric>`, with `accuracy_<tag>_<value>` for every tag."""
    tags = {
        f"accuracy_{tag}_{value}".replace(" ", "_"): row["accuracy"]
        for tag, rows in result.breakdown.items()
        for value, row in rows.items()
    }
    return {f"{result.split}/{name}": value for name, value in {**result.metrics, **tags}.items()}


def logged_evaluation(
    spec: RunSpec,
    engine: RolloutEngine,
    directory: Path,
    log: RunLogger,
    split: Split,
    step: int,
    charge: Callable[[Lengths], Mapping[str, float]] = lambda drawn: {},
) -> EvaluationResult:
    """Evaluate the engine's policy and log it and what it is charged; of the test split each problem's fraction too.

    All completions are kept in the run's folder, so that the numbers can be verified.
    """
    result = evaluate_run(spec, engine, split, step, lambda done, total: log.progress(split, done, total))
    if ranks.rank() == 0:
        keep_rows(directory, log, step, completions_file(split, step), result.completions)
    log.metrics(step, {**evaluation_metrics(result), **charge(result.drawn)})
    log.samples(result.samples)
    if split == "test":
        k = result.metrics["num_samples"]
        log.per_problem({prompt: count / k for prompt, count in result.correct_counts.items()})
    return result
