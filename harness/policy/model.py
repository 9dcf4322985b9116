"""Checks, loads and saves the policy that a run starts from: a Hub id, a local folder, or the built-in `tiny`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..base.files import write_hashed, write_manifest
from ..base.inputs import expecting, hub_answers
from ..base.words import did_you_mean
from ..devices import ranks
from ..settings.errors import SpecError
from .library import import_generation
from .lora import adapter_weights, has_adapter, merge_saved, save_adapter
from .sources import BASE, Base, base_of, folder_of, is_here, is_local, pinned, reader_of, verify_model
from .tiny import TINY, tiny_config, tiny_model, tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

M = TypeVar("M", bound=nn.Module)
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # of safetensors  # fmt: skip


def check_model(name: str, setting: str = "model") -> None:
    """ValueError if `name` is a local folder that cannot be a model with its tokenizer, or a path that is not there.
    Reads no weights; a Hub id is checked when it is loaded."""
    may_be_tiny = setting == "model"
    if name == TINY and may_be_tiny:
        return
    path = Path(name).expanduser()
    if (reader := reader_of(name)) is not None:
        return reader.check(path)
    if not path.is_dir():
        tiny = "'tiny', " if may_be_tiny else ""
        rule = f"{setting} must be {tiny}a Hub id or an existing folder, got '{name}'"
        if name.startswith((".", "~", "/")) or name.count("/") > 1 or path.exists():
            raise ValueError(f"{rule}, which is no folder")
        if may_be_tiny and "/" not in name and did_you_mean(name, [TINY]):
            raise ValueError(f"{rule}; did you mean 'tiny'?")
        return
    for part, files in (
        ("config.json", ["config.json"]),
        ("tokenizer", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"]),
        ("*.safetensors weights", ["*.safetensors"]),
    ):
        if not any(found for file in files for found in path.glob(file)):
            maker = "tokenizer" if part == "tokenizer" else "model"
            raise ValueError(f"model folder '{path}' has no {part}; save it there with {maker}.save_pretrained(folder)")
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"model weights '{file}' cannot be read ({error}); copy the file again") from None
    if (base := base_of(name)) is not None:
        try:
            check_model(base.name)
        except ValueError as error:
            raise ValueError(
                f"{setting} '{name}' is an adapter and needs the model that it changes: {error}; a cold start that was "
                "deleted is made again by a run with the same cold_start and folder of runs"
            ) from None


def length_limit(config: Any) -> int | None:
    """Most tokens of a text, including the completion, for which the model reads positions unchanged; None if
    unlimited. Rotary angles `dynamic` and `longrope` change with the text's length, for earlier tokens too."""
    config = config.get_text_config(decoder=True)
    ropes: Any = getattr(config, "rope_parameters", None)
    if not ropes:
        return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    limits = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
    kinds = [ropes] if "rope_type" in ropes else [kind for kind in ropes.values() if isinstance(kind, dict)]
    found = [(vars(config) | kind)[limits[kind["rope_type"]]] for kind in kinds if kind.get("rope_type") in limits]
    return min(found, default=None)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with an end-of-sequence and a padding token."""
    if name == TINY:
        return tiny_tokenizer()
    import_generation()
    from transformers import AutoTokenizer  # seconds to import, and a spec is checked without it

    tokenizer = AutoTokenizer.from_pretrained(**local_or_hub(name), trust_remote_code=False)
    verify_model(name)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of '{name}' has no end-of-sequence token; set tokenizer.eos_token and save it")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.clean_up_tokenization_spaces = False  # or else "7 .5" is graded as "7.5"
    return tokenizer


def load_policy(name: str, *, seed: int) -> nn.Module:
    """A causal language model on the CPU in float32, without dropout, an adapter merged into its base; `seed` only
    matters for the initial weights of `tiny`."""
    model = on_base(name, seed, _load_policy)
    for key in ("attention_dropout", "hidden_dropout", "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if getattr(model.config, key, None):
            setattr(model.config, key, 0.0)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return nn.Module.to(model, torch.float32).eval()


def on_base(name: str, seed: int, load: Callable[[str, int], M]) -> M:
    """The result of `load(name, seed)`; for an adapter, its base loaded that way with the adapter merged. InputsChanged
    if the base is not the one that the adapter was trained on."""
    base = base_of(name)
    if base is None:
        return load(name, seed)
    with expecting(base.inputs):
        model = on_base(base.name, base.seed, load)
    merge_saved(model, Path(name).expanduser())
    verify_model(name)
    return model


def check_weights(name: str) -> None:
    """ValueError if a local model lacks a weight. Reads their names and shapes alone."""
    if is_local(name) and base_of(name) is None:
        _load_policy(name, 0, device_map="meta")


def _load_policy(name: str, seed: int, **how: Any) -> nn.Module:
    if name == TINY:
        return tiny_model(seed)
    model_config(name)
    from transformers import AutoModelForCausalLM

    model = pretrained(AutoModelForCausalLM, name, **how)
    verify_model(name)
    return model


def pretrained(kind: Any, name: str, may_lack: str = " ", **how: Any) -> Any:
    """A model that a class of transformers loads. ValueError if a weight has another shape than in the configuration,
    or is missing and its name does not begin with `may_lack`."""
    given = {"dtype": torch.float32, "trust_remote_code": False, "use_safetensors": True, **local_or_hub(name), **how}
    model, found = kind.from_pretrained(**given, output_loading_info=True, ignore_mismatched_sizes=True)
    lost = sorted(weight for weight in found["missing_keys"] if not weight.startswith(may_lack))
    if lost := lost + sorted(weight for weight, *_ in found["mismatched_keys"]):
        rule = f"must have all weights in the shapes of its config.json, got none for {', '.join(lost[:3])}"
        raise ValueError(f"model '{name}' {rule} ({len(lost)} in all); copy or save it again")
    return model


def saved_weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a folder of the model holds: only the adapter, or all, tied ones once."""
    if has_adapter(model):
        return adapter_weights(model)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    again = names - {name for name, _ in model.named_parameters()}
    again |= set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return {name: value for name, value in model.state_dict().items() if name not in again}


def save_model(
    folder: Path,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    weights: Mapping[str, Tensor | None] | None = None,
    base: Base | None = None,
    group: Any = None,
) -> dict[str, str]:
    """Write a folder that `load_policy` and `load_tokenizer` load, all weights (for transformers), or an adapter alone
    (for peft) and its `base`, with a manifest: the hash (SHA-256) of each file.

    `weights` are `saved_weights` or copies of them, by default the model's. Processes that `group` together each write
    those that are not None, and the first one completes the folder.
    """
    from transformers.core_model_loading import revert_weight_conversion

    folder.mkdir(parents=True, exist_ok=True)
    given = {k: x for k, x in (saved_weights(model) if weights is None else weights).items() if x is not None}
    rank, size = (ranks.rank(), ranks.world_size()) if group is not None else (0, 1)
    adapted, config, part = has_adapter(model), cast(Any, model.config), ()
    facts: dict[str, Any] = {}
    if given and not adapted:
        file = "model.safetensors" if size == 1 else f"model-{rank + 1:05d}-of-{size:05d}.safetensors"
        own = revert_weight_conversion(model, given)  # pyright: ignore[reportArgumentType]  # as transformers names them
        part = (file, write_hashed(folder / file, partial(write_safetensors, own)), list(own))
    parts = [part for part in ranks.gathered(part, group) if part]
    if rank > 0:
        return {}
    if adapted:
        assert base is not None
        save_adapter(folder, model, given, base.name)
        facts = {BASE: asdict(base)}
    else:
        config.dtype, config.architectures = str(model.dtype)[6:], [type(model).__name__.removeprefix("FSDP")]
        if model.can_generate():  # pyright: ignore
            settings: Any = model.generation_config  # whose `save_pretrained` refuses some that it loads
            settings.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
        if size > 1:
            index = {"metadata": {}, "weight_map": {name: file for file, _, names in parts for name in names}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    return write_manifest(folder, known={file: digest for file, digest, _ in parts}, **facts)


def write_safetensors(weights: Mapping[str, Tensor], stream: Any) -> None:
    """Write tensors to a stream in the format of safetensors, whose own functions take no stream."""
    order = sorted(weights.items(), key=lambda item: (-item[1].itemsize, item[0]))  # so that each begins aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in order:
        start, end = end, end + value.numel() * value.itemsize
        header[name] = {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    stream.write(len(words).to_bytes(8, "little") + words)
    for _, value in order:
        stream.write(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)


def model_config(name: str) -> PretrainedConfig:
    """The shape of a model by its name in a spec; downloads no weights. ValueError if they are quantised."""
    if name == TINY:
        return tiny_config()
    import_generation()
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(**local_or_hub(name), trust_remote_code=False)
    if getattr(config, "quantization_config", None):
        raise ValueError(f"model '{name}' must have weights that can be trained, got quantised ones; use its original")
    return config


def empty_model(config: PretrainedConfig, *, scores: bool = False) -> Any:
    """A causal language model of that shape, or a sequence classifier, with parameters that have no storage."""
    import_generation()
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(config, trust_remote_code=False).eval()


def local_or_hub(name: str) -> dict[str, str]:
    """The model's name for transformers: a folder's path with `~` expanded, or else the Hub id and its commit."""
    if not is_here(name) and not hub_answers():
        raise SpecError(f"model '{name}' must be here, as the Hub cannot be reached; give a folder with a model")
    path = folder_of(name)
    where = {"pretrained_model_name_or_path": str(path) if path.is_dir() else name}
    return where | ({"revision": commit} if (commit := pinned(name)) else {})
