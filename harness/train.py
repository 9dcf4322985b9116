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
from harness._draw import Drawn, further_prompts, step_prompts
from harness._files import write_text
from harness._gates import GateState, check_gates, group_metrics, weight_sample, weights_metric
from harness._probe import Probe, check_sync, probe
from harness.checkpoint import latest_checkpoint, save_checkpoint
from harness.cold_start import start_policy
from harness.evaluate import evaluate, majority_correct
from harness.grading import grade, sample_rows
from harness.interfaces import RolloutEngine, RunLogger, Task
from harness.learner import Learner, correct_mismatch
from harness.lora import add_adapter
from harness.model import mixed_precision, resolve_device
from harness.schedules import adapted_kl_beta, kl_beta_factor
from harness.scoring import events
from harness.spec import RunSpec
from harness.tensors import pad_right
from harness.types import Batch, EvaluationResult, GradedGroup, Group, InvalidRun, Prompt, SampleRow, Split, TrialState

ROLLOUTS = "rollouts"  # folder of whole batches, one file per kept step


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
    save: Callable[[int, Mapping[str, Any]], None]
    memory_before: int = 0  # bytes in use before the models were loaded
    totals: Totals = field(default_factory=Totals)
    accuracies: dict[str, float] = field(default_factory=dict)
    kl_beta: float = 0.0  # of the next step, where it is adaptive
    gates: GateState = field(default_factory=GateState)

    def progress(self) -> dict[str, Any]:
        """What a checkpoint must hold besides weights and optimisers, as JSON holds it."""
        return {
            "totals": vars(self.totals),
            "accuracies": self.accuracies,
            "kl_beta": self.kl_beta,
            "gates": vars(self.gates),
        }

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

    def save(step: int, progress: Mapping[str, Any]) -> None:
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
    run.gates = GateState(**checkpoint.progress["gates"])
    return run, checkpoint.step


def _loop(run: Run, prompts: Sequence[Prompt], step: int, should_stop: Callable[[], bool]) -> RunResult:
    spec = run.spec
    if step == 0:
        if facts := _facts(run):
            run.log.metrics(0, facts)
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
        check_gates(spec.gates, run.gates, metrics, step)
        if step % spec.evaluation.every == 0 or step == spec.steps:
            run.log.samples(rows)
            _evaluate(run, "validation", step)
        stop = should_stop()
        if step % spec.checkpoints.every == 0 or step == spec.steps or stop:
            run.save(step, run.progress())
        if stop and step < spec.steps:
            return RunResult("stopped", None, run.summary())
    _evaluate(run, "test", step)
    return RunResult("complete", None, run.summary())


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
        graded = grade(spec.task, groups, sampling.max_tokens or 0)
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
        return kl_beta_factor(settings, step, run.spec.steps) * getattr(run.spec.algorithm, "kl_beta", 0.0)
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


def _facts(run: Run) -> dict[str, float]:
    """What is known before the first step: `memory/estimate_bytes`, beside the measured `memory/peak_bytes`, which also
    counts what was there before; `data/skipped_rows_<split>` where the task left out rows that are no problem."""
    spec, facts = run.spec, {}
    needed, _ = memory.estimate_run(spec) if spec.steps else (None, None)
    if needed is not None:
        facts["memory/estimate_bytes"] = float(run.memory_before + memory.peak_bytes(needed))
    splits: tuple[Split, ...] = ("train", "test") if spec.steps else ("test",)
    skipped = {f"data/skipped_rows_{split}": float(spec.task.num_skipped_rows(split)) for split in splits}
    return facts | (skipped if any(skipped.values()) else {})


def evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    """What is logged of an evaluation: `<split>/<metric>`, with `accuracy_<tag>_<value>` for every tag."""
    tags = {
        f"accuracy_{tag}_{value}".replace(" ", "_"): row["accuracy"]
        for tag, rows in result.breakdown.items()
        for value, row in rows.items()
    }
    return {f"{result.split}/{name}": value for name, value in {**result.metrics, **tags}.items()}


def logged_evaluation(
    spec: RunSpec, engine: RolloutEngine, log: RunLogger, split: Split, step: int
) -> EvaluationResult:
    """Evaluate what the engine samples from, and log it; of the test split each problem's fraction too."""
    with mixed_precision(resolve_device(spec.device), spec.autocast):
        result = evaluate(
            spec.task,
            engine,
            split,
            spec.evaluation,
            max_tokens=spec.sampling_with_limit().max_tokens or 0,
            stop=spec.sampling.stop,
            seed=spec.seed,
            step=step,
            on_progress=lambda done, total: log.progress(split, done, total),
        )
    log.metrics(step, evaluation_metrics(result))
    log.samples(result.samples)
    if split == "test":
        k = result.metrics["num_samples"]
        log.per_problem({prompt: count / k for prompt, count in result.correct_counts.items()})
    return result


def _evaluate(run: Run, split: Split, step: int) -> None:
    """Evaluate, log, and keep the accuracies that the summary needs."""
    start = time.perf_counter()
    result = logged_evaluation(run.spec, run.engine, run.log, split, step)
    run.totals.seconds += time.perf_counter() - start
    if split == "test":
        run.accuracies["test_accuracy"] = result.metrics["accuracy"]
    else:
        run.accuracies.setdefault("accuracy_initial", result.metrics["accuracy"])
        run.accuracies["accuracy_final"] = result.metrics["accuracy"]
