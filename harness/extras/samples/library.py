"""Whether a completion states a gold answer, by math-verify alone: the work of a child process."""

from collections.abc import Callable

import math_verify

from ....tasks._algebra import UNPARSABLE, Stage, judging


def prepare(cpu_seconds: str, wall_seconds: str) -> Callable[..., str]:
    """The function that answers with a verdict: `equal`, `different` or `unparsable`."""
    return judging(compare, cpu_seconds, wall_seconds)


def compare(gold: str, completion: str, begin: Stage) -> str:
    """The verdict; `begin` announces a stage."""
    begin(0)
    expected = math_verify.parse(rf"\boxed{{{gold}}}", parsing_timeout=0)
    begin(1)
    found = math_verify.parse(completion, parsing_timeout=0)
    begin(0)
    if not found:
        return UNPARSABLE
    return "equal" if math_verify.verify(expected, found, timeout_seconds=None) else "different"
