"""Where the problems of a data set task come from: a local file or folder, or the Hugging Face Hub, by `datasets`.

Local data is streamed, so nothing is written and no cache can be stale. In a folder, the files of a split are those
whose name, or else the name of the nearest folder above them, has the word `train` or `test` (`train.jsonl`,
`main/test-00000-of-00001.parquet`, `train/algebra/1.json`); a folder written by `save_to_disk` works too. A single file
is one split: `train` if its name has that word, otherwise `test`. Validation is always carved from train by a stable
hash of the question. Of equal questions the first one counts, and a question of the test split is left out of train.
Problems come in the order of their hashes, so that the first ones of a split are a fair sample of its subjects.

What else such tasks share stands here too: the prompt, with worked examples before it if `shots` asks for them, and
how the answer of a completion is found (`tasks._formats`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from harness.interfaces import Task
from harness.types import Demonstration, Prompt, Split
from tasks import _formats, _library, _numbers, _symbolic
from tasks._formats import AnswerFormat

SourceSplit = Literal["train", "test"]
Row = Mapping[str, Any]

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
_SUFFIXES = ", ".join(_BUILDERS)
_HUB_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_log = logging.getLogger(__name__)


class BadRow(ValueError):
    """A row that is no problem; the message names the field and the rule."""


class MissingSplit(ValueError):
    """The source is there, but has no such split."""


@dataclass(frozen=True, slots=True)
class Problem:
    """`answer` is canonical; `solution` is the completion that the cold start learns, None where the row has no worked
    one; `tags` are those of the prompt."""

    question: str
    answer: str
    solution: str | None
    tags: tuple[tuple[str, str], ...] = ()


class DatasetTask(Task):
    """A task whose problems are rows; a subclass says where by default (`path`, `config`) and what a row means.

    Answers are numbers; a subclass with others overrides `read`, `read_unmarked` and `equivalent`.
    """

    templates: ClassVar[Mapping[AnswerFormat, str]] = {
        "hash": "Question: {question}\nReason step by step; end with #### and the number.\nAnswer:\n",
        "boxed": "Question: {question}\nReason step by step; end with the number in \\boxed{}.\nAnswer:\n",
        "think_answer": "Question: {question}\nReason step by step in <think>...</think>; then give the number in "
        "<answer>...</answer>.\nAnswer:\n",
    }
    train_words: ClassVar[tuple[str, ...]] = ("train",)  # what the training source may be called

    path: str = Field(min_length=1, description="Hub id, or a local file or folder")
    config: str | None = Field(
        default=None, description="Hub configuration, or subfolder; by default `default`, or else all"
    )
    test_path: str | None = Field(default=None, min_length=1, description="where the test split is, if elsewhere")
    validation_fraction: float = Field(default=0.05, gt=0, lt=1, description="share of train that becomes validation")
    on_bad_row: Literal["error", "skip"] = Field("error", description="skipped rows are counted and logged")
    answer_format: AnswerFormat = Field("hash", description="how the prompt and the worked solutions ask for answers")
    shots: int = Field(default=0, ge=0, le=32, description="worked examples before the question")
    template: str = Field(
        "", description="the prompt; {question} stands for the problem; by default the answer format's own"
    )

    @model_validator(mode="before")
    @classmethod
    def _template_of_the_format(cls, data: Any) -> Any:
        """A default template, also that of another format in the settings of an earlier run, follows the format."""
        if not isinstance(data, Mapping) or data.get("template") not in (None, *cls.templates.values()):
            return data
        default = cls.model_fields["answer_format"].default
        name = data.get("answer_format", default)
        known = isinstance(name, str) and name in cls.templates
        return {**data, "template": cls.templates[name if known else default]}  # pyright: ignore[reportArgumentType]

    @field_validator("template")
    @classmethod
    def _has_place(cls, value: str) -> str:
        if "{question}" not in value:
            raise ValueError(f"template must contain {{question}}, where the problem goes, got {value!r}")
        return value

    @abstractmethod
    def parse_row(self, row: Row) -> Problem | None:
        """The problem in a row, or None where the task's filters leave it out. BadRow for a row that is no problem."""

    def source(self, split: SourceSplit) -> tuple[str, str | None]:
        """Path and configuration of a split."""
        path = self.test_path or self.path if split == "test" else self.path
        return path, self.config if path == self.path else None

    def read(self, text: str) -> str | None:
        """The answer that a text at a marker states, in canonical spelling, or None."""
        return _numbers.canonical(text)

    def read_unmarked(self, completion: str) -> Iterator[str]:
        """Where a completion without a marker may state its answer, best guess first."""
        return _formats.last_resort(completion)

    @property
    def max_completion_tokens(self) -> int:
        return 512

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """All problems of the split. ValueError naming path, split, row and field where one cannot be had."""
        examples = self._examples()
        return [Prompt(stable_id(p.question), self._ask(p, examples), p.answer, p.tags) for p in self._problems(split)]

    def demonstrations(self) -> Sequence[Demonstration]:
        """The worked solutions of the training problems; none where the rows hold only answers."""
        examples = self._examples()
        return [
            Demonstration(self._ask(p, examples), p.solution) for p in self._problems("train") if p.solution is not None
        ]

    def num_skipped_rows(self, split: Split) -> int:
        """Bad rows left out of the source of a split; train and validation have one source."""
        return _source(self, "test" if split == "test" else "train").num_skipped  # pyright: ignore[reportArgumentType]

    def extract(self, completion: str) -> str | None:
        """The answer at the marker of the configured format, or else at that of another."""
        return _formats.first_readable(_formats.stated(self._own(completion), self.answer_format), self.read)

    def extract_lenient(self, completion: str) -> str | None:
        answer = self.extract(completion)
        if answer is None:
            answer = _formats.first_readable(self.read_unmarked(self._own(completion)), self.read)
        return answer

    def format_score(self, completion: str) -> float:
        return _formats.score(self._own(completion), self.answer_format)

    def use_processes(self, count: int) -> None:
        _symbolic.set_num_children(count)

    def peer_graders(self) -> Mapping[str, Callable[[str, str], tuple[str | None, bool]]]:
        return {"math_verify": _library.math_verify}

    def reasoning(self, completion: str) -> str:
        return _formats.reasoning(self._own(completion), self.answer_format)

    def equivalent(self, answer: str, other: str) -> bool:
        return answer == other or _numbers.equal(answer, other)

    def _problems(self, split: Split) -> Sequence[Problem]:
        return _split(self, split)  # pyright: ignore[reportArgumentType] (frozen models are hashable)

    def _examples(self) -> Sequence[Problem]:
        """One worked training problem more than `shots`, so that each of them has others before it; none without."""
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
        """The completion up to where, as base models do after examples, it goes on with a problem of its own."""
        head = self.template.partition("{question}")[0].strip() if self.shots else ""
        return completion.partition(f"\n\n{head}")[0] if head else completion


def stable_id(text: str) -> str:
    """16 hex digits that are the same on every machine."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def stable_fraction(text: str) -> float:
    """A number in [0, 1), the same on every machine, spread evenly over texts and unrelated to their `stable_id`."""
    return int.from_bytes(hashlib.sha256(b"split:" + text.encode()).digest()[:6]) / 2**48


def text_field(row: Row, *names: str) -> str:
    """The first of the named fields that the row has, as stripped text. BadRow if there is none, or it is empty."""
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        wanted = " or ".join(f"'{name}'" for name in names)
        raise BadRow(f"field {wanted} is missing (fields: {', '.join(key for key in row if row[key] is not None)})")
    text = str(row[name]).strip()
    if not text:
        raise BadRow(f"field '{name}' is empty")
    return text


@dataclass(frozen=True, slots=True)
class _Source:
    """The problems of a split of the source, in the order of their hashes, and how many bad rows were skipped."""

    problems: tuple[Problem, ...]
    num_skipped: int


@lru_cache(maxsize=8)
def _split(task: DatasetTask, split: Split) -> tuple[Problem, ...]:
    if split == "test":
        return _source(task, "test").problems  # pyright: ignore[reportArgumentType]
    train = _source(task, "train").problems  # pyright: ignore[reportArgumentType]
    chosen = tuple(
        p for p in train if (stable_fraction(p.question) < task.validation_fraction) == (split == "validation")
    )
    if not chosen:
        raise ValueError(
            f"{task.source('train')[0]}: a validation_fraction of {task.validation_fraction} leaves the {split} split "
            f"empty ({len(train)} training problems); {'raise' if split == 'validation' else 'lower'} it"
        )
    return chosen


@lru_cache(maxsize=8)
def _source(task: DatasetTask, split: SourceSplit) -> _Source:
    """The problems of a split of the source, without repeated questions, and for train without those of test."""
    path, config = task.source(split)
    problems, num_rows, num_skipped = _read(task, path, load_rows(path, config, split, task.train_words))
    if not problems:
        filters = "; loosen its filters" if num_rows else ""
        raise ValueError(f"{path}: the {split} split has no usable problem among {num_rows} rows{filters}")
    taken = {problem.question for problem in _test_problems(task)} if split == "train" else set()
    kept: dict[str, Problem] = {}
    for problem in problems:
        if problem.question not in taken:
            kept.setdefault(problem.question, problem)
    if len(kept) < len(problems):
        _log.warning("%s: %d repeated problems left out of %s", path, len(problems) - len(kept), split)
    if not kept:
        raise ValueError(f"{path}: every training problem is also in the test split; point test_path elsewhere")
    return _Source(tuple(sorted(kept.values(), key=lambda problem: stable_id(problem.question))), num_skipped)


def _test_problems(task: DatasetTask) -> tuple[Problem, ...]:
    try:
        return _source(task, "test").problems  # pyright: ignore[reportArgumentType]
    except MissingSplit:
        return ()


def _read(task: DatasetTask, path: str, rows: Iterable[tuple[str, Row]]) -> tuple[list[Problem], int, int]:
    """The problems among the rows, the number of rows and that of skipped ones. ValueError for a bad row unless those
    are to be skipped."""
    problems: list[Problem] = []
    bad: list[str] = []
    count = 0
    for count, (where, row) in enumerate(rows, start=1):  # noqa: B007 (the count is returned)
        try:
            problem = task.parse_row(row)
        except BadRow as error:
            if task.on_bad_row == "error":
                raise ValueError(f"{where}: {error}; correct the row or set task.on_bad_row=skip") from None
            bad.append(f"{where}: {error}")
            continue
        if problem is not None:
            problems.append(problem)
    if bad:
        _log.warning("%s: skipped %d of %d rows; the first: %s", path, len(bad), count, bad[0])
    return problems, count, len(bad)


def load_rows(
    path: str, config: str | None, split: SourceSplit, train_words: tuple[str, ...] = ("train",)
) -> Iterator[tuple[str, Row]]:
    """Every row of a split, each with the place it comes from; a split called by any of `train_words` is train.

    ValueError where there is no such source or split.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return _folder_rows(local, config, split, train_words)
    if local.exists():
        return _single_file_rows(local, split, train_words)
    if _looks_local(path):
        raise ValueError(f"{path}: no such file or folder; give an existing {_SUFFIXES} file, a folder or a Hub id")
    return _hub_rows(path, config, split, train_words)


def _looks_local(path: str) -> bool:
    parent = Path(path).parent
    return (
        path.startswith((".", "/", "~"))
        or Path(path).suffix.lower() in _BUILDERS
        or (parent != Path(".") and parent.is_dir())
        or not _HUB_ID.fullmatch(path)
    )


def _folder_rows(
    folder: Path, config: str | None, split: SourceSplit, train_words: tuple[str, ...]
) -> Iterator[tuple[str, Row]]:
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        return _saved_rows(folder, split, train_words)
    root = folder / config if config and (folder / config).is_dir() else folder
    files = sorted(file for file in root.rglob("*") if file.suffix.lower() in _BUILDERS and file.is_file())
    chosen = [file for file in files if _split_of(file.relative_to(root), train_words) == split]
    if not chosen:
        called = " or ".join(_words(split, train_words))
        raise _missing_split(root, split, f"no {_SUFFIXES} file, and no folder with one, is called {called}")
    return (place for file in chosen for place in _file_rows(file))


def _single_file_rows(file: Path, split: SourceSplit, train_words: tuple[str, ...]) -> Iterator[tuple[str, Row]]:
    if file.suffix.lower() not in _BUILDERS:
        raise ValueError(f"{file}: a data file must be one of {_SUFFIXES}, got '{file.suffix or file.name}'")
    if (_split_of(Path(file.name), train_words) or "test") != split:
        only = "train, by its name" if split == "test" else f"test, as its name does not say {' or '.join(train_words)}"
        raise _missing_split(file, split, f"a single file is one split: {only}")
    return _file_rows(file)


def _saved_rows(folder: Path, split: SourceSplit, train_words: tuple[str, ...]) -> Iterator[tuple[str, Row]]:
    """Rows of a folder by `save_to_disk`: of a `DatasetDict`, or of a `Dataset`, which is one split as a file is."""
    import datasets

    try:
        saved: Any = datasets.load_from_disk(str(folder))
    except _read_errors() as error:
        raise ValueError(f"{folder}: cannot be read as a saved data set: {error}") from None
    is_one = isinstance(saved, datasets.Dataset)
    splits: dict[str, Any] = {_split_of(Path(folder.name), train_words) or "test": saved} if is_one else dict(saved)
    present = [word for word in _words(split, train_words) if word in splits]
    if not present:
        raise _missing_split(folder, split, f"splits: {', '.join(map(str, splits))}")
    return (
        (f"{folder} ({word}), row {number}", row)
        for word in present
        for number, row in enumerate(splits[word], start=1)
    )


def _missing_split(path: Path | str, split: SourceSplit, reason: str) -> MissingSplit:
    fix = "it serves evaluation on the test split only" if split == "train" else "set task.test_path"
    return MissingSplit(f"{path}: there is no {split} split ({reason}); {fix}")


def _split_of(path: Path, train_words: tuple[str, ...]) -> SourceSplit | None:
    """The split that the file's name, or else that of the nearest folder above it, tells."""
    if any(part.startswith(".") for part in path.parts):
        return None
    pattern = rf"(?:^|[-_. ])({'|'.join(train_words)}|test)(?:$|[-_. ])"
    words = (re.search(pattern, part.lower()) for part in reversed(path.parts))
    word = next((word[1] for word in words if word), None)
    return "train" if word in train_words else "test" if word else None


def _words(split: SourceSplit, train_words: tuple[str, ...]) -> tuple[str, ...]:
    """What a split may be called."""
    return train_words if split == "train" else ("test",)


def _file_rows(file: Path) -> Iterator[tuple[str, Row]]:
    import datasets  # slow to import, and the built-in task does without
    from datasets import config

    log = logging.getLogger("datasets")  # it prints what it raises
    level, counts = log.level, config.HF_UPDATE_DOWNLOAD_COUNTS
    log.setLevel(logging.CRITICAL + 1)
    config.HF_UPDATE_DOWNLOAD_COUNTS = False  # it tells the Hub about local files too, or waits for a network
    try:
        builder = _BUILDERS[file.suffix.lower()]
        rows: list[Any] = list(datasets.load_dataset(builder, data_files=[str(file)], split="train", streaming=True))
    except StopIteration:  # how `datasets` says that a file is empty
        rows = []
    except _read_errors() as error:
        raise ValueError(f"{file}{_bad_line(file)}: cannot be read as {file.suffix}: {error}") from None
    finally:
        log.setLevel(level)
        config.HF_UPDATE_DOWNLOAD_COUNTS = counts
    return ((f"{file}, row {number}", row) for number, row in enumerate(rows, start=1))


def _read_errors() -> tuple[type[Exception], ...]:
    import pyarrow

    return (ValueError, OSError, TypeError, KeyError, pyarrow.ArrowException)


def _bad_line(file: Path) -> str:
    """Which line of a JSON Lines file is no JSON, as part of a message."""
    if file.suffix.lower() != ".jsonl" or not os.access(file, os.R_OK):
        return ""
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            json.loads(line or b"{}")
        except ValueError:
            return f", line {number}"
    return ""


def _hub_rows(
    path: str, config: str | None, split: SourceSplit, train_words: tuple[str, ...]
) -> Iterator[tuple[str, Row]]:
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    try:
        configs = [config] if config else _default_configs(datasets.get_dataset_config_names(path))
        sources: dict[str, Any] = {name: datasets.load_dataset(path, name) for name in configs}
    except DatasetNotFoundError as error:
        raise ValueError(f"{path}: no such file, folder or Hub data set: {error}") from None
    except ConnectionError as error:
        raise ValueError(f"{path}: the Hub cannot be reached ({error}); give a local file or folder") from None
    except _read_errors() as error:
        raise ValueError(f"{path}: cannot be loaded from the Hub: {error}") from None
    words = _words(split, train_words)
    for name, source in sources.items():
        if not any(word in source for word in words):
            raise _missing_split(path, split, f"splits of configuration {name}: {', '.join(map(str, source))}")
    return (
        (f"{path} ({name}, {word}), row {number}", row)
        for name, source in sources.items()
        for word in words
        if word in source
        for number, row in enumerate(source[word], start=1)
    )


def _default_configs(names: Sequence[str]) -> Sequence[str]:
    return ["default"] if "default" in names else names
