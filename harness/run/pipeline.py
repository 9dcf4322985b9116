"""Runs stages one after another; each is a separate run that starts from the policy of the stage before.

The recipe of DeepSeek-R1 (arXiv:2501.12948, section 2.3): a supervised cold start, reinforcement learning, rejection
sampling (fine-tuning on the model's own correct answers), reinforcement learning with other rewards. The cold start
belongs to the first stage. Departures: the task decides which answers are correct, and no model filters them; the
fine-tuning starts from the sampling policy, or with `restart` from the first one, as in the paper.

A stage has a folder (`stages/<number>-<name>`), events and an MLflow run, child of the pipeline's. A complete stage is
not run again; reinforcement learning continues from its checkpoint, fine-tuning from its kept answers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..checks.disk import check_disk
from ..checks.preflight import check_runs, run_inputs
from ..data import TrialState
from ..devices import group
from ..ground.files import read_json, write_json
from ..ground.inputs import Inputs, expecting
from ..ground.stop import stop_on_signals
from ..mirror.follow import mirrored
from ..record.run import RunLog
from ..spec.errors import SpecError
from .loop import train
from .rejection import rejection_sampling
from .single import UNWATCHED, Execute, Watch, ended_result, has_ended, own_folder, run_logged
from .stages import Kind, Stage, policy_folder
from .state import RunResult

PIPELINE = "pipeline.json"


@dataclass(frozen=True)
class StageResult:
    """The result of a stage, and its folder."""

    name: str
    kind: Kind
    directory: Path
    result: RunResult


def train_pipeline(
    stages: Sequence[Stage], runs: Path, name: str, watch: Watch = UNWATCHED
) -> tuple[RunResult, list[StageResult]]:
    """Run the remaining stages in `runs/train/name`; returns the pipeline's result and that of each stage that began.

    ValueError, before any model loads, if a stage cannot run or if the folder has something else.
    """
    directory = runs / "train" / name
    with expecting(_recorded(directory).get("inputs", {})):
        trained = [stage.spec for stage in stages if stage.kind == "train"]
        check_runs([stage.spec for stage in stages], runs, ("train", "validation", "test"), trained=trained)
        folders = [directory / "stages" / f"{number}-{stage.name}" for number, stage in enumerate(stages, start=1)]
        left = [(s.spec, f) for s, f in zip(stages, folders, strict=True) if s.kind == "train" and not has_ended(f)]
        check_disk(runs, left, 1, "weights")
        inputs = run_inputs([stage.spec for stage in stages], runs / "cache")
    with expecting(inputs), own_folder(directory, stages[0].spec):
        _check_unchanged(directory, stages, inputs)
        tags = {"cohort.pipeline": name}
        opened = RunLog.open(runs, directory, stages[0].spec, experiment="train", run_name=name, tags=tags)
        with mirrored(runs, directory), opened as log, stop_on_signals() as should_stop:
            log.inputs(inputs)
            log.resume(-1)
            model = stages[0].spec.model
            results = []
            for number, (stage, folder) in enumerate(zip(stages, folders, strict=True), start=1):
                spec = stage.spec.model_copy(update={"model": model})
                execute: Execute = partial(group.train, train)
                if stage.kind == "rejection_sampling":
                    execute = partial(rejection_sampling, stage=stage, start=stages[0].spec)
                run = partial(run_logged, execute, spec, runs, folder, f"{name}/{stage.name}", should_stop, watch)
                result = ended_result(folder, spec) or run(tags=_tags(stage, name))
                results.append(StageResult(stage.name, stage.kind, folder, result))
                if result.state == "complete":  # a stage that continues later would contradict the logged values
                    log.metrics(number, _stage_metrics(result))
                if result.state != "complete" or should_stop():
                    break
                model = str(policy_folder(stage, folder).resolve())
            outcome = _outcome(results, len(stages))
            log.finish(outcome.state, outcome.reason, outcome.summary)
    return outcome, results


def _tags(stage: Stage, pipeline: str) -> dict[str, str]:
    tags = {"cohort.pipeline": pipeline, "cohort.stage": stage.name, "cohort.stage_kind": stage.kind}
    if stage.kind == "rejection_sampling":
        tags |= {f"cohort.{key}": json.dumps(stage.document()[key]) for key in ("rejection", "fit")}
    return tags


def _recorded(directory: Path) -> dict[str, Any]:
    file = directory / PIPELINE
    return read_json(file) if file.exists() else {}


def _check_unchanged(directory: Path, stages: Sequence[Stage], inputs: Inputs) -> None:
    """SpecError if the folder has a pipeline with other stages; if it has none, this one is recorded there."""
    known, document = _recorded(directory), {"stages": [stage.document() for stage in stages], "inputs": inputs}
    if known.get("stages", document["stages"]) != document["stages"]:
        raise SpecError(f"'{directory}' holds a pipeline with other stages; choose another --name, or move it away")
    if "inputs" not in known:
        write_json(directory / PIPELINE, document)


def _stage_metrics(result: RunResult) -> dict[str, float]:
    """The metrics of a stage in the pipeline's own run, at the stage's number: accuracies and costs."""
    names = {
        "accuracy_final": "validation/accuracy", "test_accuracy": "test/accuracy", "rollouts": "train/rollouts",
        "generated_tokens": "train/generated_tokens", "seconds": "seconds/total",
    }  # fmt: skip
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
