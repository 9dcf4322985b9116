"""Which policy a run starts from: a Hub id, a local folder, or the built-in `tiny` model made in code.

`tiny` is a Llama of about 167 k parameters (hidden 64, 3 layers, 2 heads, intermediate 192, tied embeddings) with a
character tokenizer for printable ASCII; other characters are mapped to their closest ASCII spelling or to `<unk>`.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import nn

from harness.plugins import nearest
from harness.policy.lora import has_adapter, merged_weights

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast


TINY = "tiny"
_NAMES = ("a Hub id or an existing folder", "'tiny', a Hub id or an existing folder")
_SPECIAL = ("<pad>", "<eos>", "<unk>")
_CHARACTERS = "\n\t" + "".join(map(chr, range(32, 127)))
_SPELLINGS = {
    "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-", "\u2212": "-",
    "\u00d7": "*", "\u00f7": "/", "\u2026": "...", "\u20ac": "EUR", "\u00a3": "GBP", "\r\n": "\n",
}  # fmt: skip


def check_model(name: str, setting: str = "model") -> None:
    """Raise ValueError where `name` is a local folder that cannot be a model with its tokenizer.

    Reads no weights. A Hub id is checked when it is loaded; a name that looks like a path must exist.
    """
    if name == TINY and setting == "model":
        return
    path = Path(name).expanduser()
    if not path.is_dir():
        looks_like_path = name.startswith((".", "~", "/")) or name.count("/") > 1 or path.exists()
        if looks_like_path:
            raise ValueError(f"{setting} must be {_NAMES[setting == 'model']}, got '{name}', which is no folder")
        if setting == "model" and "/" not in name and nearest(name, [TINY]):
            raise ValueError(
                f"model must be 'tiny', a Hub id or an existing folder, got '{name}'; did you mean 'tiny'?"
            )
        return
    if not (path / "config.json").is_file():
        raise ValueError(f"model folder '{path}' has no config.json; save it with model.save_pretrained(folder)")
    if not any(
        (path / f).is_file() for f in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    ):
        raise ValueError(
            f"model folder '{path}' has no tokenizer; save it there with tokenizer.save_pretrained(folder)"
        )
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"model folder '{path}' has no *.safetensors weights; save with model.save_pretrained(folder)")
    for file in weights:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"model weights '{file}' cannot be read ({error}); copy the file again") from None


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with an end-of-sequence and a padding token."""
    if name == TINY:
        return tiny_tokenizer()
    _import_generation()
    from transformers import AutoTokenizer  # seconds to import, and a spec is checked without it

    tokenizer = AutoTokenizer.from_pretrained(local_or_hub(name), trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of '{name}' has no end-of-sequence token; set tokenizer.eos_token and save it")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(name: str, *, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A causal language model on the CPU, without dropout; `seed` only matters for the initial weights of `tiny`."""
    if name == TINY:
        model = tiny_model(seed)
    else:
        _import_generation()
        from transformers import AutoModelForCausalLM

        _no_progress_bars()
        model = AutoModelForCausalLM.from_pretrained(
            local_or_hub(name), dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        )
    for key in ("attention_dropout", "hidden_dropout", "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if getattr(model.config, key, None):
            setattr(model.config, key, 0.0)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return nn.Module.to(model, dtype).eval()


def tiny_model(seed: int) -> LlamaForCausalLM:
    """The built-in model with freshly initialised weights; leaves the global random state as it was."""
    _import_generation()
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(tiny_config())


def tiny_config() -> LlamaConfig:
    """The shape of the built-in model."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(_SPECIAL) + len(_CHARACTERS),
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=192,
        max_position_embeddings=2048,
        initializer_range=0.06,  # 0.02, the default for wide models, learns several times slower at width 64
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=_SPECIAL.index("<eos>"),
        pad_token_id=_SPECIAL.index("<pad>"),
    )


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character: padding, end of sequence, unknown, newline, tab and printable ASCII."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*_SPECIAL, *_CHARACTERS))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    spellings = [normalizers.Replace(old, new) for old, new in _SPELLINGS.items()]
    inner.normalizer = normalizers.Sequence([*spellings, normalizers.NFKD(), normalizers.StripAccents()])  # pyright: ignore
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore
    inner.decoder = decoders.Fuse()  # pyright: ignore
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a prompt: through the chat template where the tokenizer has one, as plain text otherwise."""
    if tokenizer.chat_template:
        text = str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        )
        return tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore
    return tokenizer(text)["input_ids"]  # pyright: ignore


def encode_completion(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a completion, end of sequence included."""
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]  # pyright: ignore


def end_token_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a completion: the tokenizer's own and those of the model's generation settings."""
    ids: set[Any] = set()
    for config in (tokenizer, getattr(model, "generation_config", None), getattr(model, "config", None)):
        value: Any = getattr(config, "eos_token_id", None)
        ids.update(value if isinstance(value, list | tuple) else [value])
    return sorted(i for i in ids if i is not None)


def save_model(folder: Path, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load (safetensors), an adapter merged."""
    _no_progress_bars()
    weights = merged_weights(model) if has_adapter(model) else None
    model.save_pretrained(folder, state_dict=weights)  # pyright: ignore
    tokenizer.save_pretrained(str(folder))


def model_identity(name: str) -> dict[str, Any]:
    """What a cache key must know of a model: its name, the shape of `tiny`, size and time of a local folder's files."""
    if name == TINY:
        return {"name": name, "config": tiny_config().to_dict(), "characters": _CHARACTERS}
    path = Path(name).expanduser()
    if not path.is_dir():
        return {"name": name}
    files = {f.name: [f.stat().st_size, f.stat().st_mtime_ns] for f in sorted(path.iterdir()) if f.is_file()}
    return {"name": os.path.realpath(path), "files": files}


def _import_generation() -> None:
    """Import transformers' generation as where scikit-learn is not installed: only assisted decoding uses it.

    Importing scikit-learn, which the importances of a search need, costs 0.9 s and 103 MB.
    """
    if "transformers.generation.candidate_generator" in sys.modules:
        return
    utils: Any = import_module("transformers.utils")
    found = utils.is_sklearn_available
    utils.is_sklearn_available = lambda: False
    try:
        import transformers.generation.candidate_generator  # noqa: F401
    finally:
        utils.is_sklearn_available = found


def _no_progress_bars() -> None:
    """Keep transformers from drawing one for every checkpoint; they would break into our own."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def local_or_hub(name: str) -> str:
    """What transformers loads a model from: the folder of that name, `~` expanded, or else the Hub id as it is."""
    path = Path(name).expanduser()
    return str(path) if path.is_dir() else name
