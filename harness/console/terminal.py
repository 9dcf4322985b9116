"""Text and tables on a terminal: foreign text is made harmless, errors go to stderr."""

import json
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..base.words import duration

LOG_WIDTH = 120
_STYLE = {"complete": "green", "ok": "green", "running": "cyan", "invalid": "red", "failed": "red",
          "problem": "red", "stopped": "yellow", "pruned": "yellow", "advice": "yellow", "PASS": "green", "FAIL": "red",
          "SKIPPED": "yellow"}  # fmt: skip


def console(*, stderr: bool = False) -> Console:
    """A console on the current stdout or stderr; a pipe, a file or a notebook gets lines of a fixed, wide width."""
    screen = Console(stderr=stderr, highlight=False)
    if screen.is_terminal:
        return screen
    return Console(stderr=stderr, highlight=False, width=LOG_WIDTH, force_terminal=False, force_jupyter=False)


def plain(text: object) -> Text:
    """Text from outside (a model, a file) as one line, without control characters, never read as markup."""
    return Text("".join(c for c in " ".join(str(text).split()) if unicodedata.category(c)[0] != "C"))


def say(text: object, *, style: str = "", stderr: bool = False) -> None:
    """Print text that may hold foreign parts, line by line and unwrapped, so that paths and commands can be copied."""
    for line in str(text).splitlines() or [""]:
        indent = " " * (len(line) - len(line.lstrip(" ")))
        console(stderr=stderr).print(Text(indent) + plain(line), style=style, soft_wrap=True)


def fail(message: object) -> None:
    """Print an error for the user on stderr."""
    say(f"Error: {message}", style="bold red", stderr=True)


def print_json(document: object) -> None:
    """Print one JSON document on stdout; numbers that JSON cannot hold become null."""
    from pydantic_core import to_jsonable_python

    known = to_jsonable_python(
        document, inf_nan_mode="null", fallback=lambda x: dict(x) if isinstance(x, Mapping) else str(x)
    )
    print(json.dumps(known, indent=2))


def show_table(title: str, headers: Sequence[str], rows: Iterable[Sequence[Any]], numeric: Sequence[str] = ()) -> None:
    """Print a table of plain text (a cell that already is rich Text keeps its style); `numeric` columns align right."""
    if title:
        say(title, style="bold")
    console().print(table_of(headers, rows, numeric))


def table_of(headers: Sequence[str], rows: Iterable[Sequence[Any]], numeric: Sequence[str] = ()) -> Table:
    """A table that shows every cell whole, in lines where the screen is narrow; words, so labels, are the last to
    break, and the columns that want more share what room there is."""
    cells = [[cell if isinstance(cell, Text) else plain("" if cell is None else cell) for cell in row] for row in rows]
    columns = list(zip(headers, *([cell.plain for cell in row] for row in cells), strict=True))
    wanted = [max(map(cell_len, column)) for column in columns]
    parts = [[part for text in column for part in (text.split() if len(text) > 8 else [text])] for column in columns]
    widths = [max(map(cell_len, column)) for column in parts]
    room = console().width - len(headers) - 1
    while sum(widths) > max(room, len(widths)):
        widths[widths.index(max(widths))] -= 1
    places = sorted(range(len(widths)), key=lambda place: wanted[place] - widths[place])
    for done, place in enumerate(places):
        share = max(room - sum(widths), 0) // (len(places) - done)
        widths[place] += min(max(wanted[place] - widths[place], 0), share)
    table = Table(box=SIMPLE_HEAD, padding=(0, int(sum(wanted) + len(wanted) <= room), 0, 0))
    for header, width in zip(headers, widths, strict=True):
        table.add_column(header, justify="right" if header in numeric else "left", overflow="fold", width=width)
    for row in cells:
        table.add_row(*row)
    return table


def state_text(state: str) -> Text:
    return Text(state, style=_STYLE.get(state, ""))


def percent(value: float | None) -> str:
    """A fraction as a percentage; `-` for None and NaN."""
    return "-" if value is None or math.isnan(value) else f"{100 * value:.1f} %"


def quantity(name: str, value: float) -> str:
    """A number of a run's summary, in the unit that its name implies."""
    if "accuracy" in name:
        return percent(value)
    if name == "seconds":
        return duration(value)
    return f"{value / 2**20:,.0f} MiB" if name.endswith("_bytes") else f"{value:,.0f}"


def yes(value: bool) -> str:
    return "yes" if value else "no"


def shortened(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else text[:limit] + " ..."


def mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f}" if size < 10 * 2**20 else f"{size / 2**20:,.0f}"
