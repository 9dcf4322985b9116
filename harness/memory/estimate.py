"""Estimates the memory of a run from its spec, before anything loads.

Parameters, the bytes that a pass keeps for its backward pass and a sampler's cache are counted (`memory.count`). The
worst moment of a pass adds 3 x 4 bytes per logit of a chunk, a layer that is computed again, or a gradient of the head;
without autograd's other temporaries that is within 2 % of the peak of a pass. Gradients count as if they were always
there, as they are from the second micro-batch on. Not counted: the cold start, libraries, CUDA context, intermediates
of the prefill, and bytes that the allocator holds and nobody uses. With glibc the last is up to 60 % of the peak (it
keeps blocks below 32 MiB), so `measure` has those of 1 MiB and more given back, as CUDA's allocator would.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from harness.memory.count import Counts, Shape, count
from harness.memory.usage import GIB, device_bytes
from harness.policy.device import resolve_device
from harness.policy.forward import CHUNK, microbatch_tokens
from harness.policy.library import import_generation
from harness.policy.model import load_tokenizer, local_or_hub
from harness.policy.text import encode_prompt
from harness.policy.tiny import TINY, tiny_config
from harness.spec.run import RunSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def estimate(
    spec: RunSpec, config: PretrainedConfig, prompt_tokens: int, device: torch.device | None = None
) -> dict[str, int]:
    """Bytes by component that a run on a model of this shape needs; 0 for a component that it lacks. Reads no weights.

    Every completion is taken to reach its limit, every prompt to have `prompt_tokens`. `activations` and `kv_cache`
    with `sampling` are never there at once: see `peak_bytes`. Raises what `count` raises, and ValueError for a mixture
    of experts.
    """
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ValueError(f"the {config.model_type} is a mixture of experts")  # its passes depend on the tokens
    device = resolve_device(spec.device) if device is None else device
    fit = microbatch_tokens(spec.optimizer, device) // (prompt_tokens + spec.max_tokens)
    rows = spec.rollouts_per_step // spec.optimizer.num_minibatches
    shape = Shape.of(spec, config, min(rows, max(1, fit)), prompt_tokens)
    counts = count(shape)
    activations = _activation_bytes(spec, counts, shape, several=rows > shape.rows)
    needs_copy = spec.algorithm.needs_reference and spec.lora is None  # else the adapter is switched off
    return {
        "policy": counts.policy * (2 if counts.is_fused else 1),  # a copy while it samples, and while it learns
        "reference": counts.policy if needs_copy else 0,
        "critic": counts.critic,
        "gradients": counts.trainable,
        "optimizer": 2 * counts.trainable,  # AdamW: two moments in the precision of the parameters
        "activations": activations,
        **_engine_bytes(spec, counts, shape, device),
    }


def peak_bytes(components: Mapping[str, int]) -> int:
    """The most that the components need at one time: a step first samples, then learns."""
    steady = sum(v for k, v in components.items() if k not in ("activations", "kv_cache", "sampling"))
    return steady + max(components["activations"], components["kv_cache"] + components["sampling"])


def estimate_run(spec: RunSpec) -> tuple[dict[str, int] | None, str | None]:
    """(estimate, None), or (None, why there is none): no way to count the model, or its shape is out of reach."""
    try:
        return estimate(spec, model_config(spec.model), longest_prompt(spec)), None
    except Exception as error:  # a model that cannot be counted fails in ways of its own, and may train well
        return None, (str(error) or type(error).__name__).splitlines()[0]


def model_config(name: str) -> PretrainedConfig:
    """The shape of a model by its name in a spec; downloads no weights."""
    if name == TINY:
        return tiny_config()
    import_generation()
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(**local_or_hub(name), trust_remote_code=False)


def longest_prompt(spec: RunSpec) -> int:
    """Tokens of the longest training prompt, looked for among the 16 with most characters."""
    texts = sorted((p.text for p in spec.task.prompts("train")), key=len)[-16:]
    tokenizer = load_tokenizer(spec.model)
    return max(len(encode_prompt(tokenizer, text)) for text in texts)


def _activation_bytes(spec: RunSpec, counts: Counts, shape: Shape, *, several: bool) -> int:
    """Bytes that one micro-batch, of `several`, keeps for its backward pass and adds at its worst moment."""
    own_trunk = spec.algorithm.needs_critic and not spec.algorithm.shares_trunk
    trunk = counts.trunk.total(spec.gradient_checkpointing)
    policy = trunk + counts.logprobs
    critic = counts.values + (trunk if own_trunk else 0)
    completion = shape.rows * shape.max_tokens
    chunk = 4 * min(CHUNK, completion) * counts.vocabulary
    head_gradient = counts.head if several else 0  # a temporary if there is a gradient to add it to
    # A critic's trunk comes after the log-probs in the forward pass and before them in the backward pass.
    stages = [policy + critic, policy + 3 * chunk, policy + chunk + head_gradient]
    if spec.gradient_checkpointing:
        others = policy + critic if own_trunk else policy - 4 * completion * counts.vocabulary
        stages.append(others + counts.trunk.largest_layer())
        stages.append(policy + counts.cast + 3 * chunk)  # else the copies are kept anyway
    if counts.head_is_tied:
        stages.append(2 * head_gradient)  # at the end of the backward pass: the head's and the embeddings'
    return max(stages)


def _engine_bytes(spec: RunSpec, counts: Counts, shape: Shape, device: torch.device) -> dict[str, int]:
    """What sampling needs: `kv_cache` and `sampling` while it lasts, `engine` all the time."""
    settings: Any = spec.engine
    needed = {"kv_cache": 0, "sampling": 0, "engine": 0}
    if settings.name == "transformers":
        return needed | _cache_bytes(spec, counts, shape, settings.max_batch_rows)
    if settings.name == "vllm" and device.type == "cuda":
        share = int(settings.gpu_memory_utilization * device_bytes(device))  # weights included
        return needed | {"kv_cache" if settings.sleep else "engine": share}
    if settings.name == "vllm":
        return needed | {"engine": counts.policy + int(settings.cpu_cache_gib * GIB)}
    return needed


def _cache_bytes(spec: RunSpec, counts: Counts, shape: Shape, max_rows: int) -> dict[str, int]:
    """Of the transformers engine: keys and values of the rows decoded at once, and their distributions."""

    def rows(group: int, prompts: int) -> int:
        return group * min(prompts, max(1, max_rows // group))

    held_out = max(spec.evaluation.num_prompts, spec.evaluation.num_test_prompts)
    at_once = max(
        rows(spec.algorithm.group_size, spec.prompts_per_step), rows(spec.evaluation.num_samples, min(64, held_out))
    )
    cut = spec.sampling.top_p < 1 or spec.sampling.top_k
    per_logit = 49 if cut else 25  # logits and log-probs in float32, probabilities, their sums and order in float64
    layers = counts.trunk.cache
    cache = sum(layers) + max(layers, default=0)  # one layer is copied when rows are repeated or dropped
    return {"kv_cache": at_once * cache // shape.rows, "sampling": at_once * counts.vocabulary * per_logit}
