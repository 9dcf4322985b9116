"""Estimates the memory of a run from its spec, before anything loads, and refuses a run that does not fit.

Parameters, the bytes that a pass keeps for its backward pass and a sampler's cache are counted (`memory_count`). The
worst moment of a pass adds 3 x 4 bytes per logit (where they are many, a product of the head and a block of them), a
layer that is computed again, or a gradient of the head; without autograd's other temporaries that is within 2 % of the
peak of a pass, and within 5 % where rows share prompts. Gradients count with every pass that learns, because they exist
from the second micro-batch on. Not counted: the cold start, passes of a reward model or its fit, intermediates of the
prefill, and unused bytes that the allocator holds, with glibc up to 60 % of the rest; on a GPU `RESERVE` stands for
them, and for the libraries that `process` has elsewhere.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from ..base.machine import SHARED_GPU, usable_gpus
from ..base.tensors import num_shared
from ..data import Prompt, Split
from ..devices import group
from ..devices.device import GIB, RESERVE, device_bytes, resolve_device
from ..policy.forward import (
    block_tokens,
    can_share_prompts,
    chunk_tokens,
    is_recomputed,
    microbatch_tokens,
    prompt_tokens,
    sharing_pays_in,
)
from ..policy.model import check_model, empty_model, model_config
from ..policy.text import TextCodec, codec_of
from ..settings.errors import SpecError
from ..settings.raw import with_overrides
from ..settings.run import RunSpec, parse_run
from ..settings.stages import Stage
from .memory_count import Counts, Shape, count, models, scorer_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SURE = 0.9  # of the free memory: estimates err by a tenth, and without room a run ends; recomputing takes a third more
PROCESS = 390 * 2**20  # bytes in RAM of a worker before it loads a model
# Tokens of the longest prompt of a task, model, prompt format and evaluation, for which a tokenizer must be loaded.
_LONGEST: dict[tuple[str, ...], int] = {}


def check_memory(spec: RunSpec, copies: int = 1, *, learns: bool = True) -> None:
    """SpecError if `copies` processes with such a run, or with an evaluation alone, cannot fit on the device; passes if
    there is no estimate."""
    device = resolve_device(spec.device)
    small = {"gradient_checkpointing": True, "stages": (), "rollouts_per_step": spec.algorithm.group_size}
    # In steps so small an evaluation decides how many rows are sampled at once.
    spec = decided(spec, alone=copies == 1) if learns else spec.model_copy(update=small)
    found, _ = estimate_run(spec)
    if found is not None and not learns:  # an engine with weights of its own reads the policy on the host
        is_apart = spec.engine.name == "vllm" and device.type == "cuda"
        needed = {"kv_cache", "sampling", "engine", "process", *(() if is_apart else ("policy",))}
        found = {name: size if name in needed else 0 for name, size in found.items()}
    if found is not None:
        check_fits(found, device, spec, copies)


def decided(spec: RunSpec, *, alone: bool = True) -> RunSpec:
    """The run with `gradient_checkpointing` true or false, if it is `auto`, and on a GPU vLLM's `sleep`, if it is open:
    false on a CPU, and on a GPU if the run is `alone` there and surely fits so. A limit of operations, which would end
    at another step, makes the first one true."""
    device, recompute = resolve_device(spec.device), spec.gradient_checkpointing
    engine: Any = spec.engine
    on_gpu, alone = device.type == "cuda", alone and SHARED_GPU not in os.environ

    def surely_fits(spec: RunSpec) -> bool:
        found, _ = estimate_run(spec) if alone else (None, None)
        return found is not None and peak_bytes(found) <= SURE * device_bytes(device)

    if recompute == "auto":
        recompute = on_gpu and (spec.max_flops is not None or not surely_fits(spec))
    spec = spec.model_copy(update={"gradient_checkpointing": recompute})
    if on_gpu and engine.name == "vllm" and engine.sleep is None:
        awake, asleep = (engine.model_copy(update={"sleep": sleep}) for sleep in (False, True))
        fits = surely_fits(spec.model_copy(update={"engine": awake}))
        spec = spec.model_copy(update={"engine": awake if fits else asleep})
    return spec


def check_fits(components: Mapping[str, int], device: torch.device, spec: RunSpec, copies: int = 1) -> None:
    """SpecError if `copies` such runs need more than the GPU or the RAM has free (`device_bytes`), or if their sleeping
    engines need more of the host's memory.

    It names the large components, and what makes them smaller: settings with what each would save.
    """
    here = min(spec.devices, max(group.size_here(), len(usable_gpus())))  # of the run's devices
    pinned, free = copies * here * components.get("pinned", 0), device_bytes(torch.device("cpu"))
    if pinned > free:
        raise SpecError(
            f"vLLM must have room in the host's memory for the weights under an adapter while it sleeps, {gib(pinned)} "
            f"for {copies * here} of it, got {gib(free)} free; set engine.sleep=false, or use fewer devices or another "
            "model"
        )
    needed, available = peak_bytes(components), device_bytes(device)
    if copies * needed <= available:
        return
    beside = f" beside {gib(RESERVE)} for CUDA" if device.type == "cuda" else ""
    has = f"{'the GPU' if beside else 'this machine'} has {gib(available)} free{beside}"
    who, each = ("the run", "") if copies == 1 else (f"{copies} workers", "each: ")
    own = {name: size for name, size in components.items() if name != "pinned"}
    large = [name for name in sorted(own, key=lambda name: -own[name]) if 50 * own[name] > needed]
    shown = ", ".join(f"{name} {gib(components[name])}" for name in large)
    wider = ["spread it over more GPUs (devices)"] * bool(beside)
    saved = {words: size for words, size in _savings(spec, device, components) if 50 * size > needed}
    others = {"teacher": "a smaller teacher", "critic": "an algorithm without a critic"}
    others["rewards"] = "smaller reward models"
    uses = [*["fewer `workers`"] * (copies > 1), *(others[name] for name in large if name in others), "a smaller model"]
    fix = [f"set {words} ({gib(copies * saved[words])} less)" for words in sorted(saved, key=lambda one: -saved[one])]
    raise SpecError(
        f"{who} must fit in memory: {has}, and about {gib(copies * needed)} is needed ({each}{shown}); "
        f"{' or '.join([*fix, *(f'use {one}' for one in uses), *wider])}"
    )


def _savings(spec: RunSpec, device: torch.device, counted: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Settings as `path=value` that the run can take, with the bytes that each would save at the peak of the components
    that are `counted`, those that are not 0."""
    now, raw = None, spec.model_dump(mode="json", exclude_none=True)
    with suppress(SpecError):  # such as a model that is not here
        now, _ = estimate_run(spec)
    if now is None:
        return
    vocabulary = model_config(spec.model).get_text_config().vocab_size
    tries: dict[str, Any] = {
        "rollouts_per_step": spec.rollouts_per_step // 2,
        "sampling.max_tokens": spec.max_tokens // 2,
        "optimizer.tokens_per_microbatch": microbatch_tokens(spec.optimizer, device, vocabulary) // 2,
        "gradient_checkpointing": True, "dtype": "bfloat16", "lora.rank": 16, "algorithm.kl_beta": 0.0,
        "engine.max_batch_rows": 32,
        **({"engine.sleep": True, "engine": "transformers"} if spec.engine.name == "vllm" else {}),
    }  # fmt: skip
    for path, value in tries.items():
        with suppress(ValueError):
            then, _ = estimate_run(parse_run(with_overrides(raw, {path: value}), ""))
            if then is not None:
                before, after = ({n: size if counted.get(n) else 0 for n, size in one.items()} for one in (now, then))
                yield f"{path}={str(value).lower()}", peak_bytes(before) - peak_bytes(after)


def gib(size: int) -> str:
    """`1.50 GiB`, or `12 MiB` below a tenth of one."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"


def judge(spec: RunSpec) -> dict[str, Any]:
    """The verdict on a run on this machine; ValueError for a model folder that cannot be used.

    `components` has bytes by component, `peak_bytes` their peak (None: unknown), `device_bytes` the bytes that a run
    may use, `recomputes` whether it would recompute activations, `problem` why bytes are unknown or do not fit.
    """
    check_model(spec.model)
    components, device = None, resolve_device(spec.device)
    try:
        spec = decided(spec)
        components, problem = estimate_run(spec)
        if components is not None:
            check_fits(components, device, spec)
    except SpecError as error:
        problem = str(error)
    peak = None if components is None else peak_bytes(components)
    return {
        "components": components, "peak_bytes": peak, "device_bytes": device_bytes(device),
        "recomputes": spec.gradient_checkpointing is True, "problem": problem,
    }  # fmt: skip


def peak_bytes(components: Mapping[str, int]) -> int:
    """The peak of the components on the device: a step first samples, then learns."""
    sampling = components["kv_cache"] + components["sampling"]
    learning = components["activations"] + components.get("gradients", 0)
    return sum(components.values()) - components.get("pinned", 0) - min(learning, sampling)


def estimate_run(spec: RunSpec) -> tuple[dict[str, int] | None, str | None]:
    """(estimate, None), or (None, reason) if the model cannot be counted or its shape cannot be read.

    SpecError for an engine that cannot hold the model. With several stages, the estimate of the highest peak.
    """
    if spec.stages:
        found = [_estimate_stage(stage) for stage in spec.staged()]
        return max(found, key=lambda one: 0 if one[0] is None else peak_bytes(one[0]))
    try:
        config, read = model_config(spec.model), (spec.task, spec.prompt, spec.evaluation)
        key = (spec.model, str(spec.steps > 0), *(part.model_dump_json() for part in read))
        if key not in _LONGEST:
            _LONGEST[key] = longest(codec_of(spec), read_prompts(spec))
        process = 0 if resolve_device(spec.device).type == "cuda" else PROCESS
        return {**estimate(spec, config, _LONGEST[key]), "process": process}, None
    except SpecError:
        raise
    except Exception as error:  # counting fails in many ways for an unusual model, which may still train well
        return None, (str(error) or type(error).__name__).splitlines()[0]


def _estimate_stage(stage: Stage) -> tuple[dict[str, int] | None, str | None]:
    found, why = estimate_run(stage.placed())
    if found is None or stage.does is None:
        return found, why
    if stage.does.fits_scorer:  # weights, gradients and AdamW's moments in float32
        found["rewards"] += 4 * _scorer_bytes(stage.spec.model)
    for sampler in stage.does.samplers.values():
        other, why = estimate_run(stage.spec.model_copy(update={"model": sampler}))
        if other is None:
            return None, why
        larger = {name: max(found[name], other[name]) for name in ("kv_cache", "sampling")}
        is_frozen = stage.spec.autocast or stage.spec.devices > 1  # then each device has the whole
        teacher = _frozen_bytes(stage.spec, sampler) if is_frozen else other["policy"]
        found = {**found, **larger, "teacher": teacher}
    return found, why


def _frozen_bytes(spec: RunSpec, model: str) -> int:
    """Bytes of a model that only scores in this run."""
    return scorer_bytes(empty_model(model_config(model)).to(dtype=getattr(torch, spec.dtype)), spec.autocast)


def _scorer_bytes(model: str) -> int:
    return 4 * empty_model(model_config(model), scores=True).num_parameters()  # float32


def longest(codec: TextCodec, prompts: Sequence[Prompt]) -> int:
    """Tokens of the longest prompt; 0 without prompts. A token stands for a byte at least, or belongs to the text that
    a template puts around every prompt: so shorter ones are not read."""
    texts = {prompt.text: len(prompt.text.encode()) for prompt in prompts}
    found = around = 0
    for text in sorted(texts, key=texts.__getitem__, reverse=True):
        if texts[text] + around <= found:
            break
        around = around or len(codec.encode(" "))
        found = max(found, len(codec.encode(text)))
    return found


def run_sizes(spec: RunSpec) -> dict[str, float]:
    """What estimates of time count with: the mean `prompt_tokens` of the last prompts, how many are its own and not
    what all begin with (`own_tokens`), and whether rows of a prompt learn from it once (`shares_prompts`); empty if
    they cannot be read."""
    split: Split = "train" if spec.steps else "validation"
    with suppress(Exception):  # as in the estimate of memory
        model, codec = empty_model(model_config(spec.model)), codec_of(spec)
        prompts = [codec.encode(prompt.text) for prompt in spec.task.prompts(split)[-64:]]
        mean = sum(map(len, prompts)) / len(prompts)
        own = mean - num_shared(prompts)
        rows, limit = spec.algorithm.group_size, spec.max_tokens
        shares = can_share_prompts(model) and sharing_pays_in(model, mean * (rows - 1), rows * limit**2)
        return {"prompt_tokens": mean, "own_tokens": own, "shares_prompts": float(shares)}
    return {}


def read_prompts(spec: RunSpec) -> list[Prompt]:
    """The prompts that a run reads."""
    tasks = (spec.task, *spec.evaluation.tests)
    prompts = [prompt for task in tasks for prompt in task.prompts("test")[: spec.evaluation.num_test_prompts]]
    if spec.steps:
        prompts += spec.task.prompts("train")
        prompts += spec.task.prompts("validation")[: spec.evaluation.num_prompts]
    return prompts


def estimate(
    spec: RunSpec, config: PretrainedConfig, prompt_tokens: int, device: torch.device | None = None
) -> dict[str, int]:
    """Bytes by component that a run on a model of this shape needs; 0 for a component that it lacks. Reads no weights.

    With several devices they are the bytes per device: weights, gradients and moments are sharded, and `gathered` holds
    the layers that a pass has whole. Every completion counts with its full limit, every prompt with `prompt_tokens`;
    `gradient_checkpointing=auto` counts as false, and an open `engine.sleep` as true. `activations` and `gradients`
    never coincide with `kv_cache` and `sampling`, and `pinned` is memory of the host: see `peak_bytes`. Raises the
    errors of `count`, ValueError for a mixture of experts, and SpecError for an engine whose share of a GPU cannot hold
    the model.
    """
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ValueError(f"the {config.model_type} is a mixture of experts")  # its passes depend on the tokens
    device = resolve_device(spec.device) if device is None else device
    tokens = microbatch_tokens(spec.optimizer, device, config.get_text_config().vocab_size)
    fit = tokens // (prompt_tokens + spec.max_tokens)
    rows = spec.rollouts_per_step // spec.optimizer.num_minibatches // spec.devices
    alone = spec.devices == 1
    shape = Shape.of(spec, config, min(rows, max(1, fit)), prompt_tokens, device.type)
    counts = count(shape)
    overlaps = device.type == "cpu" and spec.steps > spec.checkpoints.every  # a copy in RAM is written meanwhile
    copies = 2 if counts.is_fused and alone else 1  # of weights while they sample, and while they learn
    own_trunk = spec.algorithm.needs_critic and not spec.algorithm.shares_trunk
    reference = 0  # an adapter is off
    if spec.kl.reference is not None:
        reference = _frozen_bytes(spec, spec.kl.reference)
    elif spec.algorithm.needs_reference and spec.lora is None:
        reference = scorer_bytes(models(shape)[0], spec.autocast)
    older = spec.staleness + (spec.staleness > 0 and not alone)  # weights to sample from; and the newest beside them
    gathered = 0
    if not alone:  # weights of the root, a layer and the next one, and gradients of a root and a layer to be summed
        roots = counts.root * (2 if own_trunk else 1)
        gathered = roots + 2 * counts.layer + min(roots + counts.layer, counts.trainable)

    def part(size: int) -> int:
        """Each device's part of `size` bytes that are spread over all devices."""
        return -(-size // spec.devices)

    return {
        "policy": part(counts.policy * copies + older * min(counts.policy, counts.trainable)),
        "reference": part(reference),
        "critic": part(counts.critic * (copies if own_trunk else 1)),
        "rewards": sum(_scorer_bytes(one.scorer) for one in spec.rewards.values() if one.scorer),  # whole on each
        "gradients": part(counts.trainable),
        "optimizer": part(2 * counts.trainable),  # AdamW: two moments in the precision of the parameters
        "checkpoint": part(3 * counts.trainable) if overlaps else 0,  # of weights and moments
        "gathered": gathered,
        "activations": _activation_bytes(spec, counts, shape, device, rows),
        **_engine_bytes(spec, config, counts, shape, device),
    }


def _activation_bytes(spec: RunSpec, counts: Counts, shape: Shape, device: torch.device, rows: int) -> int:
    """Bytes that one micro-batch of a device's `rows` keeps for its backward pass and adds at its worst moment."""
    recompute = spec.gradient_checkpointing is True
    trunk, again = counts.trunk.total(recompute), counts.trunk.largest  # a layer that is computed again
    if counts.shared is not None and spec.algorithm.group_size > 1:
        # Prompts are read once, each by one device, as many as fit in a micro-batch, and completions each with its
        # prompt's keys; leaves of prompts, where they are no parts of the pass, and their gradient; or none are shared.
        before, tokens = shape.prompt_tokens - 1, shape.rows * (shape.prompt_tokens + spec.max_tokens)
        prompts = min(rows * spec.devices, spec.prompts_per_step)
        most = max(1, prompt_tokens(spec.optimizer, device) // shape.prompt_tokens)
        own = min(-(-prompts // spec.devices), most)
        prompts = min(prompts, own * spec.devices)
        leaves = own + 2 * prompts if recompute or spec.devices > 1 else prompts * (rows > shape.rows)
        once = (trunk * own + sum(counts.trunk.cache) * leaves) * before // tokens + counts.shared.total(recompute)
        again = max(again, counts.shared.largest, again * own * before // tokens)
        trunk = max(trunk, once)
    own_trunk = spec.algorithm.needs_critic and not spec.algorithm.shares_trunk
    completion = shape.rows * shape.max_tokens
    policy = trunk + counts.logprobs
    critic = counts.values + (trunk if own_trunk else 0)
    block = 4 * counts.vocabulary * min(block_tokens(counts.vocabulary, device), completion)
    is_again = is_recomputed(completion, counts.vocabulary)
    is_in_place = device.type == "cpu" and spec.devices == 1 and spec.dtype == "float32"
    head_gradient = counts.head if rows > shape.rows and not is_in_place else 0  # a temporary that is added to another
    if block == 4 * counts.vocabulary * completion and not is_again:  # all at once
        worst = max(3 * block, block + head_gradient)
    else:  # one product, unless it is kept, and a block, or a copy of the head in its precision; and the gradient
        product = torch.bfloat16 if spec.autocast else getattr(torch, spec.dtype)
        chunk = product.itemsize * counts.vocabulary * min(chunk_tokens(counts.vocabulary, device, product), completion)
        half = counts.head // (2 if spec.autocast else 1) if product.itemsize == 2 else 0
        worst = is_again * chunk + max(4 * block, half) + head_gradient
    # A critic's trunk comes after the log-probs in the forward pass and before them in the backward pass.
    stages = [policy + critic, policy + worst]
    if recompute:
        others = policy + critic if own_trunk else trunk + counts.states
        stages += [others + again, policy + counts.cast + worst]  # else the copies are kept anyway
    if spec.algorithm.needs_teacher:  # keys and values of prompts that are longer than a row, a layer, and log-probs
        row = shape.prompt_tokens + spec.max_tokens
        read = max(microbatch_tokens(spec.optimizer, device, counts.vocabulary), 2 * row)
        stages.append((sum(counts.trunk.cache) + again) * read // (shape.rows * row) + counts.states + worst)
    if counts.head_is_tied:
        stages.append(2 * head_gradient)  # at the end of the backward pass: the head's and the embeddings'
    return max(stages)


def _engine_bytes(
    spec: RunSpec, config: PretrainedConfig, counts: Counts, shape: Shape, device: torch.device
) -> dict[str, int]:
    """Bytes of sampling: `kv_cache` and `sampling` while it runs, `engine` all the time, and `pinned` of the host."""
    settings: Any = spec.engine
    needed = {"kv_cache": 0, "sampling": 0, "engine": 0, "pinned": 0}
    if settings.name == "transformers":  # keys and values of the rows decoded at once, and their distributions

        def rows(group: int, prompts: int) -> int:
            return group * min(prompts, max(1, settings.max_batch_rows // group))

        tested = spec.evaluation
        held_out = max(tested.num_prompts, tested.num_test_prompts)
        samples = min(max(tested.num_samples, tested.num_test_samples or 1), 64)  # of a problem at a time
        prompts = -(-spec.prompts_per_step // spec.devices)
        at_once = max(rows(spec.algorithm.group_size, prompts), rows(samples, min(64, held_out)))
        # logits, also over the temperature, log-probs and probabilities; in float64, where top-p or few tokens need it,
        # probabilities, their sums and order
        per_logit = 49 if spec.sampling.top_p < 1 else 25 if counts.vocabulary <= 1024 else 17
        layers = counts.trunk.cache
        cache = sum(layers) + max(layers, default=0)  # one layer is copied when rows are repeated or dropped
        whole = counts.policy if spec.devices > 1 else 0  # gathered for as long as sampling lasts
        packs = device.type == "cpu" and torch.backends.mkldnn.is_available() and not counts.is_fused  # weights, again
        packed = counts.weights * (2 if spec.autocast else getattr(torch, spec.dtype).itemsize) if packs else 0
        sampling = at_once * counts.vocabulary * per_logit + whole + packed
        return needed | {"kv_cache": at_once * cache // shape.rows, "sampling": sampling}
    if settings.name == "vllm":
        length, step_rows = shape.prompt_tokens + shape.max_tokens, spec.rollouts_per_step // spec.devices
        settings = settings.for_run(spec.dtype, spec.autocast, lambda: length, step_rows)
        gpu = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None
        weights, passes, cache, row = settings.memory(config, counts.weights, gpu)
        if gpu is None:
            return needed | {"engine": weights + cache}
        if cache < row:
            least, share = weights + passes + row, settings.gpu_memory_utilization
            fix = f"set it to {math.ceil(100 * least / gpu) / 100}" if least < gpu else "use a smaller model"
            raise SpecError(
                "engine.gpu_memory_utilization must leave vLLM room for the model and a completion, "
                f"{least / GIB:.1f} GiB, got {share:g} of {gpu / GIB:.1f}; {fix} or raise engine.tensor_parallel_size"
            )
        is_copied = settings.sleep is not False and spec.lora is not None  # to come back under the next adapter
        phase = "engine" if settings.sleep is False else "kv_cache"
        return needed | {phase: weights + passes + cache, "pinned": is_copied * weights}
    return needed
