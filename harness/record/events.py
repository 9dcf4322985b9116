"""The event file of a run, `events.jsonl`, and its reader.

One JSON object a line: `start` of an attempt, `metrics` of a step, `samples`, `per_problem`, `kept` (a file and its
SHA-256), `finish`; each has its `time` (milliseconds since 1970), and the events of a training step have its number.
Non-finite numbers are "nan", "inf", "-inf". A line ends with `sum`, a hash of the text before it, so that a changed
digit is found. It detects damage, not forgery.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from ..base.files import strict, text_sum

EVENTS = "events.jsonl"


@dataclass(frozen=True)
class RunHistory:
    """The content of an event file: metric -> step -> value, the sampled rollouts, the test problems, the run's ending.

    A later attempt that logs a step again replaces the values of an earlier one.
    """

    history: dict[str, dict[int, tuple[float, int]]] = field(default_factory=dict)
    samples: dict[tuple[int, str], tuple[int, list[dict[str, Any]]]] = field(default_factory=dict)
    sample_times: dict[tuple[int, str], int] = field(default_factory=dict)
    fractions: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)  # area -> step -> problem -> right
    families: dict[str, str] = field(default_factory=dict)
    kept: dict[str, tuple[int, str]] = field(default_factory=dict)  # file -> step, SHA-256
    attempts: list[dict[str, Any]] = field(default_factory=list)
    finish: list[dict[str, Any]] = field(default_factory=list)

    def add(self, event: Mapping[str, Any]) -> None:
        """Take in an event. ValueError, KeyError, TypeError or AttributeError for anything else."""
        if event["type"] == "start":
            self.attempts.append(dict(event))
            self.finish.clear()
        elif event["type"] == "metrics":
            for key, value in event["values"].items():
                self.history.setdefault(key, {})[event["step"]] = (float(value), event["time"])
        elif event["type"] == "samples":
            for row in event["rows"]:
                key, attempt = (row["step"], row["split"]), len(self.attempts)
                if self.samples.get(key, (attempt,))[0] != attempt:
                    del self.samples[key]
                self.samples.setdefault(key, (attempt, []))[1].append(row)
                self.sample_times[key] = event["time"]
        elif event["type"] == "per_problem":
            self.fractions.setdefault(str(event.get("area", "test")), {})[event["step"]] = dict(event["fractions"])
            self.families.update(event.get("families", {}))
        elif event["type"] == "kept":
            self.kept[event["file"]] = (event["step"], event["sha256"])
        elif event["type"] == "finish":
            self.finish[:] = [dict(event)]
        else:
            raise ValueError(f"unknown type {event['type']!r}")

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """Area -> test problem -> fraction of its samples that were right, the mean over the area's evaluations."""
        return {
            area: {problem: fmean(one[problem] for one in steps.values()) for problem in steps[max(steps)]}
            for area, steps in self.fractions.items()
        }

    def latest(self) -> dict[str, float]:
        """The value of every metric at its last step."""
        return {key: steps[max(steps)][0] for key, steps in self.history.items()}

    def rows(self) -> list[dict[str, Any]]:
        """All sampled rollouts, by step."""
        return [row for key in sorted(self.samples) for row in self.samples[key][1]]


class Tail:
    """Reads an event file from an offset, again and again, as a mirror does; `history` has all that was read."""

    def __init__(self, file: Path) -> None:
        self.file, self.history = file, RunHistory()
        self._offset, self._number = 0, 0
        self._last = b""  # the line before the offset: an attempt that goes on from a checkpoint rewrites the file

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file was read from its beginning, and the events after the offset, which moves behind them.

        ValueError, with the line's number, if a run cannot have written the line. A kill leaves a last line without its
        end; a power cut can leave NUL bytes in place of the content. Such a line and all after it are skipped.
        """
        if not self.file.exists():
            return self._offset == 0, []
        with self.file.open("rb") as file:
            file.seek(self._offset - len(self._last))
            if file.read(len(self._last)) != self._last:
                self._offset, self._number, self._last, self.history = 0, 0, b"", RunHistory()
                file.seek(0)
            content = file.read().partition(b"\0")[0]
        anew, events = self._offset == 0, []
        for line in (text + b"\n" for text in content.split(b"\n")[:-1]):
            try:
                event = json.loads(line.decode("utf-8"))
                if not isinstance(event.get("step", 0), int):
                    raise ValueError(f"step {event['step']!r}")
                self.history.add(event)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                found = f"no event of a run in line {self._number + 1} ({type(error).__name__}: {str(error)[:80]})"
                fix = "restore it from a copy, or move its folder away: the run then starts again from the beginning"
                raise ValueError(f"{self.file} has {found}; {fix}") from None
            events.append(event)
            self._offset, self._number, self._last = self._offset + len(line), self._number + 1, line
        return anew, events


def read_events(file: Path) -> list[dict[str, Any]]:
    """The events of a file; none if there is no file. ValueError as in `Tail.read`."""
    return Tail(file).read()[1]


def read_history(file: Path) -> RunHistory:
    (tail := Tail(file)).read()
    return tail.history


def is_torn(file: Path) -> bool:
    """Whether something that is no whole line, or that a power cut lost, stands at the end of an event file."""
    content = file.read_bytes() if file.exists() else b""
    return b"\0" in content or not (content or b"\n").endswith(b"\n")


def event_line(event: Mapping[str, Any]) -> str:
    return json.dumps(strict(event), separators=(",", ":")) + "\n"


def summed(event: Mapping[str, Any]) -> dict[str, Any]:
    """The event with the `sum` of its line."""
    return {**event, "sum": text_sum(event_line(event)[:-2].encode())}


def is_as_written(line: bytes) -> bool:
    """Whether a line (without its newline) fits its sum."""
    content, _, end = line.rpartition(b',"sum":"')
    return end == f'{text_sum(content)}"}}'.encode()
