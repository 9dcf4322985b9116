"""A study's record keeps the probes of its task with a model that its trials start from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base.files import read_json
from ...base.inputs import Inputs
from ...record.study import TrialRecord

PROBE = "probe.json"
OWN = ("spec", "inputs", "probed", "reference_problems")  # of the file alone


def kept(runs: Path, trials: Sequence[TrialRecord], inputs: Inputs) -> list[Mapping[str, Any]]:
    """The results of these probes, the newest first: name; model; task; split; reference; findings, one for each probe;
    exact; exact_reference; examples."""
    starts = [_start(trial.spec) for trial in trials if "task" in trial.spec]
    files = sorted((runs / "probes").glob(f"*/{PROBE}"), key=lambda file: file.stat().st_mtime, reverse=True)
    found = [one for one in map(read_json, files) if _start(one["spec"]) in starts]
    same = [one for one in found if all(inputs.get(source, read) == read for source, read in one["inputs"].items())]
    return [{key: value for key, value in one.items() if key not in OWN} for one in same]


def _start(spec: Mapping[str, Any]) -> list[Any]:
    """The settings that decide from which model a run starts (not the content of files), and the name of its task."""
    cold = [spec["task"], spec["prompt"]] if spec["cold_start"]["steps"] else []
    return [spec["model"], spec["task"]["name"], spec["cold_start"], *cold]
