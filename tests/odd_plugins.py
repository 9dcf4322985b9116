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

POINTS = {"tasks": "OddTask", "rewards": "OddReward", "algorithms": "OddAlgorithm", "engines": "OddEngine"}
CALLS: dict[str, int] = {}  # of each kind of plugin


def install(folder: Path, monkeypatch: Any) -> None:
    info = folder / "odd_plugins-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-plugins\nVersion: 1\n")
    points = [f"[cohort.{group}]\nodd = odd_plugins:{cls}\n" for group, cls in POINTS.items()]
    (info / "entry_points.txt").write_text("\n".join([*points, "[cohort.rewards]\nodd_steps = odd_plugins:OddSteps\n"]))
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), here, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(here)
    monkeypatch.syspath_prepend(str(folder))


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


class OddReward(Reward):
    odd: str = ""

    def score(self, group: GradedGroup) -> list[float]:
        values: Any = [float(len(text) % 3) for text in group.completions]
        if not act("reward", self.odd):
            return values
        changes: dict[str, Callable[[], Any]] = {
            "too few": lambda: values[:-1], "too many": lambda: [*values, 0.0],
            "a dict": lambda: dict(enumerate(values)), "a generator": lambda: (value for value in values),
            "a word": lambda: "1234"[: len(values)],
            "nothing": lambda: None, "a tensor": lambda: torch.tensor(values),
            "on no device": lambda: torch.tensor(values, device="meta"),
            "a matrix": lambda: torch.tensor([values]),
        }  # fmt: skip
        return changes[self.odd]() if self.odd in changes else [*values[:-1], NUMBERS[self.odd]]


class OddSteps(StepReward):
    odd: str = ""

    def score(self, group: GradedGroup) -> list[float]:
        return [0.0] * len(group.completions)

    def steps(self, group: GradedGroup) -> list[list[tuple[int, float]]]:
        values: Any = [[(len(text), 1.0)] for text in group.completions]
        if not act("steps", self.odd):
            return values
        changes: dict[str, Callable[[], Any]] = {
            "too few": lambda: values[:-1], "too many": lambda: [*values, []], "nothing": lambda: None,
            "no pairs": lambda: [[1.0]] * len(values), "a place of text": lambda: [[("1", 1.0)]] * len(values),
            "a place before the text": lambda: [[(-5, 1.0)]] * len(values),
            "a place after the text": lambda: [[(10**9, 1.0)]] * len(values),
            "a place that is no number": lambda: [[(math.nan, 1.0)]] * len(values),
        }  # fmt: skip
        return changes[self.odd]() if self.odd in changes else [*values[:-1], [(0, NUMBERS[self.odd])]]


class OddTask(Arithmetic):
    name: Literal["odd"] = "odd"  # pyright: ignore[reportIncompatibleVariableOverride]
    odd: str = ""

    def format_score(self, completion: str) -> float:
        return NUMBERS[self.odd] if act("task", self.odd) and self.odd in NUMBERS else 1.0

    def extract(self, completion: str) -> Any:
        is_odd = self.odd.startswith("answer") and act("task", self.odd)
        answers = {"answer number": 4, "answer bytes": b"4", "answer list": ["4"], "answer nan": math.nan}
        return answers[self.odd] if is_odd else super().extract(completion)

    def equivalent(self, answer: str, other: str) -> Any:
        is_odd = self.odd.startswith("equal") and act("task", self.odd)
        found = {"equal nan": math.nan, "equal text": "no", "equal none": None, "equal array": np.array([True, False])}
        return found[self.odd] if is_odd else super().equivalent(answer, other)


class OddAlgorithm(GRPO):
    objective: ClassVar[Mapping[str, str]] = {"advantage": "odd"}
    name: Literal["odd"] = "odd"  # pyright: ignore[reportIncompatibleVariableOverride]
    odd: str = ""

    def advantages(self, batch: Batch) -> Any:
        batch = super().advantages(batch)
        if (not self.odd.startswith("advantages") and self.odd not in ACTS) or not act("algorithm", self.odd):
            return batch
        values = batch.advantages_BT
        one = values.clone()
        one[0, -1] = math.nan
        changes: dict[str, Callable[[], Any]] = {
            "advantages nan": lambda: batch.replace(advantages_BT=one),
            "advantages inf": lambda: batch.replace(advantages_BT=values + math.inf),
            "advantages none": lambda: batch.replace(advantages_BT=None),
            "advantages float64": lambda: batch.replace(advantages_BT=values.double()),
            "advantages whole": lambda: batch.replace(advantages_BT=values.long()),
            "advantages of rows": lambda: batch.replace(advantages_BT=values[:, 0]),
            "advantages of a column": lambda: batch.replace(advantages_BT=values[:, :1]),
            "advantages of a row less": lambda: batch.replace(advantages_BT=values[:-1]),
            "advantages list": lambda: batch.replace(advantages_BT=values.tolist()),
            "advantages on no device": lambda: batch.replace(advantages_BT=values.to("meta")),
            "advantages of prompts": lambda: batch.replace(advantages_BT=values + 1.0),
            "advantages alone": lambda: values,
            "advantages nothing": lambda: None,
            "advantages of half": lambda: batch.rows(torch.arange(len(batch) // 2)),
            "advantages other tokens": lambda: batch.replace(tokens_BT=batch.tokens_BT * 0),
        }  # fmt: skip
        return changes[self.odd]()

    def loss(self, batch: Batch, policy: Any) -> Any:
        loss, metrics = super().loss(batch, policy)
        if not self.odd.startswith("loss") or self.odd.startswith("loss weights") or not act("algorithm", self.odd):
            return loss, metrics
        key = next(iter(metrics))
        changes: dict[str, Callable[[], Any]] = {
            "loss nan": lambda: (loss * math.nan, metrics), "loss inf": lambda: (loss + math.inf, metrics),
            "loss number": lambda: (0.5, metrics), "loss alone": lambda: loss, "loss nothing": lambda: None,
            "loss vector": lambda: (loss.expand(3), metrics), "loss detached": lambda: (loss.detach(), metrics),
            "loss on no device": lambda: (loss.to("meta"), metrics),
            "loss without metrics": lambda: (loss, {}), "loss metric number": lambda: (loss, {**metrics, key: 0.5}),
            "loss metric nan": lambda: (loss, {**metrics, key: loss.detach() * math.nan}),
            "loss metric vector": lambda: (loss, {**metrics, key: loss.detach().expand(3)}),
            "loss hidden nan": lambda: (loss * math.nan, metrics | {"policy/loss": torch.tensor(0.0)}),
        }  # fmt: skip
        return changes[self.odd]()

    def loss_weights(self, completion_mask_BT: Any) -> Any:
        weights = super().loss_weights(completion_mask_BT)
        if not self.odd.startswith("loss weights") or not act("algorithm", self.odd):
            return weights
        changes: dict[str, Callable[[], Any]] = {
            "loss weights nan": lambda: weights * math.nan, "loss weights of rows": lambda: weights[:, 0],
            "loss weights doubled": lambda: weights * 2, "loss weights zero": lambda: weights * 0,
            "loss weights nothing": lambda: None,
        }  # fmt: skip
        return changes[self.odd]()


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
        is_odd = group_size > 1 and step < 10**6 and act("engine", self.odd)
        if not is_odd:
            return groups
        first: Group = groups[0]
        rollout: Rollout = first.rollouts[0]

        def other(**changes: Any) -> list[Group]:
            changed = dataclasses.replace(rollout, **changes)
            return [dataclasses.replace(first, rollouts=(changed, *first.rollouts[1:])), *groups[1:]]

        ids, logprobs = rollout.token_ids, rollout.logprobs
        changes: dict[str, Callable[[], Any]] = {
            "too few groups": lambda: groups[:-1], "too many groups": lambda: [*groups, first],
            "no groups": list, "nothing": lambda: None,
            "groups in another order": lambda: groups[::-1],
            "one group twice": lambda: [first] * len(groups),
            "too few samples": lambda: [dataclasses.replace(first, rollouts=first.rollouts[1:]), *groups[1:]],
            "fewer samples everywhere": lambda: [dataclasses.replace(g, rollouts=g.rollouts[1:]) for g in groups],
            "no samples": lambda: [dataclasses.replace(first, rollouts=()), *groups[1:]],
            "no tokens": lambda: other(token_ids=(), logprobs=()),
            "a log-prob less": lambda: other(logprobs=logprobs[1:]),
            "no log-probs": lambda: other(logprobs=()),
            "log-prob nan": lambda: other(logprobs=(math.nan, *logprobs[1:])),
            "log-prob inf": lambda: other(logprobs=(-math.inf, *logprobs[1:])),
            "log-prob of text": lambda: other(logprobs=("0", *logprobs[1:])),
            "log-probs moved": lambda: other(logprobs=tuple(value - 1 for value in logprobs)),
            "a token below": lambda: other(token_ids=(-1, *ids[1:])),
            "a token above": lambda: other(token_ids=(10**6, *ids[1:])),
            "a token of text": lambda: other(token_ids=("1", *ids[1:])),
            "another prompt's tokens": lambda: [
                dataclasses.replace(first, prompt_token_ids=first.prompt_token_ids[::-1]), *groups[1:]],
            "no text": lambda: other(text=None), "bytes": lambda: other(text=b"4"),
            "another text": lambda: other(text="#### 7"),
            "another end": lambda: other(finish_reason="length" if rollout.finish_reason == "stop" else "stop"),
            "no end": lambda: other(finish_reason="nonsense"),
            "too long": lambda: other(token_ids=ids * 40, logprobs=logprobs * 40),
            "a group of dicts": lambda: [dataclasses.asdict(group) for group in groups],
        }  # fmt: skip
        return changes[self.odd]()


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
