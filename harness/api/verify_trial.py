"""Verifies one trial: grades its completions again and compares the run's log with them and with itself.

Completions determine all metrics of the evaluations, each test problem's score, the verdict of every rollout shown or
kept, and accuracy and length of the training steps whose batch was kept. Events determine `result.json`. Losses,
rewards, seconds and memory cannot be recomputed from kept files; the checksum of their line shows whether they are
unchanged.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from .. import plugins
from ..data import Split
from ..ground.files import sha256
from ..interfaces import Task
from ..record.events import EVENTS, RunHistory, is_as_written, is_torn, read_history
from ..record.run import RunInfo, read_result
from ..record.study import TrialRecord
from ..record.system import SYSTEM
from ..run.evaluate import NO_LIMIT, completions_file, evaluate_again, evaluation_metrics
from ..run.grading import grade, group_of
from ..run.step import rollout_metrics
from ..spec.errors import parsed

Basis = Literal["completions", "events", "report"]
TOLERANCE = 1e-9  # relative: another machine may round a mean differently


@dataclass(frozen=True)
class Mismatch:
    """A cell that does not match: `place` is a column, metric or line of a file; arm and seed only for a trial's
    cell."""

    arm: str | None
    seed: int | None
    file: str
    place: str
    stored: Any
    derived: Any

    def __str__(self) -> str:
        trial = [] if self.arm is None else [self.arm, f"seed {self.seed}"]
        where = " | ".join([*trial, self.file, *([self.place] if self.place else [])])
        stored, derived = (
            "nothing" if value is None else f"{value!r:.120}" if isinstance(value, str) else str(value)[:120]
            for value in (self.stored, self.derived)
        )
        return f"{where}: stored {stored}, derived {derived}"


@dataclass
class Findings:
    """Mismatches by cell, missing evidence, and in `numbers` how many values were compared with what."""

    mismatches: list[Mismatch] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    numbers: Counter[Basis] = field(default_factory=Counter)
    completions: int = 0  # graded again
    files: int = 0  # whose hash was compared

    @property
    def is_verified(self) -> bool:
        return not (self.mismatches or self.lacks)


@dataclass(frozen=True)
class Place:
    """The scope of comparisons: the whole study, or one trial."""

    findings: Findings
    arm: str | None = None
    seed: int | None = None

    def differs(self, file: str, place: str, stored: Any, derived: Any) -> None:
        self.findings.mismatches.append(Mismatch(self.arm, self.seed, file, place, stored, derived))

    def compare(self, basis: Basis, file: str, place: str, stored: Any, derived: Any) -> None:
        self.findings.numbers[basis] += 1
        if isinstance(stored, float | int) and isinstance(derived, float | int):
            both_nan = math.isnan(stored) and math.isnan(derived)
            same = both_nan or math.isclose(stored, derived, rel_tol=TOLERANCE, abs_tol=1e-12)
        else:
            same = stored == derived
        if not same:
            self.differs(file, place, stored, derived)

    def compare_hash(self, file: str, stored: str, derived: str) -> None:
        self.findings.files += 1
        if stored != derived:
            self.differs(file, "SHA-256", stored[:16], derived[:16])

    def lacks(self, words: str) -> None:
        trial = "" if self.arm is None else f"{self.arm} | seed {self.seed}: "
        self.findings.lacks.append(trial + words)


_KEPT = re.compile(r"(rollouts|completions)/[\w-]+\.jsonl", re.ASCII)
_LAST = {  # of a run's summary -> the metric whose last value it is
    "accuracy_final": "validation/accuracy", "test_accuracy": "test/accuracy", "rollouts": "train/rollouts",
    "generated_tokens": "train/generated_tokens", "optimizer_steps": "train/optimizer_steps",
    "peak_memory_bytes": "memory/peak_bytes",
}  # fmt: skip
_AREAS: Mapping[str, Split] = {"validation": "validation", "test": "test", "start": "test"}  # of metrics -> split
# What files that a run cannot have written raise here.
BAD_FILE = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)


def check_trial(directory: Path, trial: TrialRecord, place: Place) -> None:
    """Compare everything in a trial's folder. Raises errors of many kinds for files that a run cannot have written."""
    name = f"trials/{trial.trial}"
    _check_lines(directory / EVENTS, f"{name}/{EVENTS}", place)
    try:
        info, history, result = RunInfo.load(directory), read_history(directory / EVENTS), read_result(directory)
    except ValueError as error:
        return place.differs(name, "", "files of a run", str(error))
    if info is None:
        return place.differs(name, "run.json", None, "settings of a run")
    place.compare("events", f"{name}/run.json", "seed", info.spec.get("seed"), trial.seed)
    _check_result(f"{name}/result.json", trial, history, result, place)
    try:
        settings = info.spec["task"]
        task = parsed(cast(type[Task], plugins.load("task", str(settings["name"]))), settings, "task")
    except ValueError as error:
        return place.lacks(f"its task cannot be loaded here, so nothing is graded ({error})")
    check = _Completions(directory, name, task, history, place)
    check.files()
    check.evaluations()
    check.batches(int(info.spec["algorithm"]["group_size"]))
    check.samples()


def _check_lines(file: Path, name: str, place: Place) -> None:
    """Compare every line of an event file with its checksum."""
    for number, line in enumerate(file.read_bytes().partition(b"\0")[0].split(b"\n")[:-1], 1):
        if not is_as_written(line):
            found = re.match(rb'{"type":"(\w+)"(?:,"step":(\d+))?', line)
            of = "" if not found else f" ({b' of step '.join(filter(None, found.groups())).decode()})"
            place.differs(name, f"line {number}{of}", "the sum of another line", "its own sum")
    if is_torn(file):
        place.lacks(f"{EVENTS} ends in half a line, as a kill leaves it, which counts for nothing")


def _check_result(
    file: str, trial: TrialRecord, history: RunHistory, result: Mapping[str, Any] | None, place: Place
) -> None:
    """Compare `result.json` with the events, and their summary with the metrics."""
    end = history.finish[0] if history.finish else None
    if trial.state == "complete" and (end is None or result is None):
        return place.differs(file, "state", trial.state, None)
    if end is None or result is None:
        return
    summary = {key: float(value) for key, value in end["summary"].items()}
    metrics = {key: value for key, value in history.latest().items() if not key.startswith(SYSTEM)}
    for name, derived in (("summary", summary), ("metrics", metrics)):
        for key in sorted({*derived, *result[name]}):
            place.compare("events", file, f"{name}/{key}", result[name].get(key), derived.get(key))
    place.compare("events", file, "state", result["state"], end["state"])
    place.compare("events", file, "reason", result["reason"], end["reason"])
    last = {key: metrics[metric] for key, metric in _LAST.items() if metric in metrics}
    if steps := history.history.get("validation/accuracy"):
        last["accuracy_initial"] = steps[min(steps)][0]
    for key in last.keys() & summary.keys():
        place.compare("events", file.replace("result.json", EVENTS), f"finish/{key}", summary[key], last[key])


@dataclass(frozen=True)
class _Completions:
    """Compares the completions of a trial with the run's log."""

    directory: Path
    name: str
    task: Task
    history: RunHistory
    place: Place

    def files(self) -> None:
        """Compare the kept files with the hashes in the events."""
        for file, (_, digest) in self.history.kept.items():
            if not _KEPT.fullmatch(file):
                self.place.differs(f"{self.name}/{EVENTS}", "kept", file, "a file of the run")
            elif not (self.directory / file).is_file():
                self.place.differs(f"{self.name}/{file}", "", None, "a file that the run has kept")
            else:
                self.place.compare_hash(f"{self.name}/{file}", digest, sha256(self.directory / file))

    def evaluations(self) -> None:
        """Recompute the metrics of every evaluation, and the score of every test problem."""
        for area, split in _AREAS.items():
            lacking = 0
            for step in sorted(self.history.history.get(f"{area}/accuracy", {})):
                rows = self._rows(completions_file(area, step))
                lacking += rows is None
                if rows:
                    self._evaluation(rows, area, split, step)
            if lacking:
                self.place.lacks(f"{lacking} evaluations on the {split} split have no completions")

    def _evaluation(self, rows: Sequence[Mapping[str, Any]], area: str, split: Split, step: int) -> None:
        file = f"{self.name}/{EVENTS}"
        try:
            result = evaluate_again(self.task, rows, split)
        except BAD_FILE as error:
            return self.place.differs(f"{self.name}/{completions_file(area, step)}", "", "rows of a run", repr(error))
        self.place.findings.completions += sum(len(row["samples"]) + len(row["greedy"]) for row in rows)
        derived = evaluation_metrics(result, area)
        logged = {key: steps[step][0] for key, steps in self.history.history.items() if step in steps}
        for key in sorted({*derived, *(key for key in logged if key.startswith(f"{area}/"))}):
            self.place.compare("completions", file, f"{key} at step {step}", logged.get(key), derived.get(key))
        if split == "test":
            k = result.metrics["num_samples"]
            scores = {prompt: count / k for prompt, count in result.correct_counts.items()}
            name = "start_per_problem" if area == "start" else "per_problem"
            known: Mapping[str, float] = getattr(self.history, name)
            for prompt in sorted({*scores, *known}):
                self.place.compare("completions", file, f"{name}/{prompt}", known.get(prompt), scores.get(prompt))

    def batches(self, size: int) -> None:
        """Recompute the verdicts of every kept training batch in groups of `size`, and what its step logged of them."""
        for file, (step, _) in self.history.kept.items():
            rows = self._rows(file) if file.startswith("rollouts/") else None
            if not rows:
                continue
            try:
                groups = [group_of(rows[start : start + size]) for start in range(0, len(rows), size)]
                graded = grade(self.task, groups, NO_LIMIT)
                rewards = [[float(row["reward"]) for row in rows[i : i + size]] for i in range(0, len(rows), size)]
                derived = rollout_metrics(graded, rewards)
                self._verdicts(
                    file, rows, [pair for g in graded for pair in zip(g.answers, g.correct or (), strict=True)]
                )
            except BAD_FILE as error:
                self.place.differs(f"{self.name}/{file}", "", "rows of a run", repr(error))
                continue
            for key, value in derived.items():
                stored = self.history.history.get(key, {}).get(step, (None,))[0]
                self.place.compare("completions", f"{self.name}/{EVENTS}", f"{key} at step {step}", stored, value)

    def samples(self) -> None:
        """Recompute the verdict of every rollout that was logged for the reader."""
        rows = self.history.rows()
        try:
            graded = grade(self.task, [group_of([row]) for row in rows], NO_LIMIT)
            verdicts = [(g.answers[0], (g.correct or (False,))[0]) for g in graded]
            self._verdicts(EVENTS, rows, verdicts)
        except BAD_FILE as error:
            self.place.differs(f"{self.name}/{EVENTS}", "samples", "rollouts of a run", repr(error))

    def _verdicts(
        self, file: str, rows: Sequence[Mapping[str, Any]], derived: Sequence[tuple[str | None, bool]]
    ) -> None:
        self.place.findings.completions += len(rows)
        for row, (answer, correct) in zip(rows, derived, strict=True):
            at = f"step {row['step']}, {row['split']} problem {row['prompt_id']}"
            self.place.compare("completions", f"{self.name}/{file}", f"answer, {at}", row["answer"], answer)
            self.place.compare("completions", f"{self.name}/{file}", f"correct, {at}", row["correct"], correct)

    def _rows(self, file: str) -> list[dict[str, Any]] | None:
        """The rows of a kept file; None if the run kept none, empty if it is missing or unreadable."""
        if file not in self.history.kept:
            return None
        path = self.directory / file
        if not _KEPT.fullmatch(file) or not path.is_file():
            return []
        try:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except (ValueError, RecursionError) as error:
            self.place.differs(f"{self.name}/{file}", "", "JSON Lines", str(error))
            return []
