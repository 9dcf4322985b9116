"""Plugins named `odd`, one of each kind, that do at their second call what `odd` says. `install` makes them known."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from cohort.algorithms.grpo import GRPO
from cohort.harness.data import Batch, GradedGroup, Group, Rollout
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.interfaces import Reward, StepReward
from cohort.tasks.arithmetic import Arithmetic
from entry_points import declare

POINTS = {
    "tasks": {"odd": "odd_plugins:OddTask"}, "algorithms": {"odd": "odd_plugins:OddAlgorithm"},
    "rewards": {"odd": "odd_plugins:OddReward", "odd_steps": "odd_plugins:OddSteps"},
    "engines": {"odd": "odd_plugins:OddEngine"},
}  # fmt: skip
CALLS: dict[str, int] = {}  # of each kind of plugin


def install(folder: Path, monkeypatch: Any) -> None:
    declare(folder, monkeypatch, "odd-plugins", POINTS)


# What any plugin may do besides its work.
ACTS: Mapping[str, Callable[[], object]] = {
    "raise": lambda: 1 / 0,
    "exit": lambda: exec("raise SystemExit(3)"),
    "print": lambda: print("\x1b[2J\0 noise \ud800".encode("utf-8", "replace"), flush=True),
    "ignore signals": lambda: [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)],
    "change folder": lambda: os.chdir("/"),
    "seed": lambda: [random.seed(0), np.random.seed(0), torch.manual_seed(0)],
}


def act(kind: str, odd: str) -> bool:
    """Whether this is the call that is odd in what it returns."""
    CALLS[kind] = CALLS.get(kind, 0) + bool(odd)
    if not odd or CALLS[kind] != 2:
        return False
    if odd in ACTS:
        ACTS[odd]()
        return False
    return True


NUMBERS: Mapping[str, Any] = {
    "nan": math.nan, "inf": math.inf, "-inf": -math.inf, "huge": 1e39, "10^400": 10**400, "text": "1.0", "none": None,
    "float16": np.float16(0.5), "float32": np.float32(0.5), "tensor": torch.tensor(0.5), "list": [0.5], "complex": 1j,
}  # fmt: skip

SCORES: Mapping[str, Callable[[Any], Any]] = {
    "too few": lambda values: values[:-1], "too many": lambda values: [*values, 0.0],
    "a dict": lambda values: dict(enumerate(values)), "a generator": lambda values: (value for value in values),
    "a word": lambda values: "1234"[: len(values)], "nothing": lambda values: None, "a tensor": torch.tensor,
    "a matrix": lambda values: torch.tensor([values]),
    "on no device": lambda values: torch.tensor(values, device="meta"),
    **{name: lambda values, odd=odd: [*values[:-1], odd] for name, odd in NUMBERS.items()},
}  # fmt: skip
STEPS: Mapping[str, Callable[[Any], Any]] = {
    "too few": lambda values: values[:-1], "too many": lambda values: [*values, []], "nothing": lambda values: None,
    "no pairs": lambda values: [[1.0]] * len(values), "a place of text": lambda values: [[("1", 1.0)]] * len(values),
    "a place before the text": lambda values: [[(-5, 1.0)]] * len(values),
    "a place after the text": lambda values: [[(10**9, 1.0)]] * len(values),
    "a place that is no number": lambda values: [[(math.nan, 1.0)]] * len(values),
    **{name: lambda values, odd=odd: [*values[:-1], [(0, odd)]] for name, odd in NUMBERS.items()},
}  # fmt: skip
ANSWERS = {"answer number": 4, "answer bytes": b"4", "answer list": ["4"], "answer nan": math.nan}
VERDICTS = {"equal nan": math.nan, "equal text": "no", "equal none": None, "equal array": np.array([True, False])}


def with_a_nan(values: torch.Tensor) -> torch.Tensor:
    values = values.clone()
    values[0, -1] = math.nan
    return values


CREDIT: Mapping[str, Callable[[Batch, torch.Tensor], Any]] = {
    "advantages nan": lambda batch, values: batch.replace(advantages_BT=with_a_nan(values)),
    "advantages inf": lambda batch, values: batch.replace(advantages_BT=values + math.inf),
    "advantages none": lambda batch, values: batch.replace(advantages_BT=None),
    "advantages float64": lambda batch, values: batch.replace(advantages_BT=values.double()),
    "advantages whole": lambda batch, values: batch.replace(advantages_BT=values.long()),
    "advantages of rows": lambda batch, values: batch.replace(advantages_BT=values[:, 0]),
    "advantages of a column": lambda batch, values: batch.replace(advantages_BT=values[:, :1]),
    "advantages of a row less": lambda batch, values: batch.replace(advantages_BT=values[:-1]),
    "advantages list": lambda batch, values: batch.replace(advantages_BT=values.tolist()),
    "advantages on no device": lambda batch, values: batch.replace(advantages_BT=values.to("meta")),
    "advantages of prompts": lambda batch, values: batch.replace(advantages_BT=values + 1.0),
    "advantages alone": lambda batch, values: values, "advantages nothing": lambda batch, values: None,
    "advantages of half": lambda batch, values: batch.rows(torch.arange(len(batch) // 2)),
    "advantages other tokens": lambda batch, values: batch.replace(tokens_BT=batch.tokens_BT * 0),
}  # fmt: skip
LOSS: Mapping[str, Callable[[torch.Tensor, dict[str, torch.Tensor]], Any]] = {
    "loss nan": lambda loss, metrics: (loss * math.nan, metrics),
    "loss inf": lambda loss, metrics: (loss + math.inf, metrics), "loss number": lambda loss, metrics: (0.5, metrics),
    "loss alone": lambda loss, metrics: loss, "loss nothing": lambda loss, metrics: None,
    "loss vector": lambda loss, metrics: (loss.expand(3), metrics),
    "loss detached": lambda loss, metrics: (loss.detach(), metrics),
    "loss on no device": lambda loss, metrics: (loss.to("meta"), metrics),
    "loss without metrics": lambda loss, metrics: (loss, {}),
    "loss metric number": lambda loss, metrics: (loss, dict.fromkeys(metrics, 0.5)),
    "loss metric nan": lambda loss, metrics: (loss, dict.fromkeys(metrics, loss.detach() * math.nan)),
    "loss metric vector": lambda loss, metrics: (loss, dict.fromkeys(metrics, loss.detach().expand(3))),
    "loss hidden nan": lambda loss, metrics: (loss * math.nan, metrics | {"policy/loss": torch.tensor(0.0)}),
}  # fmt: skip
WEIGHTS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "loss weights nan": lambda weights: weights * math.nan, "loss weights of rows": lambda weights: weights[:, 0],
    "loss weights doubled": lambda weights: weights * 2, "loss weights zero": lambda weights: weights * 0,
    "loss weights nothing": lambda weights: None,
}  # fmt: skip
ROLLOUTS: Mapping[str, Callable[[Rollout], dict[str, Any]]] = {  # what is different in the first rollout
    "no tokens": lambda one: {"token_ids": (), "logprobs": ()},
    "a log-prob less": lambda one: {"logprobs": one.logprobs[1:]}, "no log-probs": lambda one: {"logprobs": ()},
    "log-prob nan": lambda one: {"logprobs": (math.nan, *one.logprobs[1:])},
    "log-prob inf": lambda one: {"logprobs": (-math.inf, *one.logprobs[1:])},
    "log-prob of text": lambda one: {"logprobs": ("0", *one.logprobs[1:])},
    "log-probs moved": lambda one: {"logprobs": tuple(value - 1 for value in one.logprobs)},
    "a token below": lambda one: {"token_ids": (-1, *one.token_ids[1:])},
    "a token above": lambda one: {"token_ids": (10**6, *one.token_ids[1:])},
    "a token of text": lambda one: {"token_ids": ("1", *one.token_ids[1:])},
    "no text": lambda one: {"text": None}, "bytes": lambda one: {"text": b"4"},
    "another text": lambda one: {"text": "#### 7"}, "no end": lambda one: {"finish_reason": "nonsense"},
    "another end": lambda one: {"finish_reason": "length" if one.finish_reason == "stop" else "stop"},
    "too long": lambda one: {"token_ids": one.token_ids * 40, "logprobs": one.logprobs * 40},
}  # fmt: skip


def without(group: Group, kept: int) -> Group:
    """The group without its first rollouts."""
    return dataclasses.replace(group, rollouts=group.rollouts[kept:])


GROUPS: Mapping[str, Callable[[list[Group]], Any]] = {
    "too few groups": lambda groups: groups[:-1], "too many groups": lambda groups: [*groups, groups[0]],
    "no groups": lambda groups: [], "nothing": lambda groups: None,
    "groups in another order": lambda groups: groups[::-1], "one group twice": lambda groups: groups[:1] * len(groups),
    "too few samples": lambda groups: [without(groups[0], 1), *groups[1:]],
    "fewer samples everywhere": lambda groups: [without(group, 1) for group in groups],
    "no samples": lambda groups: [without(groups[0], len(groups[0].rollouts)), *groups[1:]],
    "another prompt's tokens": lambda groups: [
        dataclasses.replace(groups[0], prompt_token_ids=groups[0].prompt_token_ids[::-1]), *groups[1:]],
    "a group of dicts": lambda groups: [dataclasses.asdict(group) for group in groups],
}  # fmt: skip
ODD: Mapping[str, tuple[str, ...]] = {
    "reward": (*SCORES, *ACTS), "steps": (*STEPS,), "task": (*NUMBERS, *ANSWERS, *VERDICTS, *ACTS),
    "algorithm": (*CREDIT, *LOSS, *WEIGHTS, *ACTS), "engine": (*GROUPS, *ROLLOUTS, *ACTS),
}  # fmt: skip


class OddReward(Reward):
    odd: str = ""

    def score(self, group: GradedGroup) -> list[float]:
        values = [float(len(text) % 3) for text in group.completions]
        return SCORES[self.odd](values) if act("reward", self.odd) else values


class OddSteps(StepReward):
    odd: str = ""

    def score(self, group: GradedGroup) -> list[float]:
        return [0.0] * len(group.completions)

    def steps(self, group: GradedGroup) -> list[list[tuple[int, float]]]:
        values = [[(len(text), 1.0)] for text in group.completions]
        return STEPS[self.odd](values) if act("steps", self.odd) else values


class OddTask(Arithmetic):
    name: Literal["odd"] = "odd"  # pyright: ignore[reportIncompatibleVariableOverride]
    odd: str = ""

    def format_score(self, completion: str) -> float:
        return NUMBERS[self.odd] if act("task", self.odd) and self.odd in NUMBERS else 1.0

    def extract(self, completion: str) -> Any:
        return ANSWERS[self.odd] if self.odd in ANSWERS and act("task", self.odd) else super().extract(completion)

    def equivalent(self, answer: str, other: str) -> Any:
        is_odd = self.odd in VERDICTS and act("task", self.odd)
        return VERDICTS[self.odd] if is_odd else super().equivalent(answer, other)


class OddAlgorithm(GRPO):
    objective: ClassVar[Mapping[str, str]] = {"advantage": "odd"}
    name: Literal["odd"] = "odd"  # pyright: ignore[reportIncompatibleVariableOverride]
    odd: str = ""

    def advantages(self, batch: Batch) -> Any:
        batch = super().advantages(batch)
        is_odd = (self.odd in CREDIT or self.odd in ACTS) and act("algorithm", self.odd)
        return CREDIT[self.odd](batch, batch.advantages_BT) if is_odd else batch

    def loss(self, batch: Batch, policy: Any) -> Any:
        loss, metrics = super().loss(batch, policy)
        is_odd = self.odd in LOSS and act("algorithm", self.odd)
        return LOSS[self.odd](loss, metrics) if is_odd else (loss, metrics)

    def loss_weights(self, completion_mask_BT: Any) -> Any:
        weights = super().loss_weights(completion_mask_BT)
        return WEIGHTS[self.odd](weights) if self.odd in WEIGHTS and act("algorithm", self.odd) else weights


class OddEngine(TransformersEngine):
    class Settings(TransformersEngine.Settings):
        name: Literal["odd"] = "odd"  # pyright: ignore[reportIncompatibleVariableOverride]
        odd: str = ""

    def __init__(self, settings: Any, policy: Any, codec: Any) -> None:
        super().__init__(settings, policy, codec)
        self.odd = settings.odd

    def generate(self, prompts: Any, group_size: int, sampling: Any, *, seed: int, step: int) -> Any:
        groups: Any = super().generate(prompts, group_size, sampling, seed=seed, step=step)
        # Only what is trained on: the check at the start, and evaluations, have one sample of their own kind.
        if not (group_size > 1 and step < 10**6 and act("engine", self.odd)):
            return groups
        if self.odd in GROUPS:
            return GROUPS[self.odd](groups)
        first, *others = groups[0].rollouts
        changed = dataclasses.replace(first, **ROLLOUTS[self.odd](first))
        return [dataclasses.replace(groups[0], rollouts=(changed, *others)), *groups[1:]]


def reset() -> None:
    CALLS.clear()


@contextlib.contextmanager
def process_kept():
    """Undo what a plugin changes in this process."""
    folder, handlers = os.getcwd(), {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        os.chdir(folder)
        for number, handler in handlers.items():
            signal.signal(number, handler)
