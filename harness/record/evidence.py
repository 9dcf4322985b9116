"""Seals a report: `evidence.json` has the SHA-256 of every file that it was made from and of its own, the time of
writing, and the answer and colours that a mirror shows.

With it the study's folder is whole: the report can be derived again wherever the folder is copied.
"""

import dataclasses
import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from ..base.files import read_json, sha256, write_json
from .events import EVENTS
from .provenance import DIFF, versions
from .run import INFO, RESULT
from .study import LOOKS, SEARCH, STATUS, STUDY, StudyRecord

EVIDENCE = "evidence.json"
_PART = re.compile(r"[^\\:\x00-\x1f/]+")


@dataclasses.dataclass(frozen=True)
class Evidence:
    """`evidence.json`.

    files     of the record and of the report -> SHA-256
    versions  that wrote the report
    extras    of the record, which may be kept outside the study's folder
    answer, colors  of the report: its sentence, its arms' colours
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    files: Mapping[str, str]
    versions: Mapping[str, str]
    extras: Mapping[str, Any]
    answer: str
    colors: Mapping[str, str]


def write_evidence(folder: Path, record: StudyRecord, answer: str = "", colors: Mapping[str, str] = {}) -> None:
    """Seal the report in a study's folder, which was written from `record`."""
    files = {name: sha256(folder / name) for name in sealed_files(folder)}
    evidence = Evidence(files, writing_versions(), record.extras, answer, colors)
    write_json(folder / EVIDENCE, dataclasses.asdict(evidence))


def sealed_files(folder: Path) -> list[str]:
    """The files of a study that a report is made from, whether they can be read or not, and the report's own files."""
    patterns = [STUDY, STATUS, SEARCH, LOOKS, DIFF, *(f"trials/[!.]*/{name}" for name in (EVENTS, INFO, RESULT))]
    found = (file for pattern in [*patterns, "report/**/*"] for file in folder.glob(pattern) if file.is_file())
    return sorted(file.relative_to(folder).as_posix() for file in found)


def read_evidence(folder: Path) -> Evidence:
    """The content that `write_evidence` wrote. ValueError for anything else, or a file that is not the study's."""
    file = folder / EVIDENCE
    if not file.is_file():
        fix = f"write the report with: cohort report {folder.name}"
        raise ValueError(f"study '{folder.name}' has no {EVIDENCE}; {fix}")
    content = read_json(file)
    try:
        evidence = TypeAdapter(Evidence).validate_python(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not what Cohort wrote there ({error!r:.200}); restore it from a copy") from None
    for name in evidence.files:
        if not all(_PART.fullmatch(part) and part not in (".", "..") for part in name.split("/")):  # on every system
            raise ValueError(f"{file} must name files of the study alone, got {name!r:.80}")
    return evidence


def writing_versions() -> dict[str, str]:
    """The versions that decide how a report is written."""
    return {**versions(), **{one: importlib.metadata.version(one) for one in ("jinja2", "matplotlib", "scipy")}}
