"""The completions that a run keeps in its folder, from which its accuracies follow again.

`completions/<split>-<step>.jsonl` has the problems of an evaluation, one a line, with all completions that they
received; `rollouts/step-<step>.jsonl` the whole batch of a training step, one rollout a line. The run's events hold the
SHA-256 of both.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.files import sync, write_text
from harness.interfaces import RunLogger
from harness.types import Split


def rollouts_file(step: int) -> str:
    return f"rollouts/step-{step:06d}.jsonl"


def completions_file(split: Split, step: int) -> str:
    return f"completions/{split}-{step:06d}.jsonl"


def keep_rows(directory: Path, log: RunLogger, step: int, file: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of a run's folder as JSON Lines; it is on disk before the event that has its hash."""
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    path = directory / file
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    sync(path.parent)
    log.kept(step, file, hashlib.sha256(text.encode()).hexdigest())
