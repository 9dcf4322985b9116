"""Decides how training is drawn: learning curves, training dynamics, the quality of majority labels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from harness.types import TrialRecord
from reports.analysis import Analysis
from reports.figures.axes import PLOT, axis_label, cut, label_ends, scale_of, tidy, write_unit
from reports.figures.series import Series, aligned, curve_trials, smoothed
from reports.figures.style import GREY, NARROW, PALETTE, WIDE, Draw, Drawing, color_of, drawn, end_label, marker_of
from reports.prose import wording
from reports.trials import setting

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


@dataclass(frozen=True)
class _Line:
    """A series with the name at its end; a grey line has neither name nor marker nor band."""

    name: str
    series: Series
    color: str
    marker: str = ""


def learning_curves(analysis: Analysis) -> list[Drawing]:
    """The study's metric against steps, rollouts, tokens and seconds."""
    metric = analysis.record.metric
    drawings = []
    for name, cost, label in (
        ("steps", None, "training steps"),
        ("rollouts", "train/rollouts", "sampled rollouts"),
        ("tokens", "train/generated_tokens", "generated tokens"),
        ("seconds", "seconds/total", "seconds"),
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
    shown = curve_trials(analysis)
    voting = [arm for arm, trials in shown.items() if any(setting(trial.spec, weight) for trial in trials)]
    drawings = []
    for number, arm in enumerate(voting):
        right, votes = (_metric_lines(shown[arm], metrics) for metrics in (_LABELS, _VOTES))
        if "majority label" not in right:  # early studies did not record the votes themselves
            right |= _metric_lines(shown[arm], [("majority label", "train/majority_accuracy")])
        if "majority label" in right:
            title = f"Are the majority labels right? {cut(arm, 40)}"
            caption = (
                "A group's majority answer is its training label. Labels that stay above single rollouts can teach; "
                "falling lines under a rising reward are collapse."
            )
            draw = _line_chart(right.values(), 100.0, "training steps", "% right")
            drawings.append(drawn(f"labels_{number}", title, caption, draw, NARROW, 2.8))
        if "margin" in votes:
            title = f"How clear are the votes? {cut(arm, 40)}"
            caption = (
                "Margin: votes of the first answer minus those of the second, over the group. Wrong, but rewarded: "
                "share of wrong completions that agree with the majority."
            )
            draw = _line_chart(votes.values(), 100.0, "training steps", "%")
            drawings.append(drawn(f"votes_{number}", title, caption, draw, NARROW, 2.8))
    return drawings


def _arm_lines(analysis: Analysis, metric: str, cost: str | None = None) -> list[_Line]:
    """A line per arm that recorded the metric."""
    found = {arm: aligned(trials, metric, cost) for arm, trials in curve_trials(analysis).items()}
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
