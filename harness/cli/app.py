"""The command line `cohort ...`: reads arguments, calls the harness, turns outcomes into text and exit codes.

Exit codes: 0 every trial is valid; 1 some are not; 2 bad input, with a message instead of a traceback (unless
COHORT_TRACEBACK is set); 130 after Ctrl-C. Results go to stdout, progress and errors to stderr. Libraries that are
slow to import are imported inside the commands, so that `cohort --help` answers at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.cli.commands import app

# Each module registers its commands, and `cohort --help` lists them in this order.
# isort: split
from harness.cli import train  # noqa: F401

# isort: split
from harness.cli import study  # noqa: F401

# isort: split
from harness.cli import inspect  # noqa: F401


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments (by default those of the process) name; ends with SystemExit."""
    app(args=None if arguments is None else list(arguments), prog_name="cohort")
