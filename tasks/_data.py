"""A task whose problems are rows of a data set: its splits, its prompts and its worked examples.

Validation is carved from train by a stable hash of the question. Of equal questions the first one counts, and a
question of the test split is left out of train. Problems come in the order of their hashes, so that the first ones of a
split are a fair sample of its subjects. `tasks._rows` reads the rows.
"""

import hashlib
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from ..harness.data import Demonstration, Prompt, Split
from ..harness.ground.inputs import Sources, digest, digested, expected, verify
from ._answers import QuestionTask
from ._rows import Found, MissingSplit, Row, SourceSplit, find_rows, source_name

_log = logging.getLogger(__name__)


class BadRow(ValueError):
    """A row is not a problem; the message names the field and the rule."""


@dataclass(frozen=True, slots=True)
class Problem:
    """`answer` is canonical; the cold start learns `solution`, if the row has one; `tags` are the prompt's."""

    question: str
    answer: str
    solution: str | None
    tags: tuple[tuple[str, str], ...] = ()


class DatasetTask(QuestionTask):
    """A task whose problems are rows; a subclass gives the default source (`path`, `config`) and reads a row."""

    train_words: ClassVar[tuple[str, ...]] = ("train",)  # possible names of the training source

    path: str = Field(min_length=1, description="Hub id, or a local file or folder")
    config: str | None = Field(None, description="Hub configuration, or subfolder; by default `default`, or else all")
    test_path: str | None = Field(
        default=None,
        min_length=1,
        description="Hub id, or a local file or folder of the test split, if it is not in path",
    )
    validation_fraction: float = Field(
        default=0.05, gt=0, lt=1, description="share of the training problems that becomes the validation split"
    )
    on_bad_row: Literal["error", "skip"] = Field(
        "error", description="raise an error for a bad row, or skip it (skipped rows are counted and logged)"
    )
    shots: int = Field(default=0, ge=0, le=32, description="number of worked examples before the question")

    @abstractmethod
    def parse_row(self, row: Row) -> Problem | None:
        """The problem in a row, or None if the task's filters leave it out. BadRow for a row that is no problem."""

    def source(self, split: SourceSplit) -> tuple[str, str | None]:
        """Path and configuration of a split."""
        path = self.test_path or self.path if split == "test" else self.path
        return path, self.config if path == self.path else None

    def inputs(self, split: Split) -> Sources:
        """The files or the Hub commit of the split, and of the splits whose questions or examples it depends on."""
        return _sources(self, "train" if split != "test" or self.shots else "test")

    @property
    def max_completion_tokens(self) -> int:
        return 512

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """All problems of the split. ValueError names path, split, row and field of one that cannot be had."""
        examples = self._examples()
        return [Prompt(stable_id(p.question), self._ask(p, examples), p.answer, p.tags) for p in self._problems(split)]

    def questions(self, split: Split) -> Mapping[str, str]:
        return {stable_id(p.question): p.question for p in self._problems(split)}

    def demonstrations(self) -> Sequence[Demonstration]:
        """The worked solutions of the training problems; none if the rows hold only answers."""
        examples = self._examples()
        return [
            Demonstration(self._ask(p, examples), p.solution) for p in self._problems("train") if p.solution is not None
        ]

    def num_skipped_rows(self, split: Split) -> int:
        """The number of bad rows left out of the source of a split; train and validation have one source."""
        part = "test" if split == "test" else "train"
        return _source(self, part, _version(self, part))[1]  # pyright: ignore[reportArgumentType]

    def _problems(self, split: Split) -> Sequence[Problem]:
        version = _version(self, "test" if split == "test" else "train")
        return _split(self, split, version)  # pyright: ignore[reportArgumentType] (frozen models are hashable)

    def _examples(self) -> Sequence[Problem]:
        """The first `shots` + 1 worked training problems, so that each can have others before it; none for 0 shots."""
        if not self.shots:
            return ()
        try:
            worked = [problem for problem in self._problems("train") if problem.solution is not None]
        except MissingSplit as error:
            raise ValueError(
                f"task.shots must be 0 without a training split to take examples from, got {self.shots}: {error}"
            ) from None
        if self.shots >= len(worked):
            fix = f"use {len(worked) - 1} or less" if worked else "set it to 0"
            raise ValueError(
                f"task.shots must be below the number of worked solutions in the training split of "
                f"{self.source('train')[0]} ({len(worked)}), got {self.shots}; {fix}"
            )
        return worked[: self.shots + 1]

    def _ask(self, problem: Problem, examples: Sequence[Problem]) -> str:
        """The prompt: `shots` examples other than the problem itself, then its question."""
        shown = [example for example in examples if example.question != problem.question][: self.shots]
        parts = [f"{self._fill(example)}{example.solution}" for example in shown]
        return "\n\n".join([*parts, self._fill(problem)])

    def _fill(self, problem: Problem) -> str:
        return self.template.replace("{question}", problem.question)

    def _own(self, completion: str) -> str:
        """The completion up to a next problem, because base models continue with one after examples."""
        head = self.template.partition("{question}")[0].strip() if self.shots else ""
        return completion.partition(f"\n\n{head}")[0] if head else completion


def stable_id(text: str) -> str:
    """16 hex digits that are the same on every machine."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def stable_fraction(text: str) -> float:
    """A number in [0, 1) that is the same on every machine, evenly spread over texts, unrelated to `stable_id`."""
    return int.from_bytes(hashlib.sha256(b"split:" + text.encode()).digest()[:6]) / 2**48


def text_field(row: Row, *names: str) -> str:
    """The first of the named fields that the row has, as stripped text. BadRow if it is empty or there is none."""
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        wanted = " or ".join(f"'{name}'" for name in names)
        raise BadRow(f"field {wanted} is missing (fields: {', '.join(key for key in row if row[key] is not None)})")
    text = str(row[name]).strip()
    if not text:
        raise BadRow(f"field '{name}' is empty")
    return text


@lru_cache(maxsize=8)
def _split(task: DatasetTask, split: Split, version: str) -> tuple[Problem, ...]:
    """The problems of a split; `version` stands for the content of its source."""
    if split == "test":
        return _source(task, "test", version)[0]  # pyright: ignore[reportArgumentType]
    train = _source(task, "train", version)[0]  # pyright: ignore[reportArgumentType]
    is_validation = split == "validation"
    chosen = tuple(p for p in train if (stable_fraction(p.question) < task.validation_fraction) == is_validation)
    if not chosen:
        raise ValueError(
            f"{task.source('train')[0]}: a validation_fraction of {task.validation_fraction} leaves the {split} split "
            f"empty ({len(train)} training problems); {'raise' if split == 'validation' else 'lower'} it"
        )
    return chosen


@lru_cache(maxsize=8)
def _source(task: DatasetTask, split: SourceSplit, version: str) -> tuple[tuple[Problem, ...], int]:
    """The problems of a split of the source, in the order of their hashes, and the number of skipped rows.

    Repeated questions are left out, and for train those of test. ValueError for a row that may not be skipped, or if
    the source differs from the expected one, or changes meanwhile.
    """
    path, _ = task.source(split)
    problems: list[Problem] = []
    bad: list[str] = []
    num_rows = 0
    for num_rows, (where, row) in enumerate(_find(task, split).rows(), start=1):  # noqa: B007 (the count is used)
        try:
            problem = task.parse_row(row)
        except BadRow as error:
            if task.on_bad_row == "error":
                raise ValueError(f"{where}: {error}; correct the row or set task.on_bad_row=skip") from None
            bad.append(f"{where}: {error}")
        else:
            problems += [problem] if problem is not None else []
    if bad:
        _log.warning("%s: skipped %d of %d rows; the first: %s", path, len(bad), num_rows, bad[0])
    sources = _sources(task, split)
    verify(sources)
    if digest(digested(sources)) != version:
        raise ValueError(f"{path}: changes while it is read; wait until it is complete, then start again")
    if not problems:
        filters = "; loosen its filters" if num_rows else ""
        raise ValueError(f"{path}: the {split} split has no usable problem among {num_rows} rows{filters}")
    taken: set[str] = set()
    if split == "train":
        with suppress(MissingSplit):
            taken = {problem.question for problem in _source(task, "test", _version(task, "test"))[0]}  # pyright: ignore[reportArgumentType]
    kept: dict[str, Problem] = {}
    for problem in problems:
        if problem.question not in taken:
            kept.setdefault(problem.question, problem)
    if len(kept) < len(problems):
        _log.warning("%s: %d repeated problems left out of %s", path, len(problems) - len(kept), split)
    if not kept:
        raise ValueError(f"{path}: every training problem is also in the test split; point test_path elsewhere")
    return tuple(sorted(kept.values(), key=lambda problem: stable_id(problem.question))), len(bad)


def _version(task: DatasetTask, split: SourceSplit) -> str:
    """A stand-in for the content of a split's sources: the expected content, or else the present one."""
    known = {name: expected(name) for name in (source_name(*task.source(part), part) for part in ("test", split))}
    return digest(digested(_sources(task, split)) if None in known.values() else known)


def _sources(task: DatasetTask, split: SourceSplit) -> Sources:
    """The source of a split and, for train, that of test, whose questions it leaves out."""
    found: dict[str, Mapping[str, Path | str]] = {}
    for part in dict.fromkeys(("test", split)):
        with suppress(MissingSplit):  # whoever reads it says so
            if files := _find(task, part).files:
                found[source_name(*task.source(part), part)] = files
    return found


def _find(task: DatasetTask, split: SourceSplit) -> Found:
    return find_rows(*task.source(split), split, task.train_words)
