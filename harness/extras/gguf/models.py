"""Converts a GGUF file into a model folder: its weights in float32, its configuration and its tokenizer.

What quantisation took away stays away: the float32 weights are the values that llama.cpp computes with.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...base.inputs import Sources
from ...policy.sources import source_name


def reads(path: Path) -> bool:
    """Whether the path is a GGUF file, or a folder with one and without safetensors."""
    return path.suffix == ".gguf" or (any(path.glob("*.gguf")) and not any(path.glob("*.safetensors")))


def check(path: Path) -> None:
    """ValueError for a path without a whole GGUF file, or without the package that reads it."""
    file = _file(path)
    if not file.is_file() or file.open("rb").read(4) != b"GGUF":
        raise ValueError(f"model '{path}' must be a GGUF file, got {'another' if file.is_file() else 'no'} file there")
    if re.search(r"-\d+-of-\d+$", file.stem):
        raise ValueError(f"model '{path}' must be a whole GGUF file, got a part; join the parts with llama-gguf-split")
    if find_spec("gguf") is None:
        raise ValueError(f"model '{path}' is read with a package that is missing: pip install 'cohort-rl[gguf]'")


def sources(path: Path) -> Sources:
    """The GGUF file."""
    file = _file(path)
    return {source_name(str(path)): {file.name: file} if file.is_file() else {}}


def convert(path: Path, folder: Path) -> None:
    """Save the model as a folder. ValueError for a file that transformers cannot read."""
    import torch

    from ...policy.library import import_generation
    from ...policy.model import save_model

    check(path)
    import_generation()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = _file(path)
    place: Any = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    loaded: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32, output_loading_info=True)
    model, found = loaded
    if found["missing_keys"]:
        raise ValueError(f"model '{path}' must have all its weights, got none for {min(found['missing_keys'])}")
    del model.config.quantization_config
    save_model(folder, model, AutoTokenizer.from_pretrained(**place))


def _file(path: Path) -> Path:
    """The file itself, or the only one of a folder; ValueError for several."""
    if not path.is_dir():
        return path
    first, *others = sorted(path.glob("*.gguf"))
    if others:
        raise ValueError(f"model folder '{path}' must have one GGUF file, got {1 + len(others)}; name the file itself")
    return first
