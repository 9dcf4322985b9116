"""Which code and which packages results come from."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


@functools.cache
def versions() -> Mapping[str, str]:
    """Versions of what results depend on, `python` and `git_commit` among them."""
    found = {"python": platform.python_version(), "git_commit": _git_commit()}
    for package in ("cohort-rl", "torch", "transformers", "vllm", "mlflow", "optuna", "numpy"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _git_commit() -> str:
    """The commit of the checkout that this file is in, `-dirty` with uncommitted changes; `unknown` outside of one."""
    root = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)

    try:
        top, commit = git("rev-parse", "--show-toplevel"), git("rev-parse", "--verify", "HEAD")
        if commit.returncode or Path(top.stdout.strip()) != root:
            return "unknown"
        return commit.stdout.strip() + ("-dirty" if git("diff", "--quiet", "HEAD").returncode else "")
    except FileNotFoundError:
        return "unknown"  # git is not installed
