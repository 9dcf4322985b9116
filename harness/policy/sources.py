"""What a model is read from: the files of its folder, or the commit of its Hub repository."""

from pathlib import Path

from harness.files import MANIFEST, read_manifest
from harness.inputs import REVISION, expected, verify
from harness.types import Sources

SUFFIXES = (".json", ".jinja", ".model", ".safetensors", ".txt")  # of what transformers reads: weights, tokenizer, ...


def model_sources(name: str) -> Sources:
    """The source of a model by its name in a spec; empty for `tiny` and for a Hub id that cannot be reached.

    ValueError for a folder that is not what was saved there.
    """
    source, folder = source_name(name), Path(name).expanduser()
    if folder.is_dir():
        if (folder / MANIFEST).is_file() and read_manifest(folder) is None:
            raise ValueError(
                f"model folder '{folder}' is torn or altered: it is not what its {MANIFEST} says; make it or copy it "
                f"again, or delete {MANIFEST} if you changed it on purpose"
            )
        found = sorted([*folder.iterdir(), *folder.glob("*/*.jinja")])
        files = [file for file in found if file.suffix in SUFFIXES and file.name != MANIFEST and file.is_file()]
        return {source: {file.relative_to(folder).as_posix(): file for file in files}}
    if name == "tiny":  # harness.policy.tiny.TINY, which loads torch
        return {}
    from huggingface_hub import hf_hub_download

    try:  # asks no server about a commit that is in its cache
        config = hf_hub_download(name, "config.json", revision=pinned(name))
    except (OSError, ValueError):
        return {}
    return {source: {REVISION: Path(config).parent.name}}


def pinned(name: str) -> str | None:
    """The commit of a Hub model that this run must read; None if nothing was said, or for a folder."""
    return (expected(source_name(name)) or {}).get(REVISION)


def verify_model(name: str) -> None:
    """InputsChanged if a model that was just read is not what was expected; asks nothing if nothing was."""
    if expected(source_name(name)) is not None:
        verify(model_sources(name))


def source_name(name: str) -> str:
    return f"model {name}"
