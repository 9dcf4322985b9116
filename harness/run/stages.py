"""Stages that learn otherwise than from rewards: on the correct ones of sampled answers, or a reward model.

Rejection sampling: a model answers training problems, and the policy learns the correct answers. The model is the
policy as the stage starts (DeepSeek-R1, arXiv:2501.12948, section 2.3.3) or a teacher. Departures: the task decides
which answers are correct, and no model filters them; the fine-tuning starts from the sampling policy, or with `restart`
from the run's first one, as in the paper. All answers are in `rollouts/`, in the file of the stage's first step: a
killed stage goes on from there.

Reward model: a fit on the run's own rollouts, as one step of the run. DeepSeekMath's iterative GRPO (arXiv:2402.03300,
section 4.1.4): the reward model of each round goes on from the last one, with the policy's new samples and a tenth of
the historical ones. Departures: correctness ranks completions, and the first reward model starts from the policy that
the run starts from.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from ..base.streams import generator
from ..data import Demonstration, GradedGroup, Group, InvalidRun, Prompt, Rollout, Score
from ..devices.device import mixed_precision, resolve_device
from ..interfaces import Codec, RolloutEngine
from ..policy import flops
from ..policy.bradley_terry import fit_ranked, read_ranked, split
from ..policy.model import load_policy
from ..policy.sources import start_name
from ..policy.text import load_codec
from .build import Run, build_engine, note_progress, placed, reward_model
from .cold_start import start_policy
from .evaluate import PROMPTS_AT_ONCE
from .grading import grade, sample_rows
from .rollout import Clock, annotated
from .step import rollout_metrics


def fine_tuning_step(
    run: Run, prompts: Sequence[Prompt], step: int, should_stop: Callable[[], bool]
) -> tuple[dict[str, float], list[flops.Lengths]]:
    """The metrics of one step, and its lengths as those of `Rollouts`.

    The stage's first step samples first. The engine then sleeps: it has other weights until it is given the policy's.
    InvalidRun if no answer is correct, StoppedEarly if asked to stop meanwhile.
    """
    stage, learner, clock = run.stage, run.learner, Clock(run.models.now)
    found, sampled = {}, []
    if step == stage.start:
        found, sampled = _sampled(run, prompts, should_stop)
        if stage.rejection is not None and stage.rejection.restart:
            first, _ = start_policy(run.whole, run.cache)
            learner.policy.load_state_dict(first.state_dict())
        clock.lap("generate")
    run.engine.sleep()
    if run.answers is None:
        assert stage.rejection is not None
        lines = run.rollouts(stage.start + 1).read_text(encoding="utf-8").splitlines()
        run.answers = kept_answers(list(map(json.loads, lines)), stage.rejection.keep)
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
    run: Run, prompts: Sequence[Prompt], should_stop: Callable[[], bool]
) -> tuple[dict[str, float], flops.Lengths]:
    """Sample the answers of the stage and write them to its file: their metrics and lengths."""
    stage, settings, task = run.stage, run.stage.rejection, run.spec.task
    assert settings is not None
    prompts = prompts[: settings.num_prompts]
    groups: list[Group] = []
    graded: list[GradedGroup] = []
    with _sampler(run) as engine, mixed_precision(resolve_device(run.spec.device), run.spec.autocast):
        for first in range(0, len(prompts), PROMPTS_AT_ONCE):
            part, sampling = prompts[first : first + PROMPTS_AT_ONCE], stage.spec.sampling_with_limit()
            new = engine.sample(part, settings.num_samples, sampling, seed=run.spec.seed, step=stage.start)
            groups, graded = groups + new, graded + grade(task, new, run.spec.max_tokens)
            note_progress(run.log, should_stop, "sample", len(groups), len(prompts))
    scores = [Score(paid, paid, None, {}) for paid in ([float(right) for right in g.correct or ()] for g in graded)]
    rows = [asdict(row) for row in sample_rows(groups, graded, scores, step=stage.start + 1, split="train")]
    run.keep(stage.start + 1, rows)
    run.answers = kept = kept_answers(rows, settings.keep)
    counts = {
        "samples": len(rows), "correct": sum(row["correct"] for row in rows), "kept": len(kept),
        "acceptance": len(kept) / len(rows), "covered": len({one.prompt for one in kept}) / len(prompts),
    }  # fmt: skip
    metrics = {f"rejection/{name}": float(value) for name, value in counts.items()}
    return rollout_metrics(graded, [score.totals for score in scores]) | metrics, flops.lengths(groups)


def _sampler(run: Run) -> AbstractContextManager[RolloutEngine]:
    """The engine of the policy, or one of the teacher for as long as the context lasts."""
    teacher = run.stage.rejection and run.stage.rejection.teacher
    if not teacher:
        return nullcontext(run.engine)
    run.engine.sleep()
    model = placed(load_policy(teacher, seed=0), run.spec)
    return closing(build_engine(run.spec, model, load_codec(teacher, run.spec.prompt)))


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


def reward_fit_step(
    run: Run, _: Sequence[Prompt], __: int, should_stop: Callable[[], bool]
) -> tuple[dict[str, float], list[flops.Lengths]]:
    """The metrics of the fit, whose operations it charges, and no lengths: the policy neither samples nor learns.

    InvalidRun if no completions of a prompt differ in correctness, StoppedEarly if asked to stop meanwhile.
    """
    stage, fit, clock = run.stage, run.stage.fit, Clock(run.models.now)
    assert fit is not None
    run.engine.sleep()
    new, older = (read_ranked(list(map(run.rollouts, steps)), "correct")[0] for steps in stage.sources)
    order = generator("reward model replay", run.spec.seed, stage.start).permutation(len(older))
    replayed = [older[i] for i in sorted(order[: round(fit.replay * len(older))])]
    parts = split([*new, *replayed])
    if not parts[0]:
        raise InvalidRun(
            f"stage '{stage.name}' has nothing to rank, because the kept answers to each problem are all right or all "
            "wrong; keep those of more steps (checkpoints.rollouts_every)"
        )

    known = [reward_model(run.directory, one.name) for one in stage.before if one.fit]
    start = str(known[-1]) if known else start_name(run.whole, run.cache)
    on_progress = partial(note_progress, run.log, should_stop, "reward model")
    found = fit_ranked(parts, start, reward_model(run.directory, stage.name), fit, run.spec.seed, on_progress)
    read, said = run.codec.encode, run.codec.encode_completion
    rows, held_out = ([(len(read(p)), [len(said(text)) for text in ranks]) for p, ranks in part] for part in parts)
    run.charge_flops(
        lambda costs: {
            "learning": fit.epochs * flops.fitted(costs, rows, headed=False),
            "scoring": flops.scored(costs, rows + held_out, share=False, headed=False),
        }
    )
    clock.lap("update")
    metrics = {
        "prompts": found.num_prompts, "pairs": found.num_pairs, "replayed": len(replayed), "loss": found.loss,
        "accuracy": found.accuracy, "held_out_pairs": found.held_out_pairs,
        "held_out_accuracy": found.held_out_accuracy,
    }  # fmt: skip
    logged = {f"reward_model/{name}": float(value) for name, value in metrics.items() if value is not None}
    return {**logged, **clock.metrics}, [[], [], []]
