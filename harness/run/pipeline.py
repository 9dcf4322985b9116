"""Reads a file of stages and runs them in order; each is a separate run that starts from the policy of the one before.

The recipe of DeepSeek-R1 (arXiv:2501.12948, section 2.3): a supervised cold start, reinforcement learning, rejection
sampling (fine-tuning on the model's own correct answers), reinforcement learning with other rewards. The cold start
belongs to the first stage. Departures: the task decides which answers are correct, and no model filters them; the
fine-tuning starts from the sampling policy, or with `restart` from the first one, as in the paper.

A stage has a folder (`stages/<number>-<name>`), events and an MLflow run, child of the pipeline's. A complete stage is
not run again; reinforcement learning continues from its checkpoint, fine-tuning from its kept answers.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from pydantic import Field

from ..checks.disk import check_disk
from ..checks.preflight import check_runs, run_inputs
from ..data import Demonstration, InvalidRun, Section
from ..devices import group
from ..devices.device import mixed_precision, peak_memory, resolve_device
from ..ground.files import publish_folder, read_json, write_json, write_text
from ..ground.inputs import expecting
from ..ground.stop import stop_on_signals
from ..interfaces import RolloutEngine
from ..mirror.follow import mirrored
from ..policy.model import save_model
from ..record.run import RunLog, final_result
from ..spec.errors import SpecError, parsed
from ..spec.raw import parse_overrides, read_yaml, with_overrides
from ..spec.run import ColdStart, RunSpec, parse_run
from .cold_start import fit_demonstrations, start_policy
from .evaluate import PROMPTS_AT_ONCE, logged_evaluation
from .grading import grade
from .loop import train
from .single import Execute, OnStatus, ended_result, own_folder, run_logged
from .state import RunResult, StoppedEarly, build_engine, first_prompt, placed

PIPELINE = "pipeline.json"
KEPT = "kept.jsonl"  # of a stage: the answers that the policy is fine-tuned on
# Of a stage, in the pipeline's own run at the stage's number: a column of its summary -> metric.
METRICS = {
    "accuracy_final": "validation/accuracy", "test_accuracy": "test/accuracy", "rollouts": "train/rollouts",
    "generated_tokens": "train/generated_tokens", "seconds": "seconds/total",
}  # fmt: skip
Kind = Literal["train", "rejection_sampling"]


class Rejection(Section):
    """Decides which of its own answers a policy is fine-tuned on."""

    num_prompts: int = Field(default=512, ge=1, description="training problems; all when there are fewer")
    num_samples: int = Field(default=8, ge=1, description="completions of each")
    keep: int = Field(default=1, ge=1, description="distinct correct completions kept of each, the first ones")
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

    def policy(self, folder: Path) -> Path:
        """The folder of the policy of this stage, once it is complete in `folder`."""
        step = f"checkpoints/step-{self.spec.steps:08d}/" if self.kind == "train" else ""
        return folder / f"{step}policy"


def load_pipeline(path: Path, overrides: Sequence[str] = ()) -> list[Stage]:
    """The stages of a file, each validated; otherwise SpecError.

    `overrides` are `path=value`, of all stages, or of one as `stages.<name>.<path>=value`.
    """
    raw = read_yaml(path)
    common, own = {}, {}
    for dotted, value in parse_overrides(overrides).items():
        (own if dotted.startswith("stages.") else common)[dotted] = value
    stages = raw.pop("stages")
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
    base = with_overrides(raw, common)
    return [_stage(base, stage, place, f"{path}, stage '{stage['name']}'") for place, stage in enumerate(stages)]


def _stage(base: Mapping[str, Any], raw: Mapping[str, Any], place: int, where: str) -> Stage:
    """One stage from the file's common settings and its own; SpecError if it is not a valid run.

    Sections of a stage change single settings of the common ones; its rewards replace the common ones.
    """
    kind = raw.get("kind", "train")
    if kind not in get_args(Kind):
        raise SpecError(f"{where}: kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    changes: dict[str, Any] = {}
    if place and "cold_start" not in raw:  # the common one is the first stage's
        changes["cold_start.steps"] = 0
    for key, value in raw.items():
        if isinstance(value, Mapping) and key not in ("rewards", "rejection", "fit"):
            changes |= {f"{key}.{inner}": item for inner, item in value.items()}
        elif key not in ("name", "kind", "rejection", "fit"):
            changes[key] = value
    spec = parse_run(with_overrides(base, changes), where)
    if kind == "train":
        if extra := [key for key in ("rejection", "fit") if key in raw]:
            raise SpecError(f"{where}: '{extra[0]}' belongs to kind: rejection_sampling, got kind: train")
        if spec.steps < 1:
            raise SpecError(f"{where}: steps must be at least 1, got {spec.steps}; a cold start is part of a stage")
        if spec.checkpoints.finished == "nothing":
            raise SpecError(f"{where}: checkpoints.finished must be weights, where the next stage starts, got nothing")
        return Stage(str(raw["name"]), kind, spec)
    fit = parsed(ColdStart, raw.get("fit", {}), f"{where}: fit")
    if fit.steps < 1:
        raise SpecError(f"{where}: fit.steps must be at least 1, got {fit.steps}")
    rejection = parsed(Rejection, raw.get("rejection", {}), f"{where}: rejection")
    return Stage(str(raw["name"]), kind, spec, rejection, fit)


def train_pipeline(
    stages: Sequence[Stage], runs: Path, name: str, on_status: OnStatus = lambda status: None
) -> tuple[RunResult, list[dict[str, Any]]]:
    """Run the remaining stages in `runs/train/name`; returns the pipeline's result, and of each stage that began its
    name, kind, directory, state, reason and summary.

    ValueError, before any model loads, if a stage cannot run or if the folder has something else.
    """
    directory = runs / "train" / name
    known = read_json(directory / PIPELINE) if (directory / PIPELINE).exists() else {}
    with expecting(known.get("inputs", {})):
        specs, trained = [s.spec for s in stages], [s.spec for s in stages if s.kind == "train"]
        check_runs(specs, runs, ("train", "validation", "test"), trained=trained)
        folders = [directory / "stages" / f"{number}-{stage.name}" for number, stage in enumerate(stages, start=1)]
        trains = [(s.spec, folder) for s, folder in zip(stages, folders, strict=True) if s.kind == "train"]
        left = [(spec, folder) for spec, folder in trains if final_result(folder) is None]
        check_disk(runs, left, 1, "weights")
        inputs = run_inputs(specs, runs / "cache")
    with expecting(inputs), own_folder(directory, specs[0]):
        document = {"stages": [stage.document() for stage in stages], "inputs": inputs}
        if known.get("stages", document["stages"]) != document["stages"]:
            raise SpecError(f"'{directory}' holds a pipeline with other stages; choose another --name, or move it away")
        if "inputs" not in known:
            write_json(directory / PIPELINE, document)
        tags = {"cohort.pipeline": name}
        opened = RunLog(runs, directory, specs[0], experiment="train", run_name=name, tags=tags)
        with mirrored(runs, directory), opened as log, stop_on_signals() as should_stop:
            log.inputs(inputs)
            log.resume(-1)
            model, ended = specs[0].model, []
            for number, (stage, folder) in enumerate(zip(stages, folders, strict=True), start=1):
                spec = stage.spec.model_copy(update={"model": model})
                execute: Execute = partial(group.train, train)
                own = {**tags, "cohort.stage": stage.name, "cohort.stage_kind": stage.kind}
                if stage.kind == "rejection_sampling":
                    execute = partial(rejection_sampling, stage=stage, start=specs[0])
                    own |= {f"cohort.{key}": json.dumps(stage.document()[key]) for key in ("rejection", "fit")}
                result = ended_result(folder, spec) or run_logged(
                    execute, spec, runs, folder, f"{name}/{stage.name}", should_stop, on_status, tags=own
                )
                ended.append({"name": stage.name, "kind": stage.kind, "directory": folder, **vars(result)})
                if result.state == "complete":  # a stage that continues later would contradict the logged values
                    found = {m: float(result.summary[k]) for k, m in METRICS.items() if k in result.summary}
                    log.metrics(number, found)
                if result.state != "complete" or should_stop():
                    break
                model = str(stage.policy(folder).resolve())
            last, summaries = ended[-1], [stage["summary"] for stage in ended]
            costs = ("rollouts", "generated_tokens", "optimizer_steps", "seconds")  # of all stages
            summary = {key: float(np.sum([s.get(key, 0.0) for s in summaries])) for key in costs}
            summary["peak_memory_bytes"] = max(s.get("peak_memory_bytes", 0.0) for s in summaries)
            for key, place in (("accuracy_initial", 0), ("accuracy_final", -1), ("test_accuracy", -1)):
                summary |= {key: summaries[place][key]} if key in summaries[place] else {}
            reason = None if last["reason"] is None else f"stage '{last['name']}': {last['reason']}"
            state = "stopped" if last["state"] == "complete" and len(ended) < len(stages) else last["state"]
            outcome = RunResult(state, reason, summary)
            log.finish(outcome.state, outcome.reason, outcome.summary)
    return outcome, ended


def rejection_sampling(
    spec: RunSpec,
    directory: Path,
    log: RunLog,
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
        policy = placed(policy, spec)
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
                fitted, codec, kept, stage.fit, device=resolve_device(spec.device), on_progress=partial(watch, "fit"),
                on_loss=lambda step, loss: log.metrics(step, {"fit/loss": loss}),
            )  # fmt: skip
            with publish_folder(directory / "policy") as folder:
                save_model(folder, fitted.cpu(), codec.tokenizer)
            policy.load_state_dict(fitted.state_dict())
            engine.load_weights(policy.state_dict(), stage.fit.steps)
            after = logged_evaluation(spec, engine, directory, log, "validation", stage.fit.steps)
            test = logged_evaluation(spec, engine, directory, log, "test", stage.fit.steps)
            for name, other in spec.tests.items():
                logged_evaluation(other, engine, directory, log, "test", stage.fit.steps, area=f"test_{name}")
        except InvalidRun as invalid:
            return RunResult("invalid", str(invalid), {})
        except StoppedEarly:
            return RunResult("stopped", None, {})
        finally:
            engine.close()
    summary = {
        "accuracy_initial": before.metrics["accuracy"], "accuracy_final": after.metrics["accuracy"],
        "test_accuracy": test.metrics["accuracy"], "rollouts": costs["train/rollouts"],
        "generated_tokens": costs["train/generated_tokens"], "optimizer_steps": float(stage.fit.steps),
        "seconds": time.perf_counter() - begun, "peak_memory_bytes": float(peak_memory()),
    }  # fmt: skip
    return RunResult("complete", None, summary)


def kept_answers(
    spec: RunSpec,
    directory: Path,
    engine: RolloutEngine,
    settings: Rejection,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Demonstration], dict[str, float]]:
    """The answers to fine-tune on and their costs: sampled, or read from `kept.jsonl` by a later attempt.

    A completion that the token limit cut is not kept. Metrics are counts `rejection/prompts`, `samples`, `correct`,
    `duplicates` (correct, but like one before it), `kept`, and the shares `acceptance` (kept of samples) and `covered`
    (prompts with one kept).
    """
    file = directory / KEPT
    if file.exists():
        head, *rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        return [Demonstration(**row) for row in rows], head
    prompts = spec.task.prompts("train")[: settings.num_prompts]
    kept: list[Demonstration] = []
    counts = dict.fromkeys(("samples", "correct", "duplicates", "tokens", "covered"), 0)
    for first in range(0, len(prompts), PROMPTS_AT_ONCE):
        part = prompts[first : first + PROMPTS_AT_ONCE]
        with mixed_precision(resolve_device(spec.device), spec.autocast):
            groups = engine.sample(part, settings.num_samples, spec.sampling_with_limit(), seed=spec.seed, step=0)
        for graded in grade(spec.task, groups, spec.max_tokens):
            rows = zip(graded.completions, graded.correct or (), graded.truncated, strict=True)
            correct = [text for text, is_correct, cut in rows if is_correct and not cut]
            distinct = list(dict.fromkeys(correct))
            kept += [Demonstration(graded.prompt, text) for text in distinct[: settings.keep]]
            counts["samples"] += len(graded.completions)
            counts["correct"] += len(correct)
            counts["duplicates"] += len(correct) - len(distinct)
            counts["covered"] += bool(correct)
            counts["tokens"] += sum(graded.num_tokens)
        on_progress(first + len(part), len(prompts))
    metrics = {
        "rejection/prompts": float(len(prompts)),
        **{f"rejection/{key}": float(counts[key]) for key in ("samples", "correct", "duplicates")},
        "rejection/kept": float(len(kept)), "rejection/acceptance": len(kept) / counts["samples"],
        "rejection/covered": counts["covered"] / len(prompts),
        "train/rollouts": float(counts["samples"]), "train/generated_tokens": float(counts["tokens"]),
    }  # fmt: skip
    lines = [json.dumps(metrics), *(json.dumps(dataclasses.asdict(answer)) for answer in kept)]
    write_text(file, "\n".join(lines) + "\n")
    return kept, metrics
