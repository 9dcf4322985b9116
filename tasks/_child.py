"""Child processes that answer questions which may take unlimited time and memory, so that they can be killed.

A question and its answer are lines of JSON. The kernel limits a child's memory, and the processor and wall-clock time
of each stage of a question (`serve`). The parent also kills a child that says nothing, and starts another for the next
question; a question that was stopped has no answer. A child is a fresh interpreter without the parent's threads and
devices, with a fixed hash seed, so that it answers alike in every process. It ends when its input closes or its parent
is gone. POSIX only.
"""

import atexit
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from signal import ITIMER_PROF, ITIMER_REAL, SIG_IGN, SIGABRT, SIGINT, SIGPROF, SIGSEGV, setitimer, signal
from typing import Any, NamedTuple

START_SECONDS = 120.0  # importing sympy on a busy machine
GRACE_SECONDS = 1.0  # the parent waits this much longer than the child's own limits
QUESTIONS_PER_CHILD = 10_000  # then a fresh one: the caches of sympy and antlr only grow
CACHED_ANSWERS = 16_384
QUICK_SHARE = 0.1  # of the limit of processor time: a question within it is not charged
NO_MEMORY = 1  # how a child exits without

Question = tuple[Any, ...]
Begin = Callable[[int, float, float], None]  # announces a stage of a question, and limits its processor and wall time

_log = logging.getLogger(__name__)


class Reply(NamedTuple):
    """A child's reply to a question."""

    answer: Any = None  # None: the child was stopped
    stage: int | None = None  # the last that it began
    is_certain: bool = False  # whether it would reach its limits on any machine
    cpu_seconds: float = 0.0


class Children:
    """Puts the questions of any thread to child processes, `count` at once; a forked process starts its own.

    work          name of a module; its `prepare(*arguments)` returns what answers, as (begin, *question) -> JSON
    cpu_seconds   limit of a question, by which its cost is measured
    wait_seconds  for a child that says nothing
    memory_bytes  address space of a child
    """

    def __init__(
        self,
        work: str,
        arguments: tuple[object, ...] = (),
        *,
        cpu_seconds: float,
        wait_seconds: float,
        memory_bytes: int,
        count: int = 1,
    ):
        self.cpu_seconds = cpu_seconds
        self._command = ["-P", "-m", __name__, work, *map(str, (memory_bytes, *arguments))]
        self._wait_seconds = wait_seconds
        self._count = count
        self._answers: OrderedDict[Question, Any] = OrderedDict()
        self._overruns = _Overruns()
        self._forget_children()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget_children)

    def ask(self, question: Question, *, is_kept: bool = True) -> Any:
        """The answer, kept for the next time; None if the question was stopped, or came after too many that were."""
        with self._turn:
            self._turn.wait_for(lambda: self._known(question) is not None or self._num_busy < self._count)
            answer = self._known(question)
            if answer is not None or self._overruns.left == 0:
                return answer
            self._num_busy += 1
        child = None
        reply = Reply()
        try:
            child = self._take_child()
            reply = child.ask(question)
        finally:
            with self._turn:
                self._num_busy -= 1
                if child is not None:
                    self._put_back(child, is_well=reply.answer is not None)
                    self._note(question, reply, is_kept)
                self._turn.notify_all()
        return reply.answer

    def allow_overruns(self, count: float | None) -> float:
        """Let `count` further questions of this thread overrun the limits; then new ones have no answer.

        A slow question that is answered counts as the share of the limit that it took. None lifts the bound. Returns
        how many of the overruns that were allowed last are left.
        """
        left, self._overruns.left = self._overruns.left, count
        return left or 0

    def set_count(self, count: int) -> None:
        """Set the number of questions that are worked on at once."""
        with self._turn:
            self._count = count
            while self._idle and self._num_busy + len(self._idle) > count:
                self._idle.pop().end()
            self._turn.notify_all()

    def close(self) -> None:
        """End the children; the next question starts another. One that is being answered is stopped."""
        with self._turn:
            for child in self._busy:
                child.process.kill()  # the thread that waits for it ends it
            while self._idle:
                self._idle.pop().end()

    def _known(self, question: Question) -> Any:
        """What can be said without a child, or None."""
        return self._answers.get(question)

    def _note(self, question: Question, reply: Reply, is_kept: bool) -> None:
        """Charge a question to its thread's allowance, and keep its answer."""
        cost = reply.cpu_seconds / self.cpu_seconds
        if reply.answer is None:
            cost = max(cost, 1.0)
            _log.warning("not answered within the limits: %.120r", question)
        elif is_kept:
            remember(self._answers, question, reply.answer)
        if self._overruns.left and cost > QUICK_SHARE:
            self._overruns.left = max(0.0, self._overruns.left - cost)

    def _take_child(self) -> "Child":
        with self._turn:
            child = self._idle.pop() if self._idle else None
        child = child or self._start_child()
        with self._turn:
            self._busy.append(child)
        return child

    def _start_child(self) -> "Child":
        return Child([sys.executable, *self._command], self._wait_seconds)

    def _put_back(self, child: "Child", is_well: bool) -> None:
        self._busy.remove(child)
        has_room = self._num_busy + len(self._idle) < self._count
        if is_well and has_room and child.num_questions < QUESTIONS_PER_CHILD:
            self._idle.append(child)
        else:
            child.end()

    def _forget_children(self) -> None:
        """Start without children: after a fork they belong to the other process."""
        self._turn = threading.Condition()  # guards everything here
        self._num_busy = 0  # questions that have their turn
        self._busy: list[Child] = []
        self._idle: list[Child] = []


class _Overruns(threading.local):
    """The number of questions of a thread that may still overrun the limits; None: any number."""

    left: float | None = None


def remember(store: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value, and let the oldest one go if there are too many."""
    store[key] = value
    if len(store) > CACHED_ANSWERS:
        store.popitem(last=False)


class Child:
    """A started child process. RuntimeError if it cannot start, because no answer would be true then."""

    def __init__(self, command: list[str], wait_seconds: float):
        self.num_questions = 0
        self._wait_seconds = wait_seconds
        self._said = b""
        self.process = subprocess.Popen(
            command,
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
        if self._line(START_SECONDS) is None:
            self.end()
            raise RuntimeError(f"a process that answers questions ({' '.join(command[1:5])}) does not start")

    def ask(self, question: Question) -> Reply:
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
        spent = (-SIGPROF, -SIGSEGV, -SIGABRT, NO_MEMORY)  # its processor time or its memory, not the clock or a kill
        return Reply(None, stage, self.process.returncode in spent)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _line(self, seconds: float) -> Any:
        """What the next line says, or None if the child has ended or does not write one in time."""
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
    while (line := _next_line(parent)) is not None:
        start = time.process_time()
        try:
            found = answer(begin, *json.loads(line))
        except MemoryError:
            os._exit(NO_MEMORY)  # as if killed: the rest of the memory is not enough for the next question
        limit(0, 0)
        say([found, time.process_time() - start])


def _next_line(parent: int) -> str | None:
    """The next line of input, or None if it has closed or the process `parent` is gone."""
    while not select.select([0], [], [], 5.0)[0]:
        if os.getppid() != parent:
            return None
    return sys.stdin.readline() or None


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
