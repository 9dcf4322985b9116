"""Prompts and completions as token ids, the tokens that end a text, and rollouts from token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from harness.types import Group, Prompt, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = tuple[Sequence[int], Sequence[float], bool]  # token ids, their log-probs (nats), whether the text ended


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a prompt: through the tokenizer's chat template if it has one, as plain text otherwise."""
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


def as_groups(
    prompts: Sequence[Prompt], encoded: Sequence[tuple[int, ...]], rows: Iterable[Row], tokenizer: Any
) -> list[Group]:
    """One group per prompt of its equal share of `rows`, in order; `encoded` are the prompts' token ids."""
    rows = list(rows)
    texts = tokenizer.batch_decode([list(ids) for ids, _, _ in rows], skip_special_tokens=True)
    rollouts = [
        Rollout(text, tuple(ids), tuple(nats), "stop" if ended else "length")
        for text, (ids, nats, ended) in zip(texts, rows, strict=True)
    ]
    size = len(rollouts) // len(prompts)
    return [Group(p, encoded[i], tuple(rollouts[i * size : (i + 1) * size])) for i, p in enumerate(prompts)]
