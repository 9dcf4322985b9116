"""Decides what an evaluation keeps of a problem: its counts in memory, every completion in a file.

The file has one line of JSON per problem, written whole, so that a killed evaluation goes on with the next problem.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.types import SampleRow


@dataclass(frozen=True, slots=True)
class ProblemScore:
    """All that the metrics of a split need of one problem.

    majority    chance that a majority vote of its samples is right
    format      sum of the samples' format scores
    num_tokens  of all samples together; `answered` and `truncated` count samples
    greedy      whether the greedy completion is right
    """

    prompt_id: str
    num_samples: int
    num_correct: int
    majority: float
    answered: int
    truncated: int
    format: float
    num_tokens: int
    greedy: bool


class Journal:
    """The problems of an evaluation that is under way, or has ended, in a file that the next attempt reads.

    A line holds the score, the samples and the greedy completion, of which all but the first sample are written without
    what they share with it.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self) -> Iterator[tuple[ProblemScore, list[SampleRow]]]:
        """Score and samples of each problem, one at a time; a torn last line, of a kill, is cut off.

        ValueError that names the line for anything that no evaluation writes.
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
                    found = json.loads(line)
                    first = found["samples"][0]
                    yield ProblemScore(**found["score"]), [SampleRow(**{**first, **row}) for row in found["samples"]]
                except (ValueError, KeyError, TypeError, IndexError) as error:
                    raise ValueError(
                        f"{self.file} has no problem of an evaluation in line {number} ({type(error).__name__}: "
                        f"{str(error)[:80]}); restore it from a copy, or delete it: the evaluation then starts anew"
                    ) from None

    def add(self, score: ProblemScore, samples: Sequence[SampleRow], greedy: SampleRow) -> None:
        """Append a problem; it is on disk when this returns."""
        first = asdict(samples[0])
        others = [_beyond(first, asdict(row)) for row in (*samples[1:], greedy)]
        line = {"score": asdict(score), "samples": [first, *others[:-1]], "greedy": others[-1]}
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _beyond(first: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value != first[key]}
