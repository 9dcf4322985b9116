"""Chooses the settings of a command for a model other than the built-in one; --set overrides each of them.

They are added to the command's --set options, so that the study and the command that reproduces it name them and mean
the same on every machine. Learning rates: 1e-6 is usual for full RL fine-tuning of such models (arXiv:2402.03300,
section 4.2), ten times that for an adapter, and 1e-5 for a critic on a trained model. On a GPU, forward passes run in
bfloat16 and vLLM samples, if it is installed. TF32 is not chosen, because autocast leaves few float32 products.
"""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def scale_settings(model: str, sets: Sequence[str] | None, *, trains: bool = True) -> list[str]:
    """Settings as `path=value` for a command on this model, except those in `sets`; prints them in one line on stderr.

    Without `trains`, only the settings of how the model runs.
    """
    import torch

    from ..console import terminal
    from ..spec.raw import parse_overrides, with_overrides
    from ..spec.run import get_path

    given = with_overrides({"model": model}, parse_overrides(sets or ()))
    if _is_built_in(given["model"]):
        return []
    wanted: dict[str, Any] = {}
    if trains:
        rate = 1e-5 if given.get("lora") is not None else 1e-6
        wanted = {"optimizer.learning_rate": rate, "optimizer.critic_learning_rate": 1e-5}
    if given.get("device") != "cpu" and torch.cuda.is_available():
        if "dtype" not in given and torch.cuda.is_bf16_supported():
            wanted["autocast"] = True
        if "engine" not in given and get_path(given, "sampling.stop") is None and find_spec("vllm") is not None:
            wanted["engine.name"] = "vllm"
    found = [f"{path}={json.dumps(value)}" for path, value in wanted.items() if get_path(given, path) is None]
    if found:
        shown = ", ".join(found)
        terminal.say(f"For model {given['model']}: {shown} (--set PATH=VALUE for another value)", stderr=True)
    return found


def _is_built_in(model: str) -> bool:
    """Whether a model is `tiny` or a saved model of its shape."""
    config = Path(model).expanduser() / "config.json"
    if not config.is_file():
        return model == "tiny"
    from ..policy.tiny import tiny_config

    found, own = json.loads(config.read_text(encoding="utf-8")), tiny_config()
    return all(found.get(key) == getattr(own, key) for key in ("vocab_size", "hidden_size", "num_hidden_layers"))
