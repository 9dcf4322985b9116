"""Requests to stop, which a signal handler may make at any moment."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

SLICE_SECONDS = 0.1
ORDERLY = {signal.SIGINT, signal.SIGTERM}  # signals that `stop_on_signals` takes
LEAVE = (signal.SIGUSR1, signal.SIGUSR2)  # signals by which a scheduler asks for the machine back
STEP = "Stopping: each run finishes its step and writes a checkpoint; Ctrl-C again stops at once."


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

    Outside the main thread, which alone gets signals, the request is never made. `words`, on stderr, say what it does.
    """
    request = StopRequest()

    def handle(number: int, _: object) -> None:
        request.signals.append(number)
        if not request.is_set():
            request.set()
            on_first()
            with suppress(OSError, RuntimeError, ValueError):  # stderr is closed, or was just being written
                print(words, file=sys.stderr, flush=True)
        elif number == signal.SIGINT or not scheduled:
            on_second(number)

    signals = (*ORDERLY, *(LEAVE if scheduled else ())) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield request
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
