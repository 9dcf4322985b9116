"""Computer algebra in a child process that can be killed: whether two LaTeX expressions are equal.

math-verify (github.com/huggingface/Math-Verify) compares with sympy, which can spend all time and memory on text such
as `9^{9^9}`. So a question has limits of wall-clock and of processor time, which the kernel enforces in the child, and
the child one of memory; the parent kills it too if it does not answer, and starts another for the next question. A
comparison that was stopped is `unparsable`, and an answer that twice could not be read within the limits is not tried
again (once may be a busy machine).

The child is a fresh interpreter (it has nothing of the parent's threads or devices), started when first needed, one per
process. It ends when its input closes or its parent is gone, and it computes no longer than its limits. POSIX only.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, Literal

Verdict = Literal["equal", "different", "unparsable"]

START_SECONDS = 120.0  # importing sympy on a busy machine
CACHED_VERDICTS = 16_384
CACHED_UNREAD = 4096
MAX_TRIES = 2  # of reading an answer
QUESTIONS_PER_CHILD = 10_000  # then a fresh one: sympy's and antlr's caches only grow
GRACE_SECONDS = 1.0  # what the parent waits beyond the child's own limit

_READY, _FIRST, _SECOND, _COMPARE = b"R", b"1", b"2", b"C"  # what the child says it is doing
_ANSWERS: dict[bytes, Verdict] = {b"=": "equal", b"!": "different", b"?": "unparsable"}
_WARM_UP = (
    r"[\frac{1}{2},\sqrt{3}) \cup (4x,5\pi)",
    r"\begin{pmatrix} y=1 \\ 2^3 \end{pmatrix}",
)  # the first is the slowest
_log = logging.getLogger(__name__)


@cache
def checker() -> Checker:
    """The checker that this process shares."""
    return Checker()


class Checker:
    """Answers one question at a time, from any thread; a process that was forked off gets a child of its own.

    wall_seconds, cpu_seconds  limits of each of the three stages of a question: read the one, read the other, compare
    memory_bytes               address space of the child
    counts                     verdicts given, those from the cache included
    """

    def __init__(self, wall_seconds: float = 5.0, cpu_seconds: float = 3.0, memory_bytes: int = 2**30):
        self.limits = (wall_seconds, cpu_seconds, memory_bytes)
        self.counts: Counter[Verdict] = Counter()
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._verdicts: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._unread: OrderedDict[str, int] = OrderedDict()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget_child)

    def compare(self, first: str, second: str) -> Verdict:
        """Whether two LaTeX expressions are equal in both directions of math-verify's one-sided comparison."""
        pair = (first, second) if first <= second else (second, first)
        with self._lock:
            verdict = self._verdicts.get(pair)
            if verdict is None:
                verdict = self._ask(pair)
                _remember(self._verdicts, pair, verdict, CACHED_VERDICTS)
            self.counts[verdict] += 1
            return verdict

    def close(self) -> None:
        """End the child; the next question starts another."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def _ask(self, pair: tuple[str, str]) -> Verdict:
        if any(self._unread.get(text, 0) >= MAX_TRIES for text in pair):
            return "unparsable"
        if self._child is None:
            self._child = _Child(self.limits)
        verdict, stage = self._child.ask(pair)
        if verdict is None:
            if stage in (_FIRST, _SECOND):
                text = pair[stage == _SECOND]
                _remember(self._unread, text, self._unread.get(text, 0) + 1, CACHED_UNREAD)
            _log.warning("not compared within %s s and %d bytes: %.60r, %.60r", self.limits[0], self.limits[2], *pair)
        if verdict is None or self._child.num_questions >= QUESTIONS_PER_CHILD:
            self.close()
        return verdict or "unparsable"

    def _forget_child(self) -> None:
        """After a fork the child is the other process's: leave it alone."""
        self._lock = threading.Lock()
        self._child = None


def _remember(store: OrderedDict[Any, Any], key: Any, value: Any, limit: int) -> None:
    store[key] = value
    if len(store) > limit:
        store.popitem(last=False)


class _Child:
    """A running child process, past its start. RuntimeError if it cannot be started: no verdict would be true then."""

    def __init__(self, limits: tuple[float, float, int]):
        self.num_questions = 0
        self._wall_seconds = limits[0]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tasks._symbolic", *map(str, limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
        )
        if self._read(START_SECONDS) != _READY:
            self.end()
            raise RuntimeError("the process that compares answers (python -m tasks._symbolic) does not start")

    def ask(self, pair: tuple[str, str]) -> tuple[Verdict | None, bytes]:
        """The verdict, None if the child came to its limits, and the stage that was reached."""
        assert self._process.stdin is not None
        self.num_questions += 1
        stage = b""
        try:
            self._process.stdin.write(json.dumps(pair).encode() + b"\n")
        except BrokenPipeError:  # it was killed while idle
            return None, stage
        while said := self._read(self._wall_seconds + GRACE_SECONDS):
            if said in _ANSWERS:
                return _ANSWERS[said], stage
            stage = said
        return None, stage

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self, seconds: float) -> bytes:
        """The next byte, or nothing if the child has ended or does not answer in time."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
        return os.read(descriptor, 1) if poll.poll(seconds * 1000) else b""


def _serve(wall_seconds: float, cpu_seconds: float, memory_bytes: int) -> None:
    """What the child does: answer one question per line until the parent is gone."""
    import resource
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    parent = os.getppid()
    compare = _load_math_verify()
    compare(*_WARM_UP, lambda stage: None)
    answers = os.dup(1)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.write(answers, _READY)
    os.dup2(silence, 2)  # parsers print about hostile text
    for limit, value in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (value, value))

    def begin(stage: bytes) -> None:
        os.write(answers, stage)
        signal.setitimer(signal.ITIMER_REAL, wall_seconds)  # the default action of both signals ends the process
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)

    while (line := _next_line(parent)) is not None:
        first, second = json.loads(line)
        verdict = compare(first, second, begin)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(answers, next(said for said, meaning in _ANSWERS.items() if meaning == verdict))


def _next_line(parent: int) -> str | None:
    while not select.select([0], [], [], 5.0)[0]:
        if os.getppid() != parent:
            return None
    return sys.stdin.readline() or None


def _load_math_verify() -> Callable[[str, str, Callable[[bytes], None]], Verdict]:
    import math_verify
    from latex2sympy2_extended import NormalizationConfig
    from math_verify.parser import LatexExtractionConfig
    from sympy import Basic, Expr, MatrixBase

    logging.disable(logging.CRITICAL)
    # No units: that rule takes the `t` off `10t`. And no configuration for plain expressions: that one calls eval.
    rewrites = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=rewrites)]

    @lru_cache(maxsize=4096)
    def read(text: str) -> Basic | MatrixBase:
        parsed = math_verify.parse(rf"\boxed{{{text}}}", config, parsing_timeout=0)[0]
        if not isinstance(parsed, Basic | MatrixBase):
            raise ValueError("not an expression")
        if isinstance(parsed, Expr) and not parsed.free_symbols:
            parsed.doit().evalf(15)  # a value beyond the limits must show here, not in every comparison
        return parsed

    def verify(gold: Basic | MatrixBase, target: Basic | MatrixBase) -> bool:
        return math_verify.verify(gold, target, allow_set_relation_comp=True, timeout_seconds=None)

    def same_size(first: Any, second: Any) -> bool:
        """math-verify takes a difference below 1e-15 for zero, even between `2^{-98}` and `2^{-99}`."""
        if not isinstance(first, Expr) or not isinstance(second, Expr) or first.free_symbols or second.free_symbols:
            return True
        first, second = first.doit(), second.doit()
        if first.is_Rational and second.is_Rational:
            return first == second
        return bool(abs((first - second).evalf(20)) <= 1e-12 * abs(first.evalf(20)))

    def compare(first: str, second: str, begin: Callable[[bytes], None]) -> Verdict:
        try:
            begin(_FIRST)
            one = read(first)
            begin(_SECOND)
            other = read(second)
            begin(_COMPARE)
            is_equal = verify(one, other) and verify(other, one) and same_size(one, other)
        except MemoryError:
            os._exit(1)  # as if killed: what is left of the memory is not enough for the next question
        except Exception:  # the parser and sympy raise anything on text that is no mathematics
            return "unparsable"
        return "equal" if is_equal else "different"

    return compare


if __name__ == "__main__":
    _serve(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
