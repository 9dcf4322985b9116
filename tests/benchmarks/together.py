"""Eight arms with LoRA on one random Llama: trained alone, one process each, and together in one process.

Prints wall time, the seconds of sampling, peak memory and where the sampled tokens first differ; writes
`results/together.json`. `--engine vllm` needs an environment with vLLM.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

ARMS: list[dict[str, Any]] = [
    {"algorithm": {"name": "grpo", "group_size": 8, "kl_beta": 0.04}},
    {"algorithm": {"name": "grpo", "group_size": 8, "kl_beta": 0.04}, "seed": 1},
    {"algorithm": {"name": "grpo", "group_size": 4}},
    {"algorithm": {"name": "grpo", "group_size": 8}, "optimizer": {"learning_rate": 3e-4}},
    {"algorithm": {"name": "dr_grpo", "group_size": 8}},
    {"algorithm": {"name": "rloo", "group_size": 8}},
    {"algorithm": {"name": "gspo", "group_size": 8}},
    {"algorithm": {"name": "dapo", "group_size": 8}},
]
RESULTS = Path(__file__).parent / "results" / "together.json"


def specs(folder: Path, options: argparse.Namespace) -> list[Any]:
    from _workload import DigitSum
    from cohort.harness.spec.run import parse_run

    DigitSum.splits = ("train", "validation", "test")
    base = {
        "model": str(folder / "model"),
        "task": DigitSum(prompt_tokens=24, max_tokens=options.tokens),
        "engine": {"name": options.engine},
        "lora": {"rank": 8, "alpha": 16.0},
        "rollouts_per_step": options.rows,
        "steps": options.steps,
        "optimizer": {"learning_rate": 1e-3},
        "evaluation": {"every": options.steps, "num_prompts": 8, "num_test_prompts": 8, "num_samples": 2},
        "checkpoints": {"rollouts_every": 0},
        "gates": {"stuck_groups": None, "answered": None, "mismatch_kl": None},
        "device": "cpu",
    }
    return [parse_run({**base, **arm}, "benchmark") for arm in ARMS]


def make_model(folder: Path, options: argparse.Namespace) -> None:
    import torch
    from cohort.harness.policy.tiny import tiny_config, tiny_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "intermediate_size": 8 * options.hidden // 3,
    }
    heads = options.hidden // 64
    config = LlamaConfig(**{**tiny_config().to_dict(), **shape, "num_attention_heads": heads,
                            "num_key_value_heads": max(1, heads // 3), "head_dim": 64,
                            "max_position_embeddings": 512})  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")


def child(folder: Path, options: argparse.Namespace) -> None:
    """Train the arms of `options.child` (a number, or `all` of them together) and write what was seen."""
    from cohort.harness.run import step as training_step
    from cohort.harness.run.loop import train
    from cohort.harness.run.together import Together

    chosen = list(range(len(ARMS))) if options.child == "all" else [int(options.child)]
    arms = specs(folder, options)
    sampled: dict[int, list[Any]] = {number: [] for number in chosen}
    sample = training_step.sample_groups
    by_directory = {}

    def recorded(run: Any, *rest: Any) -> Any:
        drawn, probe = sample(run, *rest)
        sampled[by_directory[run.directory]] += [
            [rollout.token_ids, rollout.logprobs] for group in drawn.groups for rollout in group.rollouts
        ]
        return drawn, probe

    training_step.sample_groups = recorded
    logs = {number: Log() for number in chosen}
    works = []
    for number in chosen:
        directory = Path(tempfile.mkdtemp(dir=folder))
        by_directory[directory] = number
        works.append(
            lambda models, number=number, directory=directory: train(
                arms[number],
                directory,
                logs[number],
                cache=folder / "cache",
                models=models,  # pyright: ignore
            )
        )
    start = time.perf_counter()
    if len(chosen) > 1:
        results = Together([arms[number] for number in chosen], works).results()
    else:
        from cohort.harness.run.state import OWN_MODELS

        results = [works[0](OWN_MODELS)]
    seen = {
        "seconds": time.perf_counter() - start,
        "generate": sum(log.generate for log in logs.values()),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "states": [result.state for result in results],
        "sampled": sampled,
    }
    (folder / f"{options.child}.json").write_text(json.dumps(seen))


class Log:
    """A log that keeps the seconds of sampling alone."""

    def __init__(self) -> None:
        self.generate = 0.0

    def metrics(self, step: int, values: Any) -> None:
        self.generate += values.get("seconds/generate", 0.0)

    def holds(self, *_: Any) -> bool:
        return True

    def sync(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def first_difference(alone: list[Any], together: list[Any]) -> tuple[int | None, float, int]:
    """(row of the first sampled row that differs, largest difference of log-probs up to it, number of rows)."""
    largest = 0.0
    for row, ((ids, nats), (other, others)) in enumerate(zip(alone, together, strict=True)):
        same = next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))
        largest = max([largest, *(abs(a - b) for a, b in zip(nats[:same], others[:same], strict=True))])
        if ids != other:
            return row, largest, len(alone)
    return None, largest, len(alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="transformers", choices=["transformers", "vllm"])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, default=16, help="rollouts of a step of each arm")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        return child(options.folder, options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, options)
        names = [*map(str, range(len(ARMS))), "all"]
        for part in names:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--child", part, "--folder", name], check=True)
        seen = {part: json.loads((folder / f"{part}.json").read_text()) for part in names}
        size = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
    together, alone = seen.pop("all"), seen
    differences = {n: first_difference(a["sampled"][n], together["sampled"][n]) for n, a in alone.items()}
    row = {
        "model_bytes": size, "engine": options.engine, "rows": options.rows, "tokens": options.tokens,
        "steps": options.steps, "states": together["states"],
        "seconds_alone": sum(a["seconds"] for a in alone.values()), "seconds_together": together["seconds"],
        "generate_alone": sum(a["generate"] for a in alone.values()), "generate_together": together["generate"],
        "peak_alone": max(a["peak"] for a in alone.values()), "peak_together": together["peak"],
        "rows_that_differ": {n: d[0] for n, d in differences.items() if d[0] is not None},
        "largest_difference": max(d[1] for d in differences.values()),
        "largest_difference_in_step_1": max(
            first_difference(a["sampled"][n][: options.rows], together["sampled"][n][: options.rows])[1]
            for n, a in alone.items()
        ),
    }  # fmt: skip
    row["seconds_ratio"] = row["seconds_together"] / row["seconds_alone"]
    row["generate_ratio"] = row["generate_together"] / row["generate_alone"]
    print(json.dumps(row, indent=2))
    RESULTS.write_text(json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    main()
