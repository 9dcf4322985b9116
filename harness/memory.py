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

import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn

from harness._llama import recognised
from harness.model import (
    TINY,
    check_model,
    encode_prompt,
    load_tokenizer,
    local_or_hub,
    resolve_device,
    tiny_config,
    tiny_tokenizer,
)
from harness.plugins import nearest
from harness.spec import RunSpec, SpecError, load_run, load_study, parse_run, read_yaml, with_overrides

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from harness.types import Prompt

CHUNK = 4096  # completion tokens that `harness.tensors.token_logprobs` takes through the head at once
GIB = 2**30

# Public configurations, written down here so that nothing is downloaded; all tie the head to the embeddings.
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {
        "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936,
    },
    "Qwen2.5-1.5B": {
        "model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936,
    },
    "Qwen2.5-3B": {
        "model_type": "qwen2", "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "intermediate_size": 11008, "vocab_size": 151936,
    },
    "Llama-3.2-1B": {
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256,
    },
    "SmolLM2-135M": {
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """What training steps of one algorithm took: bytes at the peak beyond those before the model was built, the
    estimate of the same by component, and seconds per step by phase."""

    algorithm: str
    peak_bytes: int
    estimate: dict[str, int]
    seconds: dict[str, float]


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
    algorithm, adapted = spec.algorithm, _setting(spec, "lora") is not None
    counted = {id(p): p for p in policy.parameters()}
    critic = _critic_parameters(policy, set(counted), algorithm.shares_trunk) if algorithm.needs_critic else []
    trainable = [p for p in [*counted.values(), *critic] if p.requires_grad]
    policy_bytes = _bytes(counted.values())
    lean = recognised(policy) and not _setting(spec, "autocast")
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
    needed, available = copies * peak_bytes(components), device_bytes(device)
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


def device_bytes(device: torch.device) -> int:
    """Bytes of a GPU, or those of the machine's RAM (or the container's) that are free."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no limit, or a machine without cgroups
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, free)


def resident_bytes() -> int:
    """Bytes in use now, counted as `harness.train.peak_memory` counts them."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    return psutil.Process().memory_info().rss


def gib(size: int) -> str:
    """`1.50 GiB`, or `12 MiB` where it is less than a tenth of one."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"


def model_config(name: str) -> PretrainedConfig:
    """The shape of a model by its name in a spec; downloads no weights."""
    if name == TINY:
        return tiny_config()
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(local_or_hub(name), trust_remote_code=False)


def shape(name: str) -> PretrainedConfig:
    """A configuration by the name of a public model (`SHAPES`), `tiny`, or a folder with a config.json."""
    if name in SHAPES:
        from transformers import AutoConfig

        return AutoConfig.for_model(**SHAPES[name], tie_word_embeddings=True, max_position_embeddings=32768)
    if name == TINY or (Path(name).expanduser() / "config.json").is_file():
        return model_config(name)
    names = [TINY, *SHAPES]
    near = nearest(name, names)
    hint = f"; did you mean '{near}'?" if near else ""
    raise SpecError(
        f"--model-config must be one of {', '.join(names)}, or a folder with a config.json, got '{name}'{hint}"
    )


def runs_of(name_or_path: str, overrides: Sequence[str] = ()) -> dict[str, RunSpec]:
    """The runs that a file describes: one by its algorithm's name, or those of a study by the labels of its arms."""
    path = Path(name_or_path)
    raw = read_yaml(path) if path.is_file() else {"run": {}}  # what is no file is the name of a shipped study
    if isinstance(raw, Mapping) and "run" not in raw:
        run = load_run(name_or_path, overrides)
        return {run.algorithm.name: run}
    study = load_study(name_or_path, overrides)
    return {arm.label: study.run_spec(arm, study.seeds[0]) for arm in study.design_arms() or study.checked_arms()}


def judge(spec: RunSpec) -> dict[str, Any]:
    """JSON of what a run needs and whether it fits: `components`, `peak_bytes`, `device_bytes`, `problem`."""
    check_model(spec.model)
    device = resolve_device(spec.device)
    components, problem = estimate_run(spec)
    if components is None:
        return {"components": None, "peak_bytes": None, "device_bytes": device_bytes(device), "problem": problem}
    try:
        check_fits(components, device, spec)
    except SpecError as error:
        problem = str(error)
    peak = peak_bytes(components)
    return {"components": components, "peak_bytes": peak, "device_bytes": device_bytes(device), "problem": problem}


def longest_prompt(spec: RunSpec) -> int:
    """Tokens of the longest training prompt, looked for among the 16 with most characters."""
    texts = sorted((p.text for p in spec.task.prompts("train")), key=len)[-16:]
    tokenizer = load_tokenizer(spec.model)
    return max(len(encode_prompt(tokenizer, text)) for text in texts)


def measure(
    name: str,
    algorithms: Sequence[str],
    *,
    steps: int = 3,
    rollouts: int = 32,
    prompt_tokens: int = 64,
    max_tokens: int = 128,
    dtype: str = "float32",
    overrides: Mapping[str, Any] | None = None,
    on_progress: Callable[[str, int, int], None] = lambda algorithm, done, total: None,
) -> list[Measured]:
    """Peak memory and seconds of training steps on a randomly initialised model of that shape, downloading nothing.

    Each algorithm runs in a process of its own, on the same weights and prompts; every prompt and every completion
    has exactly the tokens asked for. SpecError for settings that cannot run or fit.
    """
    if len(set(algorithms)) != len(algorithms) or not all(algorithms):
        raise SpecError(f"--algorithms must be distinct names, as ppo,grpo, got '{','.join(algorithms)}'")
    config = shape(name)
    base = {
        "task": "arithmetic",
        "rollouts_per_step": rollouts,
        "sampling": {"max_tokens": max_tokens},
        "evaluation": {"num_prompts": 1, "num_test_prompts": 1, "num_samples": 1},
        "dtype": dtype,
        "steps": steps,
    }
    with tempfile.TemporaryDirectory(prefix="cohort-memory-") as folder:
        model = Path(folder) / "model"
        raws = [{**base, "model": str(model), "algorithm": algorithm} for algorithm in algorithms]
        specs = [parse_run(with_overrides(raw, overrides or {}), "cohort memory") for raw in raws]
        estimates = [estimate(spec, config, prompt_tokens) for spec in specs]
        for spec, expected in zip(specs, estimates, strict=True):
            check_fits(expected, resolve_device(spec.device), spec)
        _save_random_model(model, config, dtype)
        found = []
        for done, spec in enumerate(specs):
            on_progress(spec.algorithm.name, done, len(specs))
            found.append(_in_fresh_process(Path(folder), spec, prompt_tokens))
    return [
        Measured(spec.algorithm.name, int(result["peak_bytes"]), expected, result["seconds"])
        for spec, expected, result in zip(specs, estimates, found, strict=True)
    ]


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
    lora = _setting(spec, "lora")
    if lora is not None:
        from harness.lora import add_adapter

        add_adapter(policy, lora, seed=0)
    return policy


def _critic_parameters(policy: Any, shared: set[int], shares_trunk: bool) -> list[nn.Parameter]:
    """The parameters that a critic adds to those it shares with the policy."""
    from harness.learner import Critic

    return [p for p in Critic(policy, shared=shares_trunk).parameters() if id(p) not in shared]


def _bytes(parameters: Any) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _setting(spec: RunSpec, name: str) -> Any:
    return getattr(spec, name, None)


def _activation_bytes(spec: RunSpec, config: PretrainedConfig, policy: Any, prompt_tokens: int) -> int:
    """What one micro-batch keeps for its backward pass, and what the pass adds to it at its worst moment."""
    from harness.learner import microbatch_tokens

    length = prompt_tokens + (spec.sampling_with_limit().max_tokens or 0)
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
    if _setting(spec, "gradient_checkpointing"):  # the critic's layers come first, before the log-probs are let go
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
    adapted, autocast = _setting(spec, "lora") is not None, bool(_setting(spec, "autocast"))
    weight = 2 if spec.dtype == "bfloat16" else 4
    hidden = config.hidden_size
    if _setting(spec, "gradient_checkpointing"):
        backbone = config.num_hidden_layers * weight * hidden
    else:  # no gradient flows into frozen embeddings
        backbone = config.num_hidden_layers * _layer_bytes(spec, config) - adapted * 4 * hidden
    norm = 4 * hidden + 4 + weight * hidden * (not adapted)
    head = (2 if autocast else weight) * hidden + (0 if critic else 4 * config.vocab_size)
    return tokens * (backbone + norm) + completion * head + autocast * _copied_bytes(policy, critic)


def _layer_bytes(spec: RunSpec, config: PretrainedConfig) -> int:
    """Bytes per token that one decoder layer saves."""
    lora = _setting(spec, "lora")
    weight = 2 if spec.dtype == "bfloat16" else 4
    linear = 2 if _setting(spec, "autocast") else weight  # of what goes into matrix products
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
    value = 2 if _setting(spec, "autocast") else key
    capacity = prompt_tokens + (spec.sampling_with_limit().max_tokens or 0)
    cache = at_once * capacity * width * key_heads * (key + value)
    cut = spec.sampling.top_p < 1 or spec.sampling.top_k
    per_logit = 49 if cut else 25  # logits and log-probs in float32, probabilities, their sums and order in float64
    copied = cache  # of one layer, when rows are repeated or dropped
    return {"kv_cache": cache * config.num_hidden_layers + copied, "sampling": at_once * config.vocab_size * per_logit}


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
            if spec is None or not _setting(spec, "gradient_checkpointing"):
                advice.append("set gradient_checkpointing=true")
        elif name in ("kv_cache", "sampling") and not learning:
            vllm = spec is not None and spec.engine.name == "vllm"
            advice = [f"lower engine.{'gpu_memory_utilization' if vllm else 'max_batch_rows'}"]
        elif name == "engine":
            advice = ["lower engine.cpu_cache_gib or set engine.sleep=true"]
        elif name in ("gradients", "optimizer") and (spec is None or _setting(spec, "lora") is None):
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


def _save_random_model(folder: Path, config: PretrainedConfig, dtype: str) -> None:
    """A folder that a run loads: weights drawn with seed 0, and the built-in tokenizer, whose ids are below 100."""
    from transformers import AutoModelForCausalLM

    from harness.model import save_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    save_model(folder, model.to(getattr(torch, dtype)), tiny_tokenizer())
    del model
    gc.collect()


def _in_fresh_process(folder: Path, spec: RunSpec, prompt_tokens: int) -> dict[str, Any]:
    task, result = folder / "task.json", folder / "result.json"
    result.unlink(missing_ok=True)
    task.write_text(json.dumps({"spec": spec.model_dump(mode="json"), "prompt_tokens": prompt_tokens}))
    home = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    environment = {"MALLOC_MMAP_THRESHOLD_": str(2**20), **os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-P", "-m", "harness.memory", str(folder)]
    ended = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if ended.returncode or not result.exists():
        how = "was killed, probably for lack of memory" if ended.returncode < 0 else "failed"
        raise OSError(f"measuring {spec.algorithm.name} {how}: {ended.stderr.strip()[-500:]}")
    return json.loads(result.read_text())


def _measure_here(folder: Path) -> None:
    """Train as the task file in `folder` says, in this process, and write what it took next to it."""
    from harness import train

    task = json.loads((folder / "task.json").read_text())
    spec, count = parse_run(task["spec"], "cohort memory"), task["prompt_tokens"]
    prompts = [replace(p, text=p.text.rjust(count, "1")[-count:]) for p in spec.task.prompts("train")]
    small = spec.model_copy(update={"model": TINY, "rollouts_per_step": spec.algorithm.group_size, "steps": 1})
    _train_here(small, prompts, folder / "warm")  # libraries that load on first use are not the run's memory
    train._reset_peak_memory()
    before = resident_bytes()
    steps = _train_here(spec, prompts, folder / "run")
    peak = train.peak_memory() - before
    timed = steps[1:] or steps  # the first one warms up
    phases = [name for name in steps[0] if name.startswith("seconds/")]
    seconds = {name.removeprefix("seconds/"): statistics.median(step[name] for step in timed) for name in phases}
    (folder / "result.json").write_text(json.dumps({"peak_bytes": peak, "seconds": seconds}))


def _train_here(spec: RunSpec, prompts: Sequence[Prompt], folder: Path) -> list[dict[str, float]]:
    """The metrics of the run's steps; no token ends a completion, so that all are equally long."""
    from harness import train

    log: Any = _NoLog()
    run, _ = train._prepare(spec, folder, log, folder, lambda: False)
    engine: Any = run.engine
    engine.end_ids = torch.empty(0, dtype=torch.int64)
    try:
        return [train.train_step(run, prompts, step)[0] for step in range(spec.steps)]
    finally:
        engine.close()


class _NoLog:
    """A RunLogger that forgets."""

    def resume(self, *_: Any) -> None: ...

    progress = metrics = samples = per_problem = resume


def as_documents(results: Sequence[Measured]) -> list[dict[str, Any]]:
    """JSON of each measurement, with its ratios to the first one's memory and time."""
    first = results[0]
    return [
        {
            **asdict(r),
            "estimate_bytes": peak_bytes(r.estimate),
            "memory_ratio": r.peak_bytes / first.peak_bytes,
            "time_ratio": r.seconds["step"] / first.seconds["step"],
        }
        for r in results
    ]


if __name__ == "__main__":
    _measure_here(Path(sys.argv[1]))
