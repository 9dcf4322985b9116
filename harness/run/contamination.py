"""Measures how well a policy knows the exact words of problems, a sign that it was trained on the benchmark.

Two tests of each question, as plain text without a prompt or chat template:
- Completion: the policy reads the first part and continues greedily for as many words as were held back (partial
  prompts, arXiv:2507.10532, which holds back 40 %). Exact match and ROUGE-L (Lin 2004) compare the two.
- Likelihood: the mean log-prob per token, minus that of variants with other numbers or other words. No single score
proves that a policy has seen a question: numbers that people choose are likelier than random ones, and common phrases
are easy to complete. So scores are compared with those of other questions of the same kind.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import numpy as np
import torch
from torch import nn

from ..data import Prompt, PromptFormat, Sampling
from ..devices.device import mixed_precision, resolve_device
from ..ground.streams import generator
from ..ground.tensors import pad_right
from ..interfaces import RolloutEngine
from ..policy.forward import microbatch_tokens, token_logprobs
from ..policy.model import length_limit
from ..policy.text import TextCodec
from ..spec.run import RunSpec
from .evaluate import PROMPTS_AT_ONCE
from .state import build_engine

NUM_VARIANTS = 4  # of a question, with other numbers
HELD_BACK_WORDS = 200  # at most; the rest of a longer question is not tested
_WORD = re.compile(r"\w+|[^\w\s]")
_NUMBER = re.compile(r"[0-9]+")
# The meaning may change, as long as every question is treated alike.
_OTHER_WORDS = {
    "how many": "what number of", "how much": "what amount of", "what is": "state", "what are": "state",
    "find": "determine", "determine": "find", "compute": "calculate", "calculate": "compute", "evaluate": "compute",
    "simplify": "reduce", "suppose": "assume", "let": "set", "such that": "so that", "total": "overall",
    "each": "every", "every": "each", "per": "for each", "if": "when", "when": "if", "then": "afterwards",
    "after": "following", "before": "prior to", "and": "as well as", "but": "yet", "also": "in addition",
    "only": "just", "more than": "above", "less than": "below", "buys": "purchases", "bought": "purchased",
    "gives": "hands", "gave": "handed", "gets": "receives", "got": "received", "needs": "requires", "makes": "produces",
    "has": "owns", "had": "owned", "wants": "wishes", "costs": "is priced at", "the": "this", "a": "one", "an": "one",
}  # fmt: skip
_PHRASE = re.compile(rf"\b({'|'.join(sorted(_OTHER_WORDS, key=len, reverse=True))})\b", re.IGNORECASE)


@dataclass(frozen=True)
class Knowledge:
    """The scores of one question.

    `renumbered` and `reworded` are differences of mean log-probs in nats per token, above 0 if the question itself is
    the likelier text. A score is NaN if the question is too short, has no number, or has no known word.
    """

    prompt_id: str
    start: str
    held_back: str
    continuation: str
    exact: bool
    rouge_l: float
    renumbered: float
    reworded: float


def knowledge(
    questions: Mapping[str, str],
    policy: nn.Module,
    codec: TextCodec,
    spec: RunSpec,
    *,
    prefix_fraction: float = 0.6,
    on_progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> dict[str, Knowledge]:
    """The scores of every question (id -> text) that is not too long for the policy, on the spec's device."""
    codec = TextCodec(codec.tokenizer, PromptFormat(format="plain"))
    questions = {key: text for key, text in questions.items() if _fits(text, policy, codec)}
    with closing(build_engine(spec, policy, codec)) as engine:
        asked = ask_for_rest(
            list(questions.values()), prefix_fraction, engine, codec, spec, partial(on_progress, "completion")
        )
    liked = compare_variants(questions, policy, codec, spec, partial(on_progress, "likelihood"))
    found = {}
    for key, (start, held_back, continuation) in zip(questions, asked, strict=True):
        own, wanted = words(continuation), words(held_back)
        exact = bool(wanted) and own == wanted
        found[key] = Knowledge(key, start, held_back, continuation, exact, rouge_l(own, wanted), *liked[key])
    return found


def ask_for_rest(
    questions: Sequence[str],
    prefix_fraction: float,
    engine: RolloutEngine,
    codec: TextCodec,
    spec: RunSpec,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[tuple[str, str, str]]:
    """(first part, part held back, the policy's greedy continuation of as many words) of every question."""
    parts = [parted(question, prefix_fraction) for question in questions]
    continuations = [""] * len(parts)
    sizes = [len(codec.encode(held_back)) for _, held_back in parts]
    order = sorted(range(len(parts)), key=lambda place: sizes[place])
    for begin in range(0, len(order), PROMPTS_AT_ONCE):
        places = order[begin : begin + PROMPTS_AT_ONCE]
        sampling = Sampling(temperature=0.0, max_tokens=sizes[places[-1]] + 1)
        prompts = [Prompt(str(place), parts[place][0], "") for place in places]
        with mixed_precision(resolve_device(spec.device), spec.autocast):
            groups = engine.generate(prompts, 1, sampling, seed=spec.seed, step=0)
        for place, group in zip(places, groups, strict=True):
            count = len(words(parts[place][1]))
            continuations[place] = _first_words(group.rollouts[0].text, count)
        on_progress(begin + len(places), len(order))
    return [(start, held_back, rest) for (start, held_back), rest in zip(parts, continuations, strict=True)]


def compare_variants(
    questions: Mapping[str, str],
    policy: nn.Module,
    codec: TextCodec,
    spec: RunSpec,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, tuple[float, float]]:
    """(renumbered, reworded) of every question, as `Knowledge` has them; variants depend on seed and id alone."""
    variants: dict[str, tuple[list[str], list[str]]] = {}
    for key, text in questions.items():
        random = generator("contamination", spec.seed, key)
        others = [renumbered(text, random) for _ in range(NUM_VARIANTS)]
        variants[key] = ([other for other in others if other != text], [w for w in [reworded(text)] if w != text])
    texts = dict.fromkeys([*questions.values(), *(text for both in variants.values() for one in both for text in one)])
    known = mean_logprobs(list(texts), policy, codec, spec, on_progress)

    def advantage(text: str, others: Sequence[str]) -> float:
        return known[text] - fmean(known[other] for other in others) if others else math.nan

    return {
        key: (advantage(text, variants[key][0]), advantage(text, variants[key][1])) for key, text in questions.items()
    }


def mean_logprobs(
    texts: Sequence[str],
    policy: nn.Module,
    codec: TextCodec,
    spec: RunSpec,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """Text -> mean log-prob (nats) of its tokens after the first; NaN for a text of one token."""
    device = resolve_device(spec.device)
    rows = sorted(((text, codec.encode(text)) for text in texts), key=lambda row: len(row[1]))
    at_once = max(1, microbatch_tokens(spec.optimizer, device) // max((len(row) for _, row in rows), default=1))
    found: dict[str, float] = {}
    for start in range(0, len(rows), at_once):
        some, ids = zip(*rows[start : start + at_once], strict=True)
        tokens = pad_right(ids, torch.int64).to(device)
        mask = pad_right([[0] + [1] * (len(row) - 1) for row in ids], torch.bool).to(device)
        with torch.no_grad(), mixed_precision(device, spec.autocast):
            sums = token_logprobs(policy, tokens, mask, 1.0)[0].sum(dim=1)
        found |= dict(zip(some, (sums / mask.sum(dim=1)).tolist(), strict=True))
        on_progress(len(found), len(texts))
    return found


def parted(question: str, fraction: float) -> tuple[str, str]:
    """The first `fraction` of the characters, cut back to the end of a word if possible, and the rest, which is held
    back."""
    cut = max(1, round(fraction * len(question)))
    start = question[:cut]
    if question[cut : cut + 1].strip():  # inside a word, or before one
        start = re.sub(r"\s+\S*$", "", start)
    return start, _first_words(question[len(start) :], HELD_BACK_WORDS)


def words(text: str) -> list[str]:
    """Words, numbers and other single characters, in lower case."""
    return _WORD.findall(text.lower())


def _first_words(text: str, count: int) -> str:
    """The text up to the end of its first `count` words."""
    ends = [match.end() for _, match in zip(range(count), _WORD.finditer(text), strict=False)]
    return text[: ends[-1]] if ends else ""


def rouge_l(found: Sequence[str], wanted: Sequence[str]) -> float:
    """The F1 of the longest common subsequence of two lists of words (Lin 2004, section 3); NaN if the second is
    empty."""
    if not wanted:
        return math.nan
    lengths = [0] * (len(wanted) + 1)
    for word in found:
        diagonal = 0
        for place, other in enumerate(wanted, start=1):
            above = lengths[place]
            lengths[place] = diagonal + 1 if word == other else max(above, lengths[place - 1])
            diagonal = above
    return 2 * lengths[-1] / (len(found) + len(wanted))


def renumbered(text: str, random: np.random.Generator) -> str:
    """The text with every number replaced by another with as many digits; equal numbers get equal replacements."""
    others: dict[str, str] = {}
    for number in _NUMBER.findall(text):
        if number not in others:
            first = "0" if number[0] == "0" and len(number) > 1 else str(random.integers(1, 10))
            others[number] = first + "".join(map(str, random.integers(0, 10, len(number) - 1)))
    return _NUMBER.sub(lambda match: others[match[0]], text)


def reworded(text: str) -> str:
    """The text with the words and phrases of a fixed list replaced by others."""

    def other(match: re.Match[str]) -> str:
        found = _OTHER_WORDS[match[0].lower()]
        return found.capitalize() if match[0][0].isupper() else found

    return _PHRASE.sub(other, text)


def _fits(question: str, policy: nn.Module, codec: TextCodec) -> bool:
    """Whether the policy can read the question, and a variant of up to twice its length, like shorter texts."""
    limit, count = length_limit(policy.config), len(codec.encode(question))
    return count > 1 and (limit is None or 2 * count < limit)
