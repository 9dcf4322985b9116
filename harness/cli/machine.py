"""`cohort doctor` and `cohort memory`: whether runs fit this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from harness.cli.commands import app, command
from harness.cli.options import RUNS, Json, Runs, Sets
from harness.cli.views.memory import show_estimates, show_measured
from harness.console import terminal


@command(
    app,
    "doctor",
    "cohort doctor",
    "cohort doctor --json",
    "cohort doctor --run my_run.yaml --set model=Qwen/Qwen2.5-0.5B --set optimizer.tokens_per_microbatch=4096",
)
def doctor(
    run: Annotated[
        str | None, typer.Option("--run", metavar="SPEC.yaml", help="Estimate the memory of a run, or a study's arms.")
    ] = None,
    sets: Sets = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Check versions, device, cores, threads and the runs folder; exit code 1 on a problem.

    With --run, estimate instead what that run, or each arm of that study, needs; exit code 2 where it cannot fit.
    """
    from harness.cli import doctor
    from harness.spec.errors import SpecError

    if run is not None:
        return _show_estimates(run, sets or (), as_json)
    if sets:
        raise SpecError("--set changes a run: name its file with --run")
    found = doctor.check_machine(runs)
    if as_json:
        terminal.print_json(found)
    else:
        rows = [(c.name, terminal.state_text(c.state), c.value, c.advice or "") for c in found]
        terminal.show_table("", ["check", "state", "found", "advice"], rows)
    raise typer.Exit(1 if any(check.state == "problem" for check in found) else 0)


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
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of each prompt.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of each completion.")] = 128,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of weights and optimiser too.")] = "float32",
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Measure memory and time of training steps on a random model of a known shape; nothing is downloaded.

    Each algorithm runs in a process of its own, on completions of equal length.
    """
    from harness.cli.measure_memory import as_documents, measure
    from harness.console.progress import phase_bar
    from harness.spec.raw import parse_overrides

    with phase_bar(f"memory of {config}") as show:
        results = measure(
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
    documents = as_documents(results)
    if as_json:
        terminal.print_json({"model_config": config, "dtype": dtype, "measured": documents})
    else:
        title = f"{config}, {dtype}, {rollouts} rollouts of {prompt_tokens}+{max_tokens} tokens"
        show_measured(title, documents)


def _show_estimates(run: str, sets: Sequence[str], as_json: bool) -> None:
    """Print what the runs of a file need; SpecError where one of them cannot fit or cannot be estimated."""
    from harness.memory.fit import judge
    from harness.spec.errors import SpecError
    from harness.spec.load import runs_of

    found = [
        {"run": label, "algorithm": spec.algorithm.name, **judge(spec)} for label, spec in runs_of(run, sets).items()
    ]
    if as_json:
        terminal.print_json(found)
    else:
        show_estimates(run, found)
    for document in found:
        if document["problem"]:
            raise SpecError(f"{document['run']}: {document['problem']}")
