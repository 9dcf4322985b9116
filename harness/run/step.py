"""Runs one training step, from prompts to new weights."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ..data import Group, Prompt, SampleRow
from ..devices import ranks
from ..devices.device import resolve_device
from .batch import collate, rollout_metrics
from .gates import group_metrics
from .grading import sample_rows
from .kept import keep_rows, rollouts_file
from .sampling import sample_groups
from .schedules import adapted_kl_beta, kl_beta_factor
from .scoring import events
from .state import Clock, Run
from .weight_sync import load_weights


def train_step(run: Run, prompts: Sequence[Prompt], step: int) -> tuple[dict[str, float], list[SampleRow]]:
    """The metrics and a few of the rollouts of one step, from prompts to new weights."""
    spec, learner, engine, clock = run.spec, run.learner, run.engine, Clock(run.models.now)
    unparsable = _num_unparsable(run)
    drawn, before = sample_groups(run, prompts, step, clock)  # generate, grade, score
    chosen = drawn.trained_on(spec.prompts_per_step)
    earned = events(chosen.groups, chosen.scores, run.codec.tokenizer)
    batch = collate(chosen.groups, chosen.scores.totals, earned, chosen.greedy_rewards)
    batch = batch.to(resolve_device(spec.device))
    scheduled = learner.begin_step(step, _kl_beta(run, step))
    is_exact = engine.exact_logprobs and not (spec.staleness and spec.mismatch.correction != "none")
    batch = learner.annotate(batch, sampler_is_exact=is_exact)
    batch = learner.algorithm.advantages(batch)
    batch, corrected = learner.correct(batch, sampler_is_exact=is_exact)
    clock.lap("annotate")
    learner.keep_weights()
    updated = learner.update(batch, step)
    clock.lap("update")
    synced = load_weights(engine, learner, step + 1, before)
    clock.lap("sync")
    if spec.kl.schedule == "adaptive":
        run.kl_beta = adapted_kl_beta(spec.kl, run.kl_beta, updated["kl/reference"])
    metrics = _merged(
        updated,
        scheduled,
        corrected,
        synced,
        rollout_metrics(drawn.graded, drawn.scores.totals),
        drawn.scores.metrics,
        drawn.metrics,
        {"reward/greedy": float(np.mean(drawn.greedy_rewards))} if drawn.greedy else {},
        group_metrics(batch, run.gates),
        {} if unparsable is None else {"grading/unparsable": (_num_unparsable(run) or 0) - unparsable},
        clock.metrics(),
        _charge(run, (*drawn.groups, *drawn.greedy), clock),
        run.ledger.step(
            drawn.groups,
            drawn.greedy,
            chosen.groups,
            reads_old=learner.scores_old(is_exact),
            share=learner.shares_prompts,
        ),
    )
    rows = (drawn.groups, drawn.graded, drawn.scores.totals, drawn.scores.parts)
    if ranks.rank() == 0 and spec.checkpoints.rollouts_every and step % spec.checkpoints.rollouts_every == 0:
        kept = [dataclasses.asdict(row) for row in sample_rows(*rows, step=step + 1, split="train")]
        keep_rows(run.directory, run.log, step + 1, rollouts_file(step + 1), kept)
    return metrics, sample_rows(*rows, step=step + 1, split="train", limit=8)


def _num_unparsable(run: Run) -> int | None:
    """The number of comparisons without a verdict so far, over all ranks."""
    counted = ranks.shared(range(ranks.world_size()), lambda _: [run.spec.task.num_unparsable()])
    return None if None in counted else sum(filter(None, counted))


def _merged(*parts: Mapping[str, float]) -> dict[str, float]:
    """The metrics of all parts. ValueError if two parts have the same metric, because one would be lost."""
    merged: dict[str, float] = {}
    for part in parts:
        if both := merged.keys() & part.keys():
            raise ValueError(f"a metric must have one source, '{min(both)}' has two; rename the reward that reports it")
        merged |= part
    return merged


def _charge(run: Run, groups: Sequence[Group], clock: Clock) -> dict[str, float]:
    """Add a step's costs (everything generated) to the run's totals; returns the totals as metrics."""
    generated = sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
    totals = run.totals
    totals.rollouts += sum(len(group.rollouts) for group in groups)
    totals.generated_tokens += generated
    totals.optimizer_steps += run.spec.updates_per_step
    return {
        "train/rollouts": totals.rollouts,
        "train/generated_tokens": totals.generated_tokens,
        "train/optimizer_steps": totals.optimizer_steps,
        "throughput/tokens_per_second": generated / clock.metrics()["seconds/step"],
    }


def _kl_beta(run: Run, step: int) -> float | None:
    """The KL weight of a step; None if it is always the algorithm's own."""
    settings = run.spec.kl
    if settings.schedule == "adaptive":
        return run.kl_beta
    if settings.schedule == "cosine":
        return kl_beta_factor(settings, step, run.spec.steps) * run.spec.algorithm.kl_beta
    return None
