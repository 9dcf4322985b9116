"""The code and the packages that results come from."""

import functools
import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..base.files import write_text

ROOT = Path(__file__).resolve().parents[2]
DIFF = "uncommitted.diff"
MAX_DIFF = 500_000  # characters


@functools.cache
def versions() -> Mapping[str, str]:
    """Versions of the packages that results depend on, and `python` and `git_commit`."""
    found = {"python": platform.python_version(), "git_commit": _git_commit()}
    for package in ("cohort-rl", "torch", "transformers", "vllm", "mlflow", "optuna", "numpy"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def write_diff(folder: Path) -> None:
    """Keep the uncommitted changes of the checkout, if any, cut at MAX_DIFF, beside the record of their run."""
    if versions()["git_commit"].endswith("-dirty"):
        text = _git("diff", "--no-ext-diff", "HEAD").stdout
        cut = f"\n[cut: the diff has {len(text)} characters]\n" if len(text) > MAX_DIFF else ""
        write_text(folder / DIFF, text[:MAX_DIFF] + cut)


def _git_commit() -> str:
    """The commit of this file's checkout, with `-dirty` for uncommitted changes; `unknown` without a checkout."""
    try:
        top, commit = _git("rev-parse", "--show-toplevel"), _git("rev-parse", "--verify", "HEAD")
        if commit.returncode or Path(top.stdout.strip()) != ROOT:
            return "unknown"
        return commit.stdout.strip() + ("-dirty" if _git("diff", "--quiet", "HEAD").returncode else "")
    except FileNotFoundError:
        return "unknown"  # git is not installed


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
