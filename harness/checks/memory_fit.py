"""Decides whether a run fits on its device, and advises changes if it does not."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..devices.device import resolve_device
from ..devices.memory import GIB, device_bytes
from ..policy.model import check_model
from ..spec.errors import SpecError
from ..spec.run import RunSpec
from .memory_estimate import estimate_run, peak_bytes

SAMPLE_BYTES, TOKEN_BYTES = 2048, 128  # at most, of a completion that waits to be graded: its ids, log-probs and text


def check_memory(spec: RunSpec, copies: int = 1, together: int = 1) -> None:
    """ValueError if `copies` processes with `together` such runs each cannot fit on the device; passes if there is no
    estimate."""
    check_samples(spec, copies)
    found, _ = estimate_run(spec, together)
    if found is not None:
        check_fits(found, resolve_device(spec.device), spec, copies)


def check_samples(spec: RunSpec, copies: int = 1) -> None:
    """SpecError if the samples of one problem of an evaluation, which a vote needs together, are more than fit."""
    settings = spec.evaluation
    named = {"num_samples": settings.num_samples, "num_test_samples": settings.num_test_samples or 0}
    name, asked = max(named.items(), key=lambda item: item[1])
    most = device_bytes(torch.device("cpu")) // (copies * (SAMPLE_BYTES + TOKEN_BYTES * spec.max_tokens))
    if asked > most:
        raise SpecError(
            f"evaluation.{name} must be at most {most:,}, the samples of one problem that the free memory holds, "
            f"got {asked:,}; ask for fewer"
        )


def check_fits(components: Mapping[str, int], device: torch.device, spec: RunSpec, copies: int = 1) -> None:
    """ValueError if `copies` such runs need more than the GPU has, or than the RAM has free."""
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
    """`1.50 GiB`, or `12 MiB` below a tenth of one."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"


@dataclass(frozen=True)
class Fit:
    """Bytes that a run needs by component and at its peak (None: unknown); why they are unknown or do not fit."""

    components: dict[str, int] | None
    peak_bytes: int | None
    device_bytes: int
    problem: str | None


def judge(spec: RunSpec) -> Fit:
    """The verdict on a run on this machine; ValueError for a model folder that cannot be used."""
    check_model(spec.model)
    device = resolve_device(spec.device)
    components = None
    try:
        components, problem = estimate_run(spec)
        if components is not None:
            check_fits(components, device, spec)
    except SpecError as error:
        problem = str(error)
    peak = None if components is None else peak_bytes(components)
    return Fit(components, peak, device_bytes(device), problem)


def _large(components: Mapping[str, int]) -> list[tuple[str, int]]:
    """The components worth naming, the largest first."""
    least = 0.02 * peak_bytes(components)
    return sorted(((k, v) for k, v in components.items() if v > least), key=lambda item: -item[1])


def _fixes(components: Mapping[str, int], spec: RunSpec, copies: int) -> list[str]:
    """Changes that would make the run smaller, for the largest components first; none that it has already."""
    learning = components["activations"] >= components["kv_cache"] + components["sampling"]
    rows = "gpu_memory_utilization" if spec.engine.name == "vllm" else "max_batch_rows"
    sampling = [] if learning else [f"lower engine.{rows}"]
    activations = ["lower optimizer.tokens_per_microbatch"] if learning else []
    if learning and not spec.gradient_checkpointing:
        activations.append("set gradient_checkpointing=true")
    wider = "spread it over more GPUs (devices)"
    trained = [*(["train adapters (lora.rank=16)"] if spec.lora is None else []), wider]
    fixes = {
        "activations": activations,
        "kv_cache": sampling,
        "sampling": sampling,
        "gathered": [],
        "engine": ["lower engine.cpu_cache_gib or set engine.sleep=true"],
        "gradients": trained,
        "optimizer": trained,
        "reference": ["set algorithm.kl_beta=0 (no reference)"],
        "critic": ["use an algorithm without a critic"],
        "policy": ["use a smaller model", wider, *(["set dtype=bfloat16"] if spec.dtype == "float32" else [])],
    }
    fewer = ["use fewer --workers"] if copies > 1 else []
    return list(dict.fromkeys([*fewer, *(text for name, _ in _large(components) for text in fixes[name])]))
