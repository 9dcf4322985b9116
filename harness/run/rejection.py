"""Rejection-sampling fine-tuning: a policy samples answers and is fine-tuned on its own correct ones."""

import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ..checks.preflight import run_inputs
from ..data import Demonstration, GradedGroup, Group, InvalidRun
from ..devices.device import mixed_precision, resolve_device
from ..devices.memory import peak_memory
from ..ground.files import publish_folder, write_text
from ..ground.inputs import expecting
from ..interfaces import RolloutEngine, RunLogger
from ..policy.model import save_model
from ..spec.run import RunSpec
from .cold_start import fit_demonstrations, start_policy
from .evaluate import logged_evaluation
from .grading import grade
from .stages import Rejection, Stage
from .state import RunResult, StoppedEarly, build_engine, first_prompt

KEPT = "kept.jsonl"  # the answers that the policy is fine-tuned on
PROMPTS_AT_ONCE = 64


def rejection_sampling(
    spec: RunSpec,
    directory: Path,
    log: RunLogger,
    *,
    stage: Stage,
    start: RunSpec,
    cache: Path,
    should_stop: Callable[[], bool] = lambda: False,
) -> RunResult:
    """Sample from `spec.model`, keep correct answers, fine-tune on them, evaluate; leaves `directory/policy`.

    With `rejection.restart` the policy of `start` is fine-tuned instead. Fine-tuning is in float32 and trains all
    weights.
    """
    begun = time.perf_counter()
    inputs = run_inputs([spec, start] if stage.rejection.restart else [spec], cache)

    def watch(phase: str, done: int, total: int) -> None:
        log.progress(phase, done, total)
        if should_stop():
            raise StoppedEarly

    log.inputs(inputs)
    with expecting(inputs):
        log.prompt(first_prompt(spec, "train"))
        log.resume(-1)
        policy, codec = start_policy(spec, cache)
        policy = policy.to(device=resolve_device(spec.device), dtype=getattr(torch, spec.dtype))
        engine = build_engine(spec, policy, codec)
        try:
            before = logged_evaluation(spec, engine, directory, log, "validation", 0)
            kept, costs = kept_answers(spec, directory, engine, stage.rejection, partial(watch, "sample"))
            log.metrics(0, costs)
            if not kept:
                raise InvalidRun(
                    f"rejection sampling kept none of {costs['rejection/samples']:.0f} completions: the policy answers "
                    "nothing correctly; sample more (rejection.num_samples) or train longer before"
                )
            engine.sleep()
            fitted, _ = start_policy(start if stage.rejection.restart else spec, cache)
            fit_demonstrations(
                fitted,
                codec,
                kept,
                stage.fit,
                device=resolve_device(spec.device),
                on_progress=partial(watch, "fit"),
                on_loss=lambda step, loss: log.metrics(step, {"fit/loss": loss}),
            )
            with publish_folder(directory / "policy") as folder:
                save_model(folder, fitted.cpu(), codec.tokenizer)
            policy.load_state_dict(fitted.state_dict())
            engine.load_weights(policy.state_dict(), stage.fit.steps)
            after = logged_evaluation(spec, engine, directory, log, "validation", stage.fit.steps)
            test = logged_evaluation(spec, engine, directory, log, "test", stage.fit.steps)
        except InvalidRun as invalid:
            return RunResult("invalid", str(invalid), {})
        except StoppedEarly:
            return RunResult("stopped", None, {})
        finally:
            engine.close()
    summary = {
        "accuracy_initial": before.metrics["accuracy"],
        "accuracy_final": after.metrics["accuracy"],
        "test_accuracy": test.metrics["accuracy"],
        "rollouts": costs["train/rollouts"],
        "generated_tokens": costs["train/generated_tokens"],
        "optimizer_steps": float(stage.fit.steps),
        "seconds": time.perf_counter() - begun,
        "peak_memory_bytes": float(peak_memory()),
    }
    return RunResult("complete", None, summary)


def kept_answers(
    spec: RunSpec,
    directory: Path,
    engine: RolloutEngine,
    settings: Rejection,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Demonstration], dict[str, float]]:
    """The answers to fine-tune on and their costs: sampled, or read from `kept.jsonl` by a later attempt.

    Metrics are counts `rejection/prompts`, `samples`, `correct`, `duplicates` (correct, but like one before it),
    `kept`, and the shares `acceptance` (kept of samples) and `covered` (prompts with one kept).
    """
    file = directory / KEPT
    if file.exists():
        head, *rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        return [Demonstration(**row) for row in rows], head
    prompts = spec.task.prompts("train")[: settings.num_prompts]
    sampling = spec.sampling_with_limit()
    kept: list[Demonstration] = []
    counts = dict.fromkeys(("samples", "correct", "duplicates", "tokens", "covered"), 0)
    for first in range(0, len(prompts), PROMPTS_AT_ONCE):
        part = prompts[first : first + PROMPTS_AT_ONCE]
        with mixed_precision(resolve_device(spec.device), spec.autocast):
            groups = engine.generate(part, settings.num_samples, sampling, seed=spec.seed, step=0)
        for group, graded in zip(groups, grade(spec.task, groups, spec.max_tokens), strict=True):
            correct = correct_answers(group, graded)
            distinct = list(dict.fromkeys(correct))
            kept += [Demonstration(group.prompt.text, text) for text in distinct[: settings.keep]]
            counts["samples"] += len(group.rollouts)
            counts["correct"] += len(correct)
            counts["duplicates"] += len(correct) - len(distinct)
            if correct:
                counts["covered"] += 1
            counts["tokens"] += sum(graded.num_tokens)
        on_progress(min(first + PROMPTS_AT_ONCE, len(prompts)), len(prompts))
    metrics = {
        "rejection/prompts": float(len(prompts)),
        **{f"rejection/{key}": float(counts[key]) for key in ("samples", "correct", "duplicates")},
        "rejection/kept": float(len(kept)),
        "rejection/acceptance": len(kept) / counts["samples"],
        "rejection/covered": counts["covered"] / len(prompts),
        "train/rollouts": float(counts["samples"]),
        "train/generated_tokens": float(counts["tokens"]),
    }
    lines = [json.dumps(metrics), *(json.dumps(dataclasses.asdict(answer)) for answer in kept)]
    write_text(file, "\n".join(lines) + "\n")
    return kept, metrics


def correct_answers(group: Group, graded: GradedGroup) -> list[str]:
    """The texts of the correct completions, in order, without those cut by the token limit."""
    assert graded.correct is not None
    rows = zip(group.rollouts, graded.correct, graded.truncated, strict=True)
    return [rollout.text for rollout, correct, truncated in rows if correct and not truncated]
