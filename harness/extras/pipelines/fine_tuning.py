"""The steps of a stage of rejection sampling.

All answers are in `rollouts/`, in the file of the stage's first step: a killed stage goes on from there.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from ...base.streams import generator
from ...data import Demonstration, GradedGroup, Group, InvalidRun, Prompt, Rollout, Score
from ...devices import ranks
from ...devices.device import mixed_precision, resolve_device
from ...devices.sharding import spread
from ...interfaces import Codec, RolloutEngine
from ...policy import flops
from ...policy.model import load_policy
from ...policy.text import codec_of
from ...run.build import Run, build_engine, note_progress, placed
from ...run.cold_start import start_policy
from ...run.evaluate import PROMPTS_AT_ONCE
from ...run.grading import grade, sample_rows
from ...run.rollout import Clock, annotated
from ...run.step import rollout_metrics


def fine_tuning_step(
    settings: Any, run: Run, prompts: Sequence[Prompt], step: int, should_stop: Callable[[], bool]
) -> tuple[dict[str, float], list[flops.Lengths]]:
    """The metrics of one step with these settings (`RejectionSampling`), and its lengths like `Rollouts.lengths`.

    The stage's first step samples first. The engine then sleeps: it keeps old weights until it gets the policy's.
    InvalidRun if no answer is correct, StoppedEarly if asked to stop meanwhile.
    """
    stage, learner, clock = run.stage, run.learner, Clock(run.now)
    found, sampled = {}, []
    if step == stage.start:
        found, sampled = _sampled(settings, run, prompts, should_stop)
        if settings.restart:
            first = ranks.from_first(lambda: start_policy(run.whole, run.cache)[0])
            learner.policy.load_state_dict(spread(learner.policy, first.state_dict()))
        clock.lap("generate")
    run.engine.sleep()
    if run.answers is None:
        lines = ranks.same(lambda: run.rollouts(stage.start + 1).read_text(encoding="utf-8").splitlines())
        run.answers = kept_answers(list(map(json.loads, lines)), settings.keep)
    if not run.answers:
        raise InvalidRun(
            f"stage '{stage.name}' has kept none of {found.get('rejection/samples', 0):.0f} answers, because none is "
            "correct; sample more (rejection.num_samples) or train longer before"
        )
    chosen = drawn(len(run.answers), run.spec.rollouts_per_step, run.spec.seed, stage.start, step)
    groups = [as_group(run.answers[i], run.codec) for i in chosen]
    batch, scheduled = annotated(run, groups, step)
    clock.lap("annotate")
    updated = learner.update(batch, step)
    clock.lap("update")
    updated = {name: value for name, value in updated.items() if not name.startswith("mismatch/")}  # nothing to match
    return {**found, **scheduled, **updated, **clock.metrics}, [sampled, flops.lengths(groups), []]


def _sampled(
    settings: Any, run: Run, prompts: Sequence[Prompt], should_stop: Callable[[], bool]
) -> tuple[dict[str, float], flops.Lengths]:
    """Sample the answers of the stage and write them to its file: their metrics and lengths."""
    stage, task = run.stage, run.spec.task
    prompts = prompts[: settings.num_prompts]
    groups: list[Group] = []
    graded: list[GradedGroup] = []
    at_once = PROMPTS_AT_ONCE * ranks.world_size()
    with _sampler(settings.teacher, run) as engine, mixed_precision(resolve_device(run.spec.device), run.spec.autocast):
        for first in range(0, len(prompts), at_once):
            part, sampling = prompts[first : first + at_once], stage.spec.sampling_with_limit()
            sample = partial(engine.sample, seed=run.spec.seed, step=stage.start)
            new = ranks.shared(part, lambda own: sample(own, settings.num_samples, sampling), run.spec.engine.processes)  # noqa: B023
            groups, graded = groups + new, graded + ranks.shared(new, lambda own: grade(task, own, run.spec.max_tokens))
            note_progress(run.log, lambda: ranks.same(should_stop), "sample", len(groups), len(prompts))
    scores = [Score(paid, paid, None, {}) for paid in ([float(right) for right in g.correct or ()] for g in graded)]
    rows = [asdict(row) for row in sample_rows(groups, graded, scores, step=stage.start + 1, split="train")]
    if ranks.rank() == 0:
        run.keep(stage.start + 1, rows)
    run.answers = kept = kept_answers(rows, settings.keep)
    counts = {
        "samples": len(rows), "correct": sum(row["correct"] for row in rows), "kept": len(kept),
        "acceptance": len(kept) / len(rows), "covered": len({one.prompt for one in kept}) / len(prompts),
    }  # fmt: skip
    metrics = {f"rejection/{name}": float(value) for name, value in counts.items()}
    return rollout_metrics(graded, [score.totals for score in scores]) | metrics, flops.lengths(groups)


def _sampler(teacher: str | None, run: Run) -> AbstractContextManager[RolloutEngine]:
    """The engine of the policy, or one of the teacher for as long as the context lasts."""
    if not teacher:
        return nullcontext(run.engine)
    run.engine.sleep()
    model = placed(load_policy(teacher, seed=0), run.spec, scores=True).to(resolve_device(run.spec.device))
    return closing(build_engine(run.spec, model, codec_of(run.spec, teacher)))


def kept_answers(rows: Sequence[Mapping[str, Any]], keep: int) -> list[Demonstration]:
    """Of each problem the first `keep` distinct completions that are correct and not cut by the token limit."""
    right: dict[str, dict[str, None]] = {}
    for row in rows:
        if row["correct"] and row["finish_reason"] == "stop":
            right.setdefault(row["prompt"], {})[row["completion"]] = None
    return [Demonstration(prompt, text) for prompt, texts in right.items() for text in list(texts)[:keep]]


def drawn(count: int, size: int, seed: int, start: int, step: int) -> list[int]:
    """The places of a step's answers: each pass over all of them has an order of its own."""
    first = (step - start) * size
    passes = range(first // count, (first + size - 1) // count + 1)
    orders = [generator("fine-tuning", seed, start, number).permutation(count) for number in passes]
    return np.concatenate(orders)[first - passes[0] * count :][:size].tolist()


def as_group(answer: Demonstration, codec: Codec) -> Group:
    """A group of one answer in the policy's own tokens."""
    tokens = tuple(codec.encode_completion(answer.completion))
    rollout = Rollout(answer.completion, tokens, (0.0,) * len(tokens), "stop")
    return Group(Prompt("", answer.prompt, ""), codec.encode(answer.prompt), (rollout,))
