"""The child process of `tasks._symbolic`: it answers one question per line of its input, by `tasks._algebra`.

It ends when its input closes or its parent is gone. It announces each stage of a question in one byte, and the kernel
ends it when a stage overruns its limits. After an answer it reports the question's processor time and the values of
both texts.
"""

import json
import os
import select
import sys
import time

from ._questions import ANSWERS, NO_MEMORY, READY, WORKED_OUT

WARM_UP = (  # the first question is the slowest
    r"[\frac{1}{2},\sqrt{3}) \cup (4x,5\pi)",
    r"\begin{pmatrix} y+1 \\ 2^3 \end{pmatrix}",
)


def serve(wall_seconds: float, cpu_seconds: float, memory_bytes: int, comparison: str) -> None:
    """Answer one question per line until the parent is gone."""
    import resource
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    parent = os.getppid()
    from . import _algebra  # slow, so only here

    if comparison == "own":
        _algebra.hasten()
    compare = _algebra.compare_as_library if comparison == "library" else _algebra.compare
    compare(*WARM_UP, lambda stage: None)
    answers = os.dup(1)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.write(answers, READY)
    os.dup2(silence, 2)  # parsers print about hostile text
    for limit, value in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (value, value))

    def begin(stage: bytes) -> None:
        os.write(answers, stage)
        signal.setitimer(signal.ITIMER_REAL, wall_seconds)  # the default action of both signals ends the process
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)

    while (line := next_line(parent)) is not None:
        first, second, *kind = json.loads(line)
        start = time.process_time()
        try:
            verdict = (_algebra.is_worked_out if kind == [WORKED_OUT] else compare)(first, second, begin)
        except MemoryError:
            os._exit(NO_MEMORY)  # as if killed: the rest of the memory is not enough for the next question
        except Exception:  # the parser and sympy raise anything on text that is no mathematics
            verdict = "unparsable"
        has_values = verdict != "unparsable" and not kind and comparison == "own"
        values = map(_algebra.value, (first, second)) if has_values else ()
        said = next(said for said, meaning in ANSWERS.items() if meaning == verdict)
        details = json.dumps([time.process_time() - start, *values], default=str)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(answers, said + details.encode() + b"\n")


def next_line(parent: int) -> str | None:
    """The next line of input, or None if it has closed or the process `parent` is gone."""
    while not select.select([0], [], [], 5.0)[0]:
        if os.getppid() != parent:
            return None
    return sys.stdin.readline() or None


if __name__ == "__main__":
    serve(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
