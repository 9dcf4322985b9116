"""Records a run's inputs as part of its identity: the hash of every file, and the commit of a Hub repository.

A task, a model and a reward name their sources. A process may expect certain content there: it then asks the Hub for
that commit, and every reader of a source compares afterwards, so that a run has read exactly what its record names.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .files import sha256

Sources = Mapping[str, Mapping[str, Path | str]]  # what is read: source -> name -> file here, or text for one
Inputs = Mapping[str, Mapping[str, str]]  # the same with the SHA-256 of each file
NO_INPUTS: Inputs = {}
REVISION = "revision"  # stands for the files of a Hub repository; its commit is their hash
_expected: ContextVar[Inputs] = ContextVar("expected", default=NO_INPUTS)  # runs that share a process have their own


class Unreachable(ValueError):
    """The Hub does not answer here, so only another machine may have a source."""


class InputsChanged(ValueError):
    """A source has changed since the run was started; the message names the file, both hashes and a fix."""


@cache
def hub_answers() -> bool:
    """Whether the Hub answers this process; if not, its libraries ask it no more: each request would wait 25 s."""
    from huggingface_hub import constants, get_session

    with suppress(Exception):  # of whatever client the library has
        return bool(get_session().head(constants.ENDPOINT, timeout=10.0).status_code)
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:  # or else it reads the constant when it is imported
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return False


def digested(sources: Sources, notes: Path | None = None) -> Inputs:
    """The hash of every file of the sources; text stands for itself. `notes` as in `sha256`."""
    return {
        source: {name: sha256(file, notes) if isinstance(file, Path) else file for name, file in files.items()}
        for source, files in sources.items()
    }


def package_source(name: str, extra: str) -> Sources:
    """A package as a source, which is its version. ValueError if it is not installed."""
    try:
        return {f"package {name}": {REVISION: version(name)}}
    except PackageNotFoundError:
        raise ValueError(f"task needs the package {name}: pip install 'cohort-rl[{extra}]'") from None


@contextmanager
def expecting(inputs: Inputs) -> Iterator[None]:
    """Inside, this thread expects `inputs` of these sources. InputsChanged if it already expects other content."""
    before = _expected.get()
    check_same(before, inputs)
    token = _expected.set({**inputs, **before})
    try:
        yield
    finally:
        _expected.reset(token)


def expected(source: str) -> Mapping[str, str] | None:
    """The content that a source must have; None if any content will do."""
    return _expected.get().get(source)


def all_expected() -> Inputs:
    """The content that every source must have, for another process of the same run."""
    return _expected.get()


def check_expected(sources: Sources) -> None:
    """InputsChanged if sources that were just read differ from the expected content."""
    there = _expected.get()
    check_same(there, digested({source: files for source, files in sources.items() if source in there}))


def check_same(then: Inputs, now: Inputs) -> None:
    """InputsChanged for the first difference in a source that both have."""
    for source in sorted(then.keys() & now.keys()):
        for name in sorted(then[source].keys() | now[source].keys()):
            old, new = (files[source].get(name, "absent") for files in (then, now))
            if old != new:
                kind = "revision" if name == REVISION else "SHA-256"
                what = source if name == REVISION else f"'{name}' of {source}"
                raise InputsChanged(
                    f"the inputs of a started run cannot change, or its results would mix: the {kind} of {what} was "
                    f"{old[:16]} and is {new[:16]}; restore it, or start again under another `name`"
                )


def short(inputs: Inputs) -> dict[str, str]:
    """One hash or commit for each source, for people and tags."""
    known = sorted(inputs.items())
    return {source: next(iter(own.values()))[:16] if len(own) == 1 else digest(own) for source, own in known}


def digest(value: Any) -> str:
    """The first 16 hex digits of the SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
