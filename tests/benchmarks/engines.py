"""How fast a step's completions are sampled: our engines beside the library's own paths, in turn in one process.

    python tests/benchmarks/engines.py [--setting a|b] [--rounds 5]

Paths: our engine as it is; the same loop around the model's own forward pass; `model.generate` with a dynamic and a
static cache; vLLM where it can be imported. A path that fails is listed with its error. Prints medians and writes
`results/engines.json` beside; the first call, start-up included, is a column of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from _workload import GROUP_SIZE, SETTINGS, DigitSum, Setting, write_model
from cohort.harness.data import Prompt, Sampling
from cohort.harness.engines._decoding import LibraryDecoder
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.interfaces import RolloutEngine
from cohort.harness.policy.model import load_policy, load_tokenizer
from cohort.harness.policy.text import TextCodec

Sampler = Callable[[list[Prompt], int], int]  # prompts and step to the number of tokens sampled


class LibraryEngine(TransformersEngine):
    """Our engine as it runs models that are not recognised."""

    def _decoder(self, capacity: int) -> LibraryDecoder:
        return LibraryDecoder(self.policy, capacity)


def ours(engine: RolloutEngine, setting: Setting) -> Sampler:
    sampling = Sampling(max_tokens=setting.max_tokens)

    def sample(prompts: list[Prompt], step: int) -> int:
        groups = engine.generate(prompts, GROUP_SIZE, sampling, seed=0, step=step)
        return sum(len(r.token_ids) for group in groups for r in group.rollouts)

    return sample


def library(model: Any, codec: TextCodec, setting: Setting, cache: str | None) -> Sampler:
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=setting.max_tokens,
        do_sample=True,
        top_k=0,
        pad_token_id=codec.tokenizer.pad_token_id,
        eos_token_id=codec.tokenizer.eos_token_id,
        cache_implementation=cache,
        disable_compile=True,
    )

    def sample(prompts: list[Prompt], step: int) -> int:
        rows = torch.tensor([codec.encode(p.text) for p in prompts for _ in range(GROUP_SIZE)])
        with torch.inference_mode():
            output = model.generate(rows, attention_mask=torch.ones_like(rows), generation_config=config)
        ends = (output[:, rows.shape[1] :] == codec.tokenizer.eos_token_id).int()
        return int((ends.cumsum(1) - ends == 0).sum())

    return sample


def paths(setting: Setting, folder: Path) -> dict[str, Callable[[], Sampler]]:
    """What is compared, each made only when its turn comes."""

    def policy() -> Any:
        return load_policy(str(folder), seed=0)

    codec = TextCodec(load_tokenizer(str(folder)))
    settings = TransformersEngine.Settings()
    made: dict[str, Callable[[], Sampler]] = {
        "ours": lambda: ours(TransformersEngine(settings, policy(), codec), setting),
        "ours, library forward": lambda: ours(LibraryEngine(settings, policy(), codec), setting),
        "generate, dynamic cache": lambda: library(policy(), codec, setting, None),
        "generate, static cache": lambda: library(policy(), codec, setting, "static"),
    }
    if find_spec("vllm") is not None:
        made["vllm"] = lambda: ours(_vllm(policy(), codec), setting)
    return made


def _vllm(policy: Any, codec: TextCodec) -> RolloutEngine:
    from cohort.harness.engines.vllm import VLLMEngine

    return VLLMEngine(VLLMEngine.Settings(), policy, codec)


def measure(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and tokens of every path, taking turns; {"error": ...} for one that fails."""
    prompts = DigitSum(prompt_tokens=setting.prompt_tokens, max_tokens=setting.max_tokens).prompts("train")
    calls: dict[str, list[dict[str, float]]] = {}
    failed: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(setting, Path(folder))
        made = paths(setting, Path(folder))
        samplers: dict[str, Sampler] = {}
        for step in range(options.rounds + 1):
            chosen = [
                prompts[(step * setting.prompts_per_step + i) % len(prompts)] for i in range(setting.prompts_per_step)
            ]
            for name in [name for name in made if name not in failed]:
                print(f"  step {step}: {name}", flush=True)
                try:
                    wall, user = time.perf_counter(), _user_seconds()
                    if name not in samplers:
                        samplers[name] = made[name]()
                    tokens = samplers[name](chosen, step)
                except Exception as error:  # a path of the library that cannot run here is a result too
                    failed[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
                    continue
                call = {"seconds": time.perf_counter() - wall, "user_seconds": _user_seconds() - user, "tokens": tokens}
                calls.setdefault(name, []).append(call)
    return {name: failed.get(name) or _summary(calls[name]) for name in made}


def _summary(calls: list[dict[str, float]]) -> dict[str, float]:
    first, *rest = calls
    seconds = {key: statistics.median(call[key] for call in rest) for key in ("seconds", "user_seconds")}
    tokens = sum(call["tokens"] for call in rest)
    return {
        **seconds,
        "tokens_per_second": tokens / sum(call["seconds"] for call in rest),
        "tokens_per_user_second": tokens / sum(call["user_seconds"] for call in rest),
        "first_call_seconds": first["seconds"],
    }


def _user_seconds() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=["a", "b"], default="a")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "engines.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    setting = next(s for s in SETTINGS if s.name.startswith(options.setting))
    results = measure(setting, options)
    print(f"{setting.name}\n  {'path':<26} s/step  user s  tokens/s  tokens/user s  first call, s")
    for name, x in results.items():
        if "error" in x:
            print(f"  {name:<26} {x['error']}")
            continue
        print(
            f"  {name:<26} {x['seconds']:6.3f} {x['user_seconds']:7.3f} {x['tokens_per_second']:9.0f}"
            f" {x['tokens_per_user_second']:14.0f} {x['first_call_seconds']:14.1f}"
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    known[setting.name] = {"load": os.getloadavg()[0], "paths": results}
    options.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
