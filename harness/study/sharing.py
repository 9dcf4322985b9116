"""Decides which trials train together in one process (`harness.run.together`), and how many fit."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from .. import plugins
from ..ground.inputs import digest
from ..interfaces import RolloutEngine
from ..spec.errors import SpecError
from ..spec.run import RunSpec
from .plan import Key, Plan

COMMON = ("model", "task", "engine", "prompt", "cold_start", "sampling", "device", "dtype", "autocast")


@dataclass(frozen=True)
class Shared:
    """Trials that can share a model and an engine, and how many of them a worker runs at a time."""

    trials: tuple[Key, ...]
    at_once: int


def sharing_key(spec: RunSpec) -> str | None:
    """A hash that is equal for runs which can share a model and an engine; None for a run that cannot share."""
    if spec.lora is None or spec.devices > 1 or spec.staleness or not spec.steps:
        return None
    return _key(spec.model_dump_json(include=set(COMMON)), spec.lora.rank, spec.lora.targets, spec.engine.name)


@lru_cache(maxsize=1024)
def _key(common: str, rank: int, targets: Sequence[str], engine: str) -> str | None:
    serves = cast(type[RolloutEngine], plugins.load("engine", engine)).serves_adapters
    return digest([common, rank, list(targets)]) if serves else None


def shared(plan: Plan, workers: int, copies: int) -> dict[str, Shared]:
    """The sets of trials that share, by their key, with as many at once as each worker gets and as fit in memory.

    `copies` is the number of workers that share a device.
    """
    from ..checks.memory import check_memory

    sets: dict[str, list[Key]] = defaultdict(list)
    for key in plan.keys:
        if (common := sharing_key(plan.spec(key))) is not None:
            sets[common].append(key)
    found = {}
    for common, keys in sets.items():
        specs = {key[0]: plan.spec(key) for key in keys}.values()
        at_once = -(-len(keys) // workers)
        while at_once > 1:
            try:
                for spec in specs:
                    check_memory(spec, copies, at_once)
                found[common] = Shared(tuple(keys), at_once)
                break
            except SpecError:
                at_once -= 1
    return found


def check_together(plan: Plan) -> None:
    """SpecError if no two trials of the study can share a model."""
    keys = [sharing_key(plan.spec(key)) for key in plan.keys]
    able = [key for key in keys if key is not None]
    if len(able) == len(set(able)):
        why = "they must have lora, devices=1, staleness=0 and an engine that serves adapters (transformers, vllm)"
        if len(able) > 1:
            why = f"all differ in one of {', '.join(COMMON)}, lora.rank and lora.targets"
        raise SpecError(f"--together needs two trials that can share a model, but {why}; leave it out")
