"""Estimates the disk space that runs need, and refuses runs that do not fit.

It counts checkpoints (weights or adapter, two AdamW moments of all trained weights, the critic), the files that an
ended run keeps, and cold starts that do not exist yet. It leaves out events, rollouts and reports, which are small.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..devices.sharding import total_bytes
from ..policy.model import model_config
from ..policy.sources import start_name
from ..record.run import CHECKPOINTS, Finished
from ..settings.errors import SpecError
from ..settings.run import RunSpec
from .memory import gib
from .memory_count import Shape, models


@dataclass(frozen=True)
class Disk:
    """Bytes of one checkpoint, of a run's checkpoints at their peak (the next is written before the oldest is deleted),
    of the checkpoints that an ended run keeps, and of a cold start (0: none)."""

    checkpoint: int
    running: int
    kept: int
    cold_start: int


def estimate_disk(spec: RunSpec, finished: Finished) -> Disk | None:
    """The disk space of a run that by default keeps `finished`; None if the model's size cannot be computed. Reads no
    weights."""
    stages = spec.staged()
    try:
        largest = next((stage.spec for stage in stages if stage.spec.algorithm.needs_critic), spec)
        policy, _, added = models(Shape.of(largest, model_config(spec.model), rows=1, prompt_tokens=1))
    except Exception:  # as in the memory estimate: such a model may still train
        return None
    model = [p for name, p in policy.named_parameters() if ".lora_" not in name]
    trained, valued = (total_bytes(p for p in ps if p.requires_grad) for ps in (policy.parameters(), added))
    saved = trained if spec.lora is not None else total_bytes(model)  # the policy's own folder
    learner = 2 * (trained + valued) + valued + (trained if spec.lora is not None else 0)
    later = any(stage.spec.kl.refresh_reference_every or stage.start for stage in stages)  # policies than the first
    reference = total_bytes(model) if later and spec.lora is None else 0
    checkpoint = saved * (1 + spec.staleness) + learner + reference
    fits = [stage for stage in stages if stage.does and stage.does.fits_scorer]
    fitted = len(fits) * 4 * sum(p.numel() for p in model)  # in float32
    settings = spec.checkpoints
    written = min(settings.keep + 1, -(-spec.steps // settings.every) + 2 * len(spec.stages))
    kept = saved if spec.steps and (settings.finished or finished) == "weights" else 0
    cold_start = 4 * sum(p.numel() for p in model) if spec.cold_start.steps else 0  # in float32
    return Disk(checkpoint, written * checkpoint + fitted, kept, cold_start)


def check_disk(runs: Path, left: Sequence[tuple[RunSpec, Path]], at_once: int, keep: Finished) -> dict[str, int] | None:
    """Bytes that runs still need in their folders (`needed`), `at_once` of them at a time, and that are `free`; None
    if one cannot be estimated.

    Checkpoints and cold starts that exist already are not counted again. SpecError if the disk has not enough.
    """
    known: dict[int, Disk] = {}  # the seeds of an arm share a spec
    starts: dict[str, int] = {}
    for spec in {id(spec): spec for spec, _ in left}.values():
        disk = estimate_disk(spec, keep)
        if disk is None:
            return None
        known[id(spec)] = disk
        if disk.cold_start and not Path(start := start_name(spec, runs / "cache")).exists():
            starts[start] = disk.cold_start
    disks = [known[id(spec)] for spec, _ in left]
    more = sorted((disk.running - disk.kept for disk in disks), reverse=True)[:at_once]
    files = (file for _, folder in left for file in (folder / CHECKPOINTS).rglob("*"))
    there = sum(file.stat().st_size for file in files if file.is_file())
    needed = max(0, sum(starts.values()) + sum(disk.kept for disk in disks) + sum(more) - there)
    existing = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        who = "the run" if len(left) == 1 else f"{len(left)} runs, {min(at_once, len(left))} at a time,"
        raise SpecError(
            f"{who} must fit on the disk of '{runs}': it has {gib(free)} free, and about {gib(needed)} is "
            "needed for checkpoints, cold starts and weights that stay; free some space"
            f"{', take fewer `workers`' if at_once > 1 and len(left) > 1 else ''} or use another folder in `runs`"
        )
    return {"needed": needed, "free": free}
