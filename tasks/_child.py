"""Child processes that answer questions which may take unlimited time and memory, so that they can be killed.

A question and its answer are lines of JSON. The kernel limits a child's memory, and the processor and wall-clock time
of each stage of a question (`serve`). The parent also kills a child that says nothing; a question that was stopped has
no answer. Each thread that asks has a child of its own, a fresh interpreter without the parent's threads and devices
and with a fixed hash seed, so that all answer alike. It ends when its input closes or its parent is gone. POSIX only.
"""

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from signal import ITIMER_PROF, ITIMER_REAL, SIG_IGN, SIGABRT, SIGINT, SIGPROF, SIGSEGV, setitimer, signal
from typing import Any, NamedTuple

START_SECONDS = 120.0  # importing sympy on a busy machine
GRACE_SECONDS = 1.0  # the parent waits this much longer than the child's own limits
QUESTIONS_PER_CHILD = 10_000  # then a fresh one: the caches of sympy and antlr only grow
MAX_KEPT = 16_384  # answers, so that memory stays bounded
QUICK_SHARE = 0.1  # of the limit of processor time: a question within it is not charged
NO_MEMORY = 1  # how a child exits without

Begin = Callable[[int, float, float], None]  # announces a stage of a question, and limits its processor and wall time

_log = logging.getLogger(__name__)


class Reply(NamedTuple):
    """A child's reply to a question."""

    answer: Any = None  # None: the child was stopped
    stage: int | None = None  # the last that it began
    spent: bool = False  # whether it used up its processor time or its memory, as it would on any machine
    cpu_seconds: float = 0.0


class Children:
    """Puts questions to child processes, one for each thread that asks; a forked process starts its own.

    work          name of a module; its `prepare(*arguments)` returns what answers, as (begin, *question) -> JSON
    cpu_seconds   limit of a question, by which its cost is measured
    wait_seconds  for a child that says nothing
    memory_bytes  address space of a child
    """

    def __init__(self, work: str, *arguments: object, cpu_seconds: float, wait_seconds: float, memory_bytes: int):
        self.cpu_seconds = cpu_seconds
        self._command = [sys.executable, "-P", "-m", __name__, work, *map(str, (memory_bytes, *arguments))]
        self._wait_seconds = wait_seconds
        self._replies: OrderedDict[tuple[Any, ...], Reply] = OrderedDict()
        self._own = threading.local()  # `child`, and the overruns that are `left`

    def ask(self, *question: Any) -> Reply:
        """The reply, kept for the next time; without answer for a question after too many that overran."""
        reply = self._replies.get(question)
        left: float | None = getattr(self._own, "left", None)
        if reply is not None or left == 0:
            return reply or Reply()
        child: Child | None = getattr(self._own, "child", None)
        self._own.child = None  # whoever is interrupted leaves a child that nobody asks again
        if child is None or child.parent != os.getpid():
            child = Child(self._command, self._wait_seconds)
        reply = child.ask(question)
        cost = reply.cpu_seconds / self.cpu_seconds
        if reply.answer is None:
            cost = max(cost, 1.0)
            _log.warning("not answered within the limits: %.120r", question)
        else:
            remember(self._replies, question, reply)
        if reply.answer is None or child.num_questions >= QUESTIONS_PER_CHILD:
            child.end()
        else:
            self._own.child = child
        if left and cost > QUICK_SHARE:
            self._own.left = max(0.0, left - cost)
        return reply

    def allow_overruns(self, count: float | None) -> float:
        """Let `count` further questions of this thread overrun the limits (None: any number), then leave new ones
        unanswered; the number that is left of those allowed last. A slow answer counts as its share of the limit."""
        left: float | None = getattr(self._own, "left", None)
        self._own.left = count
        return left or 0


def remember(store: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value, and let the oldest one go if there are too many."""
    store[key] = value
    if len(store) > MAX_KEPT:
        store.popitem(last=False)


class Child:
    """A started child process, which `end` ends, or nobody's use of it. RuntimeError if it cannot start."""

    def __init__(self, command: list[str], wait_seconds: float):
        self.num_questions = 0
        self.parent = os.getpid()
        self._wait_seconds = wait_seconds
        self._said = b""
        own = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PYTHONHASHSEED": "0"}
        own["OPENBLAS_NUM_THREADS"] = "1"  # each of its threads takes a share of the address space
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=os.environ | own, bufsize=0)
        self.end = weakref.finalize(self, _end, self.process, self.parent)
        if self._line(START_SECONDS) is None:
            self.end()
            raise RuntimeError(f"a process that answers questions ({' '.join(command[1:5])}) does not start")

    def ask(self, question: tuple[Any, ...]) -> Reply:
        assert self.process.stdin is not None
        self.num_questions += 1
        stage = None
        try:
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
        except BrokenPipeError:  # something killed it while it was idle
            return Reply()
        while (said := self._line(self._wait_seconds)) is not None:
            if isinstance(said, list):
                answer, cpu_seconds = said
                return Reply(answer, stage, cpu_seconds=cpu_seconds)
            stage = said
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_SECONDS)
        return Reply(None, stage, self.process.returncode in (-SIGPROF, -SIGSEGV, -SIGABRT, NO_MEMORY))

    def _line(self, seconds: float) -> Any:
        """The value in the next line, or None if the child has ended or does not write one in time."""
        assert self.process.stdout is not None
        descriptor, end = self.process.stdout.fileno(), time.monotonic() + seconds
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
        while b"\n" not in self._said:
            left = end - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000) or not (read := os.read(descriptor, 65_536)):
                return None
            self._said += read
        line, _, self._said = self._said.partition(b"\n")
        return json.loads(line)


def _end(process: subprocess.Popen[bytes], parent: int) -> None:
    if parent == os.getpid():  # a forked process leaves it alone
        process.kill()
        process.communicate()  # closes the pipes


def serve(work: str, memory_bytes: int, *arguments: str) -> None:
    """Be the child: answer one question per line of the input until it closes or the parent is gone."""
    import resource

    signal(SIGINT, SIG_IGN)  # an interrupt is the parent's to handle
    parent = os.getppid()
    answers, silence = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    answer = import_module(work).prepare(*arguments)
    os.dup2(silence, 2)  # parsers print about hostile text
    for kind, value in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (value, value))

    def say(message: Any) -> None:
        with os.fdopen(os.dup(answers), "wb") as pipe:  # all of it, however long
            pipe.write(json.dumps(message).encode() + b"\n")

    def limit(cpu_seconds: float, wall_seconds: float) -> None:
        setitimer(ITIMER_REAL, wall_seconds)  # the default action of both signals ends the process; 0: no limit
        setitimer(ITIMER_PROF, cpu_seconds)

    def begin(stage: int, cpu_seconds: float, wall_seconds: float) -> None:
        say(stage)
        limit(cpu_seconds, wall_seconds)

    say("ready")
    while True:
        while not select.select([0], [], [], 5.0)[0]:
            if os.getppid() != parent:
                return
        if not (line := sys.stdin.readline()):
            return
        start = time.process_time()
        try:
            found = answer(begin, *json.loads(line))
        except MemoryError:
            os._exit(NO_MEMORY)  # as if killed: the rest of the memory is not enough for the next question
        limit(0, 0)
        say([found, time.process_time() - start])


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
