"""Finds the source of a model: the files of its folder, or the commit of its Hub repository."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from .. import extras
from ..base.files import MANIFEST, file_lock, publish_folder, read_manifest, whole_manifest
from ..base.inputs import REVISION, Inputs, Sources, check_expected, digest, digested, expected, hub_answers
from ..settings.run import RunSpec

SUFFIXES = (".json", ".jinja", ".model", ".safetensors", ".txt")  # of files that transformers reads
COLD_START = 4  # part of the cache key: raise it when `run/cold_start.py` changes what it trains
BASE = "base"  # in the manifest of a folder with an adapter
ADAPTER_CONFIG = "adapter_config.json"  # as peft calls it


@dataclass(frozen=True)
class Base:
    """The model that an adapter changes: its name as in a spec, the seed of `tiny`, and the files it was read from."""

    name: str
    seed: int
    inputs: Inputs

    @classmethod
    def of(cls, name: str, seed: int) -> "Base":
        folder = Path(name).expanduser()
        name = str(folder.resolve()) if folder.exists() else name
        return cls(name, seed, digested(model_sources(name)))


def base_of(name: str) -> Base | None:
    """The base of a model folder that holds only an adapter; None for any other model."""
    folder = Path(name).expanduser()
    fields = _manifest(folder).get(BASE) if (folder / ADAPTER_CONFIG).is_file() else None
    return None if fields is None else Base(**fields)


def model_sources(name: str) -> Sources:
    """The source of a model by its name in a spec; empty for `tiny` and for a Hub id that cannot be reached.

    Includes the source of an adapter's base. ValueError for a folder that has changed since it was saved.
    """
    source, folder = source_name(name), Path(name).expanduser()
    if (reader := reader_of(name)) is not None:
        return reader.sources(folder)
    if folder.is_dir():
        _manifest(folder)
        found = sorted([*folder.iterdir(), *folder.glob("*/*.jinja")])
        files = [file for file in found if file.suffix in SUFFIXES and file.name != MANIFEST and file.is_file()]
        own: Mapping[str, Path | str] = {file.relative_to(folder).as_posix(): file for file in files}
        base = base_of(name)
        return {source: own, **(model_sources(base.name) if base is not None else {})}
    if name == "tiny":  # cohort.harness.policy.tiny.TINY, which loads torch
        return {}
    from huggingface_hub import hf_hub_download

    hub_answers()
    try:  # a commit in the cache needs no request to a server
        config = hf_hub_download(name, "config.json", revision=pinned(name))
    except (OSError, ValueError):
        return {}
    return {source: {REVISION: Path(config).parent.name}}


def reader_of(name: str) -> Any:
    """The module of an extra that converts the model, if its format is one of an extra; None for any other model."""
    path = Path(name).expanduser()
    return next((reader for reader in extras.modules("models").values() if reader.reads(path)), None)


def folder_of(name: str) -> Path:
    """The folder of a local model; one in a format of an extra is converted once, into the user's cache."""
    path = Path(name).expanduser()
    if (reader := reader_of(name)) is None:
        return path
    key = digest([version("transformers"), list(digested(reader.sources(path)).values())])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cohort" / "models" / key
    with file_lock(folder.with_name(f"{key}.lock")):
        if read_manifest(folder) is None:
            with publish_folder(folder) as partial:
                reader.convert(path, partial)
    return folder


def _manifest(folder: Path) -> Mapping[str, Any]:
    """The manifest of a model folder, empty without one. ValueError if the folder does not match it."""
    if not (folder / MANIFEST).is_file():
        return {}
    try:
        return whole_manifest(folder)
    except ValueError as error:
        raise ValueError(
            f"model folder '{folder}' is torn or altered: it does not match its {MANIFEST} ({error}); make it or copy "
            f"it again, or delete {MANIFEST} if you changed it on purpose"
        ) from None


def pinned(name: str) -> str | None:
    """The commit of a Hub model that this run must read; None if nothing was said, or for a folder."""
    return (expected(source_name(name)) or {}).get(REVISION)


def verify_model(name: str) -> None:
    """InputsChanged if a model that was just read differs from the expected one; asks nothing if none is expected."""
    if expected(source_name(name)) is not None:
        check_expected(model_sources(name))


def is_local(name: str) -> bool:
    return Path(name).expanduser().is_dir() or reader_of(name) is not None


def is_here(name: str) -> bool:
    """Whether a model by its name in a spec is built in, local, or in the cache of the Hub."""
    from huggingface_hub import try_to_load_from_cache

    return name == "tiny" or is_local(name) or isinstance(try_to_load_from_cache(name, "config.json"), str)


def source_name(name: str) -> str:
    return f"model {name}"


def start_name(spec: RunSpec, cache: Path) -> str:
    """The name of the model that the run starts from: the spec's own, or the folder of its cold start."""
    return str(cache / "cold-start" / cold_start_key(spec)) if spec.cold_start.steps else spec.model


def cold_start_key(spec: RunSpec) -> str:
    """The cache key: a hash of model and data, their content included, the prompt (its words too, but for `tiny`)
    and cold start settings, and the version of the training."""
    from .tiny import CHARACTERS, TINY, tiny_config  # it loads torch

    model = [TINY, tiny_config().to_dict(), CHARACTERS] if spec.model == TINY else spec.model
    shown = islice(spec.task.demonstrations(), int(spec.model != TINY))
    first = [spec.task.in_words(one.prompt) for one in shown]  # as a chat model is asked
    task, prompt = spec.task.model_dump(mode="json"), [spec.prompt.model_dump(), *first]
    return digest([COLD_START, model, task, *prompt, spec.cold_start.model_dump(), start_inputs(spec)])


def start_inputs(spec: RunSpec) -> Inputs:
    """The inputs of the cold start."""
    return digested({**model_sources(spec.model), **spec.task.inputs("train")})
