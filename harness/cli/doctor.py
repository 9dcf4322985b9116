"""`cohort doctor` and `memory`: what would stop or slow a run on this machine, and the memory that runs need."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import api
from ..console import terminal
from .commands import command
from .options import RUNS, Json, Runs, Sets, words
from .views.answers import show_estimates


@command(
    "doctor",
    "cohort doctor",
    "cohort doctor --json",
    "cohort doctor --run my_run.yaml --set model=Qwen/Qwen2.5-0.5B --set optimizer.tokens_per_microbatch=4096",
)
def doctor(
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="SPEC.yaml", help="Estimate memory and disk of a run or of a study's arms."),
    ] = None,
    sets: Sets = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Check versions, device, cores, threads and the runs folder; exit code 1 if there is a problem.

    With --run, instead estimate memory and disk of that run, or of one trial of each arm of that study; exit code 2 if
    one cannot fit. `cohort study run --dry-run` estimates the disk of a whole study.
    """
    if run is not None:
        documents = api.estimate_runs(run, sets or (), runs=runs)
        terminal.print_json(documents) if as_json else show_estimates(run, documents)
        if bad := next((one for one in documents if one["problem"]), None):
            raise ValueError(f"{bad['run']}: {bad['problem']}")
        return
    if sets:
        raise ValueError("--set changes a run: name its file with --run")
    found = api.check_machine(runs)
    if as_json:
        terminal.print_json(found)
    else:
        rows = [(c.name, terminal.state_text(c.state), c.value, c.advice or "") for c in found]
        terminal.show_table("", ["check", "state", "found", "advice"], rows)
    raise typer.Exit(1 if any(check.state == "problem" for check in found) else 0)


@command(
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

    changes = api.parse_overrides(sets or ())
    with phase_bar(f"memory of {config}", "training on a random model"):
        found = api.measure(config, words(algorithms), prompt_tokens=prompt_tokens, settings=changes)
    if as_json:
        return terminal.print_json({"model_config": config, "measured": found})
    first = found[0]["algorithm"]
    headers = ["algorithm", "peak MiB", "estimate MiB", f"memory / {first}", "s per step", f"time / {first}"]
    rows = [
        [
            d["algorithm"], *(terminal.mebibytes(d[key]) for key in ("peak_bytes", "estimate_bytes")),
            f"{d['memory_ratio']:.2f}", f"{d['seconds']['step']:.3g}", f"{d['time_ratio']:.2f}",
        ]
        for d in found
    ]  # fmt: skip
    terminal.show_table(config, headers, rows, numeric=headers[1:])
    parts = [name for name in found[0]["estimate"] if any(d["estimate"][name] for d in found)]
    rows = [[d["algorithm"], *(terminal.mebibytes(d["estimate"][name]) for name in parts)] for d in found]
    terminal.show_table("Estimate by component, MiB", ["algorithm", *parts], rows, numeric=parts)
