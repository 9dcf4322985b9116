"""Makes the values that many tests begin with: settings of a run and of a study, progress. Tests change parts."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cohort.harness.api.study import Study, study_of
from cohort.harness.record.status import StudyStatus, TrialStatus
from cohort.harness.settings.raw import with_overrides
from cohort.harness.settings.run import RunSpec, parse_run
from cohort.harness.settings.study import StudySpec, parse_study

# The smallest run that trains: seconds on one core. `make_spec(**{**FEW, "steps": 2})`
FEW: Mapping[str, Any] = {
    "task": {"name": "arithmetic", "min_operands": 2, "max_operands": 2, "num_train": 64},
    "algorithm": {"name": "grpo", "group_size": 4, "kl_beta": 0.0},
    "sampling": {"max_tokens": 8},
    "evaluation": {"every": 9, "num_prompts": 4, "num_test_prompts": 4, "num_samples": 1},
    "rollouts_per_step": 8,
    "steps": 3,
    "gates": {"stuck_groups": None},  # its rewards may all be 0
}


def make_spec(algorithm: Any = "grpo", /, **changes: Any) -> RunSpec:
    """A run of the built-in task. `changes` are settings of a run, whole (`task={...}`) or by dotted path
    (`**{"algorithm.group_size": 4}`), applied in their order."""
    return parse_run(with_overrides({"task": "arithmetic", "algorithm": algorithm}, changes), "test")


def slow_but(quick: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases of a test, of which all but the quick ones are marked slow."""
    kept = list(quick)
    return [case if case in kept else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def staged(*stages: Mapping[str, Any], **changes: Any) -> RunSpec:
    """The smallest run with these stages."""
    steps = sum(stage.get("steps", 1) for stage in stages)
    return parse_run({**FEW, "stages": [*stages], "steps": steps, **changes}, "test")


def make_study(**changes: Any) -> StudySpec:
    """A study of the built-in task: two KL weights, seeds 0 and 1. `changes` are fields of a study, whole or by dotted
    path (`**{"run.steps": 2}`); other arms replace the factors."""
    raw = {
        "name": "toy", "question": "Does it help?", "run": {"task": "arithmetic", "algorithm": "grpo"},
        "seeds": [0, 1],
    }  # fmt: skip
    if not changes.keys() & {"factors", "arms", "components", "search", "compare"}:
        raw["factors"] = {"algorithm.kl_beta": [0.0, 0.1]}
    whole = {key: value for key, value in changes.items() if "." not in key}
    return parse_study(with_overrides(raw | whole, {k: v for k, v in changes.items() if "." in k}), "test")


# The shapes of Qwen2.5-0.5B and 7B, for which two studies of the package are made.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "gsm8k_qwen": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
                   "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True},
    "math_qwen": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
                  "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True},
    "math_7b": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
                "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip

FEW_LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 160}  # fmt: skip
FEW_ROWS = {
    "rollouts_per_step": 16, "steps": 1, "sampling.max_tokens": 4, "evaluation.num_prompts": 2,
    "evaluation.num_test_prompts": 2, "evaluation.num_test_samples": 1, "gates.stuck_groups": "null",
}  # fmt: skip


def small_sets(name: str, folder: Path) -> list[str]:
    """`real_sets` for a small model with weights, and for a few rows of a few tokens."""
    return [*real_sets(name, folder, FEW_LAYERS), *(f"{key}={value}" for key, value in FEW_ROWS.items())]


def real_scale(name: str, folder: Path) -> Study:
    """A study of the package on one GPU, as `real_sets` has it."""
    return study_of(name, real_sets(name, folder), folder / "runs")


def real_sets(name: str, folder: Path, small: Mapping[str, Any] | None = None) -> list[str]:
    """Problems of the tests, and a model folder of the right shape that has no weights in it, as overrides. With
    `small`, sizes that differ from that shape, it has weights."""
    import torch
    from cohort.harness.policy.tiny import tiny_tokenizer
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model, tokenizer = folder / f"{name}-model", tiny_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen2Config(**SHAPES[name] | ({} if small is None else {**small, **ends}))
    config.save_pretrained(model)
    tokenizer.save_pretrained(str(model))
    save_file({"none": torch.zeros(1)}, model / "model.safetensors")
    if small is not None:
        Qwen2ForCausalLM(config).save_pretrained(model)
    data = Path(__file__).parent / "fixtures" / name.partition("_")[0]
    return [f"model={model}", f"task.path={data}", "task.validation_fraction=0.5"]


def trial(arm: str, state: Any, phase: str = "", done: int = 0, total: int = 0, **more: Any) -> TrialStatus:
    """The progress of a trial of which nothing but its state, its phase and `more` is known."""
    values: dict[str, Any] = {"seed": 0, "reason": None, "accuracy": None, "tokens_per_second": None, "seconds": None}
    values |= {"arm": arm, "state": state, "phase": phase, "done": done, "total": total, "directory": Path("d")}
    return TrialStatus(**values | more)


def status(*trials: TrialStatus) -> StudyStatus:
    return StudyStatus("s", "?", trials)
