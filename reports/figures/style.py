"""Decides what all figures share: colours, type, an arm's place in the palette, axes, labels that fit, saved files.

Colours are Okabe and Ito's (2008) palette, safe for colour-blind readers, with a marker per arm for print without
colour. Arms keep their colour in every figure. With more arms than colours, the baseline (or the best of a search), the
highest and the lowest are coloured and the others grey. SVG output is deterministic, with text kept as text. Labels are
drawn as they are: matplotlib's own mathematics is off, so a `$` in a label is a dollar sign.
"""

import io
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, FixedLocator, MaxNLocator

from ...harness.base.arms import GREY, PALETTE
from ..analysis import Analysis
from ..prose.wording import is_fraction

INK, MUTED = "#1d2126", "#5c6570"
RULE = "#e4e7eb"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
FORMATS = ("svg", "png", "pdf")
SHADE, EMPTY = "#08519c", "#f3f4f6"  # of a value, its strength as opacity; of no value
WIDE, NARROW = 4.1, 3.7  # inches; 72 SVG units each, so that 8.5 pt text stays legible on a phone
DPI = 150  # of PNG files, and of the layout, because letters have other widths at each resolution

_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 8.5,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left"), False),
    **dict.fromkeys(("axes.linewidth", "grid.linewidth"), 0.7),
    "axes.axisbelow": True,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "grid.color": RULE,
    "text.color": INK,
    "text.parse_math": False,
    "text.hinting": "none",  # so that a label is as wide in every format as where the layout made room for it
    "axes.unicode_minus": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "cohort",
}

# A user's own matplotlibrc must not change a report, nor a report the backend that a notebook draws with.
_FRESH_STYLE: Any = {key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"} | _STYLE

STEPS = [1, 2, 2.5, 5, 10]

Draw = Callable[[Figure], None]
End = tuple[float, str, str]  # of a line: its last value, its name and its colour


@dataclass(frozen=True)
class Drawing:
    """One figure: `name` is its file stem, `caption` how to read it, `svg` an element, escaped."""

    name: str
    title: str
    caption: str
    svg: Markup
    figure: Figure


class Picture(Figure):
    """A figure that a notebook shows as it stands in the report, whatever the notebook's own settings."""

    def _repr_png_(self) -> bytes:
        return _saved(self, "png")


def drawn(name: str, title: str, caption: str, draw: Draw, width: float, height: float) -> Drawing:
    """The figure that `draw` fills, below its title; width and height in inches, the height with a short title.

    The layout makes room for every text: none is cut, however long the label of an arm is.
    """
    with matplotlib.rc_context(_FRESH_STYLE):
        layout = ConstrainedLayoutEngine()
        figure = Picture(figsize=(width, height), layout=layout, dpi=DPI)
        FigureCanvasAgg(figure)
        head = figure.suptitle("", x=0, ha="left", weight="bold", size=9.5, linespacing=1.15)
        for letters in range(int(13.2 * width), 1, -1):
            head.set_text("\n".join(wrapped(title, letters)))
            if head.get_window_extent().x1 <= figure.bbox.width:
                break
        figure.set_figheight(height + 0.16 * head.get_text().count("\n"))
        draw(figure)
        layout.execute(figure)
        figure.set_layout_engine("none")  # as it is now: once is enough for all formats
        svg = _saved(figure, "svg").decode("utf-8")
    svg = re.sub(r' id="([^"]+)"', rf' id="{name}-\1"', svg[svg.index("<svg") :].strip())  # unique on a page
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    head, _, rest = svg.partition(">")
    head = re.sub(r' (width|height)="[^"]*"', "", head)  # the page sets them
    described = f'{head} role="img" aria-label="{escape(f"{title}. {caption}".strip())}">{rest}'
    return Drawing(name, title, caption, Markup(described), figure)


def write_files(drawings: Sequence[Drawing], folder: Path, formats: Sequence[str] = FORMATS) -> None:
    """Write each drawing as files of its name: svg, png or pdf; files of an earlier report are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.suffix.lstrip(".") in FORMATS:
            old.unlink()
    for drawing, suffix in itertools.product(drawings, formats):
        content = f'<?xml version="1.0" encoding="utf-8"?>\n{drawing.svg}\n'.encode()
        if suffix != "svg":
            content = _saved(drawing.figure, suffix)
        (folder / f"{drawing.name}.{suffix}").write_bytes(content)


def color_of(analysis: Analysis, label: str) -> str:
    """An arm's colour in every figure."""
    return look(analysis, label)[0]


def look(analysis: Analysis, label: str) -> tuple[str, str]:
    """Colour and marker of an arm; grey if the figure does not show it, or shows many and it has no role among them."""
    labels = list(analysis.roles) if len(analysis.arms) > len(PALETTE) else [arm.label for arm in analysis.arms]
    place = labels.index(label) if label in labels else None
    return (GREY, "o") if place is None else (PALETTE[place], MARKERS[place])


def end_label(analysis: Analysis, label: str) -> str:
    """An arm's name beside its line; among many arms its role, as the table names the coloured arms."""
    return label if len(analysis.arms) <= len(PALETTE) else analysis.roles.get(label, "")


def row_chart(name: str, title: str, caption: str, labels: Sequence[str], plot: Callable[[Axes], None]) -> Drawing:
    """A figure that `plot` fills, with a row per label, the first on top.

    The label with most lines sets the height of a row; many rows are dense.
    """
    lines = [wrapped(label, 25) for label in labels]
    least = 2 if len(labels) <= 12 else 1
    height = 1.05 + (0.12 + 0.15 * max(*map(len, lines), least)) * max(len(labels), 2)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.set_yticks(range(len(labels)), ["\n".join(each) for each in lines])
        axes.tick_params(axis="y", labelcolor=INK, labelsize=7.5)
        axes.grid(axis="x")
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
        plot(axes)

    return drawn(name, title, caption, draw, WIDE, height)


def chart(plot: Callable[[Axes], Sequence[End]], x_label: str, unit: str) -> Draw:
    """Axes that `plot` fills, with horizontal rules, round ticks and the names of its lines beside their right ends.

    Ticks that `plot` sets stay. `unit` belongs to the y axis and is written flat above its highest tick.
    """

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        ends = plot(axes)
        axes.grid(axis="y")
        if axes.dataLim.y0 == axes.dataLim.y1 == 0:
            axes.set_ylim(-0.03, 1)
        if axes.dataLim.x0 == axes.dataLim.x1:  # a single step
            axes.set_xticks([axes.dataLim.x0])
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
        if not isinstance(axes.xaxis.get_major_locator(), FixedLocator):
            axes.xaxis.set_major_locator(MaxNLocator(4, steps=STEPS, integer=True))
            if axes.get_xlim()[1] >= 1e4:
                axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        _label_ends(axes, [end for end in ends if end[1]])
        axes.set_xlabel(x_label)
        axes.annotate(unit, (0, 1), (-18, 6), xycoords="axes fraction", textcoords="offset points", color=MUTED, size=8)

    return draw


def text_beside(axes: Axes, row: float, text: str) -> None:
    """A number at the right of a row."""
    axes.text(1.03, row, text, transform=axes.get_yaxis_transform(), va="center", weight="bold")


def scale_of(metric: str) -> float:
    """The factor that turns a value into the number shown: 100 for a fraction, in percent."""
    return 100.0 if is_fraction(metric) else 1.0


def unit_of(metric: str) -> str:
    """The unit of the number shown: `%` for a fraction, none otherwise."""
    return "%" if is_fraction(metric) else ""


def wrapped(label: str, width: int) -> list[str]:
    """A label in lines, all of it: broken at spaces, in a word wider than a line after a mark such as `_`, else
    anywhere."""
    words = [re.sub(r"(?<=[_.=/])(?=[A-Za-z])", "\v", word) if len(word) > width else word for word in label.split()]
    lines = textwrap.wrap(" ".join(words), width, expand_tabs=False, replace_whitespace=False)
    return [line.replace("\v", "") for line in lines] or [label]


def _saved(figure: Figure, suffix: str) -> bytes:
    """The figure in a format, without the time at which it was made."""
    unwanted = {"svg": ("Date", "Creator", "Format", "Type"), "png": ("Software",), "pdf": ("CreationDate", "Producer")}
    look: dict[str, Any] = {"transparent": True} if suffix == "svg" else {"facecolor": "white"}
    content = io.BytesIO()
    with matplotlib.rc_context(_FRESH_STYLE):
        figure.savefig(content, format=suffix, dpi=DPI, metadata=dict.fromkeys(unwanted[suffix]), **look)
    return content.getvalue()


def _label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Names beside the right end of their lines, pushed apart so that none covers another; a figure with too little
    room for their lines becomes higher."""
    figure, size = axes.get_figure(root=True), 7.5
    assert figure is not None
    named = [(value, wrapped(name, int(3.8 * figure.get_figwidth())), color) for value, name, color in sorted(ends)]
    step, around = 1.33 * size / 72, 0.62 + 0.16 * figure.get_suptitle().count("\n")  # inches of a line; of no axes
    figure.set_figheight(max(figure.get_figheight(), around + step * sum(len(lines) for _, lines, _ in named)))
    low, high = axes.get_ylim()
    unit = step / (figure.get_figheight() - around) * (high - low)
    placed = []
    bottom = -math.inf
    for value, lines, color in named:
        half = 0.5 * unit * len(lines)
        center = max(value, bottom + half)
        bottom = center + half
        placed.append([center, half, "\n".join(lines), color])
    for item in reversed(placed):
        item[0] = min(item[0], high - item[1])
        high = item[0] - item[1]
    for center, _, text, color in placed:
        shown = {"color": color, "va": "center", "size": size, "weight": "bold", "linespacing": 1.05}
        axes.text(1.02, center, text, transform=axes.get_yaxis_transform(), **shown)
