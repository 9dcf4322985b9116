"""Keeps the known costs of a run: operations, and core or GPU seconds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import nn

from ..data import Demonstration, Group
from ..devices.device import resolve_device
from ..policy import flops
from ..policy.forward import microbatch_tokens
from ..policy.text import TextCodec
from ..spec.run import RunSpec

TRAINING = ("sampling", "scoring", "learning")
_SEEN = 512  # number of demonstrations whose mean length stands for all


@dataclass
class Ledger:
    """The costs of a run over all its resumes: `flops_*`, and `core_seconds` or `gpu_seconds`."""

    spec: RunSpec
    costs: flops.Costs | None  # None where operations are not counted
    spent: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: RunSpec, policy: nn.Module) -> "Ledger":
        try:
            return cls(spec, flops.Costs.of(policy))
        except Exception:  # counting fails in many ways for an unusual model, which may still train well
            return cls(spec, None)

    def start(self, codec: TextCodec, demonstrations: Callable[[], Iterable[Demonstration]]) -> dict[str, float]:
        """Charge the cold start, if there is one; returns its metrics."""
        settings = self.spec.cold_start
        if settings.steps and self.costs is not None:
            few: list[Demonstration] = list(islice(demonstrations(), _SEEN))
            rows = [(len(codec.encode(d.prompt)), [len(codec.encode_completion(d.completion))]) for d in few]
            each = flops.fitted(self.costs, rows) / len(rows)
            self.spent["flops_cold_start"] = settings.steps * settings.batch_size * each
        return self.metrics()

    def step(
        self, drawn: Sequence[Group], greedy: Sequence[Group], trained: Sequence[Group], *, reads_old: bool, share: bool
    ) -> dict[str, float]:
        """Charge a training step; returns the metrics of all steps so far. For the arguments see `flops.stepped`."""
        if self.costs is not None:
            rows = [flops.lengths(groups) for groups in (drawn, greedy, trained)]
            tokens = microbatch_tokens(self.spec.optimizer, resolve_device(self.spec.device))
            share &= self.spec.devices == 1  # sharded models read every row whole
            self._add(
                flops.stepped(self.costs, self.spec, *rows, reads_old=reads_old, share=share, batch_tokens=tokens)
            )
        return self.metrics()

    def evaluation(self, lengths: flops.Lengths) -> dict[str, float]:
        """Charge an evaluation; returns the metrics of all evaluations so far."""
        if self.costs is not None:
            self._add({"evaluation": flops.sampled(self.costs, lengths)})
        return self.metrics()

    def time(self, seconds: float) -> None:
        """Charge time of the run, on all its devices."""
        on_gpu = resolve_device(self.spec.device).type == "cuda"
        units = self.spec.devices * (1 if on_gpu else torch.get_num_threads())
        unit = "gpu_seconds" if on_gpu else "core_seconds"
        self.spent[unit] = self.spent.get(unit, 0.0) + units * seconds

    @property
    def training(self) -> float:
        """Operations of training so far: sampling, scoring and learning."""
        return sum(self.spent.get(f"flops_{name}", 0.0) for name in TRAINING)

    @property
    def is_spent(self) -> bool:
        return self.spec.max_flops is not None and self.training >= self.spec.max_flops

    def metrics(self) -> dict[str, float]:
        """`flops/<name>`, and `flops/train`, which excludes evaluations and the cold start."""
        return {k.replace("_", "/", 1): v for k, v in self.summary().items() if k.startswith("flops_")}

    def summary(self) -> dict[str, float]:
        """All that was spent, and `flops_train`."""
        return self.spent | ({"flops_train": self.training} if "flops_learning" in self.spent else {})

    def _add(self, spent: Mapping[str, float]) -> None:
        for name, count in spent.items():
            self.spent[f"flops_{name}"] = self.spent.get(f"flops_{name}", 0.0) + count
