"""A run in stages, each a run of its own that starts from the policy of the one before: what a file says, and its run.

The recipe of DeepSeek-R1 (arXiv:2501.12948, section 2.3): a supervised cold start, reinforcement learning, rejection
sampling (the model's own correct answers, on which it is fine-tuned), reinforcement learning with other rewards. The
cold start belongs to the first stage. Departures: which answers are correct is the task's decision, no model filters
them; the fine-tuning goes on from the sampling policy unless `restart` is set, as the paper's does from the base model.

A stage has a folder (`stages/<number>-<name>`), events and an MLflow run, child of the pipeline's. One that is complete
is not run again; reinforcement learning continues from its checkpoint, a fine-tuning from the answers it has kept.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from pydantic import Field, ValidationError
from transformers import PreTrainedTokenizerBase

from harness import plugins
from harness._files import read_json, write_json, write_text
from harness._single import check_inputs, own_folder, run_logged, stop_after_step
from harness.cold_start import fit_demonstrations, start_policy
from harness.grading import grade
from harness.interfaces import RolloutEngine, RunLogger
from harness.memory import check_memory
from harness.model import mixed_precision, resolve_device, save_model
from harness.spec import (
    ColdStart,
    RunSpec,
    SpecError,
    digest,
    explain,
    parse_overrides,
    parse_run,
    read_yaml,
    with_overrides,
)
from harness.tracking import RunLog, read_result
from harness.train import RunResult, logged_evaluation, peak_memory, train
from harness.types import Demonstration, GradedGroup, Group, InvalidRun, Section, TrialState

Kind = Literal["train", "rejection_sampling"]
PIPELINE = "pipeline.json"
KEPT = "kept.jsonl"  # the answers that a rejection-sampling stage fine-tunes on
PARENT_SECONDS = 60.0  # how long the stages wait for the MLflow run that they are children of
_PROMPTS_AT_ONCE = 64


class Rejection(Section):
    """Which of its own answers a policy is fine-tuned on."""

    num_prompts: int = Field(default=512, ge=1, description="training problems; all when there are fewer")
    num_samples: int = Field(default=8, ge=1, description="completions of each")
    keep: int = Field(default=1, ge=1, description="distinct correct completions kept of each, the first ones")
    temperature: float = Field(default=1.0, gt=0)
    restart: bool = Field(default=False, description="fine-tune the policy that the pipeline started from")


@dataclass(frozen=True)
class Stage:
    """One stage; the model of `spec` is the pipeline's until the stage runs."""

    name: str
    kind: Kind
    spec: RunSpec
    rejection: Rejection = field(default_factory=Rejection)
    fit: ColdStart = field(default_factory=ColdStart)

    def document(self) -> dict[str, Any]:
        result = {"name": self.name, "kind": self.kind, "spec": self.spec.model_dump(mode="json")}
        if self.kind == "rejection_sampling":
            result |= {"rejection": self.rejection.model_dump(mode="json"), "fit": self.fit.model_dump(mode="json")}
        return result


@dataclass(frozen=True)
class StageResult:
    """How a stage ended, and where it is."""

    name: str
    kind: Kind
    directory: Path
    result: RunResult


class _StoppedEarly(Exception):
    """Asked to stop outside reinforcement learning."""


def load_pipeline(path: Path, overrides: Sequence[str] = ()) -> list[Stage]:
    """The stages of a file, every one validated; SpecError otherwise.

    `overrides` are `path=value`, of all stages, or of one as `stages.<name>.<path>=value`.
    """
    raw, common, own = read_yaml(path), {}, {}
    for dotted, value in parse_overrides(overrides).items():
        (own if dotted.startswith("stages.") else common)[dotted] = value
    base = {key: value for key, value in raw.items() if key != "stages"}
    stages = raw["stages"]
    if not isinstance(stages, list) or not stages or not all(isinstance(s, dict) and s.get("name") for s in stages):
        raise SpecError(f"{path}: stages must be a list of mappings with a name, got {stages!r:.80}")
    names = [str(stage["name"]) for stage in stages]
    if len(set(names)) != len(names) or not all(name.isidentifier() for name in names):
        raise SpecError(f"{path}: names of stages must be distinct words, got {', '.join(names)}")
    for dotted, value in own.items():
        name, _, rest = dotted.removeprefix("stages.").partition(".")
        if name not in names or not rest:
            raise SpecError(f"--set {dotted}: must be stages.<name>.<path> with a name of {', '.join(names)}")
        place = names.index(name)
        stages[place] = with_overrides(stages[place], {rest: value})
    base = with_overrides(base, common)
    return [_stage(base, stage, place, f"{path}, stage '{stage['name']}'") for place, stage in enumerate(stages)]


def pipeline_digest(stages: Sequence[Stage]) -> str:
    """A stable hash (16 hex digits) of every setting of every stage."""
    return digest([stage.document() for stage in stages])


def train_pipeline(stages: Sequence[Stage], runs: Path, name: str) -> tuple[RunResult, list[StageResult]]:
    """Run the stages in `runs/train/name`, or those that are left; the result of all, and that of each that began.

    ValueError, before any model loads, for what cannot run and for a folder with something else.
    """
    check_inputs([stage.spec for stage in stages], runs, ("train", "validation", "test"))
    for stage in stages:
        if stage.kind == "train":
            check_memory(stage.spec)
    directory = runs / "train" / name
    with own_folder(directory, stages[0].spec):
        _check_unchanged(directory, stages)
        opened = RunLog.open(
            runs, directory, stages[0].spec, experiment="train", run_name=name, parent_run_id=None,
            tags={"cohort.pipeline": name},
        )  # fmt: skip
        with opened as log, stop_after_step() as should_stop:
            log.resume(-1)
            parent, model, results = _parent_run(log), stages[0].spec.model, []
            for number, stage in enumerate(stages, start=1):
                folder = directory / "stages" / f"{number}-{stage.name}"
                spec = stage.spec.model_copy(update={"model": model})
                result = _run_stage(
                    stage, spec, stages[0].spec, runs, folder, f"{name}/{stage.name}", parent, should_stop
                )
                results.append(StageResult(stage.name, stage.kind, folder, result))
                if result.state == "complete":  # a stage that goes on later would contradict what was logged
                    log.metrics(number, _stage_metrics(result))
                if result.state != "complete" or should_stop():
                    break
                model = str(policy_folder(stage, folder).resolve())
            outcome = _outcome(results, len(stages))
            log.finish(outcome.state, outcome.reason, outcome.summary)
    return outcome, results


def policy_folder(stage: Stage, folder: Path) -> Path:
    """Where a complete stage has left its policy."""
    return folder / "policy" if stage.kind == "rejection_sampling" else (
        folder / "checkpoints" / f"step-{stage.spec.steps:08d}" / "policy"
    )  # fmt: skip


def rejection_sampling(
    spec: RunSpec,
    directory: Path,
    log: RunLogger,
    *,
    settings: Rejection,
    fit: ColdStart,
    start: RunSpec,
    cache: Path,
    should_stop: Callable[[], bool] = lambda: False,
) -> RunResult:
    """Sample from `spec.model`, keep correct answers, fine-tune on them, evaluate; leaves `directory/policy`.

    With `settings.restart` what is fine-tuned is the policy that `start` begins with. Fine-tuning is in float32 and of
    all weights.
    """
    log.resume(-1)
    begun, totals = time.perf_counter(), {}

    def watch(phase: str, done: int, total: int) -> None:
        log.progress(phase, done, total)
        if should_stop():
            raise _StoppedEarly

    policy, tokenizer = start_policy(spec, cache)
    policy = policy.to(device=resolve_device(spec.device), dtype=getattr(torch, spec.dtype))
    engine = cast(type[RolloutEngine], plugins.load("engine", spec.engine.name))(spec.engine, policy, tokenizer)
    try:
        before = logged_evaluation(spec, engine, log, "validation", 0)
        kept, totals = kept_answers(spec, directory, engine, settings, partial(watch, "sample"))
        log.metrics(0, totals)
        if not kept:
            raise InvalidRun(
                f"rejection sampling kept none of {totals['rejection/samples']:.0f} completions: the policy answers "
                "nothing correctly; sample more (rejection.num_samples) or train longer before"
            )
        engine.sleep()
        fitted, _ = start_policy(start if settings.restart else spec, cache)
        fit_demonstrations(
            fitted,
            tokenizer,
            kept,
            fit,
            device=resolve_device(spec.device),
            on_progress=partial(watch, "fit"),
            on_loss=lambda step, loss: log.metrics(step, {"fit/loss": loss}),
        )
        _save(directory / "policy", fitted.cpu(), tokenizer)
        policy.load_state_dict(fitted.state_dict())
        engine.wake()
        engine.load_weights(policy.state_dict(), fit.steps)
        after = logged_evaluation(spec, engine, log, "validation", fit.steps)
        test = logged_evaluation(spec, engine, log, "test", fit.steps)
    except InvalidRun as invalid:
        return RunResult("invalid", str(invalid), {})
    except _StoppedEarly:
        return RunResult("stopped", None, {})
    finally:
        engine.close()
    summary = {
        "accuracy_initial": before.metrics["accuracy"],
        "accuracy_final": after.metrics["accuracy"],
        "test_accuracy": test.metrics["accuracy"],
        "rollouts": totals["train/rollouts"],
        "generated_tokens": totals["train/generated_tokens"],
        "optimizer_steps": float(fit.steps),
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
    """The answers to fine-tune on and what they cost, sampled or, by a later attempt, read from `kept.jsonl`.

    Metrics are counts `rejection/prompts`, `samples`, `correct`, `duplicates` (correct, but like one before it),
    `kept`, and the shares `acceptance` (kept of samples) and `covered` (prompts with one kept).
    """
    file = directory / KEPT
    if file.exists():
        head, *rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        return [Demonstration(**row) for row in rows], head
    prompts = spec.task.prompts("train")[: settings.num_prompts]
    sampling = spec.sampling_with_limit().model_copy(update={"temperature": settings.temperature})
    kept: list[Demonstration] = []
    counts = dict.fromkeys(("samples", "correct", "duplicates", "tokens", "covered"), 0)
    for first in range(0, len(prompts), _PROMPTS_AT_ONCE):
        part = prompts[first : first + _PROMPTS_AT_ONCE]
        with mixed_precision(resolve_device(spec.device), spec.autocast):
            groups = engine.generate(part, settings.num_samples, sampling, seed=spec.seed, step=0)
        for group, graded in zip(groups, grade(spec.task, groups, sampling.max_tokens or 0), strict=True):
            correct = correct_answers(group, graded)
            distinct = list(dict.fromkeys(correct))
            kept += [Demonstration(group.prompt.text, text) for text in distinct[: settings.keep]]
            counts["samples"] += len(group.rollouts)
            counts["correct"] += len(correct)
            counts["duplicates"] += len(correct) - len(distinct)
            counts["covered"] += bool(correct)
            counts["tokens"] += sum(graded.num_tokens)
        on_progress(min(first + _PROMPTS_AT_ONCE, len(prompts)), len(prompts))
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
    """The texts of the correct completions, in order, without those that the token limit cut: they do not end there."""
    assert graded.correct is not None
    rows = zip(group.rollouts, graded.correct, graded.truncated, strict=True)
    return [rollout.text for rollout, correct, truncated in rows if correct and not truncated]


def _stage(base: Mapping[str, Any], raw: Mapping[str, Any], place: int, where: str) -> Stage:
    """One stage from the file's common settings and its own; SpecError where it is not a valid run."""
    kind = raw.get("kind", "train")
    if kind not in get_args(Kind):
        raise SpecError(f"{where}: kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    own = {key: value for key, value in raw.items() if key not in ("name", "kind", "rejection", "fit")}
    if place and "cold_start" not in own:
        own["cold_start"] = {"steps": 0}  # the common one is the first stage's
    spec = parse_run(_merged(base, own), where)
    if kind == "train":
        extra = [key for key in ("rejection", "fit") if key in raw]
        if extra:
            raise SpecError(f"{where}: '{extra[0]}' belongs to kind: rejection_sampling, got kind: train")
        if spec.steps < 1:
            raise SpecError(f"{where}: steps must be at least 1, got {spec.steps}; a cold start is part of a stage")
        return Stage(str(raw["name"]), kind, spec)
    fit = _section(ColdStart, raw.get("fit", {}), f"{where}: fit")
    if fit.steps < 1:
        raise SpecError(f"{where}: fit.steps must be at least 1, got {fit.steps}")
    return Stage(
        str(raw["name"]), kind, spec, _section(Rejection, raw.get("rejection", {}), f"{where}: rejection"), fit
    )


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of a stage change single settings of the common ones; its rewards replace the common ones."""
    dotted: dict[str, Any] = {}
    for key, value in own.items():
        if isinstance(value, Mapping) and key != "rewards":
            dotted |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            dotted[key] = value
    return with_overrides(base, dotted)


def _section(cls: type[Any], raw: Any, where: str) -> Any:
    try:
        return cls.model_validate(raw)
    except ValidationError as error:
        raise SpecError(explain(error, cls, raw if isinstance(raw, Mapping) else {}, where)) from None


def _run_stage(
    stage: Stage,
    spec: RunSpec,
    start: RunSpec,
    runs: Path,
    folder: Path,
    name: str,
    parent: str | None,
    should_stop: Callable[[], bool],
) -> RunResult:
    """Run or continue a stage in its folder; the result of one that has ended there is read."""
    ended = read_result(folder)
    if ended is not None and ended["state"] in ("complete", "invalid"):
        return RunResult(ended["state"], ended["reason"], ended["summary"])
    execute: Callable[..., RunResult] = train
    if stage.kind == "rejection_sampling":
        execute = partial(rejection_sampling, settings=stage.rejection, fit=stage.fit, start=start)
    tags = {"cohort.pipeline": name.rpartition("/")[0], "cohort.stage": stage.name, "cohort.stage_kind": stage.kind}
    if stage.kind == "rejection_sampling":
        tags |= {f"cohort.{key}": json.dumps(stage.document()[key]) for key in ("rejection", "fit")}
    return run_logged(execute, spec, runs, folder, name, should_stop, parent_run_id=parent, tags=tags)


def _parent_run(log: RunLog) -> str | None:
    """The id of the pipeline's MLflow run; None where the store does not answer, and the stages stand on their own."""
    deadline = time.monotonic() + PARENT_SECONDS
    while log.run_id is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return log.run_id


def _check_unchanged(directory: Path, stages: Sequence[Stage]) -> None:
    """SpecError where the folder has a pipeline with other stages."""
    file, document = directory / PIPELINE, {"stages": [stage.document() for stage in stages]}
    if not file.exists():
        write_json(file, document)
    elif read_json(file)["stages"] != document["stages"]:
        raise SpecError(f"'{directory}' holds a pipeline with other stages; choose another --name or delete the folder")


def _stage_metrics(result: RunResult) -> dict[str, float]:
    """What the pipeline's own run shows of a stage, at the stage's number: accuracies and costs."""
    names = {
        "accuracy_final": "validation/accuracy",
        "test_accuracy": "test/accuracy",
        "rollouts": "train/rollouts",
        "generated_tokens": "train/generated_tokens",
        "seconds": "seconds/total",
    }
    return {metric: float(result.summary[key]) for key, metric in names.items() if key in result.summary}


def _outcome(results: Sequence[StageResult], num_stages: int) -> RunResult:
    """The pipeline's state, and its summary: costs of all stages, accuracy before the first and after the last."""
    last = results[-1].result
    state: TrialState = last.state
    if state == "complete" and len(results) < num_stages:
        state = "stopped"
    summaries = [item.result.summary for item in results]
    summary = {
        key: float(np.sum([s.get(key, 0.0) for s in summaries]))
        for key in ("rollouts", "generated_tokens", "optimizer_steps", "seconds")
    }
    summary["peak_memory_bytes"] = max(s.get("peak_memory_bytes", 0.0) for s in summaries)
    if "accuracy_initial" in summaries[0]:
        summary["accuracy_initial"] = summaries[0]["accuracy_initial"]
    summary |= {key: last.summary[key] for key in ("accuracy_final", "test_accuracy") if key in last.summary}
    reason = None if last.reason is None else f"stage '{results[-1].name}': {last.reason}"
    return RunResult(state, reason, summary)


def _save(folder: Path, policy: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the model beside its place and move it there, so that a folder with that name is whole."""
    partial_folder = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial_folder, ignore_errors=True)
    save_model(partial_folder, policy, tokenizer)
    shutil.rmtree(folder, ignore_errors=True)
    partial_folder.rename(folder)
