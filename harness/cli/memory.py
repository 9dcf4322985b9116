"""`cohort memory`; `measure_memory` does the measuring."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from ..console.terminal import mebibytes, print_json, show_table
from .commands import app, command
from .options import Json, Sets


@command(
    app,
    "memory",
    "cohort memory --model-config Qwen2.5-0.5B --algorithms ppo,grpo",
    "cohort memory --model-config tiny --algorithms ppo,grpo --rollouts 64 --set algorithm.kl_beta=0 --json",
)
def memory(
    config: Annotated[
        str,
        typer.Option("--model-config", metavar="NAME", help="'tiny', Qwen2.5-0.5B, ..., or a folder with config.json."),
    ],
    algorithms: Annotated[str, typer.Option(metavar="A,B,...", help="Algorithms; ratios are to the first.")],
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Training steps; the first is not timed.")] = 3,
    rollouts: Annotated[int, typer.Option(min=1, metavar="N", help="Completions per step.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens per prompt.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens per completion.")] = 128,
    dtype: Annotated[str, typer.Option(help="Of weights and optimiser: float32 or bfloat16.")] = "float32",
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Measure memory and time of training steps on a random model of a known shape; nothing is downloaded.

    Each algorithm runs in its own process, on completions of equal length.
    """
    from ..api.measure_memory import measure
    from ..console.progress import phase_bar
    from ..spec.raw import parse_overrides

    with phase_bar(f"memory of {config}") as show:
        documents = measure(
            config,
            [word.strip() for word in algorithms.split(",")],
            steps=steps,
            rollouts=rollouts,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            dtype=dtype,
            overrides=parse_overrides(sets or ()),
            on_progress=show,
        )
    if as_json:
        print_json({"model_config": config, "dtype": dtype, "measured": documents})
    else:
        title = f"{config}, {dtype}, {rollouts} rollouts of {prompt_tokens}+{max_tokens} tokens"
        show_measured(title, documents)


def show_measured(title: str, documents: Sequence[Mapping[str, Any]]) -> None:
    """Print measured and estimated memory, the seconds of a step by phase, and ratios to the first algorithm."""
    first = documents[0]["algorithm"]
    headers = ["algorithm", "peak MiB", "estimate MiB", f"memory / {first}", "s per step", f"time / {first}"]
    rows = [
        [
            d["algorithm"], mebibytes(d["peak_bytes"]), mebibytes(d["estimate_bytes"]), f"{d['memory_ratio']:.2f}",
            f"{d['seconds']['step']:.3g}", f"{d['time_ratio']:.2f}",
        ]
        for d in documents
    ]  # fmt: skip
    show_table(title, headers, rows, numeric=headers[1:])
    parts = [name for name in documents[0]["estimate"] if any(d["estimate"][name] for d in documents)]
    rows = [[d["algorithm"], *(mebibytes(d["estimate"][name]) for name in parts)] for d in documents]
    show_table("Estimate by component, MiB", ["algorithm", *parts], rows, numeric=parts)
    phases = [name for name in documents[0]["seconds"] if name != "step"]
    rows = [[d["algorithm"], *(f"{d['seconds'][name]:.3g}" for name in phases)] for d in documents]
    show_table("Seconds by phase", ["algorithm", *phases], rows, numeric=phases)
