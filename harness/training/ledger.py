"""The known costs of a run so far: operations, seconds of cores or GPUs, energy.

Energy is what the machine counts: of the run's GPUs (NVML), or of the processor's packages (RAPL, Linux powercap), of
which a run is charged the share that it has of the time in which the machine's cores were busy. A machine that counts
none, or runs that take turns in one process, have none.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from cohort.harness.policy.device import resolve_device
from cohort.harness.policy.forward import microbatch_tokens
from cohort.harness.policy.text import TextCodec
from cohort.harness.spec.run import RunSpec
from cohort.harness.training import flops, ranks
from cohort.harness.types import Demonstration, Group

POWERCAP = Path("/sys/class/powercap")
TRAINING = ("sampling", "scoring", "learning")
_SEEN = 512  # demonstrations whose mean length counts for all


@dataclass
class Ledger:
    """The costs of a run over all its resumes: `flops_*`, `core_seconds` or `gpu_seconds`, `energy_joules`."""

    spec: RunSpec
    costs: flops.Costs | None  # None where operations are not counted
    energy: Callable[[], float | None]  # joules since it was asked last
    spent: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: RunSpec, policy: nn.Module, *, is_alone: bool) -> Ledger:
        try:
            costs = flops.Costs.of(policy)
        except Exception:  # a model that cannot be counted fails in ways of its own, and may train well
            costs = None
        device = resolve_device(spec.device)
        return cls(spec, costs, energy_meter(device) if is_alone else _unknown)

    def resume(self, spent: Mapping[str, float] | None, seconds: float) -> None:
        """Go on from what a checkpoint says, after so many seconds. One from before there were ledgers says nothing,
        and what is not known from the beginning stays unknown."""
        self.spent = dict(spent or {})
        if spent is None:
            self.costs = None
            self._charge_seconds(seconds)
        if "energy_joules" not in self.spent:
            self.energy = _unknown

    def start(self, codec: TextCodec, demonstrations: Callable[[], Any]) -> dict[str, float]:
        """Charge the cold start, if there is one; the metrics of it."""
        settings = self.spec.cold_start
        if settings.steps and self.costs is not None:
            few: list[Demonstration] = list(demonstrations()[:_SEEN])
            rows = [(len(codec.encode(d.prompt)), [len(codec.encode_completion(d.completion))]) for d in few]
            each = flops.fitted(self.costs, rows) / len(rows)
            self.spent["flops_cold_start"] = settings.steps * settings.batch_size * each
        return self.metrics()

    def step(
        self, drawn: Sequence[Group], greedy: Sequence[Group], trained: Sequence[Group], *, reads_old: bool, share: bool
    ) -> dict[str, float]:
        """Charge a training step; the metrics of all steps so far. `flops.stepped` says what the arguments are."""
        if self.costs is not None:
            rows = [flops.lengths(groups) for groups in (drawn, greedy, trained)]
            tokens = microbatch_tokens(self.spec.optimizer, resolve_device(self.spec.device))
            share &= self.spec.devices == 1  # spread models read every row whole
            self._add(
                flops.stepped(self.costs, self.spec, *rows, reads_old=reads_old, share=share, batch_tokens=tokens)
            )
        return self.metrics()

    def evaluation(self, lengths: flops.Lengths) -> dict[str, float]:
        """Charge an evaluation; the metrics of all of them so far."""
        if self.costs is not None:
            self._add({"evaluation": flops.sampled(self.costs, lengths)})
        return self.metrics()

    def time(self, seconds: float) -> None:
        """Charge time of the run, on all its devices, and the energy since this was called last."""
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
        """`flops/<name>`, and `flops/train`, which evaluations and cold start are no part of."""
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
    """Joules since the last call that this process is charged; None where the machine does not tell."""
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
    """What a counter that begins anew at `modulo` has added since the last call; None if it does not tell."""
    before = count()

    def added() -> float | None:
        nonlocal before
        now, last = count(), before
        before = now
        return None if now is None or last is None else (now - last) % modulo

    return added


def _busy() -> float:
    """Seconds in which the machine's cores have worked, summed over them."""
    times = psutil.cpu_times()
    return sum(times[:]) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def _own_seconds() -> float:
    """Those of this process and its children."""
    own = psutil.Process()
    found = 0.0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found += times.user + times.system
    return found


def _text(file: Path) -> str:
    """The content of a file; empty where it is not there or not to be read, as counters mostly are for root alone."""
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
    """What the GPU has used since its driver was loaded, by whomever; None without NVML or such a counter."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle))
    failed = failed or nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
    return None if failed else millijoules.value / 1e3
