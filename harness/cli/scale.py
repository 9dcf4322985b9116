"""Which settings a command chooses by itself for a model other than the built-in one; --set wins over each.

They join the command's own --set options, so that the study and the command that reproduces it name them and mean the
same on every machine. Rates: 1e-6 is what full fine-tuning of such models with RL takes (arXiv:2402.03300, section
4.2), an adapter takes ten times that, and a critic on top of a trained model 1e-5. On a GPU forward passes run in
bfloat16 and vLLM samples, if it is installed. Not chosen: TF32, since autocast leaves no product of float32 worth it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def scale_settings(model: str, sets: Sequence[str] | None, *, trains: bool = True) -> list[str]:
    """Settings as `path=value` for a command on this model, none that `sets` has settled; said in one line on stderr.

    Without `trains` only those that say how the model is run.
    """
    from cohort.harness.console import terminal
    from cohort.harness.spec.raw import parse_overrides, with_overrides

    given = with_overrides({"model": model}, parse_overrides(sets or ()))
    if _is_built_in(given["model"]):
        return []
    wanted = _device_settings(given)
    if trains:
        rate = 1e-5 if given.get("lora") is not None else 1e-6
        wanted = {"optimizer.learning_rate": rate, "optimizer.critic_learning_rate": 1e-5, **wanted}
    found = [f"{path}={json.dumps(value)}" for path, value in wanted.items() if not _is_given(given, path)]
    if found:
        shown = ", ".join(found)
        terminal.say(f"For model {given['model']}: {shown} (--set PATH=VALUE for another value)", stderr=True)
    return found


def _is_built_in(model: str) -> bool:
    """Whether a model is `tiny`, or a saved one of its shape."""
    config = Path(model).expanduser() / "config.json"
    if not config.is_file():
        return model == "tiny"
    from cohort.harness.policy.tiny import tiny_config

    found, own = json.loads(config.read_text(encoding="utf-8")), tiny_config()
    return all(found.get(key) == getattr(own, key) for key in ("vocab_size", "hidden_size", "num_hidden_layers"))


def _device_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """How a GPU runs a model; nothing without one."""
    from importlib.util import find_spec

    import torch

    if given.get("device") == "cpu" or not torch.cuda.is_available():
        return {}
    settings: dict[str, Any] = {}
    if "dtype" not in given and torch.cuda.is_bf16_supported():
        settings["autocast"] = True
    if "engine" not in given and not _is_given(given, "sampling.stop") and find_spec("vllm") is not None:
        settings["engine.name"] = "vllm"
    return settings


def _is_given(given: Mapping[str, Any], path: str) -> bool:
    value: Any = given
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return False
        value = value[key]
    return True
