"""A section of the page that an extra brings: `harness/extras/NAME/section.py` makes it, the page shows it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..harness import extras
from .analysis import Analysis
from .figures.style import Drawing
from .tables import Table


@dataclass(frozen=True)
class ReportSection:
    """Title and parts in order: `("table", Table)`, `("figures", [Drawing])`, `("heading", text)`, `("code", text)`,
    `("link", "FILE words")`, or text in a look of the page (`lead`, `note`, `strong`, `plain`). `short` is the title in
    the contents of the page; `write` writes the files that it links into the folder of the report."""

    id: str
    title: str
    parts: Sequence[tuple[str, Table | Sequence[Drawing] | str]]
    short: str | None = None
    write: Callable[[Path], None] | None = None

    @property
    def drawings(self) -> list[Drawing]:
        groups = [content for _, content in self.parts if not isinstance(content, Table | str)]
        return [one for group in groups for one in group]


def sections(analysis: Analysis) -> list[ReportSection]:
    """The sections of all extras that have something to show."""
    found = [module.section(analysis) for module in extras.modules("section").values()]
    return [one for one in found if one is not None]
