"""Where the real benchmarks are, for the tests that need them."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def real_data(name: str) -> Path:
    """A folder of the benchmark data in `COHORT_DATA` (by default `../shared/data`); the test is skipped without it."""
    folder = Path(os.environ.get("COHORT_DATA") or ROOT.parent / "shared" / "data") / name
    if not folder.is_dir():
        pytest.skip(f"needs {name} in COHORT_DATA")
    return folder
