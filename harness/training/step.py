"""One training step, a straight line from prompts to new weights."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from harness.files import write_text
from harness.interfaces import Task
from harness.policy.device import mixed_precision, resolve_device
from harness.tensors import pad_right
from harness.training.evaluate import majority_correct
from harness.training.gates import group_metrics, weight_sample, weights_metric
from harness.training.grading import grade, sample_rows
from harness.training.learner import correct_mismatch
from harness.training.prompts import Drawn, further_prompts, step_prompts
from harness.training.run import Run
from harness.training.schedules import adapted_kl_beta, kl_beta_factor
from harness.training.scoring import events
from harness.training.weight_sync import Probe, check_sync, probe
from harness.types import Batch, GradedGroup, Group, Prompt, SampleRow

ROLLOUTS = "rollouts"  # folder of whole batches, one file per kept step


def train_step(run: Run, prompts: Sequence[Prompt], step: int) -> tuple[dict[str, float], list[SampleRow]]:
    """One step, from prompts to new weights: its metrics and a few of its rollouts."""
    spec, learner, engine, clock = run.spec, run.learner, run.engine, Clock()
    unparsable = spec.task.num_unparsable()
    drawn, before = _draw(run, prompts, step, clock)  # generate, grade, score
    chosen = drawn.trained_on(spec.prompts_per_step)
    batch = collate(chosen.groups, chosen.scores.totals, events(chosen.groups, chosen.scores, run.tokenizer))
    batch = batch.to(resolve_device(spec.device))
    changed = learner.begin_step(step, _kl_beta(run, step))
    batch = learner.annotate(batch, sampler_is_exact=engine.exact_logprobs)
    batch = learner.algorithm.advantages(batch)
    batch, corrected = _correct(run, batch)
    clock.lap("annotate")
    weights = weight_sample(learner.policy)
    metrics = learner.update(batch, step) | changed | corrected
    clock.lap("update")
    engine.wake()
    engine.load_weights(learner.weights(merged=not engine.exact_logprobs), step + 1)
    if before is not None:
        metrics["mismatch/after_sync"] = check_sync(engine, learner.policy, before)
    clock.lap("sync")
    if spec.kl.schedule == "adaptive":
        run.kl_beta = adapted_kl_beta(spec.kl, run.kl_beta, metrics["kl/reference"])
    metrics |= rollout_metrics(drawn.graded, drawn.scores.totals) | drawn.scores.metrics | dict(drawn.metrics)
    metrics |= group_metrics(batch, run.gates) | _unparsable_since(unparsable, spec.task)
    rate = learner.optimizers["policy"].param_groups[0]["lr"]
    metrics |= weights_metric(learner.policy, weights, gradient_norm=metrics["policy/grad_norm"], rate=rate)
    metrics |= clock.metrics() | _charge(run, drawn.groups, clock)
    rows = (drawn.groups, drawn.graded, drawn.scores.totals, drawn.scores.parts)
    if spec.checkpoints.rollouts_every and step % spec.checkpoints.rollouts_every == 0:
        _keep_rollouts(run.directory, step + 1, sample_rows(*rows, step=step + 1, split="train"))
    return metrics, sample_rows(*rows, step=step + 1, split="train", limit=8)


def _draw(run: Run, prompts: Sequence[Prompt], step: int, clock: Clock) -> tuple[Drawn, Probe | None]:
    """The groups of a step, graded and scored, and what the engine said of a few of them before the update.

    With dynamic sampling further batches of prompts follow, until enough groups have unequal rewards or the budget is
    spent. The engine rests afterwards; before grading where no more can follow, since rewards may need the device.
    """
    spec, engine, budget = run.spec, run.engine, run.spec.dynamic_sampling.max_batches
    sampling, count = spec.sampling_with_limit(), spec.prompts_per_step
    drawn, before, resting = Drawn(), None, False
    for attempt in range(budget):
        chosen = step_prompts(prompts, spec.seed, step, count)
        if attempt:
            chosen = further_prompts(prompts, spec.seed, step, attempt, count, [g.prompt.id for g in drawn.groups])
        with mixed_precision(resolve_device(spec.device), spec.autocast):
            groups = engine.generate(chosen, spec.algorithm.group_size, sampling, seed=spec.seed, step=step)
        if attempt == budget - 1:
            before, resting = _rest(run, groups), True
        clock.lap("generate")
        graded = grade(spec.task, groups, spec.max_tokens)
        drawn = drawn.with_batch(spec.rewards, groups, graded)
        clock.lap("grade")
        if drawn.num_kept >= count or len(drawn.groups) >= len(prompts):
            break
    if not resting:
        before = _rest(run, drawn.groups)
        clock.lap("generate")
    return drawn if budget == 1 else drawn.with_metrics(count), before


def _rest(run: Run, groups: Sequence[Group]) -> Probe | None:
    """Let the engine sleep, after it was asked what the check of its next weights needs."""
    before = probe(run.engine, run.learner.policy, groups)
    run.engine.sleep()
    return before


def _correct(run: Run, batch: Batch) -> tuple[Batch, dict[str, float]]:
    """The batch with the importance weights that the spec asks for, where the engine's log-probs are not exact."""
    if run.spec.mismatch.correction == "none" or run.engine.exact_logprobs:
        return batch, {}
    return correct_mismatch(batch, run.spec.mismatch)


def _unparsable_since(before: int | None, task: Task) -> dict[str, float]:
    """`grading/unparsable`: the comparisons without a verdict since there were `before`; nothing where none can be."""
    return {} if before is None else {"grading/unparsable": (task.num_unparsable() or 0) - before}


def _charge(run: Run, groups: Sequence[Group], clock: Clock) -> dict[str, float]:
    """Add a step's costs, all that was generated, to the run's totals, and tell them."""
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
    """The KL weight of a step; None where it is the algorithm's own throughout."""
    settings = run.spec.kl
    if settings.schedule == "adaptive":
        return run.kl_beta
    if settings.schedule == "cosine":
        return kl_beta_factor(settings, step, run.spec.steps) * run.spec.algorithm.kl_beta
    return None


def collate(
    groups: Sequence[Group], rewards: Sequence[Sequence[float]], earned: Sequence[Mapping[int, float]] | None = None
) -> Batch:
    """The rows of all groups, right-padded to the longest; rewards [P][G].

    `earned` holds for each row {completion token: reward}, where rewards are not all earned by the last token.
    """
    rows = [(g.prompt_token_ids, r) for g in groups for r in g.rollouts]
    tokens = pad_right([prompt + r.token_ids for prompt, r in rows], torch.int64)
    step_rewards = step_ends = None
    if earned is not None:
        step_rewards, step_ends = torch.zeros(tokens.shape), torch.zeros(tokens.shape, dtype=torch.bool)
        for row, ((prompt, _), values) in enumerate(zip(rows, earned, strict=True)):
            for token, value in values.items():
                step_rewards[row, len(prompt) + token] = value
                step_ends[row, len(prompt) + token] = True
    return Batch(
        step_rewards_BT=step_rewards,
        step_ends_BT=step_ends,
        tokens_BT=tokens,
        completion_mask_BT=pad_right([[0] * len(p) + [1] * len(r.token_ids) for p, r in rows], torch.bool),
        lengths_B=torch.tensor([len(p) + len(r.token_ids) for p, r in rows]),
        truncated_B=torch.tensor([r.finish_reason == "length" for _, r in rows]),
        sampler_logprobs_BT=pad_right([[0.0] * len(p) + list(r.logprobs) for p, r in rows], torch.float32),
        rewards_B=torch.tensor([value for group in rewards for value in group], dtype=torch.float32),
        group_size=len(groups[0].rollouts),
    )


def rollout_metrics(graded: Sequence[GradedGroup], rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """What the sampled completions were like, gold included: for the reader, not for the algorithm; rewards [P][G]."""
    rewards_PG = torch.tensor(rewards, dtype=torch.float32)
    return {
        "reward/mean": float(rewards_PG.mean()),
        "reward/std": float(rewards_PG.std()) if rewards_PG.numel() > 1 else 0.0,
        "train/accuracy": float(np.mean([c for g in graded for c in g.correct or ()])),
        "train/answered": float(np.mean([a is not None for g in graded for a in g.answers])),
        "train/majority_accuracy": float(np.mean([majority_correct(g) for g in graded])),
        "train/zero_variance_groups": float((rewards_PG == rewards_PG[:, :1]).all(dim=1).float().mean()),
        "completion/length": float(np.mean([n for g in graded for n in g.num_tokens])),
        "completion/truncated": float(np.mean([t for g in graded for t in g.truncated])),
    }


def _keep_rollouts(directory: Path, step: int, rows: Sequence[SampleRow]) -> None:
    """Write all rollouts of a step as JSON Lines."""
    (directory / ROLLOUTS).mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(dataclasses.asdict(row)) for row in rows]
    write_text(directory / ROLLOUTS / f"step-{step:06d}.jsonl", "\n".join(lines) + "\n")


class Clock:
    """Wall-clock seconds of the phases of a step."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase], self.last = self.seconds.get(phase, 0.0) + now - self.last, now

    def metrics(self) -> dict[str, float]:
        return {**{f"seconds/{k}": v for k, v in self.seconds.items()}, "seconds/step": self.last - self.start}
