"""Requests to stop; a signal handler may make one at any moment."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SLICE_SECONDS = 0.1


class StopRequest:
    """Like `threading.Event`, but making it takes no lock: a handler may run inside the `wait` that would hold it.

    Calling it tells whether it is made, so that it serves as a `should_stop`.
    """

    def __init__(self) -> None:
        self._made = False

    def __call__(self) -> bool:
        return self._made

    def set(self) -> None:
        self._made = True

    def is_set(self) -> bool:
        return self._made

    def wait(self, seconds: float) -> bool:
        """Whether it is made, after at most so many seconds."""
        end = time.monotonic() + seconds
        while not self._made and (left := end - time.monotonic()) > 0:
            time.sleep(min(SLICE_SECONDS, left))
        return self._made


def interrupt(number: int) -> None:
    raise KeyboardInterrupt


@contextmanager
def stop_on_signals(
    on_first: Callable[[], None] = lambda: None, on_second: Callable[[int], None] = interrupt
) -> Iterator[StopRequest]:
    """A request that the first SIGINT or SIGTERM makes; each later one calls `on_second` with the signal's number.

    Outside the main thread, which alone gets signals, the request is never made.
    """
    request = StopRequest()

    def handle(number: int, _: object) -> None:
        if request.is_set():
            on_second(number)
            return
        request.set()
        on_first()

    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield request
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
