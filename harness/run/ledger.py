"""Keeps the known costs of a run: operations, core or GPU seconds, energy.

Energy comes from the machine's counters: of the run's GPUs (NVML), or of the processor packages (RAPL, Linux powercap),
shared out by the run's part of the time in which the machine's cores were busy. There is no energy without such
counters, or for runs that take turns in one process.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import psutil
import torch
from torch import nn

from ..data import Demonstration, Group
from ..devices import ranks
from ..devices.device import resolve_device
from ..policy.forward import microbatch_tokens
from ..policy.text import TextCodec
from ..spec.run import RunSpec
from . import flops

POWERCAP = Path("/sys/class/powercap")
TRAINING = ("sampling", "scoring", "learning")
_SEEN = 512  # number of demonstrations whose mean length stands for all


@dataclass
class Ledger:
    """The costs of a run over all its resumes: `flops_*`, `core_seconds` or `gpu_seconds`, `energy_joules`."""

    spec: RunSpec
    costs: flops.Costs | None  # None where operations are not counted
    energy: Callable[[], float | None]  # joules since its last call
    spent: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: RunSpec, policy: nn.Module, *, is_alone: bool) -> Ledger:
        try:
            costs = flops.Costs.of(policy)
        except Exception:  # counting fails in many ways for an unusual model, which may still train well
            costs = None
        device = resolve_device(spec.device)
        return cls(spec, costs, energy_meter(device) if is_alone else _unknown)

    def resume(self, spent: Mapping[str, float] | None, seconds: float) -> None:
        """Continue from a checkpoint's costs, after `seconds`. A checkpoint older than this file has none, and a cost
        not known from the beginning stays unknown."""
        self.spent = dict(spent or {})
        if spent is None:
            self.costs = None
            self._charge_seconds(seconds)
        if "energy_joules" not in self.spent:
            self.energy = _unknown

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
        """Charge time of the run, on all its devices, and the energy since the last call."""
        self._charge_seconds(seconds)
        used = ranks.shared(range(ranks.world_size()), lambda _: [self.energy()])
        if None in used:
            self.energy = _unknown
            self.spent.pop("energy_joules", None)
        else:
            self.spent["energy_joules"] = self.spent.get("energy_joules", 0.0) + sum(filter(None, used))

    def _charge_seconds(self, seconds: float) -> None:
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
        found = {k.replace("_", "/", 1): v for k, v in self.spent.items() if k.startswith("flops_")}
        return found | ({"flops/train": self.training} if "flops_learning" in self.spent else {})

    def summary(self) -> dict[str, float]:
        return self.spent | ({"flops_train": self.training} if "flops_learning" in self.spent else {})

    def _add(self, spent: Mapping[str, float]) -> None:
        for name, count in spent.items():
            self.spent[f"flops_{name}"] = self.spent.get(f"flops_{name}", 0.0) + count


def _unknown() -> float | None:
    return None


def energy_meter(device: torch.device, folder: Path = POWERCAP) -> Callable[[], float | None]:
    """Joules charged to this process since the last call; None if the machine has no counter."""
    if device.type == "cuda":
        return _since(partial(_gpu_joules, device))
    packages = [file for file in sorted(folder.glob("intel-rapl:?")) if _text(file / "name").startswith("package")]
    counted, busy = [_since(partial(_package_joules, file), _package_range(file)) for file in packages], _since(_busy)
    own = _since(_own_seconds)

    def charged() -> float | None:
        used, share = [joules() for joules in counted], (own() or 0.0) / max(busy() or 0.0, 1e-9)
        known = [joules for joules in used if joules is not None]
        return min(1.0, share) * sum(known) if known and len(known) == len(used) else None

    return charged


def _since(count: Callable[[], float | None], modulo: float = math.inf) -> Callable[[], float | None]:
    """The increase since the last call of a counter that wraps at `modulo`; None if it cannot be read."""
    before = count()

    def added() -> float | None:
        nonlocal before
        now, last = count(), before
        before = now
        return None if now is None or last is None else (now - last) % modulo

    return added


def _busy() -> float:
    """Busy seconds of the machine's cores, summed over cores."""
    times = psutil.cpu_times()
    return sum(times[:]) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def _own_seconds() -> float:
    """Busy seconds of this process and its children."""
    own = psutil.Process()
    found = 0.0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found += times.user + times.system
    return found


def _text(file: Path) -> str:
    """The content of a file; empty if it is missing or unreadable (usually only root can read these counters)."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _package_joules(package: Path) -> float | None:
    text = _text(package / "energy_uj")
    return float(text) / 1e6 if text.isdecimal() else None


def _package_range(package: Path) -> float:
    text = _text(package / "max_energy_range_uj")
    return float(text) / 1e6 if text.isdecimal() else math.inf


def _gpu_joules(device: torch.device) -> float | None:
    """Energy that the GPU has used since its driver was loaded, by all processes; None without NVML or the counter."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle))
    failed = failed or nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
    return None if failed else millijoules.value / 1e3
