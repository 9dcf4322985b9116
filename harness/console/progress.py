"""Shows a running study on a terminal, a line for each arm: steps, validation and its curve, state, time left.

Without a terminal it prints a line for each change of a trial's state, and now and then a heartbeat.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from ..data import ENDED
from ..record.events import EVENTS, RunHistory, Tail
from ..record.status import StudyStatus, TrialStatus
from .terminal import console, duration, percent, plain, say, state_text, table_of

REFRESH_SECONDS = 2.0
WIDTH = 24  # characters of a curve
BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
HEARTBEAT_SECONDS = 30.0  # between two lines of a log file where nothing else is said


@contextmanager
def study_view() -> Iterator[Callable[[StudyStatus], None]]:
    """A function that shows a study's progress: a page with a line for each arm if stderr is a terminal; else lines."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield LineView().update
        return
    page, last = Page(), deque([StudyStatus("", "starting", ())], maxlen=1)
    with Live(console=screen, get_renderable=lambda: page.render(last[0]), refresh_per_second=2, transient=True):
        yield last.append


def show_live(read: Callable[[], StudyStatus]) -> None:
    """Show the study (from `read`) until nothing is left to run; only once if stdout is not a terminal."""
    screen, page, status = console(), Page(), read()
    if not screen.is_terminal or status.finished:
        return screen.print(page.render(status))
    with Live(page.render(status), console=screen, auto_refresh=False) as live:
        while not status.finished:
            time.sleep(REFRESH_SECONDS)
            status = read()
            live.update(page.render(status), refresh=True)


class Page:
    """The page of a study; it reads the events of each trial once."""

    def __init__(self) -> None:
        self._tails: dict[Path, Tail] = {}

    def render(self, status: StudyStatus) -> Group:
        title = plain(": ".join(filter(None, [status.name, status.question])))
        arms: dict[str, list[TrialStatus]] = {}
        for trial in status.trials:
            arms.setdefault(trial.arm, []).append(trial)
        rows = [[arm, *self._cells(trials, status.metric)] for arm, trials in arms.items()]
        headers = ["arm", "step", status.metric, "curve", "state", "left"]
        left = f", {duration(status.left)} left"
        ended = sum(not trial.is_open for trial in status.trials)
        words = f"{ended}/{len(status.trials) + status.to_come} trials have ended{'' if status.finished else left}"
        return Group(title, table_of(headers, rows, numeric=("step", status.metric, "left")), Text(words))

    def _cells(self, trials: Sequence[TrialStatus], metric: str) -> list[Text]:
        curves = [self._curve(trial.directory / EVENTS, metric) for trial in trials]
        steps = [trial.steps if trial.state == "complete" else trial.step for trial in trials]
        step = f"{fmean(steps):.0f}/{max(trial.steps for trial in trials)}" if any(steps) else ""
        reached = dict.fromkeys(at for curve in curves for at in curve)
        curve = {at: fmean(one[at] for one in curves if at in one) for at in reached}  # over the trials that are there
        counts = Counter(trial.state for trial in trials)
        state = Text(", ").join([Text(f"{count} ").append_text(state_text(name)) for name, count in counts.items()])
        for trial in (one for one in trials if one.state == "running" and one.phase != "train"):
            state.append_text(plain(f", {_counted(trial.phase or 'starting', trial.done, trial.total)}"))
        left = duration(max((trial.left for trial in trials if trial.state == "running"), default=None), "")
        value = f"{curve[max(curve)]:.4g}" if curve else ""
        return [Text(step), Text(value), Text(spark([curve[at] for at in sorted(curve)])), state, Text(left)]

    def _curve(self, events: Path, metric: str) -> dict[int, float]:
        """Step -> value of the metric, as far as the events can be read here."""
        tail = self._tails.setdefault(events, Tail(events))
        with suppress(OSError, ValueError):
            tail.read()
        points = tail.history.history.get(metric, {})
        tail.history = RunHistory(history={metric: points})  # a large study has much besides
        return {step: value for step, (value, _) in points.items() if math.isfinite(value)}


def spark(values: Sequence[float]) -> str:
    """The last values as bars from the lowest to the highest of them."""
    shown = values[-WIDTH:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)


class LineView:
    """One line for each change of a trial's state, and a heartbeat at most every HEARTBEAT_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._states: dict[tuple[str, int], str] = {}
        self._last = clock()

    def update(self, status: StudyStatus) -> None:
        for trial in status.trials:
            key = (trial.arm, trial.seed)
            if trial.state == "waiting":
                continue
            if trial.state != self._states.get(key, "waiting"):
                reason = f" ({trial.reason})" if trial.reason else ""
                accuracy = "" if trial.accuracy is None else f", accuracy {percent(trial.accuracy)}"
                self._print(f"{trial.arm} | seed {trial.seed}: {trial.state}{reason}{accuracy}; {_counts(status)}")
            self._states[key] = trial.state
        running = [t for t in status.trials if t.state == "running"]
        if running and self._clock() - self._last >= HEARTBEAT_SECONDS:
            self._print(f"{_counts(status)}, {duration(status.left)} left")
            for trial in running:
                self._print(f"  {trial.arm} | seed {trial.seed}: {_line(trial)}")

    def _print(self, text: str) -> None:
        say(text, stderr=True)
        self._last = self._clock()


def _line(trial: TrialStatus) -> str:
    parts = [_counted("train", trial.step, trial.steps)] if trial.step or trial.phase == "train" else []
    if trial.phase != "train":
        parts.append(_counted(trial.phase or "starting", trial.done, trial.total))
    if math.isfinite(trial.left):
        parts.append(f"{duration(trial.left)} left")
    if trial.accuracy is not None:
        parts.append(f"accuracy {percent(trial.accuracy)}")
    if trial.tokens_per_second:
        parts.append(f"{trial.tokens_per_second:,.0f} tokens/s")
    return ", ".join(parts)


def _counted(phase: str, done: int, total: int) -> str:
    return f"{phase} {done}/{total}" if total else phase


def _counts(status: StudyStatus) -> str:
    counts = status.counts()
    done = sum(counts.get(state, 0) for state in ENDED)
    bad = [f"{counts[state]} {state}" for state in ("invalid", "failed", "pruned") if counts.get(state)]
    return ", ".join([f"{done}/{len(status.trials) + status.to_come} trials done", *bad])


@contextmanager
def phase_bar(title: str, first: str = "loading") -> Iterator[Callable[..., None]]:
    """A function that shows how far a phase is, with words on its course or the time left: a bar; without a terminal a
    line at its start and each heartbeat. The words at the start of a phase stay on the screen."""
    screen = console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20))
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        begun: dict[str, tuple[TaskID, float, int]] = {}
        shown = 0.0

        def update(phase: str, done: int, total: int, words: str = "") -> None:
            nonlocal shown
            now, is_told = time.monotonic(), phase not in begun
            if is_told:
                begun[phase] = progress.add_task("", total=None), now, done
            is_told = is_told and words != "" if screen.is_terminal else is_told or now - shown >= HEARTBEAT_SECONDS
            task, since, before = begun[phase]
            if not words and before < done < total:
                words = f"{duration((now - since) * (total - done) / (done - before))} left"
            description = _counted(f"{title}: {phase}", done, total)
            line = ", ".join(filter(None, [description, words]))
            if is_told:
                screen.print(plain(line), soft_wrap=True)  # above the bar, which this console knows
                line, shown = description, now
            progress.update(task, description=str(plain(line)), completed=done, total=total or None)

        update(first, 0, 0)
        yield update
