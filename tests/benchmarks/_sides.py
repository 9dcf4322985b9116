"""One side of the speed comparison in a process of its own: `python _sides.py JOB.json RESULT.json`.

A job names the side, the setting and how many steps to leave out and to measure. Every side reports a list of steps,
each with wall-clock and user seconds, tokens and phases, and the peak of its resident memory.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _workload import GROUP_SIZE, LEARNING_RATE, DigitSum, Setting, digit_sum, prompt_texts

Step = dict[str, Any]


class Meter:
    """Wall-clock and user seconds since the last call."""

    def __init__(self) -> None:
        self.wall, self.user = time.perf_counter(), _user_seconds()

    def lap(self) -> Step:
        wall, user = time.perf_counter(), _user_seconds()
        step = {"seconds": wall - self.wall, "user_seconds": user - self.user}
        self.wall, self.user = wall, user
        return step


def ours(setting: Setting, folder: Path, num_steps: int, job: dict[str, Any]) -> list[Step]:
    """Training steps of this project, through the loop's own `train_step`."""
    from cohort.harness.run.state import prepare
    from cohort.harness.run.step import train_step
    from cohort.harness.spec.run import parse_run

    task = DigitSum(prompt_tokens=setting.prompt_tokens, max_tokens=setting.max_tokens)
    raw = {
        "model": str(folder),
        "task": task,
        "algorithm": {"name": "grpo", "group_size": GROUP_SIZE, "kl_beta": setting.kl_beta, "clip_epsilon": 0.2},
        "optimizer": {"learning_rate": LEARNING_RATE, "num_inner_epochs": setting.num_inner_epochs},
        "checkpoints": {"rollouts_every": 0},
        "rollouts_per_step": setting.rollouts,
        "device": "cpu",
    }
    spec = parse_run(raw, "benchmark")
    directory = Path(tempfile.mkdtemp(dir=folder.parent))
    run, _ = prepare(spec, directory, _Silent(), directory, lambda: False)  # pyright: ignore
    steps: list[Step] = []
    prompts, meter = task.prompts("train"), Meter()
    for number in range(num_steps):
        metrics, _ = train_step(run, prompts, number)
        phases = {k.removeprefix("seconds/"): v for k, v in metrics.items() if k.startswith("seconds/")}
        phases.pop("step")
        tokens = metrics["completion/length"] * setting.rollouts
        steps.append({**meter.lap(), "tokens": tokens, "phases": phases})
    return steps


class _Silent:
    """A log that keeps nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def trl(setting: Setting, folder: Path, num_steps: int, job: dict[str, Any]) -> list[Step]:
    """TRL's GRPOTrainer in its own loop: a step is one batch of rollouts with its mu updates."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    logging.disable_progress_bar()
    steps: list[Step] = []
    phases: dict[str, float] = defaultdict(float)
    meter = Meter()

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % setting.num_inner_epochs:
                return
            step = meter.lap()
            step["tokens"] = phases.pop("tokens")
            phases["update"] = step["seconds"] - sum(phases.values())
            steps.append({**step, "phases": dict(phases)})
            phases.clear()

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(digit_sum(text) % 2 == 0) for text in completions]

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=folder.parent),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        model_init_kwargs={"attn_implementation": job["attention"], "dtype": "float32"},
        cache_implementation=job["cache"],
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=setting.rollouts // job["micro_batch"],
        num_generations=GROUP_SIZE,
        max_completion_length=setting.max_tokens,
        max_steps=num_steps * setting.num_inner_epochs,
        num_iterations=setting.num_inner_epochs,
        beta=setting.kl_beta,
        use_bias_correction_kl=False,  # TRL multiplies the KL by the ratio by default; ours is the k3 estimate as it is
        epsilon=0.2,
        loss_type="grpo",
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
    )
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in prompt_texts(setting.prompt_tokens)]),
        callbacks=[Watch()],
    )
    _time_phases(trainer, phases)
    meter.lap()
    trainer.train()
    return steps


def _time_phases(trainer: Any, phases: dict[str, float]) -> None:
    """Add to `phases` the seconds of sampling, of grading and of scoring without gradient, and the tokens sampled."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            if name != "annotate" or not torch.is_grad_enabled():
                phases[name] += time.perf_counter() - start
            if name == "generate":
                phases["tokens"] += sum(map(len, result[0]))
            return result

        return call

    trainer._generate_single_turn = timed("generate", trainer._generate_single_turn)
    trainer._calculate_rewards = timed("grade", trainer._calculate_rewards)
    trainer._get_per_token_logps_and_entropies = timed("annotate", trainer._get_per_token_logps_and_entropies)


SIDES = {"ours": ours, "trl": trl}


def peak_memory() -> int:
    """Bytes of resident memory at the peak so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _user_seconds() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    if job["side"].startswith("trl"):
        sys.modules["sklearn"] = None  # pyright: ignore  # mlflow brings it; transformers would import it, 105 MB
    setting = Setting(**job["setting"])
    before = peak_memory()
    steps = SIDES[job["side"]](setting, Path(job["folder"]), job["warm_up"] + job["steps"], job)
    memory = max(before, peak_memory())
    result = {
        "steps": steps[job["warm_up"] :],
        "peak_memory_bytes": memory,
        "load": os.getloadavg()[0],
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
