"""Checks runs before any of them starts (folder, devices, models, engines, rewards, data, memory) and finds their
inputs."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..base.inputs import Inputs, Unreachable, digested, expecting
from ..base.machine import SHARED_BYTES, shared_memory_bytes, usable_cores, usable_gpus
from ..data import Prompt, Split
from ..interfaces import Task
from ..mirror.store import check_runs_folder
from ..policy.sources import is_here, is_local, model_sources
from ..settings.errors import SpecError
from ..settings.run import RunSpec

log = logging.getLogger(__name__)


def check_runs(
    specs: Sequence[RunSpec],
    runs: Path,
    splits: Sequence[Split] | None = None,
    *,
    trained: Sequence[RunSpec] | None = None,
    models: bool = True,
    copies: Callable[[RunSpec], int] | None = lambda spec: 1,
) -> None:
    """ValueError for runs that cannot start: of a run, a study or a dry run. Reads no weights and writes nothing.

    Each of the `splits` must have problems, by default all that a run reads. `trained` are the runs that train, by
    default those with steps: they must fit this machine, where `copies` processes run each, unless others run them
    (None). Without `models` only the folder and the data are checked. Settings that specs share are checked once.
    Warns of training on a cut distribution.
    """
    check_runs_folder(runs)
    trained = [spec for spec in specs if spec.steps] if trained is None else trained
    if models:
        _check_models(specs)
    read: dict[tuple[str, Split], Task] = {
        (spec.task.model_dump_json(), split): spec.task for spec in specs for split in splits or _splits(spec)
    }
    if splits is None or "test" in splits:
        read |= {(test.model_dump_json(), "test"): test for spec in specs for test in spec.evaluation.tests}
    seen: dict[tuple[str, str], Split] = {}  # settings of a task, prompt id -> the first split that has it
    for (settings, split), task in read.items():
        if not (prompts := task.prompts(split)):
            raise SpecError(f"task '{task.name}' has no problems in its {split} split")
        for prompt in prompts:
            if (first := seen.setdefault((settings, prompt.id), split)) != split:
                raise SpecError(
                    f"the splits of task '{task.name}' must share no problem, or a test would count what was trained "
                    f"on, got prompt id '{prompt.id}' in {first} and in {split}; correct {type(task).__name__}.prompts"
                )
    stages = [stage.spec for spec in trained for stage in spec.staged()]
    for spec in {(spec.task.model_dump_json(), spec.sampler): spec for spec in stages}.values():
        spec.sampler.check(spec.task.prompts("train"))
    for task in {spec.task.model_dump_json(): spec.task for spec in specs if spec.cold_start.steps}.values():
        if not task.demonstrations():
            raise SpecError(f"task '{task.name}' has no worked solutions; set cold_start.steps to 0")
    both = [(spec.task, test) for spec in trained for test in spec.evaluation.tests]
    for task, test in {(own.model_dump_json(), test.model_dump_json()): (own, test) for own, test in both}.values():
        asked = set(test.questions("test").values())
        if known := asked.intersection(task.questions("train").values()):
            log.warning(
                "%d of the %d problems of the test '%s' are training problems of '%s': its accuracy counts what was "
                "trained on", len(known), len(asked), test.name, task.name,
            )  # fmt: skip
    if any(spec.sampling.top_p < 1 for spec in stages):
        log.warning(
            "sampling.top_p below 1 biases training: tokens are drawn from the cut distribution, and ratio and "
            "gradient use log-probs of the uncut one; set top_p=1 to train without that bias"
        )
    if models:
        for spec in specs:
            check_countable(spec)
        if copies is not None:
            check_capacity(specs, trained, copies)


def check_capacity(
    specs: Sequence[RunSpec], trained: Sequence[RunSpec], copies: Callable[[RunSpec], int] = lambda spec: 1
) -> None:
    """ValueError for runs that this machine cannot hold: by their device and engine and, for the runs that train, by
    the number of devices and the memory, where `copies` processes run each."""
    from ..devices.device import resolve_device
    from .memory import check_memory

    for device in dict.fromkeys(spec.device for spec in specs):
        if resolve_device(device).type == "cpu" and device == "auto" and usable_gpus():
            log.warning("device=auto is the CPU, because torch cannot use this machine's GPUs: see `cohort doctor`")
    for settings in {spec.engine.model_dump_json(): spec.engine for spec in specs}.values():
        settings.check_machine()
    check_devices(trained)
    for spec in trained:
        check_memory(spec, copies(spec))


def check_devices(specs: Sequence[RunSpec]) -> None:
    """SpecError for a run on more devices than this machine has (GPUs, or else cores), or than the group of this
    process, or for devices that cannot share an engine."""
    from ..devices import group
    from ..devices.device import resolve_device

    for kind, count in dict.fromkeys((resolve_device(spec.device).type, spec.devices) for spec in specs):
        available, what = (len(usable_gpus()), "GPUs") if kind == "cuda" else (usable_cores(), "cores")
        what = f"{what} of this machine"
        if group.size() > 1:
            available, what = group.size(), "processes of this group"
        if count > max(1, available):
            raise SpecError(
                f"devices must be at most {available}, the {what}, got {count}; lower devices, or take several hosts "
                "(`torchrun`)"
            )
        free = shared_memory_bytes()
        if kind == "cuda" and count > 1 and free is not None and free < SHARED_BYTES:
            log.warning("/dev/shm has less than 1 GiB free, and GPUs of a run talk through it: see `cohort doctor`")
    for size in {spec.engine.processes for spec in specs}:
        if group.size() > 1 and group.size_here() % size:
            raise SpecError(
                f"engine.tensor_parallel_size must divide the processes on each host, {group.size_here()}, got {size}"
            )


def missing_here(specs: Sequence[RunSpec]) -> list[str]:
    """Everything that the runs need and this machine lacks, as text: a device, a model, data of the Hub, an engine.

    ValueError for local data that are missing or lack a split.
    """
    from ..devices.device import resolve_device
    from ..policy.model import check_model

    missing: dict[str, None] = {}

    def note(subject: str, check: Callable[[], object]) -> None:
        try:
            check()
        except (ValueError, OSError, ImportError) as error:
            if subject.startswith("data") and isinstance(error, ValueError) and not isinstance(error, Unreachable):
                raise
            missing[f"{subject}: {' '.join(str(error).split())}"] = None

    for spec in specs:
        note(f"device '{spec.device}'", lambda spec=spec: resolve_device(spec.device))
        note(f"engine '{spec.engine.name}'", spec.engine.check_machine)
        check_model(spec.model)
        if not is_here(spec.model):
            missing[f"model '{spec.model}': not on this machine, so the model and its memory were not checked"] = None
    for task in {repr(spec.task): spec.task for spec in specs}.values():  # an unreachable Hub takes seconds to answer
        note(f"data of task '{task.name}'", lambda task=task: task.prompts("train"))
    return list(missing)


def run_inputs(specs: Sequence[RunSpec], cache: Path, splits: Sequence[Split] | None = None) -> Inputs:
    """The inputs of the runs: models, rewards, and the data of the `splits`, by default of all that a run reads.

    InputsChanged if they differ from the expected ones, ValueError for a torn model folder. Hashes of large files are
    kept in `cache`.
    """
    samplers, specs = _samplers(specs), [stage.spec for spec in specs for stage in spec.staged()]
    sources: dict[str, Mapping[str, Path | str]] = {}
    read = {(spec.task.model_dump_json(), bool(spec.steps), bool(spec.cold_start.steps)): spec for spec in specs}
    for spec in read.values():
        cold: tuple[Split, ...] = ("train",) if spec.cold_start.steps else ()
        for split in dict.fromkeys((*(splits or _splits(spec)), *cold)):
            sources |= spec.task.inputs(split)
    for test in (test for spec in specs for test in spec.evaluation.tests if splits is None or "test" in splits):
        sources |= test.inputs("test")
    models = [*samplers, *(name for spec in specs for name in (spec.model, spec.kl.reference) if name is not None)]
    for model in dict.fromkeys(models):
        sources |= model_sources(model)
    for reward in (reward for spec in specs for reward in spec.rewards.values()):
        sources |= reward.inputs()
    inputs = digested(sources, cache / "digests")
    with expecting(inputs):
        return inputs


def check_countable(spec: RunSpec) -> None:
    """SpecError if `max_flops` is set for a model whose operations cannot be counted. Reads no weights."""
    if spec.max_flops is None:
        return
    from ..policy.flops import Costs

    rewards = [r for stage in spec.staged() for r in stage.placed().rewards.values()]
    for model in {spec.model, *_samplers([spec]), *(r.scorer for r in rewards if r.scorer)}:
        try:
            Costs.named(model)
        except Exception as error:
            raise SpecError(f"max_flops must be left out for model '{model}': {error}; use steps") from None


def check_tokens(model: str, reference: str) -> None:
    """ValueError unless the reference of the KL reads the model's tokens as they are. Reads no weights."""
    from ..policy.model import load_tokenizer

    here, there = (load_tokenizer(name).get_vocab() for name in (model, reference))
    if here != there:
        differ = sum(there.get(token) != place for token, place in here.items())
        raise SpecError(
            f"kl.reference must have the tokenizer of the model, whose tokens it reads: {differ:,} tokens of '{model}' "
            f"and '{reference}' differ; use another reference"
        )


def check_length(spec: RunSpec, prompts: Sequence[Prompt] | None = None) -> None:
    """ValueError if a prompt, by default of all that a run reads, and its completion may be longer than the model can
    read. Reads no weights."""
    from ..policy.model import length_limit, model_config
    from ..policy.text import codec_of
    from .memory import longest, read_prompts

    limit = length_limit(model_config(spec.model))
    if limit is None:
        return
    found = longest(codec_of(spec), read_prompts(spec) if prompts is None else prompts)
    twice = spec.algorithm.needs_teacher  # which reads another completion first, with its prompt
    if (found + spec.max_tokens) * (1 + twice) > limit:
        raise ValueError(
            f"a prompt and sampling.max_tokens must fit into '{spec.model}'s context limit of {limit} tokens, got "
            f"{found} + {spec.max_tokens}{', twice' * twice}; lower sampling.max_tokens or use another model"
        )


def _check_models(specs: Sequence[RunSpec]) -> None:
    from ..policy.model import check_model, check_weights, model_config  # here: it loads torch, which fakes do without
    from ..policy.text import load_codec
    from ..policy.tiny import TINY

    for sampler, setting in _samplers(specs).items():
        check_model(sampler, setting)
    specs = [stage.spec for spec in specs for stage in spec.staged()]
    for model in dict.fromkeys(spec.model for spec in specs):
        check_model(model)
    for model, prompt in {(s.model, s.prompt.model_dump_json()): (s.model, s.prompt) for s in specs}.values():
        if prompt.needs_template if model == TINY else is_local(model):  # a Hub id: when it loads
            load_codec(model, prompt)
            check_weights(model)
    for algorithm in (s.algorithm for s in specs if s.steps and s.kl.reference is None):
        if not algorithm.learns_from_rewards:
            raise SpecError(f"kl.reference must name the teacher of {algorithm.name}: a Hub id or a model folder")
    for model, teacher in dict.fromkeys((spec.model, spec.kl.reference) for spec in specs):
        if teacher is not None:
            check_model(teacher, "kl.reference")
            if is_local(teacher):
                check_tokens(model, teacher)
    for spec in specs:
        spec.engine.check(spec.sampling_with_limit())
        for reward in spec.rewards.values():
            reward.check()
    for model, size in {(s.model, s.engine.processes) for s in specs if s.steps and s.engine.processes > 1}:
        heads = model_config(model).num_attention_heads
        if heads % size:
            raise SpecError(
                f"engine.tensor_parallel_size must divide the {heads} attention heads of '{model}', got {size}; "
                f"use {math.gcd(heads, size)}"
            )


def _samplers(specs: Sequence[RunSpec]) -> dict[str, str]:
    """The models that sample in place of the policy in some stages, each with the setting that names it."""
    kinds = [stage.does for spec in specs for stage in spec.staged() if stage.does is not None]
    return {sampler: setting for kind in kinds for setting, sampler in kind.samplers.items()}


def _splits(spec: RunSpec) -> Sequence[Split]:
    return ("train", "validation", "test") if spec.steps else ("validation", "test")
