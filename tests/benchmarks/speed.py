"""How fast a training step is beside TRL's GRPOTrainer: same tiny Llama, prompts, lengths, reward and threads.

    make bench                                  (or, in its environment: python tests/benchmarks/speed.py)
    python tests/benchmarks/speed.py --only "a:" --rounds 3

Each side runs in a process of its own, in turn (ours, TRL, ours, TRL, ...), so that a busy spell of the machine meets
both; medians are over the steps of all rounds, warm-up left out. TRL has the attention, cache and micro-batch that were
its fastest here. Prints a table and writes `results/latest.json` beside; the README beside explains the figures.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _workload import CHAT_MODEL, QUESTIONS, SETTINGS, Setting, write_model
from cohort.harness.base.machine import WORKER, allocator

HERE = Path(__file__).parent
FASTEST = {
    "168k": {"attention": "eager", "cache": "static", "micro_batch": 128},
    "3.4M": {"attention": "sdpa", "cache": "static", "micro_batch": 128},
    "100M": {"attention": "sdpa", "cache": "static", "micro_batch": 8},
    "135M": {"attention": "sdpa", "cache": None, "micro_batch": 8},
}  # of TRL's settings, tried one after another: sdpa or eager, dynamic or static cache, 128 or 64 rows


def compare(setting: Setting, options: argparse.Namespace, workplace: Path) -> dict[str, Any]:
    """Both sides of a setting, in turn."""
    folder = workplace / f"{setting.shape}-{setting.natural_stops}"
    if not folder.is_dir():
        write_model(setting, folder)
    steps = options.steps if setting.num_inner_epochs == 1 else max(2, options.steps // 2)
    job = {"setting": dataclasses.asdict(setting), "folder": str(folder), **FASTEST[setting.shape]}
    job |= {"warm_up": options.warm_up, "steps": steps, "threads": options.threads}
    runs: dict[str, list[Any]] = {"ours": [], "trl": []}
    for _ in range(options.rounds):
        for side in runs:
            runs[side].append(run_side(job | {"name": setting.name, "side": side}, workplace))
    ours, trl = (_summary(setting, found) for found in runs.values())
    return {
        "name": setting.name, "ours": ours, "trl": trl | {"settings": FASTEST[setting.shape]},
        "speed_ratio": ours["samples_per_second"] / trl["samples_per_second"],
        "token_speed_ratio": ours["tokens_per_second"] / trl["tokens_per_second"],
        "rss_ratio": ours["peak_memory_bytes"] / trl["peak_memory_bytes"],
    }  # fmt: skip


def run_side(job: dict[str, Any], workplace: Path, script: str = "_sides.py", python: str = sys.executable) -> Any:
    """What a side found in a process of its own."""
    job_file, result_file = workplace / "job.json", workplace / "result.json"
    job_file.write_text(json.dumps(job))
    environment = {
        "OMP_NUM_THREADS": str(job["threads"]), "MKL_NUM_THREADS": str(job["threads"]), "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "DISABLE_MLFLOW_INTEGRATION": "TRUE",  # TRL would import mlflow, which its users need not have
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    } | (WORKER | allocator() if job["side"] == "ours" else {})  # fmt: skip
    done = subprocess.run(
        [python, str(HERE / script), str(job_file), str(result_file)], env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{job['side']} failed in setting '{job['name']}':\n{done.stdout[-4000:]}")
    return json.loads(result_file.read_text())


def _summary(setting: Setting, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over all steps of a side; the highest peak of its processes; of ours how near to the machine's limits."""
    steps = [step for run in runs for step in run["steps"]]
    x = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    tokens = statistics.mean(step["tokens"] for step in steps)
    found = {
        "seconds_per_step": x["seconds"], "sampling_seconds": x["sampling"],
        "samples_per_second": setting.rollouts / x["seconds"], "tokens_per_second": tokens / x["seconds"],
        "completion_length": tokens / setting.rollouts,
        "peak_memory_bytes": max(run["peak_memory_bytes"] for run in runs),
        "step_seconds": [round(step["seconds"], 4) for step in steps], "load": max(run["load"] for run in runs),
    }  # fmt: skip
    if "update" not in x:
        return found
    products, copies = (statistics.median(run[name] for run in runs) for name in ("products", "copies"))
    return found | {
        "scoring": x["scoring"], "update": x["update"], "products": products, "copies": copies,
        "mfu": x["operations"] / x["update"] / products, "bytes_per_token": x["bytes"] / x["tokens"],
        "of_copies": x["bytes"] / x["sampling"] / copies,
    }  # fmt: skip


def _print(pair: dict[str, Any]) -> None:
    print(f"\n{pair['name']}\n                     s/step  sampling  samples/s  tokens/s  tokens/row  peak MB")
    for name in ("ours", "trl"):
        x = pair[name]
        print(
            f"    {name:<16} {x['seconds_per_step']:6.3f} {x['sampling_seconds']:9.3f} {x['samples_per_second']:10.1f}"
            f" {x['tokens_per_second']:9.0f} {x['completion_length']:11.2f} {x['peak_memory_bytes'] / 1e6:8.0f}"
        )
    x = pair["ours"]
    print(
        f"    ours: scoring {x['scoring']:.3f}, update {x['update']:.3f} at {x['mfu']:.2f} of {x['products'] / 1e9:.0f}"
        f" GFLOP/s; decoding {x['bytes_per_token'] / 1e6:.2f} MB a token, {x['of_copies']:.2f} of "
        f"{x['copies'] / 1e9:.1f} GB/s"
    )
    print(
        f"    ours / TRL: {pair['speed_ratio']:.2f}x samples/s, {pair['token_speed_ratio']:.2f}x tokens/s, "
        f"{pair['rss_ratio']:.2f}x peak memory",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--rounds", type=int, default=2, help="how often the sides take turns")
    parser.add_argument("--warm-up", type=int, default=2, help="steps left out at the start of every process")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of every process; half with mu > 1")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "latest.json")
    options = parser.parse_args()
    entries = []
    with tempfile.TemporaryDirectory() as workplace:
        for setting in SETTINGS:
            if not setting.prompt_tokens and not (CHAT_MODEL.is_dir() and QUESTIONS.is_file()):
                print(f"{setting.name}: left out, needs `make smollm2` and gsm8k in COHORT_DATA")
            elif options.only in setting.name:
                print(f"{setting.name}: ...", flush=True)
                entries.append(compare(setting, options, Path(workplace)))
                _print(entries[-1])
    machine = {"platform": platform.platform(), "cores": os.cpu_count(), "threads": options.threads}
    versions = {name: version(name) for name in ("torch", "transformers", "trl")}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": machine, "versions": versions, "settings": entries}, indent=1) + "\n")


if __name__ == "__main__":
    main()
