"""Grades stored completions: gives a verdict per row and grader, the rows on which graders disagree, and the graders'
speed.

`strict` is the task's own grader, which rewards and evaluations use; `lenient` also accepts an answer that is not
marked as final; a task may add graders of other libraries. A row has `gold` and `completion`, and optionally `label`
(or `correct`, as the rollouts that a run keeps have): whether the completion is right.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..interfaces import Task
from ..spec.load import load_run
from .settings import Settings, as_texts

Grade = tuple[str | None, bool]  # the extracted answer, whether it is right
_LABELS = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True)
class Case:
    """A completion and its gold answer; `label` says whether it is right, None if unknown."""

    expected: str
    completion: str
    label: bool | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answers and verdicts of all graders for one case."""

    row: int
    gold: str
    label: bool | None
    answers: Mapping[str, str | None]
    correct: Mapping[str, bool]


@dataclass(frozen=True)
class Summary:
    """The results of one grader over all cases: fractions (None without labels), and wrong verdicts counted by kind."""

    correct: float
    answered: float
    agreement: float | None
    false_positives: int
    false_negatives: int
    rows_per_second: float


@dataclass(frozen=True)
class Regraded:
    """All verdicts in order, a summary per grader, and the rows on which graders disagree."""

    verdicts: Sequence[Verdict]
    summaries: Mapping[str, Summary]
    disagreements: Sequence[int]


def graders(task: Task) -> dict[str, Callable[[str, str], Grade]]:
    """Name -> (completion, gold) -> (answer, whether it is right), for every grader that the task has."""

    def by(extract: Callable[[str], str | None]) -> Callable[[str, str], Grade]:
        def grade(completion: str, gold: str) -> Grade:
            answer = extract(completion)
            if answer is None or answer == gold:
                return answer, answer is not None
            return answer, task.equivalent(answer, gold) and task.is_answered(answer, "", gold)

        return grade

    return {"strict": by(task.extract), "lenient": by(task.extract_lenient), **task.peer_graders()}


def read_cases(file: Path) -> list[Case]:
    """The cases of a JSON Lines file. ValueError with line, field and rule for a row that is not a case."""
    cases: list[Case] = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                row: Any = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not valid JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where}: must be a JSON object, got {type(row).__name__}")
            for key in ("gold", "completion"):
                if not isinstance(row.get(key), str | int | float):
                    got = f"{row.get(key)!r} (fields: {', '.join(row)})"
                    raise ValueError(f"{where}: field '{key}' must be text, got {got}")
            label = row.get("label", row.get("correct"))
            key = label.lower() if isinstance(label, str) else label
            if label is not None and key not in _LABELS:
                raise ValueError(f"{where}: field 'label' must be true or false, got {label!r}")
            cases.append(Case(str(row["gold"]), str(row["completion"]), None if label is None else _LABELS[key]))
    if not cases:
        raise ValueError(f"{file} has no rows; write one JSON object per line with 'gold' and 'completion'")
    return cases


def grade(
    task: str,
    cases: str | Path,
    *,
    grader: str = "strict",
    workers: int = 1,
    settings: Settings = (),
) -> Regraded:
    """The verdicts of one grader of a task, or of `all`, on the completions of a JSON Lines file."""
    found = load_run(None, as_texts(settings), {"task": task, "algorithm": "grpo"}).task
    names = list(graders(found)) if grader == "all" else [grader]
    return regrade(found, read_cases(Path(cases)), names, workers)


def regrade(task: Task, cases: Sequence[Case], names: Sequence[str], workers: int = 1) -> Regraded:
    """The verdicts of every named grader on every case. ValueError for a grader that the task does not have."""
    known = graders(task)
    for name in names:
        if name not in known:
            raise ValueError(f"--grader must be one of {', '.join(known)} or all, got '{name}'")
    golds = [task.extract(case.expected) or case.expected for case in cases]
    grades: dict[str, list[Grade]] = {}
    seconds: dict[str, float] = {}
    with ThreadPoolExecutor(workers) as pool:
        for name in names:
            # A grader may have to start a process for each thread before its first verdict.
            list(pool.map(known[name], [cases[0].completion] * workers, [golds[0]] * workers))
            start = time.perf_counter()
            grades[name] = list(pool.map(known[name], [case.completion for case in cases], golds))
            seconds[name] = time.perf_counter() - start
    verdicts = []
    for i, case in enumerate(cases):
        answers = {name: grades[name][i][0] for name in names}
        correct = {name: grades[name][i][1] for name in names}
        verdicts.append(Verdict(i + 1, case.expected, case.label, answers, correct))
    summaries = {name: _summary(cases, grades[name], seconds[name]) for name in names}
    return Regraded(verdicts, summaries, [v.row for v in verdicts if len(set(v.correct.values())) > 1])


def _summary(cases: Sequence[Case], grades: Iterable[Grade], seconds: float) -> Summary:
    pairs = list(zip(cases, grades, strict=True))
    labelled = [(case.label, correct) for case, (_, correct) in pairs if case.label is not None]
    return Summary(
        correct=sum(correct for _, (_, correct) in pairs) / len(pairs),
        answered=sum(answer is not None for _, (answer, _) in pairs) / len(pairs),
        agreement=sum(label == correct for label, correct in labelled) / len(labelled) if labelled else None,
        false_positives=sum(correct and not label for label, correct in labelled),
        false_negatives=sum(label and not correct for label, correct in labelled),
        rows_per_second=len(pairs) / max(seconds, 1e-9),
    )
