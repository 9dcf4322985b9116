"""Shows a study on a terminal while it runs, a line for each arm: steps, validation and its curve, state, time left."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..record.events import EVENTS, RunHistory, read_events
from .progress import StudyTracker
from .terminal import console, duration, plain, state_text

if TYPE_CHECKING:
    from ..record.status import StudyStatus, TrialStatus

REFRESH_SECONDS = 2.0
WIDTH = 24  # characters of a curve
BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def watch(read: Callable[[], StudyStatus], metric: str, clock: Callable[[], float] = time.monotonic) -> None:
    """Show the study (from `read`) until nothing is left to run; only once if stdout is not a terminal."""
    screen, page = console(), Page(metric, clock)
    status = read()
    if not screen.is_terminal or status.finished:
        screen.print(page.render(status))
        return
    with Live(page.render(status), console=screen, auto_refresh=False) as live:
        while not status.finished:
            time.sleep(REFRESH_SECONDS)
            status = read()
            live.update(page.render(status), refresh=True)


class Page:
    """The page of a study; it remembers the curves of trials whose events have not changed."""

    def __init__(self, metric: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._metric = metric
        self._tracker = StudyTracker(clock)
        self._curves: dict[Path, tuple[tuple[int, int], dict[int, float], int]] = {}

    def render(self, status: StudyStatus) -> Group:
        table = Table(title=str(plain(f"{status.name}: {status.question}")), title_justify="left")
        for header in ("arm", "step", self._metric, "curve", "state", "left"):
            table.add_column(header, justify="right" if header in ("step", self._metric, "left") else "left")
        arms: dict[str, list[TrialStatus]] = {}
        for trial in status.trials:
            arms.setdefault(trial.arm, []).append(trial)
        for arm, trials in arms.items():
            table.add_row(plain(arm), *self._cells(trials))
        left = duration(self._tracker.study_remaining(status))
        ended = sum(not trial.is_open for trial in status.trials)
        return Group(table, Text(f"{ended}/{len(status.trials) + status.to_come} trials have ended, {left} left"))

    def _cells(self, trials: Sequence[TrialStatus]) -> list[Text]:
        curves, steps = zip(*(self._curve(trial.directory / EVENTS) for trial in trials), strict=True)
        totals = [total for phase, _, total in map(self._tracker.bar, trials) if phase == "train"]
        step = f"{fmean(steps):.0f}{f'/{max(totals)}' if totals else ''}" if any(steps) else ""
        reached = dict.fromkeys(at for curve in curves for at in curve)
        curve = {at: fmean(one[at] for one in curves if at in one) for at in reached}  # over the trials that are there
        counts = Counter(trial.state for trial in trials)
        state = Text(", ").join([Text(f"{count} ").append_text(state_text(name)) for name, count in counts.items()])
        known = [seconds for trial in trials if (seconds := self._tracker.remaining(trial)) is not None]
        left = duration(max(known)) if known and any(trial.state == "running" for trial in trials) else ""
        value = f"{curve[max(curve)]:.4g}" if curve else ""
        return [Text(step), Text(value), Text(spark([curve[at] for at in sorted(curve)])), state, Text(left)]

    def _curve(self, events: Path) -> tuple[dict[int, float], int]:
        """Step -> value of the metric, and the last step; empty for a trial of another host or with torn events."""
        try:
            stat = events.stat()
            mark = (stat.st_mtime_ns, stat.st_size)
            if events not in self._curves or self._curves[events][0] != mark:
                history = RunHistory()
                for event in read_events(events):
                    if event["type"] == "metrics":
                        history.add(event)
                points = history.history.get(self._metric, {})
                curve = {step: value for step, (value, _) in points.items() if math.isfinite(value)}
                last = max((step for steps in history.history.values() for step in steps), default=0)
                self._curves[events] = (mark, curve, last)
            return self._curves[events][1:]
        except (OSError, ValueError):
            return {}, 0


def spark(values: Sequence[float]) -> str:
    """The last values as bars from the lowest to the highest of them."""
    shown = values[-WIDTH:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)
