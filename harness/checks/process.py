"""Refuses to start where no command can work: without docstrings, without a working folder, with too little memory."""

import os
import resource
import sys

LEAST_ADDRESS_SPACE = 5 * 2**28  # bytes: PyTorch and the other libraries take about 1 GiB of addresses


def unfit_process() -> str | None:
    """Why this process can run no command, with the fix; None if it can."""
    if sys.flags.optimize > 1:
        return "PYTHONOPTIMIZE must be below 2, got 2, which removes docstrings that transformers reads; unset it"
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the working folder does not exist any more; change to one that does"
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY and most < LEAST_ADDRESS_SPACE:
        return (
            f"the address space (`ulimit -v`) must be at least {LEAST_ADDRESS_SPACE // 1024} KiB, "
            f"got {most // 1024}; raise the limit"
        )
    return None
