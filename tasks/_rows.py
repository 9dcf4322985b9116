"""Reads the rows of a split from a local file or folder, or from the Hugging Face Hub, with `datasets`.

Local data is streamed: nothing is written, and no cache can be stale. In a folder the name of a file, or else of the
nearest folder above it, contains the word `train` or `test` (`train.jsonl`, `main/test-00000-of-00001.parquet`,
`train/algebra/1.json`). A folder that `save_to_disk` wrote works too. A single file is one split: `train` if its name
contains that word, otherwise `test`.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from ..harness.ground.inputs import REVISION, expected

SourceSplit = Literal["train", "test"]
Row = Mapping[str, Any]
Rows = Iterator[tuple[str, Row]]  # each with its place in the source

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
_SUFFIXES = ", ".join(_BUILDERS)
_HUB_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class MissingSplit(ValueError):
    """The source exists, but has no such split."""


@dataclass(frozen=True, slots=True)
class Found:
    """The place of a split's rows: names, the same on every machine, with the files here, or a Hub commit."""

    files: Mapping[str, Path | str]
    rows: Callable[[], Rows]


def find_rows(path: str, config: str | None, split: SourceSplit, train_words: tuple[str, ...]) -> Found:
    """The files of a split and a function that reads its rows; any of `train_words` names the train split.

    ValueError, here or from the function, if there is no such source or split.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return _in_folder(local, config, split, train_words)
    if local.exists():
        return _in_file(local, split, train_words)
    if _looks_local(path):
        raise ValueError(f"{path}: no such file or folder; give an existing {_SUFFIXES} file, a folder or a Hub id")
    return _on_hub(path, config, split, train_words)


def source_name(path: str, config: str | None, split: SourceSplit) -> str:
    """The name of a split's source in the record of a run's inputs."""
    return f"data {path} ({f'{config}, ' if config else ''}{split})"


def _looks_local(path: str) -> bool:
    parent = Path(path).parent
    return (
        path.startswith((".", "/", "~"))
        or Path(path).suffix.lower() in _BUILDERS
        or (parent != Path(".") and parent.is_dir())
        or not _HUB_ID.fullmatch(path)
    )


def _in_folder(folder: Path, config: str | None, split: SourceSplit, train_words: tuple[str, ...]) -> Found:
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        saved = [file for file in sorted(folder.rglob("*")) if file.suffix in (".json", ".arrow") and file.is_file()]
        own = [file for file in saved if not file.name.startswith("cache-")]  # those are other programs' results
        return Found(_named(own, folder), lambda: _saved_rows(folder, split, train_words))
    root = folder / config if config and (folder / config).is_dir() else folder
    files = sorted(file for file in root.rglob("*") if file.suffix.lower() in _BUILDERS and file.is_file())
    chosen = [file for file in files if _split_of(file.relative_to(root), train_words) == split]
    if not chosen:
        called = " or ".join(_words(split, train_words))
        raise _missing_split(root, split, f"no {_SUFFIXES} file, and no folder with one, is called {called}")
    return Found(_named(chosen, folder), lambda: (place for file in chosen for place in _file_rows(file)))


def _named(files: Iterable[Path], folder: Path) -> dict[str, Path | str]:
    return {file.relative_to(folder).as_posix(): file for file in files}


def _in_file(file: Path, split: SourceSplit, train_words: tuple[str, ...]) -> Found:
    if file.suffix.lower() not in _BUILDERS:
        raise ValueError(f"{file}: a data file must be one of {_SUFFIXES}, got '{file.suffix or file.name}'")
    if (_split_of(Path(file.name), train_words) or "test") != split:
        only = "train, by its name" if split == "test" else f"test, as its name does not say {' or '.join(train_words)}"
        raise _missing_split(file, split, f"a single file is one split: {only}")
    return Found({file.name: file}, lambda: _file_rows(file))


def _saved_rows(folder: Path, split: SourceSplit, train_words: tuple[str, ...]) -> Rows:
    """The rows of a folder by `save_to_disk`: a `DatasetDict`, or a `Dataset`, which is one split like a file."""
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
    """The split named by the file, or else by the nearest folder above it."""
    if any(part.startswith(".") for part in path.parts):
        return None
    pattern = rf"(?:^|[-_. ])({'|'.join(train_words)}|test)(?:$|[-_. ])"
    words = (re.search(pattern, part.lower()) for part in reversed(path.parts))
    word = next((word[1] for word in words if word), None)
    return "train" if word in train_words else "test" if word else None


def _words(split: SourceSplit, train_words: tuple[str, ...]) -> tuple[str, ...]:
    """The possible names of a split."""
    return train_words if split == "train" else ("test",)


def _file_rows(file: Path) -> Rows:
    import datasets  # slow to import, and the built-in task does without
    from datasets import config

    log = logging.getLogger("datasets")  # it prints its exceptions
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
    """The first line of a JSON Lines file that is no JSON, as part of a message."""
    if file.suffix.lower() != ".jsonl" or not os.access(file, os.R_OK):
        return ""
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            json.loads(line or b"{}")
        except ValueError:
            return f", line {number}"
    return ""


def _on_hub(path: str, config: str | None, split: SourceSplit, train_words: tuple[str, ...]) -> Found:
    asked = (expected(source_name(path, config, split)) or {}).get(REVISION)
    sources, words = _load_from_hub(path, config, asked), _words(split, train_words)
    for name, source in sources.items():
        if not any(word in source for word in words):
            raise _missing_split(path, split, f"splits of configuration {name}: {', '.join(map(str, source))}")
    parts = [(name, word, source[word]) for name, source in sources.items() for word in words if word in source]
    commits = {commit for _, _, part in parts if (commit := _commit(part))}
    return Found(
        {REVISION: " ".join(sorted(commits))} if commits else {},
        lambda: (
            (f"{path} ({name}, {word}), row {number}", row)
            for name, word, part in parts
            for number, row in enumerate(part, start=1)
        ),
    )


@lru_cache(maxsize=4)
def _load_from_hub(path: str, config: str | None, commit: str | None) -> dict[str, Any]:
    """Configuration -> split -> rows. Offline, `datasets` takes its newest cached commit, even if asked for another."""
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    asked: Any = {"revision": commit} if commit else {}
    try:
        names = [config] if config else datasets.get_dataset_config_names(path, **asked)
        configs = ["default"] if not config and "default" in names else names
        return {name: datasets.load_dataset(path, name, **asked) for name in configs}
    except DatasetNotFoundError as error:
        raise ValueError(f"{path}: no such file, folder or Hub data set: {error}") from None
    except ConnectionError as error:
        raise ValueError(f"{path}: the Hub cannot be reached ({error}); give a local file or folder") from None
    except _read_errors() as error:
        raise ValueError(f"{path}: cannot be loaded from the Hub: {error}") from None


def _commit(rows: Any) -> str | None:
    """The commit that the rows were read at: `datasets` keeps them in a folder of that name."""
    folders = [Path(file["filename"]).parent.name for file in getattr(rows, "cache_files", ())]
    return next((name for name in folders if _COMMIT.fullmatch(name)), None)
