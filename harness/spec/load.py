"""Loads runs and studies by name or file, with overrides applied."""

import importlib.resources
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import SpecError, did_you_mean
from .raw import parse_overrides, read_yaml, with_overrides
from .run import RunSpec, parse_run
from .study import StudySpec, parse_study


def runs_of(name_or_path: str, overrides: Sequence[str] = ()) -> dict[str, RunSpec]:
    """The runs that a file describes: a single run under its algorithm's name, or a study's runs under their arms'
    labels."""
    path = Path(name_or_path)
    raw = read_yaml(path) if path.is_file() else None  # any other name means a shipped study
    if isinstance(raw, Mapping) and "run" not in raw:
        run = load_run(name_or_path, overrides)
        return {run.algorithm.name: run}
    study = load_study(name_or_path, overrides)
    return {arm.label: arm.run_spec(study.first_seeds[0]) for arm in study.checked_arms()}


def load_study(name_or_path: str, overrides: Sequence[str] = ()) -> StudySpec:
    """A study by shipped name or file path, with `path=value` overrides applied.

    An override whose first word is a field of StudySpec (`seeds=[0,1]`, `metric=...`) changes the study; any other
    changes the base run (`steps=20`, `task.path=...`).
    """
    shipped = shipped_studies()
    path = shipped.get(name_or_path, Path(name_or_path))
    if not path.is_file():
        if path.suffix in (".yaml", ".yml", ".json") or os.sep in name_or_path:
            raise SpecError(f"{path}: no such study file")
        near, fix = did_you_mean(name_or_path, list(shipped)), "or give a path to a YAML file"
        raise SpecError(f"unknown study '{name_or_path}'; {near}shipped: {', '.join(shipped)}, {fix}")
    raw = _mapping(path, "study", "question: ... and run: {task: arithmetic, algorithm: grpo}")
    raw.setdefault("name", path.stem)
    run: dict[str, Any] = {}
    for dotted, value in parse_overrides(overrides).items():
        if dotted.partition(".")[0] in StudySpec.model_fields:
            raw = with_overrides(raw, {dotted: value}, whole=StudySpec.dotted_keys)
        else:
            run[dotted] = value
    if run and isinstance(raw.get("run"), dict):
        raw["run"] = with_overrides(raw["run"], run)
        space, factors = _section(_section(raw, "search"), "space"), _section(raw, "factors")
        for dotted in run.keys() & {*space, *factors}:
            how = f"varies it; override the levels: --set 'factors.{dotted}=[...]'"
            if dotted in space:
                how = f"searches it; change the range: --set 'search.space.{dotted}={{low: ..., high: ...}}'"
            raise SpecError(f"--set {dotted}: the study {how}")
    study = parse_study(raw, where=str(path))
    arms = study.design_arms()
    for dotted in run:
        if arms and all({dotted, f"{dotted}.name"} & arm.overrides.keys() for arm in arms):
            raise SpecError(f"--set {dotted}: every arm of the study sets it, so nothing would change; change the arms")
    return study


def load_run(path: str | None, overrides: Sequence[str] = (), defaults: Mapping[str, Any] | None = None) -> RunSpec:
    """A run from a YAML or JSON file (or from `defaults` alone), with `path=value` overrides applied."""
    raw: Any = dict(defaults or {})
    if path is not None:
        raw |= _mapping(Path(path), "run", "task: arithmetic and algorithm: grpo")
    return parse_run(with_overrides(raw, parse_overrides(overrides)), where=path or "command line")


def shipped_studies() -> dict[str, Path]:
    """Name -> file of every study that Cohort ships."""
    folder = Path(str(importlib.resources.files("cohort.studies")))
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def _mapping(path: Path, kind: str, least: str) -> dict[str, Any]:
    read = read_yaml(path)
    if not isinstance(read, dict):
        got = "an empty file" if read is None else type(read).__name__
        raise SpecError(f"{path}: a {kind} file must be a mapping, got {got}; write at least {least}")
    return read


def _section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = raw.get(key)
    return section if isinstance(section, Mapping) else {}
