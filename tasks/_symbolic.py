"""Decides whether two LaTeX expressions are equal, by computer algebra in a child process that can be killed.

math-verify (github.com/huggingface/Math-Verify) compares with sympy, which can take unlimited time and memory on text
such as `9^{9^9}`. So the kernel limits the child's memory, and the wall-clock and processor time of a question. The
parent also kills a child that does not answer, and starts another for the next question. A stopped comparison is
`unparsable`. Limits are the last resort: large expressions are refused first by their size (`tasks._values`), which
does not depend on the machine.

An answer that overran the limits, when it was read or as the larger of two, is not tried again: after the first time if
it spent its processor time or memory, as it would on any machine; after the second if only the clock ran out, because
the machine may have been busy. A slow question that is answered keeps its verdict and is charged to its thread's
allowance (`allow_overruns`), as the share of the limit that it took.

Expressions whose values at a point differ are different. A child returns the values with its answer, so each of G
different expressions is compared with one other, and the rest of the G(G - 1)/2 pairs cost no question.

The first question starts the child, a fresh interpreter without the parent's threads and devices (`tasks._child`). A
process has one child, or up to `set_num_children` for threads that ask at the same time. POSIX only.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from functools import cache
from typing import Any, NamedTuple

from . import _child, _questions
from ._questions import Verdict

START_SECONDS = 120.0  # importing sympy on a busy machine
CACHED_VERDICTS = 16_384
CACHED_OVERRUNS = 4096
CACHED_VALUES = 16_384
MAX_TRIES = 2  # of reading or comparing an answer, because a busy machine may have ended the first
QUICK_SHARE = 0.1  # of the limit of processor time: a question within it is not charged
QUESTIONS_PER_CHILD = 10_000  # then a fresh one: sympy's and antlr's caches only grow
GRACE_SECONDS = 1.0  # the parent waits this much longer than the child's own limit

_log = logging.getLogger(__name__)


@cache
def checker() -> Checker:
    """The checker that this process shares."""
    return Checker()


@cache
def library() -> Checker:
    """The checker that asks math-verify alone (`tasks._answers.math_verify`)."""
    return Checker(library=True)


def set_num_children(num_children: int) -> None:
    """Let each checker work on that many questions at once, for as many comparing threads."""
    if num_children < 1:
        raise ValueError(f"num_children must be at least 1, got {num_children}")
    checker().set_num_children(num_children)
    library().set_num_children(num_children)


class Checker:
    """Answers questions from any thread, `num_children` at once; a forked process starts new children.

    wall_seconds, cpu_seconds  limits of each stage of a question: read the first, read the second, compare
    memory_bytes               address space of a child
    library                    ask math-verify alone about (gold, completion), instead of our own comparison
    counts                     verdicts given, also from the cache
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
        self._verdicts: OrderedDict[tuple[str, ...], Verdict] = OrderedDict()
        self._values: OrderedDict[str, complex] = OrderedDict()
        self._overran: OrderedDict[str, int] = OrderedDict()
        self._overruns = _Overruns()
        self._forget_children()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget_children)

    def compare(self, first: str, second: str) -> Verdict:
        """The verdict on whether two LaTeX expressions are equal in both directions of math-verify's comparison.

        With `library`: on whether the second text, a completion, states the first, the gold answer.
        """
        verdict = self._verdict((first, second) if first <= second or self.library else (second, first))
        with self._turn:
            self.counts[verdict] += 1
        return verdict

    def is_worked_out(self, answer: str, gold: str) -> bool:
        """Whether an answer that equals the gold answer leaves no work that the gold answer does not leave."""
        return self._verdict((answer, gold, _questions.WORKED_OUT)) == "equal"

    def allow_overruns(self, count: float | None) -> float:
        """Let `count` further questions of this thread overrun the limits; then all new ones are `unparsable`.

        A slow question that is answered counts as the share of the limit that it took. None lifts the bound. Returns
        how many of the overruns that were allowed last are left.
        """
        left, self._overruns.left = self._overruns.left, count
        return left or 0

    def set_num_children(self, num_children: int) -> None:
        """Set the number of questions that are worked on at once."""
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

    def _verdict(self, pair: tuple[str, ...]) -> Verdict:
        with self._turn:
            self._turn.wait_for(lambda: self._known(pair) or self._num_busy < self._num_children)
            verdict = self._known(pair) or ("unparsable" if self._overruns.left == 0 else None)
            if verdict is None:
                self._num_busy += 1
        return verdict or self._ask(pair)

    def _known(self, pair: tuple[str, ...]) -> Verdict | None:
        if pair in self._verdicts:
            return self._verdicts[pair]
        if len(pair) == 2 and _surely_differ(*map(self._values.get, pair)):
            return "different"
        return "unparsable" if any(self._overran.get(text, 0) >= MAX_TRIES for text in pair) else None

    def _ask(self, pair: tuple[str, ...]) -> Verdict:
        """The verdict of an idle child or a new one. The thread must have its turn, and passes it on at the end."""
        child = None
        reply = Reply(None)
        try:
            child = self._take_child()
            reply = child.ask(pair)
        finally:
            with self._turn:
                self._num_busy -= 1
                if child is not None:
                    self._put_back(child, is_well=reply.verdict is not None)
                    self._note(pair, reply)
                self._turn.notify_all()
        return reply.verdict or "unparsable"

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

    def _note(self, pair: tuple[str, ...], reply: Reply) -> None:
        cost = reply.cpu_seconds / self.limits[1]
        if reply.verdict is None:
            cost = max(cost, 1.0)
            if reply.stage:
                text = pair[reply.stage in (_questions.SECOND, _questions.COMPARE_LARGER_SECOND)]
                tries = MAX_TRIES if reply.is_certain else self._overran.get(text, 0) + 1
                _remember(self._overran, text, tries, CACHED_OVERRUNS)
            limits = self.limits[0], self.limits[2]
            _log.warning("not compared within %s s and %d bytes: %.60r, %.60r", *limits, *pair[:2])
        if self._overruns.left and cost > QUICK_SHARE:
            self._overruns.left = max(0.0, self._overruns.left - cost)
        for text, value in zip(pair, reply.values, strict=False):
            if value is not None:
                _remember(self._values, text, value, CACHED_VALUES)
        _remember(self._verdicts, pair, reply.verdict or "unparsable", CACHED_VERDICTS)

    def _forget_children(self) -> None:
        """Start without children: after a fork they belong to the other process."""
        self._turn = threading.Condition()  # guards everything here
        self._num_busy = 0  # questions that have their turn
        self._busy: list[_Child] = []
        self._idle: list[_Child] = []


def _surely_differ(value: complex | None, other: complex | None) -> bool:
    """Whether a child would find the values apart; the margin is above its own, so that rounding does not matter."""
    return value is not None and other is not None and abs(value - other) > 2e-6 * (abs(value) + abs(other))


def _remember(store: OrderedDict[Any, Any], key: Any, value: Any, limit: int) -> None:
    store[key] = value
    if len(store) > limit:
        store.popitem(last=False)


class _Overruns(threading.local):
    """The number of questions of a thread that may still overrun the limits; None: any number."""

    left: float | None = None


class Reply(NamedTuple):
    """A child's reply to a question."""

    verdict: Verdict | None  # None: the child reached its limits
    stage: bytes = b""  # the last that it began
    is_certain: bool = False  # whether it would reach them on any machine
    cpu_seconds: float = 0.0
    values: tuple[complex | None, ...] = ()


class _Child:
    """A started child process. RuntimeError if it cannot start, because no verdict would be true then."""

    def __init__(self, limits: tuple[float, float, int], library: bool = False):
        self.num_questions = 0
        self._wall_seconds = limits[0]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _child.__name__, *map(str, limits), "library" if library else "own"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
        )
        if self._read(START_SECONDS) != _questions.READY:
            self.end()
            raise RuntimeError(f"the process that compares answers (python -m {_child.__name__}) does not start")

    def ask(self, pair: tuple[str, ...]) -> Reply:
        assert self._process.stdin is not None
        self.num_questions += 1
        stage = b""
        try:
            self._process.stdin.write(json.dumps(pair).encode() + b"\n")
        except BrokenPipeError:  # something killed it while it was idle
            return Reply(None)
        while said := self._read(self._wall_seconds + GRACE_SECONDS):
            if said in _questions.ANSWERS:
                assert self._process.stdout is not None
                seconds, *values = json.loads(self._process.stdout.readline())
                numbers = tuple(value and complex(value) for value in values)
                return Reply(_questions.ANSWERS[said], stage, cpu_seconds=seconds, values=numbers)
            stage = said
        return Reply(None, stage, self._spent_its_share())

    def kill(self) -> None:
        """Stop it from answering; the thread that waits for the answer then ends it."""
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _spent_its_share(self) -> bool:
        """Whether its processor time or memory ended it, not the clock or a kill; False while it still runs."""
        try:
            code = self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return code in (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT, _questions.NO_MEMORY)

    def _read(self, seconds: float) -> bytes:
        """The next byte, or nothing if the child has ended or does not answer in time."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
        return os.read(descriptor, 1) if poll.poll(seconds * 1000) else b""
