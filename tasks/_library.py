"""math-verify alone as a second grader of completions: for comparison, never for a reward.

The library (version 0.9.0) finds the answer itself, reads LaTeX and plain numbers with its defaults, and compares one
way, as its users do. It runs in a child process that can be killed (`tasks._symbolic`). Departure: it does not read
expressions without LaTeX, such as `2*(3+4)`, because it would evaluate their text as Python.
"""

from tasks import _symbolic

MAX_CHARS = 20_000  # its patterns are slow on more, and the end of a completion states its answer
FOUND = "(found by math-verify)"  # the library gives its verdict only


def math_verify(completion: str, gold: str) -> tuple[str | None, bool]:
    """(FOUND or None, whether the answer is right); a text that exceeds the limits counts as unanswered."""
    verdict = _symbolic.library().compare(gold, completion[-MAX_CHARS:])
    return (None if verdict == "unparsable" else FOUND), verdict == "equal"
