"""Seconds of a learner's step with compiled layers (`torch_compile`) beside the same step without, in turns.

    python tests/benchmarks/compiled.py [--only qwen] [--rounds 5] [--steps 20]

A step is annotate and update on one batch; every step has other lengths. Three sides share the time: layers as they
are with shared prompts (what a run has by default), the same with every row read whole, and compiled layers, which
read every row whole. Seconds are those of one thread's processor time, so that other work on the machine counts less.
Compile time stands apart: what the first step takes more, by the wall clock. Writes `results/compiled.json`.
"""

import argparse
import json
import statistics
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from cohort.harness.data import Batch
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run.learner import Learner
from cohort.harness.spec.run import parse_run
from torch._dynamo.utils import counters
from transformers import Qwen2Config, Qwen2ForCausalLM

RESULTS = Path(__file__).parent / "results" / "compiled.json"
SHAPES = {"tiny": (64, 12, 32), "qwen": (8, 32, 64)}  # rows, tokens of a prompt, of a completion at most
GROUP = 8


def qwen() -> torch.nn.Module:
    """52 million parameters, and so more than the fused arithmetic of small models takes."""
    torch.manual_seed(0)
    shape = {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 12, "num_attention_heads": 10,
             "num_key_value_heads": 2, "vocab_size": 2048, "tie_word_embeddings": True}  # fmt: skip
    return Qwen2ForCausalLM(Qwen2Config(**shape)).eval()


def batch_of(shape: tuple[int, int, int], seed: int) -> Batch:
    rows, prompt, most = shape
    generator = torch.Generator().manual_seed(seed)
    lengths = prompt + torch.randint(most // 4, most + 1, (rows,), generator=generator)
    column = torch.arange(int(lengths.max()))
    tokens = torch.randint(3, 90, (rows, len(column)), generator=generator)
    starts = tokens[::GROUP, :prompt].repeat_interleave(GROUP, dim=0)
    tokens = torch.cat([starts, tokens[:, prompt:]], dim=1) * (column < lengths[:, None])
    mask = (column >= prompt) & (column < lengths[:, None])
    return Batch(
        tokens_BT=tokens,
        completion_mask_BT=mask,
        lengths_B=lengths,
        sampler_logprobs_BT=torch.zeros(mask.shape),
        rewards_B=torch.randint(0, 2, (rows,), generator=generator).float(),
        greedy_rewards_B=torch.zeros(rows),
        group_size=GROUP,
    )


def compare(name: str, options: argparse.Namespace, **changes: Any) -> dict[str, Any]:
    policy, shape = (tiny_model(0) if name == "tiny" else qwen()), SHAPES[name]
    raw = {"task": "arithmetic", "algorithm": {"name": "grpo", "group_size": GROUP, "kl_beta": 0.04}, "device": "cpu",
           "rollouts_per_step": shape[0], "optimizer": {"learning_rate": 1e-6}, **changes}  # fmt: skip
    compiles = parse_run({**raw, "torch_compile": True}, "benchmark")
    plain = parse_run(raw, "benchmark")
    sides = {side: Learner(spec, deepcopy(policy))
             for side, spec in (("shared prompts", plain), ("whole rows", plain), ("compiled", compiles))}  # fmt: skip
    sides["whole rows"].shares_prompts = False
    counters.clear()
    first: dict[str, float] = {}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(options.rounds):
        batch = batch_of(shape, number)
        for side, learner in sides.items():
            begun, since = time.perf_counter(), time.process_time()
            annotated = learner.annotate(batch, sampler_is_exact=False)
            learner.update(learner.algorithm.advantages(annotated), number)
            seconds[side].append(time.process_time() - since)
            if not number:
                first[side] = time.perf_counter() - begun
    medians = {side: statistics.median(found[1:]) for side, found in seconds.items()}
    early = counters["stats"]["unique_graphs"]
    for number in range(options.rounds, options.steps):
        learner = sides["compiled"]
        annotated = learner.annotate(batch_of(shape, number), sampler_is_exact=False)
        learner.update(learner.algorithm.advantages(annotated), number)
    return {
        "name": name,
        "settings": changes,
        "parameters": sum(p.numel() for p in policy.parameters()),
        "seconds_per_step": medians,
        "compile_seconds": first["compiled"] - first["whole rows"],
        "ratio_to_whole_rows": medians["compiled"] / medians["whole rows"],
        "ratio_to_shared_prompts": medians["compiled"] / medians["shared prompts"],
        "graphs": {"rounds": early, "steps": counters["stats"]["unique_graphs"]},
        "all_seconds": {side: [round(x, 4) for x in found] for side, found in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each side, the first apart")
    parser.add_argument("--steps", type=int, default=20, help="steps of the compiled side in all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases: list[tuple[str, dict[str, Any]]] = [
        (name, changes) for name in SHAPES for changes in ({}, {"autocast": True}) if options.only in name
    ]
    results = []
    for name, changes in cases:
        torch.compiler.reset()
        results.append(compare(name, options, **changes))
        print(json.dumps(results[-1]), flush=True)
    options.out.write_text(json.dumps({"torch": torch.__version__, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
