"""Decides what all figures share: colours, type, the place of an arm in the palette, and how a figure is saved.

Colours are Okabe and Ito's (2008) palette, safe for colour-blind readers, with a marker per arm for print without
colour. Arms keep their colour in every figure. With more arms than colours, the baseline (or the best of a search), the
highest and the lowest are coloured and the others grey. SVG output is deterministic, with text kept as text. Labels are
drawn as they are: matplotlib's own mathematics is off, so a `$` in a label is a dollar sign. On the page colours are
variables, which the dark theme sets.
"""

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ...harness.data import GREY, PALETTE
from ..analysis import Analysis
from ..trials import search_of

INK, MUTED = "#1d2126", "#5c6570"
RULE = "#e4e7eb"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
FORMATS = ("svg", "png", "pdf")
SHADE, EMPTY, ON_SHADE = "#08519c", "#f3f4f6", "#fdfeff"  # of a value, its strength as opacity; no value; text on it
WIDE, NARROW = 4.1, 3.7  # inches; 72 SVG units each, so that 8.5 pt text stays legible on a phone

_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "text.parse_math": False,
    "axes.unicode_minus": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "cohort",
    "pdf.fonttype": 3,  # five times faster than 42
    "path.simplify": True,
}

# Colour -> the variable of the page that replaces it in the dark; a paper and a file keep the colour.
_THEME = {
    INK: "ink", MUTED: "muted", RULE: "faint", GREY: "grey", "#ffffff": "paper", SHADE: "shade", EMPTY: "wash",
} | {color.lower(): f"series-{number}" for number, color in enumerate(PALETTE)}  # fmt: skip

# A user's own matplotlibrc must not change a report, nor a report the backend that a notebook draws with.
_FRESH_STYLE: Any = {key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"} | _STYLE

_STYLED_TAG, _COLOR = re.compile(r'(?:<[^<>]* style=")[^"<>]*'), re.compile(r"(?<=: )#[0-9a-f]{6}(?=;|$)")

Draw = Callable[[Figure], None]


@dataclass(frozen=True)
class Drawing:
    """One figure: `name` is its file stem, `caption` how to read it, `svg` an element, escaped."""

    name: str
    title: str
    caption: str
    svg: Markup
    figure: Figure

    @property
    def inline(self) -> Markup:
        """The element for the page, in the colours of the reader's theme."""
        return Markup(
            _STYLED_TAG.sub(lambda tag: _COLOR.sub(lambda color: themed(color.group()), tag.group()), self.svg)
        )

    def file(self, suffix: str) -> bytes:
        """The figure as a file: svg, png or pdf."""
        if suffix == "svg":
            return f'<?xml version="1.0" encoding="utf-8"?>\n{self.svg}\n'.encode()
        with matplotlib.rc_context(_FRESH_STYLE):
            return _saved(self.figure, suffix)


def drawn(name: str, title: str, caption: str, draw: Draw, width: float, height: float) -> Drawing:
    """The figure that `draw` fills, below its title; width and height in inches."""
    with matplotlib.rc_context(_FRESH_STYLE):
        lines = textwrap.wrap(title, int(13.2 * width)) or [title]
        figure = Figure(figsize=(width, height))
        FigureCanvasAgg(figure)
        draw(figure)
        for axes in figure.axes:
            box = axes.get_position()
            axes.set_position((box.x0, box.y0, box.width, box.height - 0.16 * (len(lines) - 1) / height))
        figure.text(0, 1 - 0.06 / height, "\n".join(lines), va="top", weight="bold", size=9.5, linespacing=1.15)
        svg = _saved(figure, "svg").decode("utf-8")
    return Drawing(name, title, caption, Markup(_inline(svg, name, f"{title}. {caption}".strip())), figure)


def write_files(drawings: Sequence[Drawing], folder: Path, formats: Sequence[str] = FORMATS) -> None:
    """Write each drawing as files of its name; those of an earlier report are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.suffix.lstrip(".") in FORMATS:
            old.unlink()
    for drawing in drawings:
        for suffix in formats:
            (folder / f"{drawing.name}.{suffix}").write_bytes(drawing.file(suffix))


def color_of(analysis: Analysis, label: str) -> str:
    """An arm's colour in every figure."""
    return PALETTE[place] if (place := _place(analysis, label)) is not None else GREY


def marker_of(analysis: Analysis, label: str) -> str:
    return MARKERS[place] if (place := _place(analysis, label)) is not None else "o"


def themed(color: str) -> str:
    """The colour as a style of the page, which replaces it in the dark."""
    name = _THEME.get(color.lower())
    return f"var(--{name}, {color})" if name else color


def end_label(analysis: Analysis, label: str) -> str:
    """An arm's name beside its line; among many arms its role, as the table names the coloured arms."""
    if len(analysis.arms) <= len(PALETTE):
        return label
    return _roles(analysis).get(label, "")


def _saved(figure: Figure, suffix: str) -> bytes:
    """The figure in a format, without the time at which it was made."""
    unwanted = {"svg": ("Date", "Creator", "Format", "Type"), "png": ("Software",), "pdf": ("CreationDate", "Producer")}
    options: dict[str, Any] = {"transparent": True} if suffix == "svg" else {"facecolor": "white"}
    content = io.BytesIO()
    figure.savefig(content, format=suffix, dpi=150, metadata=dict.fromkeys(unwanted[suffix]), **options)
    return content.getvalue()


def _inline(svg: str, name: str, description: str) -> str:
    """The bare SVG element, sized by its page, with unique ids and a description for screen readers."""
    body = svg[svg.index("<svg") :].strip()
    body = re.sub(r' id="([^"]+)"', rf' id="{name}-\1"', body)
    body = re.sub(r'(href="|url\()#', rf"\1#{name}-", body)
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    head, _, rest = body.partition(">")
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{escape(description)}">{rest}'


def _place(analysis: Analysis, label: str) -> int | None:
    """Position of an arm in the palette; None for an arm in the grey background."""
    labels = [arm.label for arm in analysis.arms]
    if len(labels) > len(PALETTE):
        labels = list(_roles(analysis))
    return labels.index(label) if label in labels else None


def _roles(analysis: Analysis) -> dict[str, str]:
    """Arm -> what it is among many, in the order of the palette; of equal arms the first is the highest or lowest."""
    search = search_of(analysis.record)
    found = {search["best"]: "best of the search"} if search is not None and search["best"] else {}
    found |= {analysis.baseline.label: "baseline"} if analysis.baseline is not None else {}
    arms = analysis.finished_arms
    for choose, role in ((max, "highest arm"), (min, "lowest arm")) if arms else ():
        found.setdefault(choose(arms, key=lambda arm: arm.mean).label, role)
    return found
