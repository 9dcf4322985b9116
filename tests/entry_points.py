"""Packages of plugins, declared as an installer would."""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def declare(folder: Path, monkeypatch: Any, package: str, points: Mapping[str, Mapping[str, str]]) -> None:
    """Put a package on the path of this process and of its children whose entry points are `points`: group -> name ->
    module:Class. Modules beside the tests are on that path too."""
    info = folder / f"{package.replace('-', '_')}-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    lines = [f"[cohort.{group}]\n{name} = {named[name]}\n" for group, named in points.items() for name in named]
    (info / "entry_points.txt").write_text("\n".join(lines))
    here = str(Path(__file__).parent)
    paths = [str(folder), here, *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.syspath_prepend(here)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
