"""How fast `evaluate` is beside transformers' `model.generate` and vLLM on a CPU (row f): problems of GSM8K's test in
SmolLM2's own chat template, of each a sample at temperature 1 and a greedy completion, float32. Each side has a process
of its own. Figures leave out loading and a warm-up; processor seconds say what a quiet machine would take.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _sides import answer
from _workload import CHAT_MODEL, QUESTIONS, ROOT
from speed import HERE, run_side

VLLM = ROOT / ".venv-vllm" / "bin" / "python"
FASTEST = {"attention": "sdpa", "cache": None, "batch": 48}  # of the settings of `generate`
Job = dict[str, Any]
Rows = list[list[int]]  # of token ids


def ours(job: Job) -> Job:
    """`cohort.evaluate`, from the loaded model to the accuracies."""
    from cohort.harness.run import standalone

    import cohort

    evaluate_run, found = standalone.evaluate_run, []

    def timed(*args: Any, **given: Any) -> Any:
        found.append(measured(lambda: evaluate_run(*args, **given)))
        return found[-1][0]

    standalone.evaluate_run = timed
    settings = {"task.path": str(QUESTIONS.parent), "evaluation.temperature": 1, "sampling.max_tokens": job["tokens"]}
    runs = Path(sys.argv[1]).parent / "runs"
    for limit in (1, len(job["prompts"])):
        cohort.evaluate(CHAT_MODEL, "gsm8k", samples=1, limit=limit, settings=settings, runs=runs)
    result, seconds = found[-1]
    return seconds | {"new_tokens": sum(sum(counts) for _, counts in result.drawn)}


def generate(job: Job) -> Job:
    """`model.generate`: the samples, then the greedy completions."""
    from transformers import AutoModelForCausalLM

    how: Any = {"dtype": torch.float32, "attn_implementation": job["attention"]}
    model: Any = AutoModelForCausalLM.from_pretrained(CHAT_MODEL, **how).eval()
    how = {"eos_token_id": job["ends"], "pad_token_id": job["ends"][0], "cache_implementation": job["cache"]}

    def complete(prompts: Rows, tokens: int) -> Rows:
        longest, found = max(map(len, prompts)), []
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts]).split(job["batch"])
        masks = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts]).split(job["batch"])
        for draw in ({"do_sample": True, "temperature": 1.0, "top_k": 0}, {"do_sample": False}):
            for part, mask in zip(ids, masks, strict=True):
                found += model.generate(part, attention_mask=mask, max_new_tokens=tokens, **how, **draw).tolist()
        return [row[longest:] for row in found]

    return completed(complete, job)


def vllm(job: Job) -> Job:
    """vLLM in this process: all rows in one call."""
    from vllm import LLM, SamplingParams

    most = max(map(len, job["prompts"])) + job["tokens"] + 1
    llm = LLM(str(CHAT_MODEL), dtype="float32", max_model_len=most, skip_tokenizer_init=True, enforce_eager=True)

    def complete(prompts: Rows, tokens: int) -> Rows:
        how: Any = {"max_tokens": tokens, "stop_token_ids": job["ends"], "ignore_eos": True, "detokenize": False}
        draws = [SamplingParams(temperature=t, **how) for t in (1.0, 0.0) for _ in prompts]
        asked: Any = 2 * [{"prompt_token_ids": row} for row in prompts]
        return [list(found.outputs[0].token_ids) for found in llm.generate(asked, draws, use_tqdm=False)]

    return completed(complete, job)


def completed(complete: Callable[[Rows, int], Rows], job: Job) -> Job:
    """The seconds of all completions after a warm-up, and their tokens up to the first end."""
    complete(job["prompts"][:1], 8)
    rows, seconds = measured(lambda: complete(job["prompts"], job["tokens"]))
    ends = (next((i + 1 for i, token in enumerate(row) if token in job["ends"]), len(row)) for row in rows)
    return seconds | {"new_tokens": sum(ends)}


def measured(work: Callable[[], Any]) -> tuple[Any, Job]:
    """What the work returns, and its seconds."""
    began, processor = time.perf_counter(), time.process_time()
    found = work()
    return found, {"seconds": time.perf_counter() - began, "processor": time.process_time() - processor}


SIDES = {"ours": ours, "generate": generate, "vllm": vllm}


def main() -> None:
    from cohort.harness.api.runs import evaluated_spec
    from cohort.harness.policy.text import codec_of

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=int, default=48, help="problems")
    parser.add_argument("--tokens", type=int, default=512, help="of a completion, at most")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "evaluation.json")
    options = parser.parse_args()
    if not (CHAT_MODEL.is_dir() and QUESTIONS.is_file()):
        return print("f: left out, needs `make smollm2` and gsm8k in COHORT_DATA")
    spec = evaluated_spec(CHAT_MODEL, "gsm8k", [f"task.path={QUESTIONS.parent}"])
    prompts = [codec_of(spec).encode(prompt.text) for prompt in spec.task.prompts("test")[: options.limit]]
    job: Job = {"name": "f", "prompts": prompts, "ends": codec_of(spec).end_ids(), "tokens": options.tokens}
    job |= {"threads": options.threads, **FASTEST}
    print(f"f: SmolLM2-135M, float32, evaluate of {len(prompts)} problems of GSM8K, at most {options.tokens} tokens")
    print("                     seconds  processor  tokens/s  tokens/row  peak MB  ours / it", flush=True)
    found: Job = {}
    with tempfile.TemporaryDirectory() as workplace:
        for side in SIDES if VLLM.is_file() else ("ours", "generate"):
            python = str(VLLM) if side == "vllm" else sys.executable
            found[side] = x = run_side(job | {"side": side}, Path(workplace), "evaluation.py", python)
            x["tokens_per_second"] = x["new_tokens"] / x["seconds"]
            print(
                f"    {side:<16} {x['seconds']:7.1f} {x['processor']:10.1f} {x['tokens_per_second']:9.1f}"
                f" {x['new_tokens'] / len(prompts) / 2:11.1f} {x['peak_memory_bytes'] / 1e6:8.0f}"
                f" {found['ours']['tokens_per_second'] / x['tokens_per_second']:9.2f}x tokens/s", flush=True
            )  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    answer(lambda job: SIDES[job["side"]](job)) if sys.argv[-1].endswith("result.json") else main()
