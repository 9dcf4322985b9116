"""Measures held-out accuracy on a fixed set of problems, overall and by tag: greedy, mean over samples, pass@k and
maj@k.

Problems are sampled and graded in parts, and a part's completions are dropped afterwards, so that memory never holds
more than a few thousand completions, or one problem's completions if they are more.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..base.files import sync
from ..base.streams import generator
from ..base.words import first_look
from ..data import EvaluationResult, GradedGroup, Group, Prompt, SampleRow, Sampling, Split
from ..devices import ranks
from ..devices.device import mixed_precision, resolve_device
from ..interfaces import RolloutEngine, Task
from ..policy.flops import lengths
from ..settings.run import PART_WEIGHTS, PROMPTS_AT_ONCE, EvaluationSettings, RunSpec
from .grading import begin_grading, completion_row, grade, groups_of, sample_rows

NO_LIMIT = 0  # of tokens, for completions that were cut long ago: only rewards use it
SAMPLES_AT_ONCE = 64  # of one problem, for the same engine
ROWS_AT_ONCE = 8192  # completions in memory, unless a single problem has more
KEPT_WEIGHTS = 8e12  # as PART_WEIGHTS, where rows are kept as they end: minutes, because few rows decode slowly
ROWS = ".rows"  # ending of the file of an unfinished part's rows


@dataclass(frozen=True, slots=True)
class ProblemScore:
    """One problem's part in the metrics of a split: by metric, the sum over its samples; the chance that a majority
    vote of them is right; and whether the greedy completion is right."""

    prompt_id: str
    num_samples: int
    sums: Mapping[str, float]
    majority: float
    greedy: bool


class EndedRows(dict[str, list[int]]):
    """The completions of an unfinished part that have ended, by row: token ids, each in the file as it comes."""

    def __init__(self, file: Path) -> None:
        """Reads what a killed evaluation left in the file, up to a torn or damaged line."""
        self.file = file
        with suppress(OSError, ValueError, TypeError):
            super().__init__(map(json.loads, file.read_text().splitlines()))
        if file.exists():
            file.write_text("".join(f"{json.dumps(row)}\n" for row in self.items()))

    def __setitem__(self, name: str, ids: list[int]) -> None:
        super().__setitem__(name, ids)
        with self.file.open("a") as file:
            file.write(f"{json.dumps([name, ids])}\n")

    def clear(self) -> None:
        super().clear()
        self.file.unlink(missing_ok=True)


def evaluate_run(
    spec: RunSpec,
    engine: RolloutEngine,
    split: Split,
    step: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    num_shown: int = 16,
    kept: Path | None = None,
    weights: int = 0,
    on_look: Callable[[str], None] = lambda causes: None,
) -> EvaluationResult:
    """Accuracy on the first problems of a split, the same every time: one greedy completion and k samples for each.

    The result includes at most `num_shown` rollouts for the reader. Problems in the file `kept` are not sampled again;
    the others are added to it, each part on disk before the next begins, so that a killed evaluation can continue. The
    number of a model's `weights` bounds the parts of an engine on a CPU; with 0 they are as large as memory allows.
    Rows that the engine notes as they end are dropped with their part. `on_look` gets the causes of weak first samples.
    """
    settings, num_samples = spec.evaluation, spec.evaluation.samples_of(split)
    prompts = spec.task.prompts(split)[: settings.num_test_prompts if split == "test" else settings.num_prompts]
    places = {prompt.id: place for place, prompt in enumerate(prompts)}
    scores: dict[str, ProblemScore] = {}
    shown: dict[tuple[int, int], SampleRow] = {}  # ordered by sample, then by problem
    drawn: list[tuple[int, Sequence[int]]] = []

    def marked(groups: Sequence[Group]) -> list[GradedGroup]:
        return ranks.shared(groups, lambda part: begin_grading(spec.task, part, spec.max_tokens).result())

    def score(groups: Sequence[Group], graded: Sequence[GradedGroup], greedy: Sequence[Group]) -> None:
        for group, samples, first in zip(groups, graded, marked(greedy), strict=True):
            place, rows = places[group.prompt.id], sample_rows([group], [samples], step=step, split=split)
            scores[group.prompt.id] = problem_score(samples, first)
            shown.update({(i, place): row for i, row in enumerate(rows) if i * len(prompts) + place < num_shown})

    for group, greedy in kept_problems(kept) if kept is not None else ():
        if group.prompt.id in places:
            score([group], marked([group]), [greedy])
    left = [prompt for prompt in prompts if prompt.id not in scores]
    at_once = min(ROWS_AT_ONCE // num_samples, ROWS_AT_ONCE if engine.plans_batches else PROMPTS_AT_ONCE)
    each = weights * spec.max_tokens * (1 + num_samples)  # weights read for a problem
    at_once = min(at_once, int((PART_WEIGHTS if engine.ended is None else KEPT_WEIGHTS) / max(each, 1)))
    at_once = max(at_once, 1) * ranks.world_size()
    if left:
        on_progress(len(prompts) - len(left), len(prompts))
    for start in range(0, len(left), at_once):
        part = left[start : start + at_once]
        groups = _sampled(spec, engine, part, num_samples, step)
        graded = marked(groups)
        if start == 0 and (len(part) < len(left) or len(part) * each > PART_WEIGHTS):
            found = sample_metrics([problem_score(samples, samples) for samples in graded])
            if causes := first_look({**found, "accuracy": 0.5}, spec.max_tokens):  # it is too small to judge accuracy
                on_look(f"of the completions, {' and '.join(causes)}")
        greedy_groups = _sampled(spec, engine, part, None, step)
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with kept.open("a", encoding="utf-8") as file:
                for both in zip(groups, greedy_groups, strict=True):
                    file.write(f"{json.dumps(completion_row(*both))}\n")
                file.flush()
                os.fsync(file.fileno())
            sync(kept.parent)
        if engine.ended is not None:
            engine.ended.clear()
        score(groups, graded, greedy_groups)
        drawn += [*lengths(groups), *lengths(greedy_groups)]
        on_progress(len(prompts) - len(left) + start + len(part), len(prompts))
    samples = [shown[key] for key in sorted(shown)]
    return replace(_result(split, prompts, [scores[prompt.id] for prompt in prompts]), samples=samples, drawn=drawn)


def weights_read(spec: RunSpec, engine: RolloutEngine, policy: Any) -> int:
    """The `weights` for `evaluate_run`: those of the policy for an engine that holds a whole batch on a CPU, else 0."""
    is_slow = resolve_device(spec.device).type == "cpu" and not engine.plans_batches
    return sum(parameter.numel() for parameter in policy.parameters()) if is_slow else 0


def evaluate_again(task: Task, rows: Sequence[Mapping[str, Any]], split: Split) -> EvaluationResult:
    """The result of `evaluate_run`, from its kept completions graded again; without samples."""
    both = [groups_of(row) for row in rows]
    graded, greedy = (grade(task, part, NO_LIMIT) for part in zip(*both, strict=True))
    scores = [problem_score(*marked) for marked in zip(graded, greedy, strict=True)]
    return _result(split, [samples.prompt for samples, _ in both], scores)


def _result(split: Split, prompts: Sequence[Prompt], scores: Sequence[ProblemScore]) -> EvaluationResult:
    counts = {score.prompt_id: int(score.sums["accuracy"]) for score in scores}
    families = {prompt.id: prompt.family for prompt in prompts if prompt.family}
    return EvaluationResult(split, sample_metrics(scores), counts, [], breakdown(prompts, scores), families)


def _sampled(
    spec: RunSpec, engine: RolloutEngine, prompts: Sequence[Prompt], num_samples: int | None, step: int
) -> list[Group]:
    """`num_samples` of each prompt, or None: the greedy completion. An engine that holds its batch in memory gets a few
    samples per call; calls after the first have their own seed, as the noise is keyed by a sample's number in its call.
    """
    temperature = 0.0 if num_samples is None else spec.evaluation.temperature
    sampling = Sampling(temperature=temperature, max_tokens=spec.max_tokens, stop=spec.sampling.stop)
    count = num_samples or 1
    most = count if engine.plans_batches else SAMPLES_AT_ONCE
    calls: list[list[Group]] = []
    with mixed_precision(resolve_device(spec.device), spec.autocast):
        for start in range(0, count, most):
            seed = spec.seed if not start else int(generator("evaluation", spec.seed, start).integers(2**63))
            draw = partial(engine.sample, group_size=min(most, count - start), sampling=sampling, seed=seed, step=step)
            calls.append(ranks.shared(prompts, draw, spec.engine.processes))
    parts = zip(*calls, strict=True)
    return [replace(same[0], rollouts=tuple(r for group in same for r in group.rollouts)) for same in parts]


def problem_score(graded: GradedGroup, greedy: GradedGroup) -> ProblemScore:
    """The record of a problem, from its samples and its greedy completion."""
    sums = {
        "accuracy": sum(graded.correct or ()), **({} if graded.scores is None else {"score": sum(graded.scores)}),
        "answered": sum(answer is not None for answer in graded.answers), "lenient_accuracy": sum(graded.lenient or ()),
        "marked_accuracy": sum(graded.marked or ()), "truncated": sum(graded.truncated),
        "format": sum(graded.format_scores), "num_tokens": sum(graded.num_tokens),
    }  # fmt: skip
    is_right = bool(greedy.correct and greedy.correct[0])
    return ProblemScore(graded.prompt_id, len(graded.completions), sums, graded.majority_correct, is_right)


def breakdown(prompts: Sequence[Prompt], scores: Sequence[ProblemScore]) -> dict[str, dict[str, dict[str, float]]]:
    """Tag name -> tag value -> accuracy, greedy_accuracy and num_prompts of the problems with that tag, sorted."""
    found: dict[tuple[str, str], list[ProblemScore]] = defaultdict(list)
    for prompt, score in zip(prompts, scores, strict=True):
        for tag in prompt.tags:
            found[tag].append(score)
    result: dict[str, dict[str, dict[str, float]]] = {}
    for (name, value), members in sorted(found.items()):
        metrics = sample_metrics(members)
        result.setdefault(name, {})[value] = {k: metrics[k] for k in ("accuracy", "greedy_accuracy", "num_prompts")}
    return result


def metric_names(settings: EvaluationSettings, partial_credit: bool = False) -> list[str]:
    """The names of the metrics that `evaluate_run` gives with these settings, for a task with partial credit too."""
    names = ["accuracy", *(["score"] if partial_credit else []), "answered", "lenient_accuracy", "marked_accuracy"]
    names += ["truncated", "format", "num_tokens"]
    return list(sample_metrics([ProblemScore("", settings.num_samples, dict.fromkeys(names, 0), 0.0, False)]))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased pass@k of a problem from n samples with c correct: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, eq. 1)."""
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def sample_metrics(scores: Sequence[ProblemScore]) -> dict[str, float]:
    """Metrics of n samples per problem, among them pass@k for the powers of two from 2 on and for n."""
    k = scores[0].num_samples
    sizes = sorted({k, *(2**j for j in range(1, k.bit_length()))})
    count = sum(score.num_samples for score in scores)
    means = {name: float(sum(score.sums[name] for score in scores)) / count for name in scores[0].sums}
    return {
        "accuracy": means.pop("accuracy"),
        **{f"pass_at_{j}": float(np.mean([pass_at_k(k, int(s.sums["accuracy"]), j) for s in scores])) for j in sizes},
        f"maj_at_{k}": float(np.mean([score.majority for score in scores])),
        **means,
        "num_prompts": float(len(scores)),
        "num_samples": float(k),
        "greedy_accuracy": float(np.mean([score.greedy for score in scores])),
    }


def evaluation_metrics(result: EvaluationResult, area: str) -> dict[str, float]:
    """The logged metrics of an evaluation: `<area>/<metric>`, with `accuracy_<tag>_<value>` for every tag."""
    parts = [(f"accuracy_{tag}_{value}", row) for tag, rows in result.breakdown.items() for value, row in rows.items()]
    tags = {name.replace(" ", "_"): row["accuracy"] for name, row in parts}
    return {f"{area}/{name}": value for name, value in {**result.metrics, **tags}.items()}


def kept_problems(file: Path) -> Iterator[tuple[Group, Group]]:
    """Samples and greedy completion of each problem that an evaluation has written, one at a time; none without a file.
    A last line torn by a kill is cut off. ValueError, with the line's number, if no evaluation can have written it."""
    if not file.exists():
        return
    with file.open("r+b") as opened:
        whole = 0
        for number, line in enumerate(opened, 1):
            if not line.endswith(b"\n"):
                opened.truncate(whole)
                return
            whole += len(line)
            try:
                samples, greedy = groups_of(json.loads(line))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"{file} has no problem of an evaluation in line {number} ({type(error).__name__}: "
                    f"{str(error)[:80]}); restore it from a copy, or delete it to restart the evaluation"
                ) from None
            yield samples, greedy


def completions_file(area: str, step: int) -> str:
    """The file of an evaluation in a run's folder."""
    return f"completions/{area}-{step:06d}.jsonl"
