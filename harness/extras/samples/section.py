"""The section of a report on the problems that only one of two arms solves, and the page that lists them."""

from collections import Counter
from contextlib import suppress
from pathlib import Path

from ....reports.analysis import Analysis
from ....reports.section import ReportSection
from ....reports.tables import table
from ...api.result import Result
from ...base.files import write_text
from .page import SOLVED, compared, page

_LEAD = (
    "Test problems by who solves them: at least half of an arm's samples are right, over the seeds that both arms "
    "completed. The page of problems says which differences are sure."
)


def section(analysis: Analysis, folder: Path | None) -> ReportSection | None:
    """Each comparison's problems, counted; and beside the report in `folder` a page, of the two arms that differ on
    most. None without the folder, or where trials keep no completions."""
    with suppress(ValueError, OSError):
        if folder is not None and analysis.comparisons:
            result, rows = Result(analysis.record, folder.parent, None), []
            for a, b in ((one.arm, one.baseline.label) for one in analysis.comparisons):
                counts = Counter(problem["solved"] for problem in compared(result, a, b))
                rows.append([a, b, *(counts[name] for name in SOLVED.values())])
            a, b, *_ = max(rows, key=lambda row: row[2] + row[3])
            write_text(folder / "problems.html", page(result, a, b, runs=result.folder.parent.parent), sync=False)
            link = ("link", f"problems.html The problems of {a} and {b} one by one, with both arms' completions")
            note = ("note", f"Of two other arms: cohort samples {result.name} A B --out problems.html")
            parts = [("lead", _LEAD), ("table", table(["A", "<B", *SOLVED.values()], rows)), link, note]
            return ReportSection("problems", "Problems that only one arm solves", parts, "Problems")
    return None
