"""Gets problems and scores of the package reasoning-gym from a child process (`tasks._gym_child`).

A generator or a verifier may take unlimited time and memory on unusual settings or answers. So the kernel limits the
child's memory and the time of a question; a child that overruns is ended, and the next question starts another. An
answer that is not scored within the limits scores 0. The child's hash seed is fixed, so that a generator makes the same
problems in every process. POSIX only.
"""

import atexit
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Any, NamedTuple

from . import _gym_child

START_SECONDS = 120.0  # importing the package on a busy machine
MAKE_AT_ONCE = 8
CACHED_SCORES = 16_384
WAIT_SECONDS = 2 * _gym_child.PATIENCE * _gym_child.MAKE_SECONDS  # the child's own limits end it before
GRACE_SECONDS = 1.0  # for a child that ends

_log = logging.getLogger(__name__)


class Part(NamedTuple):
    """A stream of problems, made by the generator with this seed."""

    dataset: str
    settings: str  # JSON
    seed: int
    size: int


class Item(NamedTuple):
    """One problem, with the generator's own answer, if any, and the fields that the template names."""

    question: str
    answer: str | None
    fields: tuple[str, ...]


class Refused(ValueError):
    """The generator cannot be used like this; the child's reply says why."""

    def __init__(self, reply: dict[str, Any]):
        super().__init__(reply)
        self.reply = reply


def version() -> str:
    """The version of the package. ValueError if it is not installed."""
    try:
        return installed("reasoning-gym")
    except PackageNotFoundError:
        raise ValueError("task reasoning_gym needs a package: pip install 'cohort-rl[gym]'") from None


@cache
def gym() -> "Gym":
    """The gym that this process shares."""
    return Gym()


def make(part: Part, keys: tuple[str, ...]) -> Iterator[Item]:
    """All problems of a part, each made when it is asked for first. Refused for an invalid generator, settings or
    keys."""
    for first in range(0, part.size, MAKE_AT_ONCE):
        yield from _made(part, first, min(first + MAKE_AT_ONCE, part.size), keys)


@lru_cache(maxsize=100_000)
def _made(part: Part, first: int, last: int, keys: tuple[str, ...]) -> list[Item]:
    return gym().make(part, first, last, keys)


class Gym:
    """Asks one child from any thread; a forked process starts a new child.

    cpu_seconds   limit of scoring one answer
    memory_bytes  address space of the child
    """

    def __init__(self, cpu_seconds: float = 3.0, memory_bytes: int = 2**31):
        self.cpu_seconds = cpu_seconds
        self.memory_bytes = memory_bytes
        self._scores: OrderedDict[tuple[Part, int, str], float] = OrderedDict()
        self._overruns = _Overruns()
        self._forget_child()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget_child)

    def make(self, part: Part, first: int, last: int, keys: Sequence[str]) -> list[Item]:
        """The problems from `first` to before `last`. Refused for invalid settings, or if it takes too long."""
        with self._turn:
            reply, _ = self._ask("make", part, first, last, keys)
        if not reply or "items" not in reply:
            raise Refused(reply or {"error": f"nothing within {_gym_child.MAKE_SECONDS:g} s and its share of memory"})
        return [Item(question, answer, tuple(fields)) for question, answer, fields in reply["items"]]

    def score(self, part: Part, index: int, answer: str) -> float:
        """The verifier's score, from 0 to 1; 0 for an answer that overran the limits or came after too many of them."""
        key = (part, index, answer)
        with self._turn:
            if key not in self._scores:
                if self._overruns.left == 0:
                    return 0.0
                reply, is_certain = self._ask("score", part, index, answer, self.cpu_seconds)
                if reply is None:
                    _log.warning("not scored in %s s and %d bytes: %.60r", self.cpu_seconds, self.memory_bytes, answer)
                    if self._overruns.left:
                        self._overruns.left = max(0.0, self._overruns.left - 1)
                    if not is_certain:  # a busy machine, or a kill: asked again
                        return 0.0
                self._scores[key] = reply["score"] if reply else 0.0
                if len(self._scores) > CACHED_SCORES:
                    self._scores.popitem(last=False)
            return self._scores[key]

    def allow_overruns(self, count: float | None) -> float:
        """Let `count` further answers of this thread overrun the limits; then all new ones score 0. None lifts the
        bound. Returns how many of those allowed last are left."""
        left, self._overruns.left = self._overruns.left, count
        return left or 0

    def close(self) -> None:
        """End the child; the next question starts another."""
        with self._turn:
            self._end_child()

    def _ask(self, *question: Any) -> tuple[dict[str, Any] | None, bool]:
        """The child's reply, None if it reached its limits; and whether it would reach them on any machine."""
        child = self._child = self._child or self._start_child()
        assert child.stdin is not None
        reply = None
        try:
            child.stdin.write(json.dumps(question).encode() + b"\n")
            reply = _read_line(child, WAIT_SECONDS)
        except BrokenPipeError:  # something killed it while it was idle
            pass
        finally:
            if reply is None:  # also after an interrupt: its late reply would answer the next question
                with suppress(subprocess.TimeoutExpired):
                    child.wait(GRACE_SECONDS)
                self._end_child()
        return reply, child.returncode in (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT, _gym_child.NO_MEMORY)

    def _start_child(self) -> "subprocess.Popen[bytes]":
        version()
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", _gym_child.__name__, str(self.memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                "PYTHONHASHSEED": "0",
                "OPENBLAS_NUM_THREADS": "1",  # each of its threads takes a share of the address space
            },
            bufsize=0,
        )
        if _read_line(child, START_SECONDS) is None:
            self._child = child
            self._end_child()
            raise RuntimeError(f"the process that holds reasoning-gym (python -m {_gym_child.__name__}) does not start")
        return child

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    pipe.close()
            self._child = None

    def _forget_child(self) -> None:
        """Start without a child: after a fork it belongs to the other process."""
        self._turn = threading.Lock()  # guards everything here
        self._child: subprocess.Popen[bytes] | None = None


class _Overruns(threading.local):
    """The number of answers of a thread that may still overrun the limits; None: any number."""

    left: float | None = None


def _read_line(child: "subprocess.Popen[bytes]", seconds: float) -> dict[str, Any] | None:
    """The next line of the child, or None if it has ended or does not answer in time."""
    assert child.stdout is not None
    descriptor, end, line = child.stdout.fileno(), time.monotonic() + seconds, b""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    while not line.endswith(b"\n"):
        left = end - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000) or not (read := os.read(descriptor, 65_536)):
            return None
        line += read
    return json.loads(line)
