"""Requests to stop; a signal handler may make one at any moment, and `acknowledged` says at once that it was heard."""

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SLICE_SECONDS = 0.1
ORDERLY = {signal.SIGINT, signal.SIGTERM}  # signals that `stop_on_signals` takes
LEAVE = (signal.SIGUSR1, signal.SIGUSR2)  # signals by which a scheduler asks for the machine back
STEP = "Stopping: each run finishes its step and writes a checkpoint; Ctrl-C again stops at once."
_open: list[str] = []  # what a signal does to those that stop in an orderly way, the innermost last


class StopRequest:
    """Like `threading.Event`, but making it takes no lock: a handler may run inside the `wait` that would hold it.

    Calling it tells whether it is made, so that it serves as a `should_stop`.
    """

    def __init__(self) -> None:
        self._made = False
        self.signals: list[int] = []  # all that have come, in their order

    def is_set(self) -> bool:
        return self._made

    __call__ = is_set

    def set(self) -> None:
        self._made = True

    def wait(self, seconds: float) -> bool:
        """Whether it is made, after waiting at most `seconds`."""
        end = time.monotonic() + seconds
        while not self._made and (left := end - time.monotonic()) > 0:
            time.sleep(min(SLICE_SECONDS, left))
        return self._made


def interrupt(number: int) -> None:
    raise KeyboardInterrupt


@contextmanager
def acknowledged(say: Callable[[str], None], leave: Callable[[int], object] = os._exit) -> Iterator[None]:
    """Report at once what every SIGINT and SIGTERM does, from a separate thread, even while the main thread is in
    an import or a long operation.

    Code outside `stop_on_signals` ends by KeyboardInterrupt at the first signal. If that never arrives, the second
    signal calls `leave` with the exit status.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, written = os.pipe()
    os.set_blocking(written, False)
    before = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    ended = threading.Event()
    _thread.start_new_thread(_listen, (heard, ended, say, leave))  # at the exit nobody waits for it
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        os.close(written)


def _listen(heard: int, ended: threading.Event, say: Callable[[str], None], leave: Callable[[int], object]) -> None:
    again = False
    while number := os.read(heard, 1):  # b"" once the other end is closed
        if ended.is_set() or number[0] not in (signal.SIGINT, signal.SIGTERM, *LEAVE):
            continue
        if not again:
            say(_open[-1] if _open else "Stopping; Ctrl-C again stops at once.")
        elif not _open:
            leave(128 + number[0])
        again = True
    os.close(heard)


@contextmanager
def stop_on_signals(
    on_first: Callable[[], None] = lambda: None,
    on_second: Callable[[int], None] = interrupt,
    words: str = STEP,
    *,
    scheduled: bool = False,
) -> Iterator[StopRequest]:
    """A request that the first SIGINT or SIGTERM makes; each later one calls `on_second` with the signal's number.

    `scheduled`: a scheduler sends these signals and LEAVE, may repeat them, and may send them to a process and its
    child, so only a SIGINT counts as a later one.

    Outside the main thread, which alone gets signals, the request is never made. `words` say what it does.
    """
    request = StopRequest()

    def handle(number: int, _: object) -> None:
        request.signals.append(number)
        if not request.is_set():
            request.set()
            on_first()
        elif number == signal.SIGINT or not scheduled:
            on_second(number)

    signals = (*ORDERLY, *(LEAVE if scheduled else ())) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, handle) for number in signals}
    _open.append(words)
    try:
        yield request
    finally:
        _open.pop()
        for number, previous in before.items():
            signal.signal(number, previous)
