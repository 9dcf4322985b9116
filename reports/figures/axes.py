"""Decides the look of a chart's parts: rows and lines with their names, units, ticks, and labels that must fit."""

import math
import re
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ..prose.wording import is_fraction
from .style import INK, MUTED

PLOT = (0.1, 0.155, 0.66, 0.65)  # left, bottom, width, height of a line chart, as fractions of the figure
_STEPS = [1, 2, 2.5, 5, 10]
_ROW = (25, 3)  # characters and lines of a name beside its row


def rows(figure: Figure, labels: Sequence[str]) -> Axes:
    """Axes with one horizontal row per label, the first on top, and room for a number at the right."""
    height = figure.get_size_inches()[1]
    left = 0.05 + min(0.0175 * max(len(line) for label in labels for line in wrapped(label, *_ROW)), 0.34)
    axes = figure.add_axes((left, 0.5 / height, 0.89 - left, 1 - 0.95 / height))
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_yticks(range(len(labels)), ["\n".join(wrapped(label, *_ROW)) for label in labels])
    axes.tick_params(axis="y", labelcolor=INK, labelsize=7.5)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
    return axes


def write_unit(axes: Axes, text: str) -> None:
    """The unit of the y axis, written flat above its highest tick."""
    axes.annotate(text, (0, 1), (-18, 6), xycoords="axes fraction", textcoords="offset points", color=MUTED, size=8)


def tidy(axes: Axes) -> None:
    """Horizontal rules and round ticks, after everything is drawn."""
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if low == high == 0:
        axes.set_ylim(-0.03, 1)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=_STEPS))
    if axes.get_xlim()[1] >= 1e4:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _thousands(value)))


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Names beside the right end of their lines, pushed apart so that none covers another."""
    low, high = axes.get_ylim()
    unit = 10 / (axes.get_window_extent().height * 72 / axes.figure.dpi) * (high - low)
    placed = []
    bottom = -math.inf
    for value, name, color in sorted(ends):
        lines = wrapped(name, int(3.2 * axes.figure.bbox.width / axes.figure.dpi), 4)
        half = 0.5 * unit * len(lines)
        center = max(value, bottom + half)
        bottom = center + half
        placed.append([center, half, "\n".join(lines), color])
    overflow = max(0.0, bottom - high)
    ceiling = math.inf
    for item in reversed(placed):
        item[0] = min(item[0], ceiling - item[1]) if ceiling < math.inf else item[0] - overflow
        ceiling = item[0] - item[1]
    for center, _, text, color in placed:
        shown = {"color": color, "va": "center", "size": 7.5, "weight": "bold", "linespacing": 1.05}
        axes.text(1.02, center, text, transform=axes.get_yaxis_transform(), **shown)


def scale_of(metric: str) -> float:
    """The factor that turns a value into the number shown: 100 for a fraction, in percent."""
    return 100.0 if is_fraction(metric) else 1.0


def axis_label(metric: str, label: str = "") -> str:
    """The label with its unit, or the unit alone; fractions are in percent."""
    if not is_fraction(metric):
        return label
    return f"{label}, %" if label else "%"


def rows_height(labels: Sequence[str]) -> float:
    """Inches of a figure with one row per label; the label with most lines sets the height of a row, many are dense."""
    most, least = max(len(wrapped(label, *_ROW)) for label in labels), 2 if len(labels) <= 12 else 1
    return 1.05 + (0.12 + 0.15 * max(most, least)) * max(len(labels), 2)


def cut(text: str, length: int) -> str:
    """The text, or its beginning with `...`, in at most `length` characters."""
    return text if len(text) <= length else text[: length - 3] + "..."


def _thousands(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value else "0"


def wrapped(label: str, width: int, most: int) -> list[str]:
    """A label in at most `most` lines, broken at spaces, and after `_` in a word wider than a line."""
    words = [part for word in label.split() for part in ([word] if len(word) <= width else _parts(word, width))]
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    lines = [cut(line, width + 3) for line in lines if line] or [label]
    return lines if len(lines) <= most else [*lines[: most - 1], cut(" ".join(lines[most - 1 :]), width)]


def _parts(word: str, width: int) -> list[str]:
    """A long word in pieces that end in `_` or `=` if one is in reach."""
    parts = [""]
    for piece in re.findall(rf"[^_=]{{0,{width - 1}}}[_=]?", word):
        if parts[-1] and len(parts[-1]) + len(piece) > width:
            parts.append("")
        parts[-1] += piece
    return parts
