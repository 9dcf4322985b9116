"""Runs one probe of a model's knowledge of a benchmark's questions, for `cohort probe contamination`."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch

from ..checks.preflight import check_inputs, run_inputs
from ..data import SampleRow, Split
from ..devices.device import resolve_device
from ..ground.files import write_json
from ..ground.inputs import expecting
from ..ground.streams import generator
from ..mirror.run_log import RunLog
from ..mirror.studies import PROBE, log_found
from ..spec.errors import SpecError
from ..spec.run import RunSpec
from .cold_start import start_policy
from .contamination import Knowledge, knowledge, words
from .single import OnProgress, own_folder
from .state import first_prompt

SCORES = {"completion": "rouge_l", "renumbered": "renumbered", "reworded": "reworded"}  # probe -> of `Knowledge`
EXAMPLES = 3
Judge = Callable[[Mapping[str, Sequence[float]], Mapping[str, Sequence[float]], np.random.Generator], Sequence[Any]]


@dataclass(frozen=True)
class ProbeSettings:
    """The settings of a probe. `reference` is another split of the task, or a source whose test split has fresh
    problems."""

    split: Split = "test"
    reference: str = "validation"
    num_problems: int = 500  # of each set, at most
    prefix_fraction: float = 0.6
    num_variants: int = 4


def check_settings(spec: RunSpec, settings: ProbeSettings) -> None:
    """SpecError for settings that probe nothing."""
    if not 0 < settings.prefix_fraction < 1:
        raise SpecError(f"--fraction must be above 0 and below 1, got {settings.prefix_fraction}; the default is 0.6")
    if settings.reference == settings.split:
        raise SpecError(
            f"--reference must be other problems than those probed, got '{settings.split}' for both; name another "
            "split, or a file of fresh problems"
        )
    _reference(spec, settings)


def probe_once(
    spec: RunSpec,
    settings: ProbeSettings,
    runs: Path,
    name: str,
    judge: Judge,
    on_progress: OnProgress = lambda phase, done, total: None,
) -> dict[str, Any]:
    """The probe of the policy that the spec starts from; `judge` turns the scores into findings.

    It goes to `probe.json` in `runs/probes/name` and to MLflow's experiment `probe`. ValueError, before a model loads,
    for problems or a folder that cannot be used; the settings are checked.
    """
    other, other_split = _reference(spec, settings)
    check_inputs([spec], runs, (settings.split,))
    check_inputs([other], runs, (other_split,), models=False)
    probed = spec.task.questions(settings.split)
    reference = {key: text for key, text in other.task.questions(other_split).items() if key not in probed}
    sets = [dict(list(one.items())[: settings.num_problems]) for one in (probed, reference)]
    if not sets[1]:
        raise SpecError(
            f"--reference must have problems that are not in {settings.split}; '{settings.reference}' has none"
        )
    directory, cache = runs / "probes" / name, runs / "cache"
    inputs = {**run_inputs([other], cache, (other_split,)), **run_inputs([spec], cache, (settings.split,))}
    facts = {**dataclasses.asdict(settings), "name": name, "model": spec.model, "task": spec.task.name}
    with (
        expecting(inputs),
        own_folder(directory, spec),
        RunLog.open(runs, directory, spec, experiment=PROBE, run_name=name) as log,
    ):
        log.inputs(inputs)
        log.prompt(first_prompt(spec, settings.split))
        log.resume(-1)
        policy, codec = start_policy(spec, cache, on_progress)
        policy = policy.to(device=resolve_device(spec.device), dtype=getattr(torch, spec.dtype))
        parts = {"prefix_fraction": settings.prefix_fraction, "num_variants": settings.num_variants}
        found = knowledge({**sets[0], **sets[1]}, policy, codec, spec, **parts, on_progress=on_progress)
        known = [[found[key] for key in one if key in found] for one in sets]
        judged = judge(scores(known[0]), scores(known[1]), generator("contamination test", spec.seed))
        findings = [dataclasses.asdict(one) for one in judged]
        exact = [float(np.mean([one.exact for one in rows])) for rows in known]
        best = sorted(known[0], key=lambda one: (one.exact, len(words(one.held_back))), reverse=True)
        document = {
            **facts,
            "exact": exact[0],
            "exact_reference": exact[1],
            "findings": findings,
            "examples": [dataclasses.asdict(one) for one in best[:EXAMPLES] if one.exact],
            "spec": spec.model_dump(mode="json"),
            "inputs": inputs,
        }
        log.metrics(0, _metrics(findings, exact))
        log.samples([_sample(one, settings.split) for one in known[0]])
        rows = [[dataclasses.asdict(one) for one in side] for side in known]
        write_json(directory / "probe.json", {**document, "probed": rows[0], "reference_problems": rows[1]})
        log.finish("complete", None, {})
        if log.run_id is not None:
            log_found(runs, log.run_id, "probe.json", document)
    return document


def scores(known: Sequence[Knowledge]) -> dict[str, list[float]]:
    """Probe -> the score of each question."""
    return {probe: [getattr(one, key) for one in known] for probe, key in SCORES.items()}


def _reference(spec: RunSpec, settings: ProbeSettings) -> tuple[RunSpec, Split]:
    """The spec and the split of the reference."""
    if settings.reference in get_args(Split):
        return spec, cast("Split", settings.reference)
    if "test_path" not in type(spec.task).model_fields:
        raise SpecError(
            f"--reference must be one of {', '.join(get_args(Split))} for task '{spec.task.name}', which reads no "
            f"data, got '{settings.reference}'"
        )
    task = spec.task.model_copy(update={"test_path": settings.reference})
    return spec.model_copy(update={"task": task}), "test"


def _metrics(findings: Sequence[Mapping[str, Any]], exact: Sequence[float]) -> dict[str, float]:
    metrics = {"probe/exact": exact[0], "probe/exact_reference": exact[1]}
    for found in findings:
        for key, value in found.items():
            if key != "probe" and not math.isnan(value):
                metrics[f"probe/{found['probe']}_{key}"] = value
    return metrics


def _sample(one: Knowledge, split: Split) -> SampleRow:
    """A completion as a rollout: what was held back stands as gold, ROUGE-L as reward."""
    reward = None if math.isnan(one.rouge_l) else one.rouge_l
    return SampleRow(
        step=0, split=split, prompt_id=one.prompt_id, prompt=one.start, completion=one.continuation,
        gold=one.held_back, answer=None, correct=one.exact, reward=reward, num_tokens=len(words(one.continuation)),
        finish_reason="length",
    )  # fmt: skip
