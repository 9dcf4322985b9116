"""The built-in model `tiny`, made in code: a Llama of about 167 k parameters and a character tokenizer.

Hidden 64, 3 layers, 2 heads, intermediate 192, tied embeddings. The tokenizer knows printable ASCII; other characters
are mapped to their closest ASCII spelling or to `<unk>`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from .library import import_generation

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


TINY = "tiny"
_SPECIAL = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "\n\t" + "".join(map(chr, range(32, 127)))
_SPELLINGS = {
    "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-", "\u2212": "-",
    "\u00d7": "*", "\u00f7": "/", "\u2026": "...", "\u20ac": "EUR", "\u00a3": "GBP", "\r\n": "\n",
}  # fmt: skip


def tiny_model(seed: int) -> LlamaForCausalLM:
    """The built-in model with freshly initialised weights; leaves the global random state as it was."""
    config = tiny_config()
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def tiny_config() -> LlamaConfig:
    """The shape of the built-in model."""
    import_generation()
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(_SPECIAL) + len(CHARACTERS),
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


def tiny_tokenizer(size: int = 0) -> PreTrainedTokenizerFast:
    """One token per character: padding, end of sequence, unknown, newline, tab and printable ASCII; and characters of
    the higher planes of Unicode until there are `size` tokens."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*_SPECIAL, *CHARACTERS))}
    vocabulary |= {chr(0x10000 + i): i for i in range(len(vocabulary), size)}
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
