"""`cohort memory`; `measure_memory` does the measuring."""

from typing import Annotated

import typer

from .. import api
from ..console.terminal import mebibytes, print_json, show_table
from .commands import app, command
from .options import Json, Sets, words


@command(
    app,
    "memory",
    "cohort memory --model-config Qwen2.5-0.5B --algorithms ppo,grpo",
    "cohort memory --model-config tiny --algorithms ppo,grpo --set rollouts_per_step=64 --set dtype=bfloat16 --json",
)
def memory(
    config: Annotated[
        str,
        typer.Option("--model-config", metavar="NAME", help="'tiny', Qwen2.5-0.5B, ..., or a folder with config.json."),
    ],
    algorithms: Annotated[str, typer.Option(metavar="A,B,...", help="Algorithms; ratios are to the first.")],
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens per prompt.")] = 64,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Measure memory and time of training steps on a random model of a known shape; nothing is downloaded.

    Each algorithm runs in its own process: 3 steps (the first is not timed) of 32 completions of 128 tokens in float32,
    unless --set gives other steps, rollouts_per_step, sampling.max_tokens or dtype. --json adds seconds by phase.
    """
    from ..console.progress import phase_bar
    from ..spec.raw import parse_overrides

    changes = parse_overrides(sets or ())
    with phase_bar(f"memory of {config}", "training on a random model"):
        found = api.measure(config, words(algorithms), prompt_tokens=prompt_tokens, settings=changes)
    if as_json:
        return print_json({"model_config": config, "measured": found})
    first = found[0]["algorithm"]
    headers = ["algorithm", "peak MiB", "estimate MiB", f"memory / {first}", "s per step", f"time / {first}"]
    rows = [
        [
            d["algorithm"], mebibytes(d["peak_bytes"]), mebibytes(d["estimate_bytes"]), f"{d['memory_ratio']:.2f}",
            f"{d['seconds']['step']:.3g}", f"{d['time_ratio']:.2f}",
        ]
        for d in found
    ]  # fmt: skip
    show_table(config, headers, rows, numeric=headers[1:])
    parts = [name for name in found[0]["estimate"] if any(d["estimate"][name] for d in found)]
    rows = [[d["algorithm"], *(mebibytes(d["estimate"][name]) for name in parts)] for d in found]
    show_table("Estimate by component, MiB", ["algorithm", *parts], rows, numeric=parts)
