"""Estimates the memory of a run from its spec, before anything loads.

Parameters, the bytes that a pass keeps for its backward pass and a sampler's cache are counted (`memory.count`). The
worst moment of a pass adds 3 x 4 bytes per logit of a chunk, a layer that is computed again, or a gradient of the head;
without autograd's other temporaries that is within 2 % of the peak of a pass. Gradients always count, because they
exist from the second micro-batch on. Not counted: the cold start, libraries, CUDA context, intermediates of the
prefill, and unused bytes that the allocator holds. With glibc the last are up to 60 % of the peak (it keeps blocks
below 32 MiB), so `measure` makes it give back blocks of 1 MiB and more, like CUDA's allocator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..devices.device import resolve_device
from ..devices.memory import GIB, device_bytes
from ..policy.forward import chunk_tokens, is_recomputed, microbatch_tokens
from ..policy.model import model_config
from ..policy.text import checked_codec
from ..spec.errors import SpecError
from ..spec.run import RunSpec
from .memory_count import Counts, Shape, count
from .survey import longest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LONGEST: dict[tuple[str, str, str], int] = {}


def estimate(
    spec: RunSpec,
    config: PretrainedConfig,
    prompt_tokens: int,
    device: torch.device | None = None,
    together: int = 1,
) -> dict[str, int]:
    """Bytes by component that a run on a model of this shape needs; 0 for a component that it lacks. Reads no weights.

    With several devices they are the bytes per device: weights, gradients and moments are sharded, and `gathered` holds
    the layers that a pass has whole. For runs that train `together` they are the bytes of all runs: the frozen weights
    exist once, and one run learns at a time. Every completion counts with its full limit, every prompt with
    `prompt_tokens`. `activations` never coincide with `kv_cache` and `sampling`: see `peak_bytes`. Raises the errors of
    `count`, ValueError for a mixture of experts, and SpecError for an engine whose share of a GPU cannot hold the
    model.
    """
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ValueError(f"the {config.model_type} is a mixture of experts")  # its passes depend on the tokens
    device = resolve_device(spec.device) if device is None else device
    fit = microbatch_tokens(spec.optimizer, device) // (prompt_tokens + spec.max_tokens)
    rows = spec.rollouts_per_step // spec.optimizer.num_minibatches // spec.devices
    alone = spec.devices == 1
    reads_whole = spec.gradient_checkpointing or spec.torch_compile
    is_shared = alone and spec.algorithm.group_size > 1 and not reads_whole and prompt_tokens > 1
    prompts = min(rows, spec.prompts_per_step) if is_shared else 0
    shape = Shape.of(spec, config, min(rows, max(1, fit)), prompt_tokens, prompts)
    counts = count(shape)
    activations = _activation_bytes(spec, counts, shape, several=rows > shape.rows)
    copies = 2 if counts.is_fused and alone else 1  # of weights while they sample, and while they learn
    own_trunk = spec.algorithm.needs_critic and not spec.algorithm.shares_trunk
    stale = spec.staleness + 1 if spec.staleness else 0  # copies of trained weights: older ones, and its own meanwhile
    older = stale * min(counts.policy, counts.trainable)
    needs_copy = spec.algorithm.needs_reference and spec.lora is None  # else the adapter is switched off
    return {
        "policy": _part(counts.policy * copies, spec) + (together - 1) * counts.trainable + older,
        "reference": _part(counts.policy, spec) if needs_copy else 0,
        "critic": _part(counts.critic * (copies if own_trunk else 1), spec),
        "gradients": _part(together * counts.trainable, spec),
        "optimizer": _part(
            2 * together * counts.trainable, spec
        ),  # AdamW: two moments in the precision of the parameters
        "gathered": 0 if alone else _gathered(spec, counts, own_trunk),
        "activations": activations,
        **_engine_bytes(spec, counts, shape, device, together),
    }


def _part(size: int, spec: RunSpec) -> int:
    """Bytes of each device, of those that are spread over all."""
    return -(-size // spec.devices)


def _gathered(spec: RunSpec, counts: Counts, own_trunk: bool) -> int:
    """Bytes that a device holds unsharded in a pass: weights of the root, a layer and the next one, and gradients of a
    root and a layer before they are summed."""
    roots = counts.root * (2 if own_trunk else 1)
    gradients = min(roots + counts.layer, counts.trainable)
    return roots + 2 * counts.layer + gradients


def peak_bytes(components: Mapping[str, int]) -> int:
    """The peak of the components: a step first samples, then learns."""
    in_turn = ("activations", "kv_cache", "sampling")
    steady = sum(v for k, v in components.items() if k not in in_turn)
    sampling = components["kv_cache"] + components["sampling"]
    return steady + max(components["activations"], sampling)


def estimate_run(spec: RunSpec, together: int = 1) -> tuple[dict[str, int] | None, str | None]:
    """(estimate, None), or (None, reason) if the model cannot be counted or its shape cannot be read.

    SpecError for an engine that cannot hold the model.
    """
    try:
        return estimate(spec, model_config(spec.model), longest_prompt(spec), together=together), None
    except SpecError:
        raise
    except Exception as error:  # counting fails in many ways for an unusual model, which may still train well
        return None, (str(error) or type(error).__name__).splitlines()[0]


def longest_prompt(spec: RunSpec) -> int:
    """Tokens of the longest of the training prompts with most characters.

    Kept for each task, model and prompt format: a study asks twice for every arm, and each time would load a tokenizer.
    """
    key = spec.task.model_dump_json(), spec.model, spec.prompt.model_dump_json()
    if key not in _LONGEST:
        codec = checked_codec(spec.model, spec.prompt)
        _LONGEST[key] = max(len(codec.encode(text)) for text in longest(spec.task, "train"))
    return _LONGEST[key]


def _activation_bytes(spec: RunSpec, counts: Counts, shape: Shape, *, several: bool) -> int:
    """Bytes that one micro-batch, of `several`, keeps for its backward pass and adds at its worst moment."""
    own_trunk = spec.algorithm.needs_critic and not spec.algorithm.shares_trunk
    trunk = max(counts.trunk.total(spec.gradient_checkpointing), counts.shared)  # sharing may be given up
    completion = shape.rows * shape.max_tokens
    at_once = min(chunk_tokens(counts.vocabulary), completion)
    chunk, again = 4 * at_once * counts.vocabulary, 0
    logprobs = counts.logprobs
    if is_recomputed(completion, counts.vocabulary):  # of one chunk alone, in its turn
        logprobs, again = counts.states, counts.logprobs * at_once // completion
    policy = trunk + logprobs
    critic = counts.values + (trunk if own_trunk else 0)
    several = several or at_once < completion
    head_gradient = counts.head if several else 0  # a temporary if there is a gradient to add it to
    # A critic's trunk comes after the log-probs in the forward pass and before them in the backward pass.
    stages = [policy + critic, policy + again + 3 * chunk, policy + again + chunk + head_gradient]
    if spec.gradient_checkpointing:
        others = policy + critic if own_trunk else policy - 4 * completion * counts.vocabulary
        stages.append(others + counts.trunk.largest_layer())
        stages.append(policy + counts.cast + 3 * chunk)  # else the copies are kept anyway
    if counts.head_is_tied:
        stages.append(2 * head_gradient)  # at the end of the backward pass: the head's and the embeddings'
    return max(stages)


def _engine_bytes(spec: RunSpec, counts: Counts, shape: Shape, device: torch.device, together: int) -> dict[str, int]:
    """Bytes of sampling: `kv_cache` and `sampling` while it runs, `engine` all the time."""
    settings: Any = spec.engine
    needed = {"kv_cache": 0, "sampling": 0, "engine": 0}
    if settings.name == "transformers":
        return needed | _cache_bytes(spec, counts, shape, settings.max_batch_rows, together)
    if settings.name == "vllm" and device.type == "cuda":
        share = int(settings.gpu_memory_utilization * device_bytes(device))  # weights included
        _check_share(spec, counts, shape, share, device)
        return needed | {"kv_cache" if settings.sleep and together == 1 else "engine": share}
    if settings.name == "vllm":
        return needed | {"engine": counts.policy // settings.tensor_parallel_size + int(settings.cpu_cache_gib * GIB)}
    return needed


def _check_share(spec: RunSpec, counts: Counts, shape: Shape, share: int, device: torch.device) -> None:
    """SpecError if vLLM's share of each GPU cannot hold its weights and the keys and values of one completion."""
    settings: Any = spec.engine
    dtype = getattr(settings, "dtype", None) or ("bfloat16" if spec.autocast else spec.dtype)
    row = sum(counts.trunk.cache) // shape.rows
    needed = (_itemsize(dtype) * counts.weights + row) / settings.tensor_parallel_size
    if needed > share:
        least = math.ceil(100 * needed / device_bytes(device)) / 100
        raise SpecError(
            f"engine.gpu_memory_utilization must leave vLLM room for the model and a completion, "
            f"{needed / GIB:.1f} GiB, got {settings.gpu_memory_utilization:g} of the GPU, {share / GIB:.1f} GiB; "
            + (f"set it to {least:.2f} or more" if least <= 1 else "use a smaller model or engine.tensor_parallel_size")
        )


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def _cache_bytes(spec: RunSpec, counts: Counts, shape: Shape, max_rows: int, together: int) -> dict[str, int]:
    """Of the transformers engine: keys and values of the rows decoded at once, and their distributions."""

    def rows(group: int, prompts: int) -> int:
        return group * min(together * prompts, max(1, max_rows // group))

    held_out = max(spec.evaluation.num_prompts, spec.evaluation.num_test_prompts)
    samples = min(max(spec.evaluation.num_samples, spec.evaluation.num_test_samples or 1), 64)  # of a problem at a time
    prompts = -(-spec.prompts_per_step // spec.devices)
    at_once = max(rows(spec.algorithm.group_size, prompts), rows(samples, min(64, held_out)))
    cut = spec.sampling.top_p < 1 or spec.sampling.top_k
    per_logit = 49 if cut else 25  # logits and log-probs in float32, probabilities, their sums and order in float64
    layers = counts.trunk.cache
    cache = sum(layers) + max(layers, default=0)  # one layer is copied when rows are repeated or dropped
    whole = counts.policy if spec.devices > 1 else 0  # gathered for as long as sampling lasts
    sampling = at_once * counts.vocabulary * per_logit + whole
    return {"kv_cache": at_once * cache // shape.rows, "sampling": sampling}
