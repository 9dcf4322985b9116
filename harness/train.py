"""The one training loop: every algorithm runs through it, so that the algorithm is the only thing that differs.

A run is a function of its spec: prompts and noise are keyed by (seed, step), and a killed run that resumes from its
last checkpoint ends as an uninterrupted one would.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from harness import memory, plugins
from harness._files import write_text
from harness._probe import check_sync, probe
from harness.checkpoint import latest_checkpoint, save_checkpoint
from harness.cold_start import start_policy
from harness.evaluate import evaluate, majority_correct
from harness.grading import all_rows, grade, sample_rows
from harness.interfaces import RolloutEngine, RunLogger
from harness.learner import Learner, correct_mismatch
from harness.lora import add_adapter
from harness.model import mixed_precision, resolve_device
from harness.schedules import adapted_kl_beta, kl_beta_factor
from harness.scoring import Scores, events, score
from harness.spec import RunSpec
from harness.tensors import pad_right
from harness.types import Batch, EvaluationResult, GradedGroup, Group, InvalidRun, Prompt, SampleRow, Split, TrialState

ROLLOUTS = "rollouts"  # folder of whole batches, one file per kept step
MAX_MISMATCH_KL = 0.1  # nats per token between engine and learner, above which the engine samples another policy


@dataclass(frozen=True)
class RunResult:
    """How a run ended; `summary` holds what results.csv shows, as far as the run came."""

    state: TrialState
    reason: str | None
    summary: dict[str, float]


@dataclass
class Totals:
    """Cumulative costs of a run, over all its resumes."""

    rollouts: int = 0
    generated_tokens: int = 0
    optimizer_steps: int = 0
    seconds: float = 0.0
    peak_memory_bytes: int = 0


@dataclass
class Run:
    """One run in progress: what is trained, what it cost so far and what is known of its accuracy."""

    spec: RunSpec
    engine: RolloutEngine
    learner: Learner
    log: RunLogger
    directory: Path
    tokenizer: PreTrainedTokenizerBase
    save: Callable[[int, dict[str, Any]], None]
    memory_before: int = 0  # bytes in use before the models were loaded
    totals: Totals = field(default_factory=Totals)
    accuracies: dict[str, float] = field(default_factory=dict)
    kl_beta: float = 0.0  # of the next step, where it is adaptive

    def summary(self) -> dict[str, float]:
        return {**self.accuracies, **{k: float(v) for k, v in vars(self.totals).items()}}


def train(
    spec: RunSpec,
    directory: Path,
    log: RunLogger,
    *,
    cache: Path,
    should_stop: Callable[[], bool] = lambda: False,
) -> RunResult:
    """Run `spec` in `directory`, or resume it from the last checkpoint there.

    Ends "complete", "invalid" with a reason, or "stopped" after the step during which `should_stop()` turned true; a
    cold start that was not done by then begins anew next time. Cold starts are cached in `cache`. Bad settings raise
    ValueError before any model is loaded.
    """
    spec.engine.check(spec.sampling_with_limit())
    train_prompts = spec.task.prompts("train") if spec.steps else []
    run: Run | None = None
    try:
        run, step = _prepare(spec, directory, log, cache, should_stop)
        return _loop(run, train_prompts, step, should_stop)
    except InvalidRun as invalid:
        return RunResult("invalid", str(invalid), run.summary() if run else {})
    except _StoppedEarly:
        return RunResult("stopped", None, {})
    finally:
        if run is not None:
            run.engine.close()


class _StoppedEarly(Exception):
    """Asked to stop during the cold start."""


def _prepare(
    spec: RunSpec, directory: Path, log: RunLogger, cache: Path, should_stop: Callable[[], bool]
) -> tuple[Run, int]:
    """The run with its models loaded, and the number of training steps already done."""
    _reset_peak_memory()
    memory_before = memory.resident_bytes()
    device = resolve_device(spec.device)
    checkpoints = directory / "checkpoints"
    checkpoint = latest_checkpoint(checkpoints, spec.digest())
    log.resume(checkpoint.step if checkpoint else -1)

    def watch_cold_start(done: int, total: int) -> None:
        log.progress("cold start", done, total)
        if should_stop():
            raise _StoppedEarly

    policy, tokenizer = start_policy(spec, cache, watch_cold_start)
    policy = policy.to(device=device, dtype=getattr(torch, spec.dtype))
    if spec.lora is not None:
        add_adapter(policy, spec.lora, spec.seed)
    if spec.gradient_checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # pyright: ignore
    learner = Learner(spec, policy)
    engine_class = cast(type[RolloutEngine], plugins.load("engine", spec.engine.name))
    engine = engine_class(spec.engine, policy, tokenizer)

    def save(step: int, progress: dict[str, Any]) -> None:
        save_checkpoint(
            checkpoints,
            step,
            spec_digest=spec.digest(),
            policy=policy,
            tokenizer=tokenizer,
            learner_state=learner.state(),
            progress=progress,
            keep=spec.checkpoints.keep,
        )

    run = Run(spec, engine, learner, log, directory, tokenizer, save, memory_before)
    run.kl_beta = getattr(spec.algorithm, "kl_beta", 0.0)
    if checkpoint is None:
        return run, 0
    weights = {} if spec.lora else checkpoint.policy_weights(policy)  # an adapter is in the learner's state
    learner.load_state(weights, checkpoint.learner_state())
    engine.load_weights(learner.weights(merged=not engine.exact_logprobs), checkpoint.step)
    run.totals = Totals(**checkpoint.progress["totals"])
    run.accuracies = dict(checkpoint.progress["accuracies"])
    run.kl_beta = checkpoint.progress["kl_beta"]
    return run, checkpoint.step


def _loop(run: Run, prompts: Sequence[Prompt], step: int, should_stop: Callable[[], bool]) -> RunResult:
    spec = run.spec
    if step == 0:
        _log_skipped_rows(run)
        _log_estimate(run)
        _evaluate(run, "validation", 0)
    while step < spec.steps:
        start = time.perf_counter()
        metrics, rows = train_step(run, prompts, step)
        step += 1
        run.totals.seconds += time.perf_counter() - start
        metrics["seconds/total"] = run.totals.seconds
        run.totals.peak_memory_bytes = max(run.totals.peak_memory_bytes, peak_memory())
        metrics["memory/peak_bytes"] = run.totals.peak_memory_bytes
        run.log.metrics(step, metrics)
        run.log.progress("train", step, spec.steps)
        if step % spec.evaluation.every == 0 or step == spec.steps:
            run.log.samples(rows)
            _evaluate(run, "validation", step)
        stop = should_stop()
        if step % spec.checkpoints.every == 0 or step == spec.steps or stop:
            run.save(step, {"totals": vars(run.totals), "accuracies": run.accuracies, "kl_beta": run.kl_beta})
        if stop and step < spec.steps:
            return RunResult("stopped", None, run.summary())
    _evaluate(run, "test", step)
    return RunResult("complete", None, run.summary())


def train_step(run: Run, prompts: Sequence[Prompt], step: int) -> tuple[dict[str, float], list[SampleRow]]:
    """One step, from prompts to new weights: its metrics and a few of its rollouts."""
    spec, algorithm, clock = run.spec, run.spec.algorithm, Clock()
    chosen = step_prompts(prompts, spec.seed, step, spec.prompts_per_step)
    sampling = spec.sampling_with_limit()
    device = resolve_device(spec.device)
    with mixed_precision(device, spec.autocast):
        groups = run.engine.generate(chosen, algorithm.group_size, sampling, seed=spec.seed, step=step)
    before = probe(run.engine, run.learner.policy, groups)
    run.engine.sleep()
    clock.lap("generate")
    unparsable = spec.task.num_unparsable()
    graded = grade(spec.task, groups, sampling.max_tokens or 0)
    if unparsable is not None:
        unparsable = (spec.task.num_unparsable() or 0) - unparsable
    scores = score(spec.rewards, graded)
    clock.lap("grade")
    batch = collate(groups, scores.totals, events(groups, scores, run.tokenizer)).to(device)
    changed = run.learner.begin_step(step, _kl_beta(run, step))
    batch = run.learner.annotate(batch, sampler_is_exact=run.engine.exact_logprobs)
    batch = run.learner.algorithm.advantages(batch)
    if spec.mismatch.correction != "none" and not run.engine.exact_logprobs:
        batch, weights = correct_mismatch(batch, spec.mismatch)
        changed |= weights
    clock.lap("annotate")
    metrics = run.learner.update(batch, step) | changed
    if spec.kl.schedule == "adaptive":
        run.kl_beta = adapted_kl_beta(spec.kl, run.kl_beta, metrics["kl/reference"])
    clock.lap("update")
    run.engine.wake()
    run.engine.load_weights(run.learner.weights(merged=not run.engine.exact_logprobs), step + 1)
    if before is not None:
        metrics["mismatch/after_sync"] = check_sync(run.engine, run.learner.policy, before)
    clock.lap("sync")
    if metrics["mismatch/kl"] > MAX_MISMATCH_KL:
        raise InvalidRun(
            f"engine and learner disagree by {metrics['mismatch/kl']:.3g} nats per token (at most {MAX_MISMATCH_KL}): "
            "the engine samples another policy than the one that is trained"
        )
    generated = int(batch.completion_mask_BT.sum())
    run.totals.rollouts += len(batch)
    run.totals.generated_tokens += generated
    run.totals.optimizer_steps += spec.updates_per_step
    metrics |= rollout_metrics(graded, batch) | scores.metrics | clock.metrics()
    if unparsable is not None:
        metrics["grading/unparsable"] = unparsable
    metrics |= {
        "train/rollouts": run.totals.rollouts,
        "train/generated_tokens": run.totals.generated_tokens,
        "train/optimizer_steps": run.totals.optimizer_steps,
        "throughput/tokens_per_second": generated / metrics["seconds/step"],
    }
    if spec.checkpoints.rollouts_every and step % spec.checkpoints.rollouts_every == 0:
        _keep_rollouts(run.directory, step + 1, all_rows(groups, graded, scores.totals, step=step + 1), scores)
    return metrics, sample_rows(
        groups, graded, scores.totals, step=step + 1, split="train", limit=8, parts=scores.parts
    )


def _kl_beta(run: Run, step: int) -> float | None:
    """The KL weight of a step; None where it is the algorithm's own throughout."""
    settings = run.spec.kl
    if settings.schedule == "adaptive":
        return run.kl_beta
    if settings.schedule == "cosine":
        return kl_beta_factor(settings, step, run.spec.steps) * getattr(run.spec.algorithm, "kl_beta", 0.0)
    return None


def step_prompts(prompts: Sequence[Prompt], seed: int, step: int, count: int) -> list[Prompt]:
    """The prompts of a training step: consecutive parts of an endless stream that is reshuffled on every pass."""
    result: list[Prompt] = []
    while len(result) < count:
        epoch, offset = divmod(step * count + len(result), len(prompts))
        order = np.random.default_rng([seed, epoch]).permutation(len(prompts))
        result += [prompts[i] for i in order[offset : offset + count - len(result)]]
    return result


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


def rollout_metrics(graded: Sequence[GradedGroup], batch: Batch) -> dict[str, float]:
    """What the sampled completions were like, gold included: for the reader, not for the algorithm."""
    rewards = batch.rewards_PG
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()) if rewards.numel() > 1 else 0.0,
        "train/accuracy": float(np.mean([c for g in graded for c in g.correct or ()])),
        "train/answered": float(np.mean([a is not None for g in graded for a in g.answers])),
        "train/majority_accuracy": float(np.mean([majority_correct(g) for g in graded])),
        "train/zero_variance_groups": float((rewards == rewards[:, :1]).all(dim=1).float().mean()),
        "completion/length": float(np.mean([n for g in graded for n in g.num_tokens])),
        "completion/truncated": float(batch.truncated_B.float().mean()),
    }


def _keep_rollouts(directory: Path, step: int, rows: Sequence[SampleRow], scores: Scores) -> None:
    """Write all rollouts of a step, with the parts of their rewards, as JSON Lines."""
    parts = {name: [value for group in values for value in group] for name, values in scores.parts.items()}
    lines = [
        json.dumps({**dataclasses.asdict(row), "rewards": {name: values[i] for name, values in parts.items()}})
        for i, row in enumerate(rows)
    ]
    (directory / ROLLOUTS).mkdir(parents=True, exist_ok=True)
    write_text(directory / ROLLOUTS / f"step-{step:06d}.jsonl", "\n".join(lines) + "\n")


class Clock:
    """Wall-clock seconds of the phases of a step."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase], self.last = now - self.last, now

    def metrics(self) -> dict[str, float]:
        return {**{f"seconds/{k}": v for k, v in self.seconds.items()}, "seconds/step": self.last - self.start}


def peak_memory() -> int:
    """Bytes at the peak since the run began: of the CUDA allocator, or else resident memory of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(x.split()[1]) * 1024 for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _reset_peak_memory() -> None:
    """Start the peak anew, so that the runs that one worker does in turn do not inherit each other's."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return
    control = Path("/proc/self/clear_refs")
    if control.exists():
        with contextlib.suppress(AttributeError):  # glibc only: give what the last run freed back to the system
            ctypes.CDLL(None).malloc_trim(0)
        control.write_text("5")


def _log_estimate(run: Run) -> None:
    """`memory/estimate_bytes`, beside the measured `memory/peak_bytes`, which also counts what was there before."""
    needed, _ = memory.estimate_run(run.spec) if run.spec.steps else (None, None)
    if needed is not None:
        run.log.metrics(0, {"memory/estimate_bytes": float(run.memory_before + memory.peak_bytes(needed))})


def _log_skipped_rows(run: Run) -> None:
    """`data/skipped_rows_<split>` where the task left out rows that are no problem."""
    splits: tuple[Split, ...] = ("train", "test") if run.spec.steps else ("test",)
    skipped = {f"data/skipped_rows_{split}": float(run.spec.task.num_skipped_rows(split)) for split in splits}
    if any(skipped.values()):
        run.log.metrics(0, skipped)


def evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    """What is logged of an evaluation: `<split>/<metric>`, with `accuracy_<tag>_<value>` for every tag."""
    tags = {
        f"accuracy_{tag}_{value}".replace(" ", "_"): row["accuracy"]
        for tag, rows in result.breakdown.items()
        for value, row in rows.items()
    }
    return {f"{result.split}/{name}": value for name, value in {**result.metrics, **tags}.items()}


def _evaluate(run: Run, split: Split, step: int) -> None:
    """Evaluate, log, and keep the accuracies that the summary needs."""
    start = time.perf_counter()
    with mixed_precision(resolve_device(run.spec.device), run.spec.autocast):
        result = evaluate(
            run.spec.task,
            run.engine,
            split,
            run.spec.evaluation,
            max_tokens=run.spec.sampling_with_limit().max_tokens or 0,
            stop=run.spec.sampling.stop,
            seed=run.spec.seed,
            step=step,
            on_progress=lambda done, total: run.log.progress(split, done, total),
        )
    run.totals.seconds += time.perf_counter() - start
    run.log.metrics(step, evaluation_metrics(result))
    run.log.samples(result.samples)
    if split == "test":
        run.accuracies["test_accuracy"] = result.metrics["accuracy"]
        k = result.metrics["num_samples"]
        run.log.per_problem({prompt: count / k for prompt, count in result.correct_counts.items()})
    else:
        run.accuracies.setdefault("accuracy_initial", result.metrics["accuracy"])
        run.accuracies["accuracy_final"] = result.metrics["accuracy"]
