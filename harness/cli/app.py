"""Runs the command line `cohort ...`: reads arguments, calls the harness, turns outcomes into text and exit codes.

Exit codes: 0 every trial is valid; 1 some are not; 2 bad input, with a message instead of a traceback (unless
COHORT_TRACEBACK is set); 130 after Ctrl-C. Results go to stdout, progress and errors to stderr. Commands import slow
libraries inside their functions, so that `cohort --help` answers at once.
"""

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

# Each module registers its commands; `cohort --help` lists them in this order, the extras' commands last.
try:
    from .. import extras
    from ..checks.process import unfit_process
    from ..console import terminal
    from .commands import app

    # isort: off
    from . import runs, study, doctor, results, lists  # noqa: F401

    extras.modules("commands")
except KeyboardInterrupt:
    raise SystemExit(130) from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments (by default the process's own) name; ends with SystemExit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # None if it is closed
            stream.reconfigure(errors="backslashreplace")  # so that Greek letters do not fail on an ASCII terminal
    if (reason := unfit_process()) is not None:
        terminal.fail(reason)
        raise SystemExit(2)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="cohort")
    except KeyboardInterrupt:  # before a command began
        raise SystemExit(130) from None
    finally:
        try:
            print(end="", flush=True)
        except OSError:  # a full disk, which has been told; the interpreter's own flush at its end would fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
