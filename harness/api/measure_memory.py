"""Measures peak memory and seconds of training steps on a random model of a known shape, for `cohort memory`."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checks.memory import check_fits, estimate, peak_bytes
from ..devices.device import peak_memory, reset_peak_memory, resident_bytes, resolve_device
from ..plugins import nearest
from ..policy.model import model_config, save_model
from ..policy.tiny import TINY, tiny_tokenizer
from ..spec.errors import SpecError
from ..spec.raw import with_overrides
from ..spec.run import RunSpec, parse_run

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ..data import Prompt


# Public configurations, copied here so that nothing is downloaded.
SIZES = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "intermediate_size", "vocab_size", "tie_word_embeddings")  # fmt: skip
SHAPES = {
    "Qwen2.5-0.5B": ("qwen2", 896, 24, 14, 2, 4864, 151936, True),
    "Qwen2.5-1.5B": ("qwen2", 1536, 28, 12, 2, 8960, 151936, True),
    "Qwen2.5-3B": ("qwen2", 2048, 36, 16, 2, 11008, 151936, True),
    "Qwen2.5-7B": ("qwen2", 3584, 28, 28, 4, 18944, 152064, False),
    "Llama-3.2-1B": ("llama", 2048, 16, 32, 8, 8192, 128256, True),
    "SmolLM2-135M": ("llama", 576, 30, 9, 3, 1536, 49152, True),
}
RUN = {
    "task": "arithmetic", "rollouts_per_step": 32, "sampling": {"max_tokens": 128}, "steps": 3,
    "evaluation": {"num_prompts": 1, "num_test_prompts": 1, "num_samples": 1},
}  # fmt: skip


def shape(name: str) -> PretrainedConfig:
    """The configuration of a public model (`SHAPES`), of `tiny`, or of a folder with a config.json."""
    if name in SHAPES:
        from transformers import AutoConfig

        sizes: dict[str, Any] = dict(zip(SIZES, SHAPES[name], strict=True))
        return AutoConfig.for_model(**sizes, max_position_embeddings=32768)
    if name == TINY or (Path(name).expanduser() / "config.json").is_file():
        return model_config(name)
    names = [TINY, *SHAPES]
    near = nearest(name, names)
    hint = f"; did you mean '{near}'?" if near else ""
    raise SpecError(
        f"--model-config must be one of {', '.join(names)}, or a folder with a config.json, got '{name}'{hint}"
    )


def measure(
    name: str, algorithms: Sequence[str], *, prompt_tokens: int = 64, settings: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Peak memory and seconds of training steps on a randomly initialised model of that shape, downloading nothing.

    For each algorithm: peak bytes above those before the model was built, their estimate in all and by component,
    seconds of a step and of its phases, and memory and time relative to the first. Each runs in its own process, on the
    same weights and prompts; every prompt and completion has exactly the requested number of tokens. `settings` are
    those of a run, by dotted path. SpecError for settings that cannot run or fit.
    """
    if len(set(algorithms)) != len(algorithms) or not all(algorithms):
        raise SpecError(f"--algorithms must be distinct names, such as ppo,grpo, got '{','.join(algorithms)}'")
    config = shape(name)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="cohort-memory-") as folder:
        model = Path(folder) / "model"
        raws = [{**RUN, "model": str(model), "algorithm": algorithm} for algorithm in algorithms]
        specs = [parse_run(with_overrides(raw, settings or {}), "cohort memory") for raw in raws]
        estimates = [estimate(spec, config, prompt_tokens) for spec in specs]
        for spec, expected in zip(specs, estimates, strict=True):
            check_fits(expected, resolve_device(spec.device), spec)
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            random = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        save_model(model, random.to(getattr(torch, specs[0].dtype)), tiny_tokenizer())  # all its ids are below 100
        del random
        for number, (spec, expected) in enumerate(zip(specs, estimates, strict=True)):
            with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
                try:
                    task = (spec.model_dump(mode="json"), prompt_tokens, Path(folder) / str(number))
                    peak, seconds = fresh.submit(_measured, *task).result()
                except BrokenProcessPool:
                    raise OSError(f"measuring {spec.algorithm.name} was killed, probably for lack of memory") from None
            first = found[0] if found else {"peak_bytes": peak, "seconds": seconds}
            found.append({
                "algorithm": spec.algorithm.name, "peak_bytes": peak, "estimate": expected, "seconds": seconds,
                "estimate_bytes": peak_bytes(expected), "memory_ratio": peak / first["peak_bytes"],
                "time_ratio": seconds["step"] / first["seconds"]["step"],
            })  # fmt: skip
    return found


def _measured(raw: Mapping[str, Any], prompt_tokens: int, folder: Path) -> tuple[int, dict[str, float]]:
    """Bytes at the peak of steps in a process that does nothing else, and the median seconds of a step by phase."""
    with contextlib.suppress(AttributeError):  # without glibc
        ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: give back freed blocks of 1 MiB and more
    spec = parse_run(raw, "cohort memory")
    prompts = [replace(p, text=p.text.rjust(prompt_tokens, "1")[-prompt_tokens:]) for p in spec.task.prompts("train")]
    small = spec.model_copy(update={"model": TINY, "rollouts_per_step": spec.algorithm.group_size, "steps": 1})
    _train(small, prompts, folder / "warm")  # libraries that load on first use do not count as the run's memory
    reset_peak_memory()
    before = resident_bytes()
    steps = _train(spec, prompts, folder / "run")
    peak = peak_memory() - before
    timed = steps[1:] or steps  # the first step warms up
    phases = [name for name in steps[0] if name.startswith("seconds/")]
    return peak, {name.removeprefix("seconds/"): statistics.median(step[name] for step in timed) for name in phases}


def _train(spec: RunSpec, prompts: Sequence[Prompt], folder: Path) -> list[dict[str, float]]:
    """The metrics of the run's steps; no token ends a completion, so that all have equal length."""
    from ..engines.transformers import TransformersEngine
    from ..run.state import prepare
    from ..run.step import train_step

    log: Any = _NoLog()
    run, _ = prepare(spec, folder, log, folder, lambda: False)
    if isinstance(run.engine, TransformersEngine):
        run.engine = TransformersEngine(run.engine.settings, run.learner.policy, run.codec, end_ids=())
    try:
        return [train_step(run, prompts, step)[0] for step in range(spec.steps)]
    finally:
        run.engine.close()


class _NoLog:
    """A RunLogger that stores nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *values: None
