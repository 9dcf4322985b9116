"""`cohort gpu`: every claim of the run-book, with its verdict and its numbers."""

from collections import Counter
from typing import Annotated, Any

import typer

from ...cli import options
from ...cli.commands import command
from ...console import terminal


@command(
    "gpu", "cohort gpu", "cohort gpu --minutes 9", "cohort gpu Qwen/Qwen2.5-0.5B --only float32,bfloat16,sleep --json"
)
def gpu(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A Hub id or folder; by default made-up weights.")
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="CLAIMS", help="These claims alone.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=1, help="Stop after so long; the same command then goes on.")
    ] = None,
    runs: options.Runs = options.RUNS,
    as_json: options.Json = False,
) -> None:
    """Measure what Cohort claims of a GPU and say PASS, FAIL or SKIPPED for each claim, in 30 minutes at most.

    Exit code 1 if a claim fails. Paste the table into an issue. It runs without a GPU too, and skips what needs one.
    """
    from .book import run_book

    def say(one: Any) -> None:
        terminal.say(f"{one.state:8}{one.claim} ({one.seconds:.0f} s)", stderr=True)

    found, is_whole = run_book(runs, model, options.words(only), say, minutes)
    if as_json:
        terminal.print_json({"claims": found, "is_whole": is_whole})
    else:
        rows = [(one.claim, terminal.state_text(one.state), str(one), f"{one.seconds:.0f}") for one in found]
        terminal.show_table("", ["claim", "state", "found", "seconds"], rows, numeric=["seconds"])
        terminal.say(", ".join(f"{count} {state}" for state, count in Counter(one.state for one in found).items()))
    raise typer.Exit(1 if any(one.state == "FAIL" for one in found) else 0 if is_whole else 130)
