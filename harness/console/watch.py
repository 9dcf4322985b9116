"""Shows a study on a terminal while it runs, a line for each arm: steps, validation and its curve, state, time left."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..record.events import EVENTS, Tail
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
    """The page of a study; it reads the events of each trial once."""

    def __init__(self, metric: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._metric = metric
        self._tracker = StudyTracker(clock)
        self._tails: dict[Path, Tail] = {}

    def render(self, status: StudyStatus) -> Group:
        table = Table(title=str(plain(f"{status.name}: {status.question}")), title_justify="left")
        for header in ("arm", "step", self._metric, "curve", "state", "left"):
            table.add_column(header, justify="right" if header in ("step", self._metric, "left") else "left")
        arms: dict[str, list[TrialStatus]] = {}
        for trial in status.trials:
            arms.setdefault(trial.arm, []).append(trial)
        for arm, trials in arms.items():
            table.add_row(plain(arm), *self._cells(trials))
        left = f", {duration(self._tracker.study_remaining(status))} left"
        ended = sum(not trial.is_open for trial in status.trials)
        words = f"{ended}/{len(status.trials) + status.to_come} trials have ended{'' if status.finished else left}"
        return Group(table, Text(words))

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
        """Step -> value of the metric, and the last step, as far as the events can be read here."""
        tail = self._tails.setdefault(events, Tail(events))
        with suppress(OSError, ValueError):
            tail.read()
            tail.history.samples.clear()  # a long study has many
        history = tail.history.history
        points = history.get(self._metric, {})
        curve = {step: value for step, (value, _) in points.items() if math.isfinite(value)}
        return curve, max((step for steps in history.values() for step in steps), default=0)


def spark(values: Sequence[float]) -> str:
    """The last values as bars from the lowest to the highest of them."""
    shown = values[-WIDTH:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)
