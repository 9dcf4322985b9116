"""How much memory a run needs, told from its spec before anything loads, and measured afterwards.

Weights, gradients and optimiser states are counted exactly, on the model built without storage (torch's meta device).
What a forward pass keeps is a formula for Llama-like decoders, in bytes per token of a micro-batch; H hidden size, I
width of the MLP, Q and K widths of all query and of all key heads, s bytes of a number (4, or 2 in bfloat16):

    layer             2 norms of (4H + sH + sH), s(2Q + 2K) of attention and its 4-byte sums, 4sI of the MLP
    with checkpoints  sH per layer, and one layer as above while it is computed again
    head              4V per completion token (log-softmax), and 3 x 4V per token of a chunk (logits, their gradient)

Adapters keep no normed states (frozen scales) and an input in float32 per layer; under autocast the norms stay in
float32, every linear layer has its own bfloat16 input, and the weights a bfloat16 copy. Measured against the tensors
that autograd saves, the formula is within 5 % for Llama and Qwen2 shapes (`tests/test_memory.py`). Gradients are
counted as if they were there all the time, as they are from the second micro-batch on. Not counted: the cold start,
the libraries, the CUDA context, intermediates of the prefill, and what the allocator holds beyond what is in use.
With glibc the last is up to 60 % of the peak (blocks below 32 MiB are not given back), so that `measure` has blocks of
1 MiB and more given back at once, which counts as CUDA's allocator does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from harness.memory.usage import GIB, device_bytes
from harness.policy.device import resolve_device
from harness.policy.fused_llama import recognised
from harness.policy.model import (
    TINY,
    encode_prompt,
    load_tokenizer,
    local_or_hub,
    tiny_config,
)
from harness.spec.run import RunSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


CHUNK = 4096  # completion tokens that `harness.policy.forward.token_logprobs` takes through the head at once


def estimate(
    spec: RunSpec, config: PretrainedConfig, prompt_tokens: int, device: torch.device | None = None
) -> dict[str, int]:
    """Bytes by component that a run on a model of this shape needs, 0 for what it has not; reads no weights.

    Every completion is taken to reach its limit, every prompt to have `prompt_tokens`. `activations` and `kv_cache`
    with `sampling` are never there at once: see `peak_bytes`. ValueError for a model without the usual sizes.
    """
    device = resolve_device(spec.device) if device is None else device
    _check_shape(config)
    policy = _meta_policy(spec, config)
    algorithm, adapted = spec.algorithm, spec.lora is not None
    counted = {id(p): p for p in policy.parameters()}
    critic = _critic_parameters(policy, set(counted), algorithm.shares_trunk) if algorithm.needs_critic else []
    trainable = [p for p in [*counted.values(), *critic] if p.requires_grad]
    policy_bytes = _bytes(counted.values())
    lean = recognised(policy) and not spec.autocast
    weights = {
        "policy": policy_bytes * (2 if lean else 1),  # with rearranged copies, while it samples and while it learns
        "reference": policy_bytes if algorithm.needs_reference and not adapted else 0,
        "critic": _bytes(critic),
        "gradients": _bytes(trainable),
        "optimizer": 2 * _bytes(trainable),  # AdamW: two moments in the precision of the parameters
    }
    generation = _engine_bytes(spec, config, prompt_tokens, policy_bytes, device)
    return {**weights, "activations": _activation_bytes(spec, config, policy, prompt_tokens), **generation}


def peak_bytes(components: Mapping[str, int]) -> int:
    """The most that the components need at one time: a step first samples, then learns."""
    steady = sum(v for k, v in components.items() if k not in ("activations", "kv_cache", "sampling"))
    return steady + max(components["activations"], components["kv_cache"] + components["sampling"])


def estimate_run(spec: RunSpec) -> tuple[dict[str, int] | None, str | None]:
    """(estimate, None), or (None, why there is none): a model of another kind, or one whose shape is out of reach."""
    try:
        return estimate(spec, model_config(spec.model), longest_prompt(spec)), None
    except Exception as error:  # a model that is not Llama-like fails in ways of its own, and may train well
        return None, (str(error) or type(error).__name__).splitlines()[0]


def model_config(name: str) -> PretrainedConfig:
    """The shape of a model by its name in a spec; downloads no weights."""
    if name == TINY:
        return tiny_config()
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(local_or_hub(name), trust_remote_code=False)


def longest_prompt(spec: RunSpec) -> int:
    """Tokens of the longest training prompt, looked for among the 16 with most characters."""
    texts = sorted((p.text for p in spec.task.prompts("train")), key=len)[-16:]
    tokenizer = load_tokenizer(spec.model)
    return max(len(encode_prompt(tokenizer, text)) for text in texts)


def _check_shape(config: PretrainedConfig) -> None:
    """ValueError for what is not a decoder of layers with attention and one MLP."""
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        if not isinstance(getattr(config, name, None), int):
            raise ValueError(f"the configuration of a {config.model_type} has no {name}")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(config, name, None):
            raise ValueError(f"the {config.model_type} is a mixture of experts")


def _meta_policy(spec: RunSpec, config: PretrainedConfig) -> Any:
    """The run's policy with shapes and no storage."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    policy = policy.to(dtype=getattr(torch, spec.dtype))
    lora = spec.lora
    if lora is not None:
        from harness.policy.lora import add_adapter

        add_adapter(policy, lora, seed=0)
    return policy


def _critic_parameters(policy: Any, shared: set[int], shares_trunk: bool) -> list[nn.Parameter]:
    """The parameters that a critic adds to those it shares with the policy."""
    from harness.policy.critic import Critic

    return [p for p in Critic(policy, shared=shares_trunk).parameters() if id(p) not in shared]


def _bytes(parameters: Any) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _activation_bytes(spec: RunSpec, config: PretrainedConfig, policy: Any, prompt_tokens: int) -> int:
    """What one micro-batch keeps for its backward pass, and what the pass adds to it at its worst moment."""
    from harness.policy.forward import microbatch_tokens

    length = prompt_tokens + spec.max_tokens
    rows = spec.rollouts_per_step // spec.optimizer.num_minibatches
    at_once = min(rows, max(1, microbatch_tokens(spec.optimizer, resolve_device(spec.device)) // length))
    tokens, completion = at_once * length, at_once * (length - prompt_tokens)
    kept = saved_bytes(spec, config, policy, tokens, completion)
    log_probs = 4 * completion * config.vocab_size
    own_trunk = spec.algorithm.needs_critic and not spec.algorithm.shares_trunk
    if own_trunk:  # a head on the policy's own states reads what the language-model head keeps anyway
        kept += saved_bytes(spec, config, policy, tokens, completion, critic=True)
    chunk = 4 * min(CHUNK, completion) * config.vocab_size
    copies = 3 + (2 if spec.algorithm.entropy_needs_gradient else 0)
    head = policy.get_output_embeddings().weight
    several = rows > at_once  # only then is there a gradient already that the head's own is added to
    head_gradient = several * head.requires_grad * head.numel() * head.element_size()
    stages = [kept + copies * chunk, kept + chunk + head_gradient]
    if spec.gradient_checkpointing:  # the critic's layers come first, before the log-probs are let go
        others = kept if own_trunk else kept - log_probs
        stages.append(others + tokens * _layer_bytes(spec, config))
    if head is policy.get_input_embeddings().weight:
        stages.append(2 * head_gradient)  # at the end of the backward pass: the head's and the embeddings'
    return max(stages)


def saved_bytes(
    spec: RunSpec, config: PretrainedConfig, policy: Any, tokens: int, completion: int, *, critic: bool = False
) -> int:
    """Bytes that autograd saves in a forward pass over `tokens`, of which `completion` are scored: of `token_logprobs`
    or, for the critic, of `token_values`."""
    adapted, autocast = spec.lora is not None, spec.autocast
    weight = 2 if spec.dtype == "bfloat16" else 4
    hidden = config.hidden_size
    if spec.gradient_checkpointing:
        backbone = config.num_hidden_layers * weight * hidden
    else:  # no gradient flows into frozen embeddings
        backbone = config.num_hidden_layers * _layer_bytes(spec, config) - adapted * 4 * hidden
    norm = 4 * hidden + 4 + weight * hidden * (not adapted)
    head = (2 if autocast else weight) * hidden + (0 if critic else 4 * config.vocab_size)
    return tokens * (backbone + norm) + completion * head + autocast * _copied_bytes(policy, critic)


def _layer_bytes(spec: RunSpec, config: PretrainedConfig) -> int:
    """Bytes per token that one decoder layer saves."""
    lora = spec.lora
    weight = 2 if spec.dtype == "bfloat16" else 4
    linear = 2 if spec.autocast else weight  # of what goes into matrix products
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    width, key_heads = _head_shape(config)
    query, keys = heads * width, key_heads * width
    norms = 2 * (4 * hidden + 4)  # in float32 always
    attention = linear * (2 * query + 2 * keys) + 4 * heads
    inputs = linear * hidden * (2 if linear == weight else 5)  # autocast makes one for each of q, k, v, gate and up
    if lora is None:
        return norms + 2 * weight * hidden + inputs + attention + 4 * linear * inner
    adapters = 7 * linear * lora.rank
    if weight == 4:
        return norms + inputs + attention + 4 * linear * inner + adapters
    return norms + 4 * (5 * hidden + query + inner) + attention + 3 * linear * inner + adapters  # float32 inputs


def _head_shape(config: PretrainedConfig) -> tuple[int, int]:
    """(width of an attention head, number of key-value heads)."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return width, getattr(config, "num_key_value_heads", None) or heads


def _copied_bytes(policy: Any, critic: bool) -> int:
    """The bfloat16 copies of weights that autocast makes and autograd keeps; the critic has no head to speak of."""
    head = policy.get_output_embeddings()
    linear = [m for m in policy.modules() if isinstance(m, nn.Linear) and not (critic and m is head)]
    return sum(2 * m.weight.numel() for m in linear)


def _engine_bytes(
    spec: RunSpec, config: PretrainedConfig, prompt_tokens: int, policy_bytes: int, device: torch.device
) -> dict[str, int]:
    """What sampling needs: `kv_cache` and `sampling` while it lasts, `engine` all the time."""
    settings: Any = spec.engine
    if settings.name == "transformers":
        return {**_cache_bytes(spec, config, prompt_tokens, settings.max_batch_rows), "engine": 0}
    if settings.name == "vllm" and device.type == "cuda":
        share = int(settings.gpu_memory_utilization * device_bytes(device))  # weights included
        return {"kv_cache": share * settings.sleep, "sampling": 0, "engine": share * (not settings.sleep)}
    if settings.name == "vllm":
        return {"kv_cache": 0, "sampling": 0, "engine": policy_bytes + int(settings.cpu_cache_gib * GIB)}
    return {"kv_cache": 0, "sampling": 0, "engine": 0}


def _cache_bytes(spec: RunSpec, config: PretrainedConfig, prompt_tokens: int, max_rows: int) -> dict[str, int]:
    """Of the transformers engine: keys and values of the rows decoded at once, and their distributions."""

    def rows(group: int, prompts: int) -> int:
        return group * min(prompts, max(1, max_rows // group))

    held_out = max(spec.evaluation.num_prompts, spec.evaluation.num_test_prompts)
    at_once = max(
        rows(spec.algorithm.group_size, spec.prompts_per_step), rows(spec.evaluation.num_samples, min(64, held_out))
    )
    width, key_heads = _head_shape(config)
    key = 4 if spec.dtype == "float32" else 2  # the rotation of keys is not autocast, values are
    value = 2 if spec.autocast else key
    capacity = prompt_tokens + spec.max_tokens
    cache = at_once * capacity * width * key_heads * (key + value)
    cut = spec.sampling.top_p < 1 or spec.sampling.top_k
    per_logit = 49 if cut else 25  # logits and log-probs in float32, probabilities, their sums and order in float64
    copied = cache  # of one layer, when rows are repeated or dropped
    return {"kv_cache": cache * config.num_hidden_layers + copied, "sampling": at_once * config.vocab_size * per_logit}
