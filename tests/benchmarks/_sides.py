"""One side of the speed comparison in a process of its own: `python _sides.py JOB.json RESULT.json`.

A job names the side, the setting and how many steps to leave out and to measure. Every side reports a list of steps,
each with seconds, seconds of sampling and tokens, and the peak of its resident memory.
"""

import json
import os
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from _workload import GROUP_SIZE, LEARNING_RATE, DigitSum, Setting

Step = dict[str, Any]


def ours(setting: Setting, folder: Path, num_steps: int, job: dict[str, Any]) -> list[Step]:
    """Training steps of this project, through the loop's own `train_step`."""
    from cohort.harness.run.build import prepare
    from cohort.harness.run.step import train_step
    from cohort.harness.settings.run import parse_run

    task = DigitSum(prompt_tokens=setting.prompt_tokens, max_tokens=setting.max_tokens, graded=setting.graded)
    raw = {
        "model": str(folder), "task": task, "device": "cpu", "checkpoints": {"rollouts_every": 0},
        "autocast": setting.bfloat16,
        "algorithm": {"name": "grpo", "group_size": GROUP_SIZE, "kl_beta": setting.kl_beta, "clip_epsilon": 0.2},
        "optimizer": {"learning_rate": LEARNING_RATE, "num_inner_epochs": setting.num_inner_epochs},
        "rollouts_per_step": setting.rollouts,
    }  # fmt: skip
    spec = parse_run(raw, "benchmark")
    directory = Path(tempfile.mkdtemp(dir=folder.parent))
    run, _ = prepare(spec, directory, MagicMock(), directory, lambda: False)  # a log that keeps nothing
    steps: list[Step] = []
    prompts = task.prompts("train")
    assert run.costs is not None
    for number in range(num_steps):
        began = time.perf_counter()
        metrics, drawn = train_step(run, prompts, number)
        step = {"seconds": time.perf_counter() - began, "tokens": metrics["completion/length"] * setting.rollouts}
        phases = ("sampling", "generate"), ("scoring", "annotate"), ("update", "update")
        step |= {name: metrics[f"seconds/{phase}"] for name, phase in phases}
        step["operations"] = run.learner.operations(run.costs, *drawn.lengths(spec.prompts_per_step))["learning"]
        step["bytes"] = bytes_read(run.learner.policy, drawn.groups) / (2 if setting.bfloat16 else 1)
        steps.append(step)
    return steps


def bytes_read(policy: Any, groups: Any) -> float:
    """Bytes in float32 that decoding a batch reads: all weights for each place of its longest completion, and for each
    token the keys and values of those before it. The embeddings are the head's weights too."""
    config, rows = policy.config, [(len(g.prompt_token_ids), len(r.token_ids)) for g in groups for r in g.rollouts]
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = sum(count * (prompt + count / 2) for prompt, count in rows)
    weights = sum(parameter.numel() for parameter in policy.parameters())
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * width
    return 4 * (weights * max(count for _, count in rows) + cache * pairs)


def limits(dtype: torch.dtype) -> dict[str, float]:
    """Operations per second of a large product, and bytes per second that a copy reads and writes, in this process."""
    factor, source, target = torch.randn(2048, 2048).to(dtype), torch.randn(2**26), torch.zeros(2**26)
    product, copy = (timeit.timeit(x, number=5) / 5 for x in (lambda: factor @ factor, lambda: target.copy_(source)))
    return {"products": 2 * 2048**3 / product, "copies": 2 * source.nbytes / copy}


def trl(setting: Setting, folder: Path, num_steps: int, job: dict[str, Any]) -> list[Step]:
    """TRL's GRPOTrainer in its own loop: a step is one batch of rollouts with its mu updates."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    logging.disable_progress_bar()
    steps: list[Step] = []
    began, tokens, sampling = time.perf_counter(), 0, 0.0

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            nonlocal began, tokens, sampling
            if state.global_step % setting.num_inner_epochs:
                return
            steps.append({"seconds": time.perf_counter() - began, "sampling": sampling, "tokens": tokens})
            began, tokens, sampling = time.perf_counter(), 0, 0.0

    def asked(text: str) -> Any:  # in a chat's turns the template of the model is applied
        return text if setting.prompt_tokens else [{"role": "user", "content": text}]

    task = DigitSum(prompt_tokens=setting.prompt_tokens, max_tokens=setting.max_tokens, graded=setting.graded)

    rows = [{"prompt": asked(one.text), "gold": one.gold} for one in task.prompts("train")]

    def reward(completions: list[Any], gold: list[str], **kwargs: Any) -> list[float]:
        texts = [x if isinstance(x, str) else x[0]["content"] for x in completions]
        return [float(task.extract(text) == answer) for text, answer in zip(texts, gold, strict=True)]

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=folder.parent), use_cpu=True, bf16=setting.bfloat16,
        gradient_checkpointing=False, report_to=[], logging_strategy="no", save_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False,
        model_init_kwargs={"attn_implementation": job["attention"], "dtype": "float32"},
        cache_implementation=job["cache"], per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=setting.rollouts // job["micro_batch"], num_generations=GROUP_SIZE,
        max_completion_length=setting.max_tokens, max_steps=num_steps * setting.num_inner_epochs,
        num_iterations=setting.num_inner_epochs, beta=setting.kl_beta, epsilon=0.2, loss_type="grpo", temperature=1.0,
        use_bias_correction_kl=False,  # TRL multiplies the KL by the ratio by default; ours is the k3 estimate as it is
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0,
        optim="adamw_torch_fused",
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(folder), reward_funcs=reward, args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Watch()],
    )  # fmt: skip
    sample: Any = trainer._generate_single_turn

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal tokens, sampling
        start = time.perf_counter()
        result = sample(*args, **kwargs)
        sampling += time.perf_counter() - start
        tokens += sum(map(len, result[0]))
        return result

    trainer._generate_single_turn = counted  # pyright: ignore
    began = time.perf_counter()
    trainer.train()
    return steps


SIDES = {"ours": ours, "trl": trl}


def peak_memory() -> int:
    """Bytes of resident memory at the peak so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def answer(work: Callable[[Step], Step]) -> None:
    """Write what the side of a job finds, with the peak of its memory, where the command line says."""
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    if job["side"] == "ours":  # whose runs forget the peak between their phases
        from cohort.harness.devices import device
        from cohort.harness.run import build

        device.forget_peak_memory = build.forget_peak_memory = lambda: None
    else:
        sys.modules["sklearn"] = None  # pyright: ignore  # mlflow brings it; transformers would import it, 105 MB
    result = work(job) | {"peak_memory_bytes": peak_memory(), "load": os.getloadavg()[0]}
    if "setting" in job:  # after the peak
        result |= limits(torch.bfloat16 if job["setting"]["bfloat16"] else torch.float32)
    Path(sys.argv[2]).write_text(json.dumps(result))


def train(job: Step) -> Step:
    setting, steps = Setting(**job["setting"]), job["warm_up"] + job["steps"]
    return {"steps": SIDES[job["side"]](setting, Path(job["folder"]), steps, job)[job["warm_up"] :]}


if __name__ == "__main__":
    answer(train)
