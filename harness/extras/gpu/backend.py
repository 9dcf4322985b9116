"""The machine as the claims of the run-book (`claims`) use it: its memory, models, engines and training runs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.benchmark import Timer

from ...api.machine import Check, check_machine
from ...base.machine import usable_cores, usable_gpus
from ...data import InvalidRun
from ...devices.device import device_bytes, resolve_device
from ...mirror.address import MIRROR
from ...policy.lora import add_adapter
from ...policy.model import load_policy, save_model
from ...policy.text import TextCodec, codec_of
from ...policy.tiny import tiny_tokenizer
from ...record.events import EVENTS, RunHistory, read_history
from ...run.build import build_engine, placed
from ...run.standalone import train_once
from ...settings.load import load_study
from ...settings.raw import with_overrides
from ...settings.run import RunSpec, parse_run
from . import raising

# Without --model: the shape of Qwen2.5-0.5B on a GPU, a small one of the same kind on a CPU.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "cuda": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
             "intermediate_size": 4864, "vocab_size": 151936},
    "cpu": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 384, "vocab_size": 4096},
}  # fmt: skip
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Backend:
    """This machine. Tests have one of their own, which answers at once, and wrongly if a test asks for it."""

    folder: Path  # of this run of the book
    model: str
    engine: str
    num_tokens: int = 50_000  # whose log-probs are compared
    num_rows: int = 256  # of a large batch
    num_cycles: int = 20  # of sleep, wake and reload
    long_tokens: int = 8192  # of a long completion

    @cached_property
    def device(self) -> torch.device:
        return resolve_device("auto")

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def num_devices(self) -> int:
        """Devices of a trial that this machine has."""
        return len(usable_gpus()) if self.on_gpu else usable_cores()

    def checks(self) -> list[Check]:
        return check_machine(self.folder)

    def free_bytes(self) -> int:
        return device_bytes(self.device)

    start = staticmethod(build_engine)
    now = staticmethod(time.perf_counter)

    def settings(self, **changes: Any) -> dict[str, Any]:
        """The settings of a run of a few steps, changed by dotted path. Rewards are coins, because the weights are made
        up: so there is something to learn from."""
        on_gpu, few = self.on_gpu, {"every": 100, "num_prompts": 8, "num_test_prompts": 8, "num_samples": 1}
        raw = {
            "model": self.model, "task": "arithmetic", "algorithm": {"name": "grpo", "group_size": 8, "kl_beta": 0.01},
            "engine": {"name": self.engine}, "control": "random", "evaluation": few, "steps": 3, "autocast": on_gpu,
            "sampling": {"max_tokens": 256 if on_gpu else 64}, "rollouts_per_step": 256 if on_gpu else 32,
            "checkpoints": {"every": 100, "finished": "nothing", "rollouts_every": 1},
        }  # fmt: skip
        return with_overrides(raw, changes)

    def spec(self, **changes: Any) -> RunSpec:
        return parse_run(self.settings(**changes), "the run-book")

    def policy(self, spec: RunSpec) -> tuple[nn.Module, TextCodec]:
        """The policy of a run, on its device and with its adapter, and the codec."""
        policy = placed(load_policy(spec.model, seed=0), spec)
        if spec.lora is not None:
            add_adapter(policy, spec.lora, spec.seed)
        return policy, codec_of(spec)

    def cache_of(self, engine: Any) -> tuple[str, int]:
        """The name of vLLM's model runner, and the bytes of its key-value cache."""
        (found,) = engine.llm.collective_rpc(_cache)
        return found

    def is_change_found(self, engine: Any, number: int) -> bool:
        """Whether the engine's comparison finds one number of one of vLLM's tensors that changed after the load."""
        engine.llm.collective_rpc(_change, args=(number,))
        try:
            engine.check_weights()
        except InvalidRun:
            return True
        return False

    def held_bytes(self) -> int:
        """Bytes of the GPU in use, by whomever, or else of this process's RAM."""
        if self.on_gpu:
            torch.cuda.synchronize()
            free, size = torch.cuda.mem_get_info()
            return size - free
        return psutil.Process().memory_info().rss

    def train(self, name: str, settings: Mapping[str, Any], *, kill_after: int | None = None) -> RunHistory:
        """The events of a run that `cohort train` makes, or continues, in a process of its own; RuntimeError if it
        fails. With `kill_after` it gets SIGKILL once it has logged so many steps."""
        runs, file = self.folder / "runs", self.folder / f"{name}.yaml"
        file.write_text(json.dumps(settings), encoding="utf-8")
        process = _cohort("train", file, "--name", name, "--runs", runs)
        events = runs / "train" / name / EVENTS
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            if kill_after is not None:
                with suppress(ValueError):  # of a last line that is half written
                    if max(read_history(events).history.get("policy/loss", {0: None})) >= kill_after:
                        process.kill()
        if process.wait() != (0 if kill_after is None else -9):
            raise RuntimeError(f"the run '{name}' ended with status {process.returncode}")
        return read_history(events)

    def fail_one(self, settings: Mapping[str, Any], rank: int) -> tuple[float, str]:
        """(seconds until both have ended, what they said) of a run on two devices, of which one raises."""
        file, begin = self.folder / "raises.yaml", time.monotonic()
        file.write_text(json.dumps(settings), encoding="utf-8")
        words = (str(rank), "train", str(file), "--name", f"raises-{rank}", "--runs", str(self.folder / "runs"))
        launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", raising.__name__)
        command = [sys.executable, "-P", "-m", *launcher, *words]
        said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_own()).stdout
        print(said, file=sys.stderr)
        return time.monotonic() - begin, said

    def real_settings(self, **changes: Any) -> dict[str, Any] | None:
        """The settings of GRPO in the study `real_sums`, changed by dotted path; None where its model is not here."""
        if not Path("models/smollm2/config.json").exists():
            return None
        arms = {arm.label: arm.spec for arm in load_study("real_sums", []).checked_arms()}
        return with_overrides(arms["grpo"].model_dump(mode="json", exclude_none=True), changes)

    def train_here(self, name: str, settings: Mapping[str, Any]) -> RunHistory:
        """The events of a run in this process, which shows it nowhere else."""
        os.environ[MIRROR] = "none"
        train_once(parse_run(settings, name), self.folder / "runs", name)
        return read_history(self.folder / "runs" / "train" / name / EVENTS)

    def rates(self, dtype: torch.dtype) -> tuple[float, float]:
        """Operations a second of a large matrix product, and bytes a second that a copy reads and writes."""
        size = 8192 if self.on_gpu else 1024
        one, other = (torch.ones(2**26, dtype=dtype, device=self.device) for _ in range(2))  # more than caches hold
        used = {"one": one, "other": other, "left": one[: size**2].view(size, size)}
        product, copy = (Timer(work, globals=used).timeit(10).mean for work in ("left @ left", "other.copy_(one)"))
        return 2 * size**3 / product, 2 * one.nbytes / copy


def make_up(folder: Path, shape: Mapping[str, Any]) -> None:
    """Write a model of this shape with random weights, and a tokenizer that has a character for each of its tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = tiny_tokenizer(shape["vocab_size"])
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen2Config(**shape, **ends, tie_word_embeddings=True, max_position_embeddings=16384)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_model(folder, Qwen2ForCausalLM(config).bfloat16(), tokenizer)


def _cohort(*words: object) -> subprocess.Popen[bytes]:
    """A command of Cohort in a process that keeps its results to itself: settings of the environment do not count."""
    command = [sys.executable, "-P", "-m", "cohort", *map(str, words)]
    return subprocess.Popen(command, stdout=sys.stderr, env=_own())


def _own() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("COHORT_")} | {MIRROR: "none"}


def _cache(worker: Any) -> tuple[str, int]:
    runner: Any = worker.model_runner
    tensors = {x.data_ptr(): x for x in runner.kv_caches}
    return f"{type(runner).__module__}.{type(runner).__name__}", sum(x.nbytes for x in tensors.values())


@torch.no_grad()
def _change(worker: Any, number: int) -> None:
    tensors = list(worker.get_model().parameters())
    chosen = tensors[number % len(tensors)].data
    chosen[(0,) * chosen.dim()] += 1
