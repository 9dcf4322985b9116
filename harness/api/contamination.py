"""Probes a model for a benchmark's questions: measures it on two sets of problems, judges, and keeps what was found."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch

from ...reports.contamination import judge, summary
from ..checks.preflight import check_runs, run_inputs
from ..data import SampleRow, Split
from ..devices.device import resolve_device
from ..ground.files import write_json
from ..ground.inputs import digest, expecting
from ..ground.streams import generator
from ..mirror.follow import mirrored
from ..record.run import RunLog
from ..record.study import PROBE
from ..run.cold_start import start_policy
from ..run.contamination import Knowledge, knowledge, words
from ..run.single import own_folder
from ..run.state import first_prompt
from ..spec.errors import SpecError
from ..spec.run import RunSpec

SCORES = {"completion": "rouge_l", "renumbered": "renumbered", "reworded": "reworded"}  # probe -> of `Knowledge`
EXAMPLES = 3


def probe_contamination(
    spec: RunSpec,
    runs: Path,
    name: str | None = None,
    *,
    split: Split = "test",
    reference: str = "validation",
    num_problems: int = 500,
    prefix_fraction: float = 0.6,
    on_progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> dict[str, Any]:
    """The probe of the policy that the spec starts from, on at most `num_problems` of a split and of the `reference`.

    The reference is another split of the task, or a source whose test split has fresh problems. The result goes to
    `probe.json` in `runs/probes/name` and to MLflow's experiment `probe`. ValueError, before a model loads, for
    settings that probe nothing, and for problems or a folder that cannot be used. `said` is the result in words.
    """
    if not 0 < prefix_fraction < 1:
        raise SpecError(f"--fraction must be above 0 and below 1, got {prefix_fraction}; the default is 0.6")
    if reference == split:
        raise SpecError(
            f"--reference must be other problems than those probed, got '{split}' for both; name another split, or a "
            "file of fresh problems"
        )
    other, other_split = _reference(spec, reference)
    check_runs([spec], runs, (split,), trained=())
    check_runs([other], runs, (other_split,), models=False)
    probed = spec.task.questions(split)
    fresh = {key: text for key, text in other.task.questions(other_split).items() if key not in probed}
    sets = [dict(list(one.items())[:num_problems]) for one in (probed, fresh)]
    if not sets[1]:
        raise SpecError(f"--reference must have problems that are not in {split}; '{reference}' has none")
    facts = {"split": split, "reference": reference, "num_problems": num_problems, "prefix_fraction": prefix_fraction}
    name = name or f"{spec.task.name}-{split}-{digest([spec.digest(), facts])[:8]}"
    directory, cache = runs / "probes" / name, runs / "cache"
    inputs = {**run_inputs([other], cache, (other_split,)), **run_inputs([spec], cache, (split,))}
    with (
        expecting(inputs),
        own_folder(directory, spec),
        mirrored(runs, directory),
        RunLog.open(runs, directory, spec, experiment="probe", run_name=name) as log,
    ):
        log.inputs(inputs)
        log.prompt(first_prompt(spec, split))
        log.resume(-1)
        policy, codec = start_policy(spec, cache, on_progress)
        policy = policy.to(device=resolve_device(spec.device), dtype=getattr(torch, spec.dtype))
        found = knowledge(
            {**sets[0], **sets[1]}, policy, codec, spec, prefix_fraction=prefix_fraction, on_progress=on_progress
        )
        known = [[found[key] for key in one if key in found] for one in sets]
        judged = judge(scores(known[0]), scores(known[1]), generator("contamination test", spec.seed))
        findings = [asdict(one) for one in judged]
        exact = [float(np.mean([one.exact for one in rows])) for rows in known]
        best = sorted(known[0], key=lambda one: (one.exact, len(words(one.held_back))), reverse=True)
        document = {
            **facts,
            "name": name,
            "model": spec.model,
            "task": spec.task.name,
            "exact": exact[0],
            "exact_reference": exact[1],
            "findings": findings,
            "examples": [asdict(one) for one in best[:EXAMPLES] if one.exact],
            "spec": spec.model_dump(mode="json"),
            "inputs": inputs,
        }
        metrics = {"probe/exact": exact[0], "probe/exact_reference": exact[1]}
        for one in findings:
            values = {f"probe/{one['probe']}_{key}": value for key, value in one.items() if key != "probe"}
            metrics |= {key: value for key, value in values.items() if not isnan(value)}
        log.metrics(0, metrics)
        log.samples([_sample(one, split) for one in known[0]])
        rows = [[asdict(one) for one in side] for side in known]
        write_json(directory / PROBE, {**document, "probed": rows[0], "reference_problems": rows[1]})
        log.finish("complete", None, {})
    return document | {"said": summary(document)}


def scores(known: Sequence[Knowledge]) -> Mapping[str, list[float]]:
    """Probe -> the score of each question."""
    return {probe: [getattr(one, key) for one in known] for probe, key in SCORES.items()}


def _reference(spec: RunSpec, reference: str) -> tuple[RunSpec, Split]:
    """The spec and the split of the reference."""
    if reference in get_args(Split):
        return spec, cast("Split", reference)
    if "test_path" not in type(spec.task).model_fields:
        raise SpecError(
            f"--reference must be one of {', '.join(get_args(Split))} for task '{spec.task.name}', which reads no "
            f"data, got '{reference}'"
        )
    return spec.model_copy(update={"task": spec.task.model_copy(update={"test_path": reference})}), "test"


def _sample(one: Knowledge, split: Split) -> SampleRow:
    """A completion as a rollout: what was held back stands as gold, ROUGE-L as reward."""
    return SampleRow(
        step=0, split=split, prompt_id=one.prompt_id, prompt=one.start, completion=one.continuation,
        gold=one.held_back, answer=None, correct=one.exact, reward=None if isnan(one.rouge_l) else one.rouge_l,
        num_tokens=len(words(one.continuation)), finish_reason="length",
    )  # fmt: skip
