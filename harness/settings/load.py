"""Loads runs and studies by name or file, with overrides applied."""

import importlib.resources
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import extras
from .errors import SpecError, did_you_mean
from .raw import parse_overrides, read_yaml, with_overrides
from .run import RunSpec, parse_run
from .study import StudySpec, parse_study


def runs_of(name_or_path: str, overrides: Sequence[str] = ()) -> dict[str, RunSpec]:
    """The runs that a file describes: a single run under its algorithm's name, or a study's runs under their arms'
    labels."""
    path = Path(name_or_path)
    raw = read_yaml(path) if path.is_file() else None  # any other name means a shipped study
    if isinstance(raw, Mapping) and not raw.keys() & {"run", "extends"}:
        run = load_run(name_or_path, overrides)
        return {run.algorithm.name: run}
    study = load_study(name_or_path, overrides)
    return {arm.label: arm.run_spec(study.seeds[0]) for arm in study.checked_arms()}


def load_study(name_or_path: str, overrides: Sequence[str] = ()) -> StudySpec:
    """A study by shipped name or file path, with `path=value` overrides applied.

    An override whose first word is a field of StudySpec (`seeds=[0,1]`, `metric=...`) changes the study; any other
    changes the base run (`steps=20`, `task.path=...`).
    """
    path, raw = _study_mapping(name_or_path)
    raw.setdefault("name", path.stem)
    given = parse_overrides(overrides)
    own = {dotted: value for dotted, value in given.items() if dotted.partition(".")[0] in StudySpec.model_fields}
    run = {dotted: value for dotted, value in given.items() if dotted not in own}
    raw = with_overrides(raw, own, whole=StudySpec.dotted_keys)
    if run and isinstance(raw.get("run"), dict):
        raw["run"] = with_overrides(raw["run"], run)
    study = parse_study(raw, where=str(path))
    arms, space = study.design_arms(), study.search.space if study.search else {}
    for dotted in run:
        why = "every arm of the study sets it, so nothing would change; change the arms"
        if dotted in space:
            why = f"the study searches it; change the range: 'search.space.{dotted}={{low: ..., high: ...}}'"
        elif dotted in study.factors:
            why = f"the study varies it; override the levels: 'factors.{dotted}=[...]'"
        elif not arms or not all({dotted, f"{dotted}.name"} & arm.overrides.keys() for arm in arms):
            continue
        raise SpecError(f"{dotted}: {why}")
    return study


def _study_mapping(name_or_path: str, extended_by: Path | None = None) -> tuple[Path, dict[str, Any]]:
    """The file of a study, and its settings with those of the study that it `extends` (a shipped name, or a file beside
    it): its `run` changes single settings, any other section replaces the extended one, null removes one."""
    shipped = shipped_studies()
    path = shipped.get(name_or_path, (extended_by.parent if extended_by else Path()) / name_or_path)
    if not path.is_file():
        if path.suffix in (".yaml", ".yml", ".json") or os.sep in name_or_path:
            raise SpecError(f"{path}: no such study file")
        near, fix = did_you_mean(name_or_path, list(shipped)), "or give a path to a YAML file"
        raise SpecError(f"unknown study '{name_or_path}'; {near}shipped: {', '.join(shipped)}, {fix}")
    raw = _mapping(path, "study", "question: ... and run: {task: arithmetic, algorithm: grpo}")
    if (other := raw.pop("extends", None)) is None:
        return path, raw
    if extended_by is not None:
        raise SpecError(f"{extended_by}: extends goes one level, and '{path}' itself extends another; name that one")
    if not isinstance(other, str):
        raise SpecError(f"{path}: extends must be one study, a shipped name or a file, got {other!r}")
    _, base = _study_mapping(other, path)
    base.pop("name", None)
    run = _merged(base.get("run"), raw.get("run"))
    whole = {**base, **raw, **({} if run is None else {"run": run})}
    return path, {key: value for key, value in whole.items() if value is not None}


def _merged(base: Any, own: Any) -> Any:
    """A section with single settings of its own; a plugin of another name has nothing of the one in its place."""
    base = {"name": base} if isinstance(base, str) and isinstance(own, Mapping) else base
    if own is None:
        return base
    if not (isinstance(base, Mapping) and isinstance(own, Mapping)) or own.get("name") not in (None, base.get("name")):
        return own
    return {key: _merged(base.get(key), own[key]) if key in own else base[key] for key in {**base, **own}}


def load_run(path: str | None, overrides: Sequence[str] = (), defaults: Mapping[str, Any] | None = None) -> RunSpec:
    """A run from a YAML or JSON file (or from `defaults` alone), with `path=value` overrides applied."""
    raw: Any = dict(defaults or {})
    if path is not None:
        raw |= _mapping(Path(path), "run", "task: arithmetic and algorithm: grpo")
    return parse_run(with_overrides(raw, parse_overrides(overrides)), where=path or "command line")


def shipped_studies() -> dict[str, Path]:
    """Name -> file of every study that Cohort ships."""
    own = Path(str(importlib.resources.files("cohort.studies")))
    files = [file for folder in (own, *extras.folders("studies")) for file in folder.glob("*.yaml")]
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem)}


def _mapping(path: Path, kind: str, least: str) -> dict[str, Any]:
    read = read_yaml(path)
    if not isinstance(read, dict):
        got = "an empty file" if read is None else type(read).__name__
        raise SpecError(f"{path}: a {kind} file must be a mapping, got {got}; write at least {least}")
    return read
