"""Fits a Bradley-Terry reward model on ranked rollouts, the second step of RLHF.

Ouyang et al. 2022 (arXiv:2203.02155, eq. 1): for two completions of one prompt, the first ranked higher, the loss is
-log sigmoid(score(first) - score(second)), averaged over all such pairs of the prompt, then over prompts. Rollouts come
from the `rollouts/` folder that a run keeps. Completions of equal rank make no pair; a stable hash of the prompt splits
training from held-out prompts. Dropout, if the model has any, is on during the fit and follows its seed.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ...base.files import publish_folder
from ...base.inputs import digest, expected
from ...base.streams import generator
from ...base.tensors import pad_right
from ...data import InvalidRun
from ...devices.device import resolve_device
from ...policy.library import import_generation
from ...policy.model import check_model, load_tokenizer, model_config, on_base, pretrained, save_model
from ...policy.sources import source_name, verify_model
from ...policy.text import TextCodec
from ...policy.tiny import TINY

Parts = tuple[list["Ranked"], list["Ranked"]]  # to fit, and held out
Progress = Callable[[int, int], None]  # optimiser steps done, all of them
HELD_OUT = 0.1  # share of prompts that the fit never sees


class Ranked(NamedTuple):
    """The distinct completions of one prompt and the values that rank them, not all equal."""

    prompt: str
    ranks: dict[str, float]

    def rows(self) -> list[tuple[str, str]]:
        return [(self.prompt, completion) for completion in self.ranks]

    def better(self) -> Tensor:
        """[K, K] bool: whether completion i is ranked higher than completion j."""
        ranks = torch.tensor([*self.ranks.values()], dtype=torch.float64)
        return ranks[:, None] > ranks[None, :]


@dataclass(frozen=True)
class RewardModelFit:
    """The results of a fit: counts, and how often the higher-ranked completion of a pair scores higher (fractions)."""

    num_prompts: int
    num_pairs: int
    held_out_prompts: int
    held_out_pairs: int
    dropped_prompts: int
    loss: float
    accuracy: float
    held_out_accuracy: float | None


class Scorer:
    """A frozen sequence classifier with one label and its tokenizer."""

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase):
        self.model, self.codec = model, TextCodec(tokenizer)

    def score(self, rows: Sequence[tuple[str, str]]) -> list[float]:
        """The score of each (prompt, completion), in order."""
        with torch.inference_mode():
            return [float(value) for i in range(0, len(rows), 32) for value in self(rows[i : i + 32])]

    def __call__(self, rows: Sequence[tuple[str, str]]) -> Tensor:
        """[B] scores, with gradients if they are on."""
        ids = [[*self.codec.encode(p), *self.codec.encode_completion(c)] for p, c in rows]
        mask = pad_right([[1] * len(row) for row in ids], torch.int64)
        padding: Any = self.codec.tokenizer.pad_token_id
        tokens = pad_right(ids, torch.int64).masked_fill(mask == 0, padding)
        device = next(self.model.parameters()).device
        return self.model(input_ids=tokens.to(device), attention_mask=mask.to(device)).logits[:, 0].float()


def load_scorer(path: str) -> Scorer:
    """The reward model at a Hub id or local folder. ValueError if its head has not exactly one label."""
    return _load_scorer(path, digest(expected(source_name(path))))


@lru_cache(maxsize=2)
def _load_scorer(path: str, version: str) -> Scorer:
    """The same, cached by the inputs that it must find."""
    model, tokenizer = load_classifier(path)
    return Scorer(model.to(resolve_device("auto")).eval().requires_grad_(False), tokenizer)


def load_classifier(name: str, seed: int | None = None) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """A sequence classifier with one label on the CPU, float32; with a seed, a missing head is drawn from it.

    Without a seed the model must already have a head: ValueError otherwise.
    """
    import_generation()
    from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification

    def load(name: str, _: int) -> Any:
        config: Any = model_config(name)
        if name == TINY:
            config.num_labels = 1
            return LlamaForSequenceClassification(config)
        is_scorer = any("SequenceClassification" in kind for kind in config.architectures or [])
        if seed is None and not (is_scorer and config.num_labels == 1):
            found = f"{config.num_labels} labels" if is_scorer else " and ".join(config.architectures or ["none"])
            raise ValueError(
                f"rewards.reward_model.path must be a sequence classifier with one label, got {found} in '{name}'; "
                "fit one with `cohort reward-model`"
            )
        may_lack = " " if seed is None else "score"  # a head that is drawn
        model = pretrained(AutoModelForSequenceClassification, name, may_lack, num_labels=1)
        verify_model(name)
        return model

    tokenizer = load_tokenizer(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed or 0)
        model = on_base(name, 0, load)
    model.config.pad_token_id = tokenizer.pad_token_id  # the head reads the last token that is no padding
    return model, tokenizer


def train_reward_model(
    sources: Sequence[Path],
    model: str,
    out: Path,
    how: Any,
    *,
    by: str = "reward",
    seed: int = 0,
    on_progress: Progress = lambda done, total: None,
) -> RewardModelFit:
    """Fit a reward model on the rollouts in `sources` (files, or run folders) and save it as the folder `out`.

    `how` is a `stages.reward_model.RewardFit`. `by` names the value that ranks completions: `reward`, `correct`, or one
    of the run's rewards. ValueError, before any model loads, for rollouts with equal values in every group and for a
    folder that exists.
    """
    if out.exists():
        raise ValueError(f"--out must be a new folder, got '{out}', which exists")
    check_model(model)
    ranked, dropped = read_ranked(sources, by)
    parts = split(ranked)
    if not parts[0]:
        raise ValueError(
            f"rollouts must hold a prompt whose completions differ in '{by}', got {dropped} prompts without; "
            "rank by another value, or keep rollouts of more steps (checkpoints.rollouts_every)"
        )
    return replace(fit_ranked(parts, model, out, how, seed, on_progress), dropped_prompts=dropped)


def split(ranked: Sequence[Ranked]) -> Parts:
    """(completions to fit, held-out ones). A prompt is held out in every fit, or in none."""
    parts: Parts = ([], [])
    for one in ranked:
        fraction = int.from_bytes(hashlib.sha256(b"reward-model:" + one.prompt.encode()).digest()[:6]) / 2**48
        parts[fraction < HELD_OUT].append(one)
    return parts


def fit_ranked(parts: Parts, model: str, out: Path, how: Any, seed: int, on_progress: Progress) -> RewardModelFit:
    """Fit a reward model on the first part, which is not empty; it becomes the folder `out`, or takes its place."""
    train, held_out = parts
    network, tokenizer = load_classifier(model, seed)
    device = resolve_device("auto")
    scorer = Scorer(network.to(device).train(), tokenizer)
    optimizer = torch.optim.AdamW(network.parameters(), lr=how.learning_rate, weight_decay=0.0)
    losses: list[float] = []
    total = how.epochs * -(-len(train) // how.prompts_per_batch)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(generator("reward model dropout", seed).integers(2**63)))
        for epoch in range(how.epochs):
            order = generator("reward model order", seed, epoch).permutation(len(train))
            for start in range(0, len(train), how.prompts_per_batch):
                batch = [train[i] for i in order[start : start + how.prompts_per_batch]]
                optimizer.zero_grad()
                sizes = [len(item.ranks) for item in batch]
                scores = scorer([row for item in batch for row in item.rows()]).split(sizes)
                loss = torch.stack([pair_loss(s, item.better()) for s, item in zip(scores, batch, strict=True)]).mean()
                if not torch.isfinite(loss):
                    raise InvalidRun(f"the loss is {float(loss)} at step {len(losses)}; lower learning_rate")
                loss.backward()
                nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                losses.append(float(loss.detach()))
                on_progress(len(losses), total)
    network.eval()
    right, pairs = count_right(scorer, train)
    held_right, held_pairs = count_right(scorer, held_out)
    with publish_folder(out) as partial:
        save_model(partial, network.cpu(), tokenizer)
    _load_scorer.cache_clear()  # it may hold what the folder had
    accuracy = held_right / held_pairs if held_pairs else None
    last = float(np.mean(losses[-total // how.epochs :]))
    return RewardModelFit(len(train), pairs, len(held_out), held_pairs, 0, last, right / pairs, accuracy)


def read_ranked(sources: Sequence[Path], by: str) -> tuple[list[Ranked], int]:
    """(prompts with completions of different rank, number of prompts without), in the order of the files.

    A source is a file, or a folder with files of rollouts in it or in its `rollouts/`.
    """
    groups: dict[tuple[str, str, int], dict[str, float]] = defaultdict(dict)
    for source in sources:
        found = [source] if source.is_file() else sorted({*source.glob("*.jsonl"), *source.glob("rollouts/*.jsonl")})
        files = [file for file in found if file.name != "events.jsonl"]
        if not files:
            raise ValueError(f"'{source}' has no rollouts (*.jsonl, or rollouts/*.jsonl in a run's folder)")
        for file in files:
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
                place = f"{file}, line {number}"
                try:
                    row = json.loads(line)
                    group, completion = (row["prompt_id"], row["prompt"], row["step"]), row["completion"]
                except KeyError as error:
                    raise ValueError(f"{place}: field {error} is missing; is it a file of rollouts?") from None
                except (ValueError, TypeError):
                    raise ValueError(f"{place}: must be a JSON object, got {line[:40]!r}") from None
                value = row.get(by, row.get("rewards", {}).get(by))
                if not isinstance(value, int | float):
                    known = ["reward", "correct", *row.get("rewards", {})]
                    raise ValueError(f"{place}: --by must be one of {', '.join(known)}, got '{by}'")
                groups[group].setdefault(completion, float(value))
    ranked = [Ranked(prompt, ranks) for (_, prompt, _), ranks in groups.items() if len(set(ranks.values())) > 1]
    return ranked, len(groups) - len(ranked)


def count_right(scorer: Scorer, ranked: Sequence[Ranked]) -> tuple[int, int]:
    """(pairs whose higher-ranked completion scores higher, all pairs)."""
    right = total = 0
    for item in ranked:
        scores, better = torch.tensor(scorer.score(item.rows())), item.better()
        right += int(((scores[:, None] > scores[None, :]) & better).sum())
        total += int(better.sum())
    return right, total


def pair_loss(scores_K: Tensor, better_KK: Tensor) -> Tensor:
    """Mean of -log sigmoid(s_i - s_j) over the pairs (i, j) in which i is ranked higher."""
    difference = scores_K[:, None] - scores_K[None, :]
    return -F.logsigmoid(difference[better_KK.to(difference.device)]).mean()
