"""Names of settings in TRL (`GRPOConfig`, `LoraConfig`) and verl (`ppo_trainer.yaml`), and ours for the same."""

from collections.abc import Sequence
from typing import Any

from .paths import flat

_THEIRS = {
    "algorithm.clip_epsilon": "epsilon clip_ratio clip_ratio_low",
    "algorithm.clip_epsilon_high": "epsilon_high clip_ratio_high",
    "algorithm.entropy_bonus": "entropy_coeff",
    "algorithm.gae_lambda": "lam",
    "algorithm.group_size": "num_generations rollout.n",
    "algorithm.kl_beta": "beta kl_loss_coef kl_coef",
    "algorithm.name": "loss_type adv_estimator",
    "algorithm.ratio_bound": "delta clip_ratio_c",
    "algorithm.value_clip": "cliprange_value",
    "checkpoints.every": "save_steps save_freq",
    "critic.warmup_steps": "critic_warmup",
    "devices": "n_gpus_per_node",
    "dtype": "bf16",
    "engine.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "engine.name": "use_vllm",
    "engine.tensor_parallel_size": "vllm_tensor_parallel_size tensor_model_parallel_size",
    "evaluation.every": "eval_steps test_freq",
    "high_entropy_tokens": "top_entropy_quantile",
    "kl.refresh_reference_every": "ref_model_sync_steps",
    "lora.alpha": "lora_alpha",
    "lora.rank": "lora_r lora_rank",
    "lora.targets": "lora_target_modules target_modules",
    "model": "model_name_or_path",
    "optimizer.beta2": "adam_beta2",
    "optimizer.learning_rate": "lr",
    "optimizer.max_grad_norm": "grad_clip",
    "optimizer.num_inner_epochs": "num_iterations ppo_epochs",
    "optimizer.num_minibatches": "ppo_mini_batch_size",
    "optimizer.schedule": "lr_scheduler_type",
    "optimizer.tokens_per_microbatch": "gradient_accumulation_steps ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
    "ppo_max_token_len_per_gpu",
    "optimizer.warmup_steps": "warmup_ratio",
    "overlong": "mask_truncated_completions",
    "rewards": "reward_weights",
    "rollouts_per_step": "per_device_train_batch_size train_batch_size",
    "sampling.max_tokens": "max_completion_length max_response_length",
    "steps": "max_steps num_train_epochs total_training_steps total_epochs",
    "task.path": "dataset_name",
}
NAMES = {theirs: ours for ours, names in _THEIRS.items() for theirs in names.split()}
DIFFERENCES = {
    "per_device_train_batch_size": "which counts the completions of a step on all devices",
    "train_batch_size": "which counts completions: prompts times algorithm.group_size",
    "ppo_mini_batch_size": "which counts minibatches instead of stating their size",
    "gradient_accumulation_steps": "which bounds memory without changing the result",
    **dict.fromkeys(("num_train_epochs", "total_epochs", "warmup_ratio"), "which counts training steps"),
}


def ours(keys: Sequence[str], value: Any) -> str:
    """`did you mean ...? ` for the first setting at or below a key that another library calls so; empty if none is."""
    for path in flat({".".join(keys): value}):
        for name in (".".join(path.split(".")[-2:]), path.rpartition(".")[2]):
            if name in NAMES:
                note = f" ({DIFFERENCES[name]})" if name in DIFFERENCES else ""
                return f"did you mean '{NAMES[name]}'{note}? "
    return ""
