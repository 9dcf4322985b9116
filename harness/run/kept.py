"""Keeps a run's completions in its folder, so that its accuracies can be recomputed.

`completions/<area>-<step>.jsonl` has one problem of an evaluation per line, with all its completions;
`rollouts/step-<step>.jsonl` has the whole batch of a training step, one rollout per line. The run's events hold the
SHA-256 of each file.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..data import Group
from ..ground.files import sync, write_text
from ..interfaces import RunLogger
from .grading import groups_of


class Completions:
    """The problems of an evaluation with all their completions, in a growing file, so that a killed evaluation can
    continue."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def clear(self) -> None:
        self.file.unlink(missing_ok=True)

    def read(self) -> Iterator[tuple[Group, Group]]:
        """Samples and greedy completion of each problem, one at a time; a last line torn by a kill is cut off.

        ValueError, with the line's number, if an evaluation cannot have written the line.
        """
        if not self.file.exists():
            return
        with self.file.open("r+b") as file:
            whole = 0
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    file.truncate(whole)
                    return
                whole += len(line)
                try:
                    row = json.loads(line)
                    (samples,), (greedy,) = groups_of([row], "samples"), groups_of([row], "greedy")
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise ValueError(
                        f"{self.file} has no problem of an evaluation in line {number} ({type(error).__name__}: "
                        f"{str(error)[:80]}); restore it from a copy, or delete it to restart the evaluation"
                    ) from None
                yield samples, greedy

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append problems (`completion_rows`); they are on disk when this returns."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(_lines(rows))
            file.flush()
            os.fsync(file.fileno())
        sync(self.file.parent)


def rollouts_file(step: int) -> str:
    return f"rollouts/step-{step:06d}.jsonl"


def completions_file(area: str, step: int) -> str:
    return f"completions/{area}-{step:06d}.jsonl"


def keep_rows(directory: Path, log: RunLogger, step: int, file: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of a run's folder as JSON Lines; it is on disk before the event with its hash."""
    text = _lines(rows)
    path = directory / file
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    sync(path.parent)
    log.kept(step, file, hashlib.sha256(text.encode()).hexdigest())


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)
