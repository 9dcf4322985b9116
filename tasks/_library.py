"""What math-verify alone, with its own way to find an answer, makes of a completion: to compare, never to reward.

It reads gold and completion with its defaults for LaTeX and plain numbers (version 0.9.0) and compares them one way, as
its users do, in a child process that can be killed (`tasks._symbolic`). Departure: expressions without LaTeX, such as
`2*(3+4)`, are not read, because the library evaluates their text as Python.
"""

from __future__ import annotations

from tasks import _symbolic

MAX_CHARS = 20_000  # its patterns take long on more, and the end of a completion states its answer
FOUND = "(found by math-verify)"  # the library is asked for its verdict only


def math_verify(completion: str, gold: str) -> tuple[str | None, bool]:
    """(whether an answer was found, whether it is right); a text that exceeds the limits counts as unanswered."""
    verdict = _symbolic.library().compare(gold, completion[-MAX_CHARS:])
    return (None if verdict == "unparsable" else FOUND), verdict == "equal"
