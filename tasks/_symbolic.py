"""Computer algebra in a child process that can be killed: whether two LaTeX expressions are equal.

math-verify (github.com/huggingface/Math-Verify) compares with sympy, which can spend all time and memory on text such
as `9^{9^9}`. So a question has limits of wall-clock and of processor time, which the kernel enforces in the child, and
the child one of memory; the parent kills it too if it does not answer, and starts another for the next question. A
comparison that was stopped is `unparsable`, and an answer that twice could not be read within the limits is not tried
again (once may be a busy machine).

The child is a fresh interpreter (it has nothing of the parent's threads or devices), started when first needed. It ends
when its input closes or its parent is gone, and it computes no longer than its limits. A process has one, or as many as
`set_num_children` allows it for threads that ask at the same time. POSIX only.

Departures from math-verify: variables that differ in case differ, `i` is the imaginary unit, tuples and matrices are
compared entry by entry, a tuple may state a column vector, and chains of inequalities may be read from either end.
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


@cache
def library() -> Checker:
    """What math-verify alone makes of a completion; see `tasks._library`."""
    return Checker(library=True)


def set_num_children(num_children: int) -> None:
    """Let each checker work on so many questions at once. It is of use to as many threads that compare."""
    if num_children < 1:
        raise ValueError(f"num_children must be at least 1, got {num_children}")
    checker().set_num_children(num_children)
    library().set_num_children(num_children)


class Checker:
    """Answers questions from any thread, `num_children` at once; a process that was forked off gets its own children.

    wall_seconds, cpu_seconds  limits of each of the three stages of a question: read the one, read the other, compare
    memory_bytes               address space of a child
    library                    ask math-verify as it is about (gold, completion), instead of our own comparison
    counts                     verdicts given, those from the cache included
    """

    def __init__(
        self,
        wall_seconds: float = 5.0,
        cpu_seconds: float = 3.0,
        memory_bytes: int = 2**30,
        num_children: int = 1,
        library: bool = False,
    ):
        self.library = library
        self.limits = (wall_seconds, cpu_seconds, memory_bytes)
        self.counts: Counter[Verdict] = Counter()
        self._num_children = num_children
        self._verdicts: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._unread: OrderedDict[str, int] = OrderedDict()
        self._forget_children()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget_children)

    def compare(self, first: str, second: str) -> Verdict:
        """Whether two LaTeX expressions are equal in both directions of math-verify's one-sided comparison.

        Of the library: whether the second text, a completion, states the first, the gold answer.
        """
        pair = (first, second) if first <= second or self.library else (second, first)
        with self._turn:
            self._turn.wait_for(lambda: self._known(pair) or self._num_busy < self._num_children)
            verdict = self._known(pair)
            if verdict is None:
                self._num_busy += 1
        if verdict is None:
            verdict = self._ask(pair)
        with self._turn:
            self.counts[verdict] += 1
        return verdict

    def set_num_children(self, num_children: int) -> None:
        """Work on so many questions at once from now on."""
        with self._turn:
            self._num_children = num_children
            while self._idle and self._num_busy + len(self._idle) > num_children:
                self._idle.pop().end()
            self._turn.notify_all()

    def close(self) -> None:
        """End the children; the next question starts another. A question that is being answered is `unparsable`."""
        with self._turn:
            for child in self._busy:
                child.kill()
            while self._idle:
                self._idle.pop().end()

    def _known(self, pair: tuple[str, str]) -> Verdict | None:
        if any(self._unread.get(text, 0) >= MAX_TRIES for text in pair):
            return "unparsable"
        return self._verdicts.get(pair)

    def _ask(self, pair: tuple[str, str]) -> Verdict:
        """The verdict of an idle child or a new one, for a thread that has its turn; gives the turn on."""
        child, verdict, stage = None, None, b""
        try:
            child = self._take_child()
            verdict, stage = child.ask(pair)
        finally:
            with self._turn:
                self._num_busy -= 1
                if child is not None:
                    self._put_back(child, is_well=verdict is not None)
                    self._note(pair, verdict, stage)
                self._turn.notify_all()
        return verdict or "unparsable"

    def _take_child(self) -> _Child:
        with self._turn:
            child = self._idle.pop() if self._idle else None
        child = child or self._start_child()
        with self._turn:
            self._busy.append(child)
        return child

    def _start_child(self) -> _Child:
        return _Child(self.limits, self.library)

    def _put_back(self, child: _Child, is_well: bool) -> None:
        self._busy.remove(child)
        has_room = self._num_busy + len(self._idle) < self._num_children
        if is_well and has_room and child.num_questions < QUESTIONS_PER_CHILD:
            self._idle.append(child)
        else:
            child.end()

    def _note(self, pair: tuple[str, str], verdict: Verdict | None, stage: bytes) -> None:
        if verdict is None:
            if stage in (_FIRST, _SECOND):
                text = pair[stage == _SECOND]
                _remember(self._unread, text, self._unread.get(text, 0) + 1, CACHED_UNREAD)
            _log.warning("not compared within %s s and %d bytes: %.60r, %.60r", self.limits[0], self.limits[2], *pair)
        _remember(self._verdicts, pair, verdict or "unparsable", CACHED_VERDICTS)

    def _forget_children(self) -> None:
        """Start without children. After a fork they are the other process's: leave them alone."""
        self._turn = threading.Condition()  # guards everything here
        self._num_busy = 0  # questions that have their turn
        self._busy: list[_Child] = []
        self._idle: list[_Child] = []


def _remember(store: OrderedDict[Any, Any], key: Any, value: Any, limit: int) -> None:
    store[key] = value
    if len(store) > limit:
        store.popitem(last=False)


class _Child:
    """A running child process, past its start. RuntimeError if it cannot be started: no verdict would be true then."""

    def __init__(self, limits: tuple[float, float, int], library: bool = False):
        self.num_questions = 0
        self._wall_seconds = limits[0]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tasks._symbolic", *map(str, limits), "library" if library else "own"],
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

    def kill(self) -> None:
        """Make it answer no more; whoever waits for its answer then ends it."""
        self._process.kill()

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


def _serve(wall_seconds: float, cpu_seconds: float, memory_bytes: int, comparison: str) -> None:
    """What the child does: answer one question per line until the parent is gone."""
    import resource
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    parent = os.getppid()
    compare = _load_library() if comparison == "library" else _load_math_verify()
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


def _load_library() -> Callable[[str, str, Callable[[bytes], None]], Verdict]:
    import math_verify
    from math_verify import parser

    def refuse(text: str) -> None:
        raise ValueError("plain expressions are not read: the library evaluates their text as Python")

    logging.disable(logging.CRITICAL)
    parser.parse_expr_cached = refuse  # pyright: ignore[reportAttributeAccessIssue]

    def compare(gold: str, completion: str, begin: Callable[[bytes], None]) -> Verdict:
        try:
            begin(_FIRST)
            expected = math_verify.parse(rf"\boxed{{{gold}}}", parsing_timeout=0)
            begin(_SECOND)
            found = math_verify.parse(completion, parsing_timeout=0)
            begin(_COMPARE)
            is_right = bool(found) and math_verify.verify(expected, found, timeout_seconds=None)
        except MemoryError:
            os._exit(1)
        except Exception:
            return "unparsable"
        return "equal" if is_right else "different" if found else "unparsable"

    return compare


def _load_math_verify() -> Callable[[str, str, Callable[[bytes], None]], Verdict]:
    import math_verify
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from latex2sympy2_extended.logic import And
    from math_verify.parser import get_last_eq
    from sympy import (
        Basic,
        Eq,
        Expr,
        I,
        ImmutableMatrix,
        Interval,
        MatrixBase,
        Symbol,
        Tuple,
        default_sort_key,
        evaluate,
        simplify,
    )
    from sympy.core.relational import Relational
    from sympy.logic.boolalg import BooleanAtom
    from sympy.matrices.expressions import MatrixExpr

    logging.disable(logging.CRITICAL)
    # No units: that rule takes the `t` off `10t`.
    rewrites = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    as_written = ConversionConfig(lowercase_symbols=False)
    small_i, capital_i = Symbol("i", real=True), Symbol("I", real=True)  # the parser takes the capital for the unit

    def parse(text: str) -> Any:
        # Not math_verify.parse: it ignores case.
        return latex2sympy(text, is_real=True, normalization_config=None, conversion_config=as_written)

    @lru_cache(maxsize=4096)
    def read(text: str) -> Basic | MatrixBase:
        text = normalize_latex(text, rewrites)
        try:
            parsed = parse(text)
        except Exception:
            parsed = parse(get_last_eq(text))
        if not isinstance(parsed, Basic | MatrixBase):
            raise ValueError("not an expression")
        if parsed.has(I):
            parsed = renamed(parsed, {I: capital_i})
        if parsed.has(small_i):
            parsed = Tuple(parsed.start, parsed.end) if isinstance(parsed, Interval) else parsed
            parsed = renamed(parsed, complex_variables(parsed) | {small_i: I})
        if isinstance(parsed, MatrixBase | MatrixExpr):
            parsed = ImmutableMatrix(parsed.doit())
        chain = [part.canonical for part in parsed.args if isinstance(part, Relational) and not isinstance(part, Eq)]
        if isinstance(parsed, And) and len(chain) == len(parsed.args):
            parsed = And(*sorted(chain, key=default_sort_key))
        if isinstance(parsed, BooleanAtom):
            raise ValueError("not an answer")  # else all that is false would be equal
        if isinstance(parsed, Expr) and not parsed.free_symbols:
            parsed.doit().evalf(15)  # a value beyond the limits must show here, not in every comparison
        return parsed

    def complex_variables(value: Any) -> dict[Any, Any]:
        return {symbol: Symbol(symbol.name) for symbol in value.free_symbols}

    def renamed(value: Any, names: dict[Any, Any]) -> Any:
        with evaluate(False):  # else `x=i` for a real x would be False
            return value.xreplace(names)

    def verify(gold: Basic | MatrixBase, target: Basic | MatrixBase) -> bool:
        return math_verify.verify(gold, target, allow_set_relation_comp=True, timeout_seconds=None)

    def entries(value: Any, other: Any) -> tuple[tuple[Any, ...], list[Any]] | None:
        """The shape and the values that are compared one by one; a tuple is a column if `other` is one."""
        is_column = isinstance(other, MatrixBase) and other.cols == 1 < other.rows
        if isinstance(value, Interval) and not (is_column and value.is_open):  # the parser takes `(1,2)` for one
            return ("interval", value.left_open, value.right_open), [value.start, value.end]
        if isinstance(value, MatrixBase):
            return ("matrix", *value.shape), list(value.flat())
        if not isinstance(value, Interval | Tuple):
            return None
        values = [value.start, value.end] if isinstance(value, Interval) else list(value)
        return ("matrix", len(values), 1) if is_column else ("tuple", len(values)), values

    def equal(first: Any, second: Any) -> bool:
        parts, others = entries(first, second), entries(second, first)
        if parts and others and parts[0] == others[0]:
            return all(map(equal, parts[1], others[1]))
        if isinstance(first, Expr) and isinstance(second, Expr) and (first.is_Symbol or second.is_Symbol):
            return bool(simplify(first - second) == 0)  # math-verify joins letters to words, without case
        return verify(first, second) and verify(second, first) and same_size(first, second)

    def same_size(first: Any, second: Any) -> bool:
        """math-verify takes a difference below 1e-15 for zero, even between `2^{-98}` and `2^{-99}`."""
        if not isinstance(first, Expr) or not isinstance(second, Expr) or first.free_symbols or second.free_symbols:
            return True
        if first == second:
            return True  # infinity, for one
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
            if one.has(I) or other.has(I):
                one, other = (renamed(value, complex_variables(value)) for value in (one, other))
            is_equal = equal(one, other)
        except MemoryError:
            os._exit(1)  # as if killed: what is left of the memory is not enough for the next question
        except Exception:  # the parser and sympy raise anything on text that is no mathematics
            return "unparsable"
        return "equal" if is_equal else "different"

    return compare


if __name__ == "__main__":
    _serve(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
