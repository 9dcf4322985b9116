"""The step of the studies for GPUs on one H100, by arithmetic: operations and bytes over what the device can do.

    python tests/benchmarks/h100.py

Nothing is measured. A pass runs at 40 % of the 989 TFLOP/s of bfloat16 products, decoding at 70 % of the 3.35 TB/s of
the memory: a token reads all weights once for all rows and each row's keys and values. Completions have half of their
limit, prompts 150 tokens. All sample with vLLM and have the study's KL. As they come (TRL 1.16, verl 0.9.1), TRL and
verl read each prompt with each of its completions, read the batch again for old log-probs, and compute activations
again; prime-rl, which wants a second GPU for vLLM, does the first alone (its activations as in its versions that keep
them). Seconds of the optimiser, of waiting and of grading are not in it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import transformers
from cohort.harness.policy import flops
from cohort.harness.policy.lora import add_adapter
from cohort.harness.policy.model import empty_model
from cohort.harness.settings.load import load_study

PRODUCTS, MEMORY, PROMPT = 0.4 * 989e12, 0.7 * 3.35e12, 150
SHAPES = {"gsm8k_qwen": (896, 24, 14, 2, 4864, True), "math_qwen": (1536, 28, 12, 2, 8960, True),
          "math_7b": (3584, 28, 28, 4, 18944, False)}  # fmt: skip
TOO_LARGE = {
    "math_7b"
}  # to keep activations on 80 GB, by our estimate (docs/running.md); prime-rl is given that they fit
# Whether a prompt is read once for its completions, the batch again for old log-probs, and activations are made again.
SIDES = {"Cohort": (True, False, False), "TRL": (False, True, True), "verl": (False, True, True),
         "prime-rl": (False, False, False)}  # fmt: skip


def policy_of(name: str, spec: Any) -> Any:
    hidden, depth, heads, own, wide, tied = SHAPES[name]
    config = transformers.Qwen2Config(
        hidden_size=hidden, num_hidden_layers=depth, num_attention_heads=heads, num_key_value_heads=own,
        intermediate_size=wide, vocab_size=151_936, tie_word_embeddings=tied,
    )  # fmt: skip
    policy = empty_model(config)
    if spec.lora is not None:
        add_adapter(policy, spec.lora, seed=0)
    return policy


def seconds(name: str) -> tuple[int, float, dict[str, float]]:
    """(completion tokens of a step, seconds of sampling, seconds of each side's other passes) of a study's GRPO."""
    (spec, *_) = (arm.spec for arm in load_study(name).checked_arms() if "grpo" in arm.spec.algorithm.name)
    policy = policy_of(name, spec)
    costs, length = flops.Costs.of(policy), spec.max_tokens // 2
    rows = [(PROMPT, [length] * spec.algorithm.group_size)] * spec.prompts_per_step
    weights = 2 * sum(p.numel() for key, p in policy.named_parameters() if ".lora_" not in key)
    config = policy.config
    token = 4 * config.num_hidden_layers * config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    read = length * weights + spec.rollouts_per_step * token * length * (PROMPT + length / 2)
    sampling = read / MEMORY + flops.sampled(costs, [(PROMPT, [1])] * spec.prompts_per_step) / PRODUCTS
    found = {}
    for side, (shares, reads_old, again) in SIDES.items():
        own = replace(costs, recomputes=again or (side == "Cohort" and name in TOO_LARGE))
        work = flops.learned(own, rows, spec, share=shares)
        work += reads_old * flops.scored(costs, rows, share=False)
        if spec.algorithm.needs_reference:
            work += flops.scored(costs.frozen, rows, share=shares)
        found[side] = work / PRODUCTS
    return spec.rollouts_per_step * length, sampling, found


def table() -> str:
    lines = [
        "| study | tokens a step | sampling, s | other passes, s: " + " | ".join(SIDES) + " | step, ours / the best |"
    ]
    lines.append("| --- | --: | --: " + "| --: " * len(SIDES) + "| --: |")
    for name in SHAPES:
        tokens, sampling, found = seconds(name)
        best = min(value for side, value in found.items() if side != "Cohort")
        ratio = (sampling + found["Cohort"]) / (sampling + best)
        cells = [name, f"{tokens:,}", f"{sampling:.1f}", *(f"{value:.1f}" for value in found.values()), f"{ratio:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
