"""A request to stop that a signal handler can make at any moment."""

from __future__ import annotations

import time

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
