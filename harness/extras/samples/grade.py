"""Grades stored completions: a verdict per row and grader, the rows on which graders disagree, and their speed.

`strict` is the task's own grader, which rewards and evaluations use; `lenient` takes the last number or formula where
no answer is marked, as `task.answers=last` does; `math_verify` is that library alone. A row has `gold` and
`completion`, and optionally `label` (or `correct`, as the rollouts that a run keeps have): whether the completion is
right, and `question` (or `prompt`): without it `strict` cannot tell an answer from a restatement of its question.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from pydantic import AliasChoices, BaseModel, Field

from ....tasks._answers import AnswerTask
from ....tasks._latex import Checker
from ...api.settings import Settings, as_texts
from ...base.machine import usable_cores
from ...data import as_graded
from ...interfaces import Task
from ...settings.errors import did_you_mean, parsed
from ...settings.load import load_run

Grade = tuple[str | None, bool]  # the extracted answer, whether it is right
LIBRARY_CHARS = 20_000  # math-verify's patterns are slow on more, and the end of a completion states its answer
FOUND = "(found by math-verify)"  # the library gives its verdict only


class Case(BaseModel, frozen=True, coerce_numbers_to_str=True):
    """A completion and its gold answer; `label` says whether it is right, None if unknown."""

    expected: str = Field(validation_alias="gold")
    completion: str
    question: str = Field(default="", validation_alias=AliasChoices("question", "prompt"))
    label: bool | None = Field(default=None, validation_alias=AliasChoices("label", "correct"))


@dataclass(frozen=True, slots=True)
class GradedCase:
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

    verdicts: Sequence[GradedCase]
    summaries: Mapping[str, Summary]
    disagreements: Sequence[int]


def graders(task: Task) -> dict[str, Callable[[str, str, str], Grade]]:
    """Name -> (completion, gold, question) -> (answer, whether it is right), for every grader that the task has: only
    `strict` for one without markers, and not math-verify for one with a verifier of its own, which scores in part."""

    def grade(extract: Callable[[str], str | None], completion: str, gold: str, question: str) -> Grade:
        answer = extract(as_graded(question, completion))
        if answer is None or answer == gold:
            return answer, answer is not None
        return answer, task.equivalent(answer, gold) and task.is_answered(answer, question, gold)

    found: dict[str, Callable[[str, str, str], Grade]] = {"strict": partial(grade, task.extract)}
    if isinstance(task, AnswerTask):
        found["lenient"] = partial(grade, task.model_copy(update={"answers": "last"}).extract)
        if not task.partial_credit:
            found["math_verify"] = math_verify
    return found


def math_verify(completion: str, gold: str, _: str = "") -> Grade:
    """math-verify alone, for comparison and never for a reward: (FOUND or None, whether the answer is right).

    The library (version 0.9.0) finds the answer itself, reads LaTeX and plain numbers with its defaults, and compares
    one way, as its users do. Departure: it does not read expressions without LaTeX, such as `2*(3+4)`, because it would
    evaluate their text as Python. A text that exceeds the limits of a checker counts as unanswered.
    """
    verdict = _library().verdict("compare", gold, completion[-LIBRARY_CHARS:])
    return (None if verdict == "unparsable" else FOUND), verdict == "equal"


@cache
def _library() -> Checker:
    return Checker(f"{__package__}.library")


def read_cases(file: Path) -> list[Case]:
    """The cases of a JSON Lines file. ValueError with line, field and rule for a row that is not a case."""
    if not file.is_file():
        near = did_you_mean(file.name, [one.name for one in file.parent.glob("*.jsonl")])
        fix = "give JSON Lines with 'gold' and 'completion', such as rollouts/step-000041.jsonl of a run"
        raise ValueError(f"`cases` must be a file, got '{file}'; {near}{fix}")
    cases: list[Case] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not valid JSON: {error}") from None
            cases.append(parsed(Case, row, where))
    if not cases:
        raise ValueError(f"{file} has no rows; write one JSON object per line with 'gold' and 'completion'")
    return cases


def grade(
    task: str, cases: str | Path, *, grader: str = "strict", workers: int | None = None, settings: Settings = ()
) -> Regraded:
    """The verdicts of one grader of a task, or of `all`, on a JSON Lines file, by a process a core or `workers`.

    ValueError for a grader that the task does not have, and for a row that is no case.
    """
    judge = load_run(None, as_texts(settings), {"task": task, "algorithm": "grpo"}).task
    known = graders(judge)
    if grader not in (*known, "all"):
        raise ValueError(f"`grader` must be one of {', '.join(known)} or all, got '{grader}'")
    rows = read_cases(Path(cases))
    golds = [judge.extract(case.expected) or case.expected for case in rows]
    grades: dict[str, list[Grade]] = {}
    summaries: dict[str, Summary] = {}
    with ThreadPoolExecutor(workers := workers or usable_cores()) as pool:
        for name in known if grader == "all" else [grader]:
            # A grader may have to start a process for each thread before its first verdict.
            list(pool.map(known[name], *([first] * workers for first in (rows[0].completion, golds[0], ""))))
            start = time.perf_counter()
            questions = [case.question for case in rows]
            grades[name] = list(pool.map(known[name], [case.completion for case in rows], golds, questions))
            summaries[name] = _summary(rows, grades[name], time.perf_counter() - start)
    verdicts = []
    for i, case in enumerate(rows):
        answers = {name: found[i][0] for name, found in grades.items()}
        correct = {name: found[i][1] for name, found in grades.items()}
        verdicts.append(GradedCase(i + 1, case.expected, case.label, answers, correct))
    return Regraded(verdicts, summaries, [v.row for v in verdicts if len(set(v.correct.values())) > 1])


def _summary(cases: Sequence[Case], grades: Sequence[Grade], seconds: float) -> Summary:
    labelled = [(case.label, right) for case, (_, right) in zip(cases, grades, strict=True) if case.label is not None]
    return Summary(
        correct=sum(right for _, right in grades) / len(grades),
        answered=sum(answer is not None for answer, _ in grades) / len(grades),
        agreement=sum(label == right for label, right in labelled) / len(labelled) if labelled else None,
        false_positives=sum(right and not label for label, right in labelled),
        false_negatives=sum(label and not right for label, right in labelled),
        rows_per_second=len(grades) / max(seconds, 1e-9),
    )
