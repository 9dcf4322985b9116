"""Data of tests: cases that `golden/` lists, and where the real benchmarks are."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


def golden(name: str) -> Any:
    """The cases of a file of `golden/`."""
    return yaml.safe_load((ROOT / "tests" / "golden" / f"{name}.yaml").read_text("ascii"))


def real_data(name: str) -> Path:
    """A folder of the benchmark data in `COHORT_DATA` (by default `../shared/data`); the test is skipped without it."""
    folder = Path(os.environ.get("COHORT_DATA") or ROOT.parent / "shared" / "data") / name
    if not folder.is_dir():
        pytest.skip(f"needs {name} in COHORT_DATA")
    return folder
