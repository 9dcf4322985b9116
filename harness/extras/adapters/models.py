"""Merges an adapter that peft saved (LoRA and its kin) into the model that its `adapter_config.json` names.

Adapters that Cohort saved have a manifest, which binds them to the content of their base; the core reads them.
"""

import json
from pathlib import Path
from typing import Any

from ...base.files import MANIFEST
from ...base.inputs import Sources
from ...policy.sources import ADAPTER_CONFIG, SUFFIXES, model_sources, source_name

WEIGHTS = "adapter_model.safetensors"


def reads(path: Path) -> bool:
    """Whether the path is a folder with an adapter, and not one that Cohort saved."""
    return (path / ADAPTER_CONFIG).is_file() and not (path / MANIFEST).is_file()


def check(path: Path) -> None:
    """ValueError for an adapter without weights, without a base or with a bad one, or of a kind that cannot be merged.
    Reads no weights."""
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    from ...policy.model import check_model

    if not (path / WEIGHTS).is_file():
        raise ValueError(f"adapter '{path}' has no {WEIGHTS}; save it there with model.save_pretrained(folder)")
    kind: Any = _config(path).get("peft_type")
    if not hasattr(PEFT_TYPE_TO_TUNER_MAPPING.get(kind), "merge_and_unload"):
        raise ValueError(f"adapter '{path}' must change weights, as LoRA does, to be merged, got peft_type {kind}")
    try:
        check_model(_base(path))
    except ValueError as error:
        raise ValueError(f"model '{path}' is an adapter and needs the model that it changes: {error}") from None


def sources(path: Path) -> Sources:
    """The files of the adapter, and the sources of its base."""
    files = {file.name: file for file in sorted(path.iterdir()) if file.suffix in SUFFIXES}
    return {source_name(str(path)): files, **model_sources(_base(path))}


def convert(path: Path, folder: Path) -> None:
    """Save the base with the adapter merged. ValueError if the adapter is for another model."""
    import torch
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    from ...policy.lora import check_layers
    from ...policy.model import load_policy, load_tokenizer, save_model

    check(path)
    model: Any = load_policy(_base(path), seed=0)
    config, saved = PeftConfig.from_pretrained(str(path)), load_file(path / WEIGHTS)
    with torch.random.fork_rng(devices=[]):
        wrapped: Any = PeftModel(model, config)
    check_layers(model, f"the layers of adapter '{path}'")
    own = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    if other := [name for name in own.keys() ^ saved.keys() if ".base_layer." not in name]:  # a head's, which peft adds
        raise ValueError(f"adapter '{path}' must fit '{_base(path)}', got {min(other)} in one of the two only")
    set_peft_model_state_dict(wrapped, saved)
    has_own, tokenizer = (path / "tokenizer_config.json").is_file(), load_tokenizer(_base(path))
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False) if has_own else tokenizer
    save_model(folder, wrapped.merge_and_unload(), tokenizer)


def _base(path: Path) -> str:
    """The name of the model that the adapter changes."""
    if not (base := _config(path).get("base_model_name_or_path")):
        raise ValueError(f"{ADAPTER_CONFIG} names none; set base_model_name_or_path there to a Hub id or a folder")
    return base


def _config(path: Path) -> dict[str, Any]:
    return json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
