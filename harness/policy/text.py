"""Decides how a policy reads prompts and ends completions: tokenizer, `prompt` settings, rollouts from token ids.

All texts for a policy are encoded with a `TextCodec`, so that sampling, the cold start, limits and displays cannot
differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn

from ..data import Group, Prompt, PromptFormat, Rollout
from .library import hold_date
from .model import load_tokenizer, model_config
from .tiny import TINY

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..settings.run import RunSpec

Row = tuple[Sequence[int], Sequence[float], bool]  # token ids, their log-probs (nats), whether the text ended
AUTO = PromptFormat()
QUESTION, ANSWER = "zquestionz", "zanswerz"  # no template has these words, and none is likely to change them


def load_codec(model: str, settings: PromptFormat, *in_words: Callable[[str], str]) -> TextCodec:
    """The codec of a model by its name in a spec; ValueError if its chat template cannot be used, or if a token has no
    embedding. Reads no weights."""
    codec, config = TextCodec(tokenizer := load_tokenizer(model), settings, *in_words), model_config(model)
    ids = {*tokenizer.get_vocab().values()} - tokenizer.added_tokens_decoder.keys()  # of which some occur in no text
    need = 1 + max(*ids, *codec.encode(QUESTION), *codec.encode_completion(ANSWER), tokenizer.pad_token_id)  # pyright: ignore
    if model != TINY and need > (rows := getattr(config.get_text_config(decoder=True), "vocab_size", need)):
        raise ValueError(
            f"model '{model}' must embed each token of its tokenizer, got {rows} embeddings for {need} tokens; use the "
            f"tokenizer that it was trained with, or save it after resize_token_embeddings({need})"
        )
    return codec


def codec_of(spec: RunSpec, model: str | None = None) -> TextCodec:
    """The codec with which a model, by default the run's own, reads the prompts of the run and of its tests."""

    def in_words(text: str) -> str:
        for task in (spec.task, *spec.evaluation.tests):
            text = task.in_words(text)
        return text

    return load_codec(model or spec.model, spec.prompt, in_words)


class TextCodec:
    """Prompts and completions as the token ids that one policy reads and writes.

    `turn_end` is the token that closes an answer in the model's chat template. It also ends a completion of a plain
    prompt, because nothing after it belongs to the answer. ValueError for settings that need a missing or failing
    template. A chat's prompt is put `in_words`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: PromptFormat = AUTO,
        in_words: Callable[[str], str] = lambda text: text,
    ):
        hold_date()
        self.in_words = in_words
        self.tokenizer, self.settings, self._model = tokenizer, settings, tokenizer.name_or_path or TINY
        self.encode = cache(self._encode)
        self.is_chat = settings.format != "plain" and bool(tokenizer.chat_template)
        if not self.is_chat and settings.needs_template:
            raise ValueError(
                f"prompt.format=chat, prompt.system and prompt.template_arguments need a chat template, which the "
                f"tokenizer of '{self._model}' lacks; leave them out or use another model"
            )
        if self.is_chat:  # whose template may fail, leave something out, or not get some arguments
            taken = inspect.signature(tokenizer.apply_chat_template).parameters.keys() | {"messages", "strftime_now"}
            if refused := sorted(taken & settings.template_arguments.keys()):
                raise ValueError(
                    "prompt.template_arguments must be names that are free for a template, got "
                    f"{', '.join(refused)}; leave them out"
                )
            prompt = self._render(QUESTION)
            for part, name in ((QUESTION, "the question"), ((settings.system or "").strip(), "prompt.system")):
                if part not in prompt:
                    raise self._refusal(f"leaves out {name}")
        self.opens_thought = self.is_chat and self._render(QUESTION).rstrip().endswith("<think>")
        self.turn_end = self._find_turn_end() if tokenizer.chat_template else None

    def encode_completion(self, text: str) -> list[int]:
        """Token ids of a completion, with the token that ends it: the end of turn in a chat, else of the sequence."""
        end = self.turn_end if self.is_chat and self.turn_end is not None else self.tokenizer.eos_token_id
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], end]  # pyright: ignore

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def end_ids(self, policy: nn.Module | None = None) -> list[int]:
        """Every token that ends a completion: the tokenizer's, the end of turn, the ends in the policy's settings."""
        ids: set[Any] = {self.turn_end}
        for config in (self.tokenizer, getattr(policy, "generation_config", None), getattr(policy, "config", None)):
            value: Any = getattr(config, "eos_token_id", None)
            ids.update(value if isinstance(value, list | tuple) else [value])
        return sorted(i for i in ids if i is not None)

    def _encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt."""
        if self.is_chat:
            text = self._render(self.in_words(text))
        ids: Any = self.tokenizer(text, add_special_tokens=not self.is_chat)["input_ids"]
        begin = self.tokenizer.bos_token_id
        return tuple(ids[1:] if begin is not None and ids[:2] == [begin] * 2 else ids)

    def _render(self, *turns: str) -> str:
        """A question, or a question and its answer, through the chat template."""
        system = self.settings.system
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turns, strict=False)]
        try:
            arguments: Any = {"add_generation_prompt": len(turns) == 1, **self.settings.template_arguments}
            rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        except Exception as error:  # a template is foreign code, which may raise anything
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            raise self._refusal(f"fails ({reason})") from None
        return str(rendered)

    def _find_turn_end(self) -> int | None:
        """The first special token after an answer in the chat template; None without one."""
        try:
            _, answer, after = self._render(QUESTION, ANSWER).rpartition(ANSWER)
        except ValueError:
            if self.is_chat:
                raise
            return None  # a plain prompt does not need the template
        ids: Any = self.tokenizer(after, add_special_tokens=False)["input_ids"] if answer else []
        known = self.tokenizer.added_tokens_decoder
        return next((i for i in ids if i in known and i != self.tokenizer.unk_token_id), None)

    def _refusal(self, what: str) -> ValueError:
        return ValueError(f"the chat template of '{self._model}' {what}; correct it or set prompt.format=plain")


def as_groups(
    prompts: Sequence[Prompt], encoded: Sequence[tuple[int, ...]], rows: Iterable[Row], codec: TextCodec
) -> list[Group]:
    """One group per prompt of its equal share of `rows`, in order; `encoded` are the prompts' token ids. The text of a
    prompt ends in `<think>` where the chat template opens a thought."""
    rows = list(rows)
    if codec.opens_thought:
        prompts = [replace(prompt, text=f"{prompt.text}\n<think>") for prompt in prompts]
    shown = [list(ids[:-1] if ids[-1] == codec.turn_end else ids) for ids, _, _ in rows]  # it may be no special token
    texts = codec.tokenizer.batch_decode(shown, skip_special_tokens=True)
    rollouts = [
        Rollout(text, tuple(ids), tuple(nats), "stop" if ended else "length")
        for text, (ids, nats, ended) in zip(texts, rows, strict=True)
    ]
    size = len(rollouts) // len(prompts)
    return [Group(p, encoded[i], tuple(rollouts[i * size : (i + 1) * size])) for i, p in enumerate(prompts)]
