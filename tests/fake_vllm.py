"""A stand-in for vLLM on a GPU, without either: it samples a model of transformers and refuses what vLLM refuses.

`install` puts it in the place of the package. `LLM.calls` lists what the engine asked for, in order. On a GPU, vLLM
ends in an illegal address where it stops, loads or samples with memory that `sleep` has unmapped; here a `RuntimeError`
says so. Weights are random until the first reload, as after `load_format="dummy"`. `Pool` is its memory, of BYTES.
"""

import copy
import os
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from cohort.harness.devices.device import UNMAPPED
from cohort.harness.policy.lora import merge_saved
from transformers import AutoConfig, AutoModelForCausalLM

BYTES = {"weights": 1_000, "kv_cache": 500_000}
TAGS = frozenset(BYTES)


class Pool:
    """vLLM's allocator: its blocks, which torch counts whether or not they are asleep."""

    @staticmethod
    def get_instance() -> SimpleNamespace:
        asleep = LLM.last.asleep
        blocks = {tag: SimpleNamespace(handle=(0, size), is_asleep=tag in asleep) for tag, size in BYTES.items()}
        return SimpleNamespace(pointer_to_data=blocks)


@dataclass
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True


@dataclass
class LoRARequest:
    name: str
    number: int
    folder: str
    load_inplace: bool = False


class LLM:
    last: ClassVar["LLM"]
    loads_weights: ClassVar[bool] = True  # False: a reload is missed, without an error
    memory_is_full: ClassVar[bool] = False

    def __init__(self, *, model: str, dtype: str, load_format: str = "auto", **settings: Any) -> None:
        assert load_format == "dummy", "the folder has no weights"
        self.settings, self.environment = settings, dict(os.environ)
        self.folder, self.dtype = model, getattr(torch, dtype)
        with torch.random.fork_rng():
            torch.manual_seed(12345)
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).to(self.dtype).eval()
        limit = settings["max_model_len"] or self.model.config.max_position_embeddings
        core = SimpleNamespace(shutdown=self._shutdown)
        model = SimpleNamespace(max_model_len=limit)
        self.llm_engine = SimpleNamespace(engine_core=core, model_config=model, add_lora=self._add_lora)
        self.adapted: dict[int, Any] = {}  # the model with each adapter
        self.asleep: frozenset[str] = frozenset()
        self.calls: list[str] = ["start"]
        self.batches: list[int] = []  # requests per call
        self.has_weights = False
        LLM.last = self

    def _add_lora(self, request: Any) -> None:
        self.calls.append("adapter")
        self._need(*TAGS)
        self.adapted[request.number] = copy.deepcopy(self.model)
        merge_saved(self.adapted[request.number], Path(request.folder))

    def collective_rpc(self, method: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if callable(method):
            slots = SimpleNamespace(lora_index_to_id=sorted(self.adapted))
            manager = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=slots))
            return [method(SimpleNamespace(get_model=lambda: self.model, model_runner=manager), *args)]
        self.calls.append(method)
        assert method == "reload_weights" and kwargs is not None
        self._need("weights")
        weights = dict(kwargs["weights_iterator"])
        if LLM.loads_weights or not self.has_weights:
            with torch.no_grad():
                for name, value in self.model.state_dict().items():
                    value.copy_(weights[name])
        self.has_weights = True

    def sleep(self, level: int) -> None:
        self.calls.append("sleep")
        self.asleep, self.has_weights = TAGS, level == 1 or not LLM.loads_weights

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append("wake " + " ".join(tags or sorted(TAGS)))
        if LLM.memory_is_full:
            raise RuntimeError("CUDA Error: out of memory")
        self.asleep -= TAGS if tags is None else set(tags)

    def reset_prefix_cache(self) -> bool:
        self._need("kv_cache")
        return True

    def generate(
        self, prompts: list[dict], parameters: list[SamplingParams], use_tqdm: bool, lora_request: Any = None
    ) -> list[Any]:
        self.calls.append("score" if parameters[0].prompt_logprobs is not None else "generate")
        self._need(*TAGS)
        assert not torch.is_autocast_enabled("cpu"), "the learner's autocast reaches vLLM's model"
        if not self.has_weights:
            raise RuntimeError("samples before it has weights")
        self.batches.append(len(prompts))
        rows = [tuple(prompt["prompt_token_ids"]) for prompt in prompts]
        models = [self.adapted[r.number] for r in lora_request] if lora_request else [self.model] * len(rows)
        return [self._answer(*asked) for asked in zip(rows, parameters, models, strict=True)]

    @torch.inference_mode()
    def _answer(self, row: tuple[int, ...], parameters: SamplingParams, model: Any) -> Any:
        tokens, values = list(row), []
        if parameters.prompt_logprobs is not None:
            found = self._logprobs(model, tokens)[:-1].gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
            return SimpleNamespace(prompt_logprobs=SimpleNamespace(logprobs=found))
        noise = torch.Generator().manual_seed(parameters.seed or 0)
        while len(values) < parameters.max_tokens and (not values or tokens[-1] not in parameters.stop_token_ids):
            logprobs = torch.log_softmax(self._logprobs(model, tokens)[-1] / (parameters.temperature or 1.0), -1)
            drawn = int(torch.multinomial(logprobs.exp(), 1, generator=noise))
            tokens.append(drawn if parameters.temperature else int(logprobs.argmax()))
            values.append(float(logprobs[tokens[-1]]))
        drawn = SimpleNamespace(token_ids=tokens[len(row) :], logprobs=SimpleNamespace(logprobs=values))
        return SimpleNamespace(outputs=[drawn])

    def _logprobs(self, model: Any, tokens: list[int]) -> torch.Tensor:
        with torch._C.DisableTorchFunction():  # the device of what vLLM computes is its own affair
            return torch.log_softmax(model(input_ids=torch.tensor([tokens])).logits[0].float(), -1)

    def _need(self, *tags: str) -> None:
        if self.asleep & set(tags):
            raise RuntimeError(f"an illegal memory access: {self.calls[-1]} while {sorted(self.asleep)} are unmapped")

    def _shutdown(self) -> None:
        self.calls.append("shutdown")
        self._need(*TAGS)


def install(monkeypatch: Any, cache: Any) -> type[LLM]:
    """The class of the fake, which `import vllm` finds until the test ends; its caches are in `cache`."""
    modules = {
        "vllm": {"__spec__": ModuleSpec("vllm", None), "LLM": LLM, "SamplingParams": SamplingParams},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)},
        "vllm.envs": {"VLLM_CACHE_ROOT": str(cache)}, "vllm.device_allocator.cumem": {"CuMemAllocator": Pool},
        "vllm.lora.request": {"LoRARequest": LoRARequest}, "vllm.config.lora": {"MaxLoRARanks": Literal[8, 16, 32]},
    }  # fmt: skip
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (80 * 2**30, 80 * 2**30))
    monkeypatch.setattr(UNMAPPED, "count", 0)
    monkeypatch.setattr(LLM, "loads_weights", True)
    monkeypatch.setattr(LLM, "memory_is_full", False)
    return LLM
