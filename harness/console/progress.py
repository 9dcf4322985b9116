"""Shows a running study: bars in a terminal, else lines that keep a log file readable.

Without a terminal a study prints one line per change of a trial's state, and a heartbeat from time to time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..data import ENDED
from .terminal import console, duration, percent, plain

if TYPE_CHECKING:
    from ..record.status import StudyStatus, TrialStatus

HEARTBEAT_SECONDS = 30.0  # between two lines of a log file where nothing else is said


class StudyTracker:
    """Remembers the progress of each trial across phases, so that an evaluation does not hide the training steps.

    The time left follows from the growth of a done fraction since it was first above 0: the time before (loading, a
    cold start) says nothing about the speed afterwards.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._bars: dict[tuple[str, int], tuple[str, int, int]] = {}
        self._starts: dict[object, tuple[float, float]] = {}  # time, fraction

    def bar(self, trial: TrialStatus) -> tuple[str, int, int]:
        """(phase, done, total) of the trial's last phase that counts steps."""
        key = (trial.arm, trial.seed)
        if trial.phase in ("cold start", "train") and trial.total:
            self._bars[key] = (trial.phase, trial.done, trial.total)
        return self._bars.get(key, ("", 0, 0))

    def fraction(self, trial: TrialStatus) -> float:
        """Share of the trial's training steps that are done; 1 for a trial that has ended."""
        if trial.state in ENDED:
            return 1.0
        phase, done, total = self.bar(trial)
        return done / total if phase == "train" and total else 0.0

    def study_fraction(self, status: StudyStatus) -> float:
        """Share of all training steps that are done, including those of future trials."""
        return sum(map(self.fraction, status.trials)) / max(len(status.trials) + status.to_come, 1)

    def remaining(self, trial: TrialStatus) -> float | None:
        """Seconds that the trial still needs, or None if unknown."""
        return self._remaining((trial.arm, trial.seed), self.fraction(trial))

    def study_remaining(self, status: StudyStatus) -> float | None:
        """Seconds that the study still needs, or None if unknown."""
        return self._remaining("study", self.study_fraction(status))

    def _remaining(self, key: object, fraction: float) -> float | None:
        """None before any growth was seen."""
        now = self._clock()
        if fraction > 0:
            self._starts[key] = min(self._starts.get(key, (now, fraction)), (now, fraction), key=lambda start: start[1])
        began, at = self._starts.get(key, (now, fraction))
        return (now - began) * (1 - fraction) / (fraction - at) if fraction > at else None


@contextmanager
def study_view() -> Iterator[LiveView | LineView]:
    """Bars if stderr is a terminal; lines otherwise."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield LineView(screen)
        return
    view = LiveView(screen)
    with view.live:
        yield view


class LiveView:
    """One bar for the study, one for each running trial."""

    def __init__(self, screen: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracker = StudyTracker(clock)
        self._study = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), console=screen
        )
        self._trials = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}", markup=False),
            console=screen,
        )
        self._overall = self._study.add_task("trials", total=1, text="starting")
        self._tasks: dict[tuple[str, int], TaskID] = {}
        bars = Group(self._study, self._trials)
        self.live = Live(bars, console=screen, refresh_per_second=4, transient=True)

    def update(self, status: StudyStatus) -> None:
        left = duration(self._tracker.study_remaining(status))
        text = f"{_counts(status)}, {left} left"
        self._study.update(self._overall, completed=self._tracker.study_fraction(status), text=text)
        running = {(t.arm, t.seed): t for t in status.trials if t.state == "running"}
        for key in [key for key in self._tasks if key not in running]:
            self._trials.remove_task(self._tasks.pop(key))
        for key, trial in running.items():
            _, done, total = self._tracker.bar(trial)
            if key not in self._tasks:
                self._tasks[key] = self._trials.add_task(str(plain(_title(trial))), total=None, text="")
            self._trials.update(
                self._tasks[key], completed=done, total=total or None, text=str(plain(_line(trial, self._tracker)))
            )


class LineView:
    """One line for each change of a trial's state, and a heartbeat at most every HEARTBEAT_SECONDS."""

    def __init__(self, screen: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._screen, self._clock, self._tracker = screen, clock, StudyTracker(clock)
        self._states: dict[tuple[str, int], str] = {}
        self._last = clock()

    def update(self, status: StudyStatus) -> None:
        left = self._tracker.study_remaining(status)
        for trial in status.trials:
            key = (trial.arm, trial.seed)
            self._tracker.remaining(trial)
            if trial.state in ("waiting", "paused"):
                continue  # a trial that takes turns is reported once
            if trial.state != self._states.get(key, "waiting"):
                reason = f" ({trial.reason})" if trial.reason else ""
                accuracy = "" if trial.accuracy is None else f", accuracy {percent(trial.accuracy)}"
                self._print(f"{_title(trial)}: {trial.state}{reason}{accuracy}; {_counts(status)}")
            self._states[key] = trial.state
        running = [t for t in status.trials if t.state == "running"]
        if running and self._clock() - self._last >= HEARTBEAT_SECONDS:
            self._print(f"{_counts(status)}, {duration(left)} left")
            for trial in running:
                self._print(f"  {_title(trial)}: {_line(trial, self._tracker)}")

    def _print(self, text: str) -> None:
        indent = " " * (len(text) - len(text.lstrip(" ")))
        self._screen.print(Text(indent) + plain(text), soft_wrap=True)
        self._last = self._clock()


def _title(trial: TrialStatus) -> str:
    return f"{trial.arm} | seed {trial.seed}"


def _line(trial: TrialStatus, tracker: StudyTracker) -> str:
    phase, done, total = tracker.bar(trial)
    parts = [f"{phase or trial.phase or 'starting'} {done}/{total}" if total else trial.phase or "starting"]
    if phase and trial.phase and trial.phase != phase:
        parts.append(f"{trial.phase} {trial.done}/{trial.total}")
    left = tracker.remaining(trial)
    if left is not None:
        parts.append(f"{duration(left)} left")
    if trial.accuracy is not None:
        parts.append(f"accuracy {percent(trial.accuracy)}")
    if trial.tokens_per_second:
        parts.append(f"{trial.tokens_per_second:,.0f} tokens/s")
    return ", ".join(parts)


def _counts(status: StudyStatus) -> str:
    counts = status.counts()
    done = sum(counts.get(state, 0) for state in ENDED)
    bad = [f"{counts[state]} {state}" for state in ("invalid", "failed", "pruned") if counts.get(state)]
    return ", ".join([f"{done}/{len(status.trials) + status.to_come} trials done", *bad])


@contextmanager
def phase_bar(title: str, first: str = "loading") -> Iterator[Callable[[str, int, int], None]]:
    """A function that shows how far each phase is: a bar on a terminal; elsewhere a line for each new phase, and some
    more."""
    screen = console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        tasks: dict[str, TaskID] = {}
        shown = 0.0

        def update(phase: str, done: int, total: int) -> None:
            nonlocal shown
            words, count = plain(f"{title}: {phase}"), f" {done}/{total}" if total else ""
            if not screen.is_terminal and (phase not in tasks or time.monotonic() - shown >= HEARTBEAT_SECONDS):
                screen.print(words + count, soft_wrap=True)
                shown = time.monotonic()
            if phase not in tasks:
                tasks[phase] = progress.add_task(str(words), total=total or None)
            progress.update(tasks[phase], completed=done, total=total or None)

        update(first, 0, 0)
        yield update
