"""Whether a run fits on its device, and what to change where it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from harness.memory.estimate import estimate_run, peak_bytes
from harness.memory.usage import GIB, device_bytes
from harness.policy.device import resolve_device
from harness.policy.model import check_model
from harness.spec.errors import SpecError
from harness.spec.run import RunSpec


def check_memory(spec: RunSpec, copies: int = 1) -> None:
    """ValueError where `copies` such runs at a time cannot fit on the device; nothing where that cannot be told."""
    found, _ = estimate_run(spec)
    if found is not None:
        check_fits(found, resolve_device(spec.device), spec, copies)


def check_fits(
    components: Mapping[str, int], device: torch.device, spec: RunSpec | None = None, copies: int = 1
) -> None:
    """ValueError where `copies` runs that need this need more than the GPU has, or than is free of the machine's RAM.

    `spec` leaves out of the advice what the run does already.
    """
    needed = copies * peak_bytes(components)
    available = device_bytes(device)
    if needed <= available:
        return
    has = f"the GPU has {gib(available)}" if device.type == "cuda" else f"this machine has {gib(available)} free"
    who = "the run" if copies == 1 else f"{copies} workers"
    shown = ", ".join(f"{name} {gib(size)}" for name, size in _large(components))
    each = "" if copies == 1 else "each: "
    raise SpecError(
        f"{who} must fit in memory: {has}, and about {gib(needed)} is needed ({each}{shown}); "
        f"{' or '.join(_fixes(components, spec, copies))}"
    )


def gib(size: int) -> str:
    """`1.50 GiB`, or `12 MiB` where it is less than a tenth of one."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"


@dataclass(frozen=True)
class Fit:
    """What a run needs, component by component (None: cannot be told), and why it cannot fit or cannot be told."""

    components: dict[str, int] | None
    device_bytes: int
    problem: str | None

    def as_json(self) -> dict[str, Any]:
        peak = None if self.components is None else peak_bytes(self.components)
        return {
            "components": self.components,
            "peak_bytes": peak,
            "device_bytes": self.device_bytes,
            "problem": self.problem,
        }


def judge(spec: RunSpec) -> Fit:
    """What a run needs on this machine; ValueError for a model folder that cannot be used."""
    check_model(spec.model)
    device = resolve_device(spec.device)
    components, problem = estimate_run(spec)
    if components is not None:
        try:
            check_fits(components, device, spec)
        except SpecError as error:
            problem = str(error)
    return Fit(components, device_bytes(device), problem)


def _large(components: Mapping[str, int]) -> list[tuple[str, int]]:
    """The components worth a word, the largest first."""
    least = 0.02 * peak_bytes(components)
    return sorted(((k, v) for k, v in components.items() if v > least), key=lambda item: -item[1])


def _fixes(components: Mapping[str, int], spec: RunSpec | None, copies: int) -> Iterator[str]:
    """What would make the run smaller, the largest components first."""
    learning = components["activations"] >= components["kv_cache"] + components["sampling"]
    given: set[str] = set()
    if copies > 1:
        yield "use fewer --workers"
    for name, _ in _large(components):
        advice: list[str] = []
        if name == "activations" and learning:
            advice = ["lower optimizer.tokens_per_microbatch"]
            if spec is None or not spec.gradient_checkpointing:
                advice.append("set gradient_checkpointing=true")
        elif name in ("kv_cache", "sampling") and not learning:
            vllm = spec is not None and spec.engine.name == "vllm"
            advice = [f"lower engine.{'gpu_memory_utilization' if vllm else 'max_batch_rows'}"]
        elif name == "engine":
            advice = ["lower engine.cpu_cache_gib or set engine.sleep=true"]
        elif name in ("gradients", "optimizer") and (spec is None or spec.lora is None):
            advice = ["train adapters (lora.rank=16)"]
        elif name == "reference":
            advice = ["set algorithm.kl_beta=0 (no reference)"]
        elif name == "critic":
            advice = ["use an algorithm without a critic"]
        elif name == "policy":
            advice = ["use a smaller model"]
            if spec is None or spec.dtype == "float32":
                advice.append("set dtype=bfloat16")
        for text in advice:
            if text not in given:
                given.add(text)
                yield text
