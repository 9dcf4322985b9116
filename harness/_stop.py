"""Requests to stop, which signal handlers make at any moment."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SLICE_SECONDS = 0.1


class StopRequest:
    """Like `threading.Event`, but making it takes no lock: a handler may run inside the `wait` that would hold it."""

    def __init__(self) -> None:
        self._made = False

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


@contextmanager
def on_stop_signals(handler: Callable[..., None]) -> Iterator[None]:
    """SIGINT and SIGTERM call `handler` meanwhile; nothing changes outside the main thread, which alone gets them."""
    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
