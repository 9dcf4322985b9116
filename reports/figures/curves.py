"""Decides how training is drawn: learning curves, training dynamics, the quality of majority labels.

The curves of several seeds are aligned at positions that all of them have; dynamics and labels are smoothed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from ...harness.record.study import TrialRecord
from ..analysis import Analysis
from ..prose import wording
from ..statistics import Floats
from ..trials import setting
from .axes import PLOT, axis_label, cut, label_ends, scale_of, tidy, write_unit
from .style import GREY, NARROW, PALETTE, WIDE, Draw, Drawing, color_of, drawn, end_label, marker_of

# metric, title, unit on the y axis
DYNAMICS = (
    ("train/accuracy", "Accuracy of training rollouts", "%"),
    ("reward/mean", "Mean reward per completion", "reward"),
    ("kl/reference", "Distance from the reference policy", "KL, nats per token"),
    ("policy/entropy", "Entropy of the policy", "nats per token"),
    ("completion/length", "Completion length", "tokens"),
    ("train/zero_variance_groups", "Groups whose rewards are all equal", "% of groups"),
    ("policy/clip_fraction", "Tokens stopped by clipping", "% of tokens"),
    ("policy/grad_norm", "Gradient norm before clipping", "norm"),
    ("critic/explained_variance", "Variance of returns explained by the critic", "fraction"),
)
_CAPTION = "Line: mean over seeds; band: lowest to highest seed."

# (name of a line, its metric)
_LABELS = (
    ("majority label", "vote/label_accuracy"),
    ("single rollouts", "train/accuracy"),
    ("validation", "validation/accuracy"),
)
_VOTES = (
    ("margin", "vote/margin"),
    ("wrong, but rewarded", "vote/false_positive_rate"),
    ("with an answer", "vote/answered"),
)
_LABELS_CAPTION = (
    "A group's majority answer is its training label. Labels that stay above single rollouts can teach; falling lines "
    "under a rising reward are collapse."
)
_VOTES_CAPTION = (
    "Margin: votes of the first answer minus those of the second, over the group. Wrong, but rewarded: share of wrong "
    "completions that agree with the majority."
)


@dataclass(frozen=True)
class Series:
    """A metric of one arm: one row of `values_ST` per seed at the shared positions `x_T`."""

    x_T: Floats
    values_ST: Floats


@dataclass(frozen=True)
class _Line:
    """A series with the name at its end; a grey line has neither name nor marker nor band."""

    name: str
    series: Series
    color: str
    marker: str = ""


def learning_curves(analysis: Analysis) -> list[Drawing]:
    """The study's metric against steps, rollouts, tokens, seconds and operations."""
    metric = analysis.record.metric
    drawings = []
    for name, cost, label in (
        ("steps", None, "training steps"),
        ("rollouts", "train/rollouts", "sampled rollouts"),
        ("tokens", "train/generated_tokens", "generated tokens"),
        ("seconds", "seconds/total", "seconds"),
        ("flops", "flops/train", "operations of training"),
    ):
        lines = _arm_lines(analysis, metric, cost)
        if lines:
            draw = _line_chart(lines, scale_of(metric), label, axis_label(metric), has_markers=cost is None)
            title = f"{wording.capitalised(wording.spoken(metric))} against {label}"
            drawings.append(drawn(f"learning_{name}", title, _CAPTION, draw, WIDE, 2.7))
    return drawings


def dynamics(analysis: Analysis) -> list[Drawing]:
    """The inside of the runs: one small figure per metric that any arm recorded."""
    drawings = []
    for metric, title, unit in DYNAMICS:
        lines = [replace(line, series=smoothed(line.series)) for line in _arm_lines(analysis, metric)]
        if lines:
            draw = _line_chart(lines, scale_of(metric), "training steps", unit)
            drawings.append(drawn(f"dynamics_{metric.replace('/', '_')}", title, _CAPTION, draw, NARROW, 2.6))
    return drawings


def label_quality(analysis: Analysis) -> list[Drawing]:
    """For each arm that is paid by a majority vote: how often its labels are right, how clear the votes are."""
    weight = "rewards.majority_vote.weight"
    shown = _curve_trials(analysis)
    voting = [arm for arm, trials in shown.items() if any(setting(trial.spec, weight) for trial in trials)]
    drawings = []
    for number, arm in enumerate(voting):
        right, votes = (_metric_lines(shown[arm], metrics) for metrics in (_LABELS, _VOTES))
        if "majority label" not in right:  # early studies did not record the votes themselves
            right |= _metric_lines(shown[arm], [("majority label", "train/majority_accuracy")])
        for name, question, caption, lines, needed, unit in (
            ("labels", "Are the majority labels right?", _LABELS_CAPTION, right, "majority label", "% right"),
            ("votes", "How clear are the votes?", _VOTES_CAPTION, votes, "margin", "%"),
        ):
            if needed in lines:
                draw = _line_chart(lines.values(), 100.0, "training steps", unit)
                title = f"{question} {cut(arm, 40)}"
                drawings.append(drawn(f"{name}_{number}", title, caption, draw, NARROW, 2.8))
    return drawings


def aligned(trials: Sequence[TrialRecord], metric: str, cost: str | None = None) -> Series | None:
    """A metric of several seeds at shared positions: the steps that all have, or an even grid of a cumulative cost.

    Values that are not finite are left out. None if no seed has the metric or the seeds share no position.
    """
    curves = []
    for trial in trials:
        pairs = [(step, value) for step, value in trial.history.get(metric, ()) if math.isfinite(value)]
        if cost is not None:
            spent = np.array([(-math.inf, 0.0), *trial.history.get(cost, ())])  # nothing before the first step
            place = np.searchsorted(spent[:, 0], [step for step, _ in pairs], side="right") - 1
            pairs = list(zip(spent[place, 1], (value for _, value in pairs), strict=True)) if len(spent) > 1 else []
        if pairs:
            curves.append(dict(pairs))
    if not curves:
        return None
    if cost is None:
        x = np.array(sorted(set.intersection(*(set(curve) for curve in curves))), dtype=float)
        rows = [[curve[step] for step in x] for curve in curves]
    else:
        start, end = max(min(curve) for curve in curves), min(max(curve) for curve in curves)
        x = np.linspace(start, end, 41) if end > start else np.array([])
        rows = [np.interp(x, list(curve), list(curve.values())) for curve in curves]
    return Series(x, np.array(rows, dtype=float)) if x.size else None


def smoothed(series: Series) -> Series:
    """A centred moving average over 1/40 of the steps (at least 1), shorter at the ends."""
    reach = series.x_T.size // 80
    if reach == 0:
        return series
    window = [slice(max(0, i - reach), i + reach + 1) for i in range(series.x_T.size)]
    return Series(series.x_T, np.stack([series.values_ST[:, part].mean(axis=1) for part in window], axis=1))


def _curve_trials(analysis: Analysis) -> dict[str, list[TrialRecord]]:
    """Arm -> the trials that its curves show: the complete ones, or the unfinished ones while none is complete."""
    trials = [trial for trial in analysis.record.trials if trial.state == "complete"]
    if not trials:
        trials = [trial for trial in analysis.record.trials if trial.state in ("running", "stopped")]
    chosen = {arm.label: [trial for trial in trials if trial.arm == arm.label] for arm in analysis.arms}
    return {label: found for label, found in chosen.items() if found}


def _arm_lines(analysis: Analysis, metric: str, cost: str | None = None) -> list[_Line]:
    """A line per arm that recorded the metric."""
    found = {arm: aligned(trials, metric, cost) for arm, trials in _curve_trials(analysis).items()}
    return [
        _Line(end_label(analysis, arm), series, color_of(analysis, arm), marker_of(analysis, arm))
        for arm, series in found.items()
        if series is not None
    ]


def _metric_lines(trials: Sequence[TrialRecord], metrics: Sequence[tuple[str, str]]) -> dict[str, _Line]:
    """Name -> the smoothed line of its metric, coloured in order; the few points of a validation stay as they are."""
    found = {}
    for number, (name, metric) in enumerate(metrics):
        series = aligned(trials, metric)
        if series is not None:
            found[name] = _Line(name, series if name == "validation" else smoothed(series), PALETTE[number])
    return found


def _line_chart(lines: Iterable[_Line], scale: float, x_label: str, y_label: str, has_markers: bool = False) -> Draw:
    def draw(figure: Figure) -> None:
        axes = figure.add_axes(PLOT)
        ends = []
        for line in sorted(lines, key=lambda line: line.color != GREY):  # grey lines lie below the others
            x, values = line.series.x_T, scale * line.series.values_ST
            mean, is_grey = values.mean(axis=0), line.color == GREY
            if len(values) > 1 and not is_grey:
                axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=line.color, alpha=0.16, lw=0)
            axes.plot(
                x,
                mean,
                color=line.color,
                lw=0.9 if is_grey else 1.7,
                marker=line.marker if has_markers and not is_grey else None,
                ms=3.4,
                markevery=max(1, x.size // 8),
                solid_capstyle="round",
            )
            if not is_grey:
                ends.append((float(mean[-1]), line.name, line.color))
        tidy(axes)
        label_ends(axes, ends)
        axes.set_xlabel(x_label)
        write_unit(axes, y_label)

    return draw
