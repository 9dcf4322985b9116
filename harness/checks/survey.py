"""Surveys the data of tasks for checks: the longest prompts of a split, and whether there are worked solutions.

Reading or drawing data takes seconds, and so does importing PyTorch; `surveyed` does the first in another process.
"""

import json
import logging
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import islice
from multiprocessing.connection import Connection
from typing import Literal

from ..data import Split
from ..interfaces import Task

Part = Split | Literal["demonstrations"]
NUM_LONGEST = 16
_ahead: ContextVar[Callable[[], dict[str, list[str]]]] = ContextVar("ahead", default=dict)


def longest(task: Task, part: Part) -> list[str]:
    """The prompts with most characters, the longest last; of the demonstrations the first. Empty if there are none."""
    found = _ahead.get()().get(_key(task, part))
    return _read(task, part) if found is None else found


@contextmanager
def surveyed(parts: Iterable[tuple[Task, Part]]) -> Iterator[None]:
    """Inside, `longest` of these parts comes from another process, which starts at once.

    What fails there, or warns, is read again here. Once PyTorch is imported there is nothing to do meanwhile, and its
    threads would not survive a fork: then everything is read here.
    """
    if "torch" in sys.modules:
        yield
        return
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_survey, args=(list(parts), writer), daemon=True)
    child.start()
    writer.close()

    @cache
    def found() -> dict[str, list[str]]:
        """What the other process has found; waits for it."""
        try:
            return json.loads(reader.recv_bytes())
        except EOFError:  # it was killed
            return {}

    token = _ahead.set(found)
    try:
        yield
    finally:
        _ahead.reset(token)
        child.kill()
        child.join()


class _Warned(logging.Handler):
    """Turns a warning into an error."""

    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeWarning(record.getMessage())


def _survey(parts: list[tuple[Task, Part]], writer: Connection) -> None:
    """Send the longest prompts of all parts that can be read without a warning."""
    signal.set_wakeup_fd(-1)  # or a signal would count twice in the parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    logging.getLogger().handlers = [_Warned(logging.WARNING)]
    found: dict[str, list[str]] = {}
    for task, part in parts:
        try:
            found[_key(task, part)] = _read(task, part)
        except Exception:  # the parent meets it too, and says it
            continue
    writer.send_bytes(json.dumps(found).encode())


def _read(task: Task, part: Part) -> list[str]:
    if part == "demonstrations":
        return [demonstration.prompt for demonstration in islice(task.demonstrations(), 1)]
    return sorted((prompt.text for prompt in task.prompts(part)), key=len)[-NUM_LONGEST:]


def _key(task: Task, part: Part) -> str:
    return f"{part} {task.model_dump_json()}"
