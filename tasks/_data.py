"""A task whose problems are rows of a data set: its splits, its prompts, its worked examples, and where rows come from.

Validation is carved from train by a stable hash of the question. Of equal questions the first one counts, and a
question of the test split is left out of train. Problems come in the order of their hashes, so that the first ones of a
split are a fair sample of its subjects.

Rows come from a local file or folder, which is read anew, or from the Hugging Face Hub (with `datasets`). In a folder
the name of a file, or else of the nearest folder above it, contains the word `train` or `test` (`train.jsonl`,
`main/test-00000-of-00001.parquet`, `train/algebra/1.json`). A folder that `save_to_disk` wrote works too. A single file
is one split: `train` if its name contains that word, otherwise `test`. With `test_fraction` the training source, then
also a single file of any name, gives the test split too, by a stable hash of the family or else the question.
"""

import csv
import hashlib
import io
import json
import logging
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ..harness.base import inputs
from ..harness.base.inputs import REVISION, Sources, Unreachable, check_expected, digest, digested, expected
from ..harness.data import Demonstration, Prompt, Split
from ._answers import QuestionTask, write

SourceSplit = Literal["train", "test"]
DataSource = Annotated[str, Field(min_length=1, description="Hub id, or a local file or folder")]
Row = Mapping[str, Any]
# Where the rows of a split are (files here, or a Hub commit), and a function that reads them with their places. The
# names of files are the same on every machine.
Found = tuple[Mapping[str, Path | str], Callable[[], Iterator[tuple[str, Row]]]]

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
_LISTED = ", ".join(SUFFIXES)
_HUB_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Every error of pyarrow is one of these.
_READ_ERRORS = (ValueError, OSError, TypeError, KeyError, RuntimeError, csv.Error)
_log = logging.getLogger(__name__)


class BadRow(ValueError):
    """A row is not a problem; the message names the field and the rule."""


class MissingSplit(ValueError):
    """The source exists, but has no such split."""


@dataclass(frozen=True, slots=True)
class Problem:
    """`answer` is canonical; the cold start learns `solution`, if the row has one; `tags` and `family` are the
    prompt's."""

    question: str
    answer: str
    solution: str | None
    tags: tuple[tuple[str, str], ...] = ()
    family: str = ""


class DatasetTask(QuestionTask):
    """A task whose problems are rows; a subclass gives the default source (`path`, `config`) and reads a row."""

    train_words: ClassVar[tuple[str, ...]] = ("train",)  # possible names of the training source

    path: DataSource
    config: str | None = Field(default=None, description="Hub configuration or subfolder; else `default`, or all")
    test_path: str | None = Field(
        default=None,
        min_length=1,
        description="Hub id, or a local file or folder of the test split, if it is not in path",
    )
    test_fraction: float | None = Field(default=None, gt=0, lt=1, description="share of training rows for the test")
    validation_fraction: float = Field(
        default=0.05, gt=0, lt=1, description="share of the training problems that becomes the validation split"
    )
    columns: Mapping[str, Annotated[str, Field(min_length=1)]] = Field(
        default={},
        description="fields of the task -> their names in the rows, such as {question: prompt, answer: target}; "
        "family: the field that names a problem's family, such as its template",
    )
    shots: int = Field(default=0, ge=0, le=32, description="number of worked examples before the question")

    @model_validator(mode="after")
    def _has_one_test_split(self) -> "DatasetTask":
        if self.test_fraction is not None and self.test_path is not None:
            raise ValueError(f"test_fraction must be null where test_path ('{self.test_path}') names the test problems")
        return self

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # of a mapping there is none

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
        found, examples = self._problems(split), self._examples()
        return [Prompt(stable_id(p.question), self._ask(p, examples), p.answer, p.tags, p.family) for p in found]

    def questions(self, split: Split) -> Mapping[str, str]:
        return {stable_id(p.question): p.question for p in self._problems(split)}

    def demonstrations(self) -> Sequence[Demonstration]:
        """The worked solutions of the training problems; none if the rows hold only answers."""
        found, examples = self._problems("train"), self._examples()
        return [Demonstration(self._ask(p, examples), p.solution) for p in found if p.solution is not None]

    def _problems(self, split: Split) -> Sequence[Problem]:
        problems = _read(self, "test" if split == "test" else "train")
        if split == "test":
            return problems
        is_validation = split == "validation"
        chosen = [p for p in problems if (stable_fraction(p.question) < self.validation_fraction) == is_validation]
        if not chosen:
            raise ValueError(
                f"{self.source('train')[0]}: a validation_fraction of {self.validation_fraction} leaves the {split} "
                f"split empty ({len(problems)} training problems); {'raise' if is_validation else 'lower'} it"
            )
        return chosen

    def _examples(self) -> Sequence[Problem]:
        """The first `shots` + 1 worked training problems, so that each can have others before it; none for 0 shots.
        Where no row has a solution, they state their answers alone."""
        if not self.shots:
            return ()
        try:
            problems = self._problems("train")
            worked = [problem for problem in problems if problem.solution is not None] or [
                replace(problem, solution=write(self.answer_format, "", problem.answer).strip()) for problem in problems
            ]
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
        parts = [f"{self.fill(example.question)}{example.solution}" for example in shown]
        return "\n\n".join([*parts, self.fill(problem.question)])

    def own_part(self, completion: str) -> str:
        """The completion up to a next problem: the start of the template after a blank line, and after any thought."""
        head = self.template.partition("{question}")[0].strip().rpartition("\n")[2]
        next_one = re.compile(rf"(?:(?<=\n\n)|(?<=\n\r\n))[ *#]{{0,8}}{re.escape(head)}")
        found = next_one.search(completion, max(completion.find("</think>"), 0)) if head else None
        return completion[: found.start()].rstrip() if found else completion


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


def _read(task: DatasetTask, split: SourceSplit) -> Sequence[Problem]:
    """The problems of a split's source, in the order of their hashes, without repeated questions and in train the
    test's. ValueError for a bad row, or if the source differs from the expected one, or changes meanwhile."""
    known = {name: expected(name) for name in (_source_name(task, part) for part in ("test", split))}
    version = digest(digested(_sources(task, split)) if None in known.values() else known)
    return _read_version(task, split, version)  # pyright: ignore[reportArgumentType] (frozen models are hashable)


@lru_cache(maxsize=8)
def _read_version(task: Any, split: SourceSplit, version: str) -> Sequence[Problem]:
    """The result of `_read`; `version` stands for the content of the sources: the expected, or else the present one."""
    path, _ = task.source(split)
    problems: list[Problem] = []
    rows = list(_find(task, split)[1]())
    for field, column in task.columns.items() if split == "test" and rows else ():
        if all(isinstance(row, Mapping) and row.get(column) is None for _, row in rows):
            raise ValueError(
                f"{path}: task.columns must name fields of the rows, got '{column}' for {field}, which none of the "
                f"{len(rows)} rows of the test split has (fields: {', '.join(map(str, rows[0][1]))})"
            )
    for where, row in rows:
        try:
            if not isinstance(row, Mapping):
                raise BadRow(f"must be an object with fields, got {row!r:.40}")
            named = {field: row[column] for field, column in task.columns.items() if column in row}
            problem = task.parse_row({**row, **named})
        except BadRow as error:
            raise ValueError(f"{where}: {error}; correct the row or remove it") from None
        if problem is not None:
            family = named.get("family")
            is_known = family is not None and family == family  # not NaN, which tables have for nothing
            problems.append(replace(problem, family=str(family).strip()) if is_known else problem)
    sources = _sources(task, split)
    check_expected(sources)
    if digest(digested(sources)) != version:
        raise ValueError(f"{path}: changes while it is read; wait until it is complete, then start again")
    if not problems:
        filters = "; loosen its filters" if rows else ""
        raise ValueError(f"{path}: the {split} split has no usable problem among {len(rows)} rows{filters}")
    if (share := task.test_fraction) is not None:
        part = [stable_fraction(f"test:{p.family or p.question}") < share for p in problems]
        problems = [p for p, is_test in zip(problems, part, strict=True) if is_test == (split == "test")]
    taken: set[str] = set()
    if split == "train":
        with suppress(MissingSplit):
            taken = {problem.question for problem in _read(task, "test")}
    kept = {problem.question: problem for problem in reversed(problems) if problem.question not in taken}
    if len(kept) < len(problems):
        _log.warning("%s: %d repeated problems left out of %s", path, len(problems) - len(kept), split)
    if not kept and share is not None:
        raise ValueError(f"{path}: a test_fraction of {share} leaves the {split} split empty; take one nearer to 0.5")
    if not kept:
        raise ValueError(f"{path}: every training problem is also in the test split; point test_path elsewhere")
    return sorted(kept.values(), key=lambda problem: stable_id(problem.question))


def _sources(task: DatasetTask, split: SourceSplit) -> Sources:
    """The source of a split and, for train, the source of test, whose questions it leaves out."""
    found: dict[str, Mapping[str, Path | str]] = {}
    for part in dict.fromkeys(("test", split)):
        with suppress(MissingSplit):  # whoever reads it says so
            if files := _find(task, part)[0]:
                found[_source_name(task, part)] = files
    return found


def _source_name(task: DatasetTask, split: SourceSplit) -> str:
    """The name of a split's source in the record of a run's inputs."""
    path, config = task.source(split)
    return f"data {path} ({f'{config}, ' if config else ''}{split})"


def _find(task: DatasetTask, split: SourceSplit) -> Found:
    """ValueError, here or from the function that reads, if there is no such source or split."""
    path, config = task.source(split)
    words, split = task.train_words, "train" if task.test_fraction is not None else split
    local = Path(path).expanduser()
    if not local.exists():
        is_hub_id = _HUB_ID.fullmatch(path) and not path.startswith(".") and local.suffix.lower() not in SUFFIXES
        if not is_hub_id or (local.parent != Path(".") and local.parent.is_dir()):
            fix = f"give an existing {_LISTED} file, a folder or a Hub id{_listing(local.parent)}"
            raise ValueError(f"{path}: no such file or folder; {fix}")
        return _on_hub(task, split)
    folder, files = local.parent, [local]
    is_one_split = not local.is_dir() or (local / "state.json").exists()
    if local.is_dir():
        folder = local
        root = local / config if config and (local / config).is_dir() else local
        files = sorted(file for file in root.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        if is_one_split or (local / "dataset_dict.json").exists():
            # By `save_to_disk`, whose `cache-` files are other programs' results.
            files = [file for file in files if file.suffix == ".arrow" and not file.name.startswith("cache-")]
        if not is_one_split:
            files = [file for file in files if _split_of(file.relative_to(root), words) == split]
            if not files:
                called = " or ".join(words if split == "train" else ("test",))
                why = f"no {_LISTED} file, and no folder with one, is called {called}"
                raise _missing_split(root, split, why + _listing(root))
    elif local.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{local}: a data file must be one of {_LISTED}, got '{local.suffix or local.name}'")
    if is_one_split and task.test_fraction is None and (_split_of(Path(local.name), words) or "test") != split:
        only = "train, by its name" if split == "test" else f"test, as its name does not say {' or '.join(words)}"
        raise _missing_split(local, split, f"a single {'folder' if local.is_dir() else 'file'} is one split: {only}")
    named = {file.relative_to(folder).as_posix(): file for file in files}
    return named, lambda: (row for file in named.values() for row in file_rows(file))


def _missing_split(path: Path | str, split: SourceSplit, reason: str) -> MissingSplit:
    both = "it serves evaluation on the test split only; to train, give a folder with a train and a test file"
    fix = f"{both}, or set task.test_fraction" if split == "train" else "set task.test_path or task.test_fraction"
    return MissingSplit(f"{path}: there is no {split} split ({reason}); {fix}")


def _listing(folder: Path) -> str:
    """The content of a folder, as the end of a clause; empty if there is no such folder."""
    names = sorted(f"{file.name}{'/' * file.is_dir()}" for file in folder.iterdir()) if folder.is_dir() else []
    shown = ", ".join([*names[:8], *[f"{len(names) - 8} more"] * (len(names) > 8)])
    return f"; '{folder}' has {shown or 'nothing'}" if folder.is_dir() else ""


def _split_of(path: Path, train_words: tuple[str, ...]) -> SourceSplit | None:
    """The split named by the file, or else by the nearest folder above it."""
    if any(part.startswith(".") for part in path.parts):
        return None
    pattern = rf"(?:^|[-_. ])({'|'.join(train_words)}|test)(?:$|[-_. ])"
    words = (re.search(pattern, part.lower()) for part in reversed(path.parts))
    word = next((word[1] for word in words if word), None)
    return "train" if word in train_words else "test" if word else None


def file_rows(file: Path) -> Iterator[tuple[str, Row]]:
    """Place and fields of each row of a file. ValueError, here, for one that cannot be read."""
    try:
        if file.suffix.lower().startswith(".json"):
            rows = _json_rows(file.read_text("utf-8"))
        elif file.suffix.lower() == ".csv":
            read = csv.DictReader(io.StringIO(file.read_text("utf-8-sig")), strict=True)
            rows = [{name: cell or None for name, cell in row.items()} for row in read]
            if long := [number for number, row in enumerate(rows, start=1) if None in row]:
                raise ValueError(f"row {long[0]} has more cells than the header ({len(read.fieldnames or ())})")
        else:
            from pyarrow import ipc, parquet  # slow to import, and the built-in task does without

            if file.suffix.lower() == ".parquet":
                table = parquet.read_table(file)
            else:
                content = file.read_bytes()
                table = (ipc.open_file if content.startswith(b"ARROW1") else ipc.open_stream)(content).read_all()
            rows = table.to_pylist()
        json.dumps(rows, ensure_ascii=False, default=str).encode()  # ValueError for half a character
    except _READ_ERRORS as error:
        raise ValueError(f"{file}: cannot be read as {file.suffix}: {error}") from None
    return ((f"{file}, row {number}", row) for number, row in enumerate(rows, start=1))


def _json_rows(text: str) -> list[Row]:
    """The objects of a text: one a line, or all in a list, or a single one."""
    with suppress(ValueError):
        whole = json.loads(text)
        return whole if isinstance(whole, list) else [whole]
    rows: list[Row] = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return rows


def _on_hub(task: DatasetTask, split: SourceSplit) -> Found:
    path, config = task.source(split)
    words = task.train_words if split == "train" else ("test",)
    sources = _load_from_hub(path, config, (expected(_source_name(task, split)) or {}).get(REVISION))
    for name, source in sources.items():
        if not any(word in source for word in words):
            raise _missing_split(path, split, f"splits of configuration {name}: {', '.join(map(str, source))}")
    parts = [(name, word, source[word]) for name, source in sources.items() for word in words if word in source]
    # `datasets` keeps rows in a folder that is called as the commit they were read at.
    folders = {Path(file["filename"]).parent.name for *_, rows in parts for file in getattr(rows, "cache_files", ())}
    commits = sorted(filter(_COMMIT.fullmatch, folders))
    return {REVISION: " ".join(commits)} if commits else {}, lambda: (
        (f"{path} ({name}, {word}), row {number}", row)
        for name, word, rows in parts
        for number, row in enumerate(rows, start=1)
    )


@lru_cache(maxsize=4)
def _load_from_hub(path: str, config: str | None, commit: str | None) -> dict[str, Any]:
    """Configuration -> split -> rows. Offline, `datasets` takes its newest cached commit, even if asked for another."""
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    inputs.hub_answers()
    asked: Any = {"revision": commit} if commit else {}
    try:
        names = [config] if config else datasets.get_dataset_config_names(path, **asked)
        configs = ["default"] if not config and "default" in names else names
        return {name: datasets.load_dataset(path, name, **asked) for name in configs}
    except DatasetNotFoundError as error:
        raise ValueError(f"{path}: no such file, folder or Hub data set: {error}") from None
    except ConnectionError as error:
        raise Unreachable(f"{path}: the Hub cannot be reached ({error}); give a local file or folder") from None
    except _READ_ERRORS as error:
        raise Unreachable(f"{path}: cannot be loaded from the Hub: {error}") from None
