"""Reads the settings and folders that the functions of the API get, and chooses settings that suit a model."""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from pydantic_core import to_jsonable_python

from ..console import terminal
from ..data import Split
from ..settings.errors import SpecError
from ..settings.raw import parse_overrides, with_overrides
from ..settings.run import Optimizer, get_path

Settings = Mapping[str, Any] | Sequence[str]  # dotted path -> value, or texts PATH=VALUE as after `--set`
RATE = "optimizer.learning_rate"
REPORTING = "reading the results and drawing the figures"


def runs_folder(folder: str | Path | None) -> Path:
    return Path(folder or os.environ.get("COHORT_RUNS") or "runs")


def checked_split(split: str) -> Split:
    if split not in get_args(Split):
        raise SpecError(f"`split` must be one of {', '.join(get_args(Split))}, got '{split}'")
    return cast("Split", split)


def shell(command: str, options: Mapping[str, Any]) -> str:
    """A shell command with more options; a list repeats its option, None leaves it out."""
    words = [command]
    for option, value in options.items():
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is not None:
                words += [option, shlex.quote(str(item))]
    return " ".join(words)


def as_texts(settings: Settings) -> list[str]:
    """The settings as texts after `--set`, from which the same values are read."""
    if not isinstance(settings, Mapping):
        return list(settings)
    texts = []
    for path, value in settings.items():
        try:
            plain = to_jsonable_python(value, fallback=lambda x: dict(x) if isinstance(x, Mapping) else x.item())
        except (AttributeError, ValueError, TypeError):  # `item` is numpy's
            kinds = "numbers, text, lists and mappings"
            raise SpecError(f"setting '{path}' must be made of {kinds}, got {type(value).__name__}") from None
        text = yaml.safe_dump(plain, default_flow_style=True, width=float("inf"), allow_unicode=True)
        texts.append(f"{path}={text.strip().removesuffix('...').strip()}")
    return texts


def scale_settings(
    model: str,
    sets: Sequence[str],
    *,
    trains: bool = True,
    has_critic: bool = True,
    file: Mapping[str, Any] | None = None,
) -> list[str]:
    """Settings as `path=value` for a command on a model that is not built in, except those in `sets` or a run's `file`;
    prints them in one line on stderr. The study and the command that reproduces it name them and mean the same on every
    machine.

    Learning rates (only if it `trains`): 1e-6 is usual for full RL fine-tuning of such models (arXiv:2402.03300,
    section 4.2), ten times that for an adapter, and 1e-5 for a critic (if it `has_critic`) on a trained model. On a
    GPU, forward passes run in bfloat16 and vLLM samples, if it is installed. TF32 is not chosen, because autocast
    leaves few float32 products.
    """
    import torch

    given = with_overrides({**(file or {}), "model": model}, parse_overrides(sets))
    if _is_small(given["model"]):
        return []
    wanted: dict[str, Any] = {}
    if trains:
        rate = 1e-5 if given.get("lora") is not None else 1e-6
        wanted = {"optimizer.learning_rate": rate} | ({"optimizer.critic_learning_rate": 1e-5} if has_critic else {})
    if given.get("device") != "cpu" and torch.cuda.is_available():
        if "dtype" not in given and torch.cuda.is_bf16_supported():
            wanted["autocast"] = True
        if "engine" not in given and get_path(given, "sampling.stop") is None and find_spec("vllm") is not None:
            wanted["engine.name"] = "vllm"
    texts = [f"{path}={json.dumps(value)}" for path, value in wanted.items() if get_path(given, path) is None]
    if texts:
        shown = ", ".join(texts)
        terminal.say(f"For model {given['model']}: {shown} (--set PATH=VALUE for another value)", stderr=True)
    return texts


def suited_rate(model: str, sets: Sequence[str], *, file: Mapping[str, Any] | None = None) -> list[str]:
    """The usual learning rate of a model that is not built in, as `path=value`, if a run's `file` has the rate of one
    that is and the user takes the other when asked. Without a terminal a line on stderr says how to take it."""
    changed, rate = parse_overrides(sets), cast(Any, get_path(file or {}, RATE))
    given = with_overrides({**(file or {}), "model": model}, changed)
    is_own = RATE in changed or given.get("lora") is not None or not isinstance(rate, int | float)
    if is_own or rate < Optimizer().learning_rate or _is_small(given["model"]):
        return []
    return [f"{RATE}=1e-06"] if _takes(f"{RATE}={rate:g} suits tiny; for {given['model']} 1e-06 is usual") else []


@cache  # a question is asked once
def _takes(told: str) -> bool:
    is_asked = sys.stdin.isatty() and sys.stderr.isatty()
    terminal.say(f"{told}{'. Take it? (y/n)' if is_asked else f' (--set {RATE}=1e-06)'}", stderr=True)
    return is_asked and sys.stdin.readline().strip().lower().startswith("y")


def _is_small(model: str) -> bool:
    """Whether a model is `tiny`, or a saved one of its shape."""
    config = Path(model).expanduser() / "config.json"
    if not config.is_file():
        return model == "tiny"
    from ..policy.tiny import tiny_config

    found, own = json.loads(config.read_text(encoding="utf-8")), tiny_config()
    return all(found.get(key) == getattr(own, key) for key in ("vocab_size", "hidden_size", "num_hidden_layers"))
