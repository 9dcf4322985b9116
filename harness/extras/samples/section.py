"""The section of a report on the problems that only one of two arms solves, and the page that lists them."""

import logging
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

from ....reports.analysis import Analysis
from ....reports.join import JoinedStudy
from ....reports.section import ReportSection
from ....reports.tables import table
from ...api.result import Result
from ...base.files import write_text
from ...record.study import StudyRecord
from .page import SOLVED, compared, page

PAGE = "problems.html"
_LEAD = (
    "Test problems by who solves them: at least half of an arm's samples are right, over the seeds that both arms "
    "completed. The page of problems says which differences are sure."
)


def section(analysis: Analysis) -> ReportSection | None:
    """Each comparison's problems, counted, with a link to the page of the two arms that differ on most."""
    record, result, rows = analysis.record, Result(analysis.record, Path(), None), []
    for a, b in ((one.arm, one.baseline.label) for one in analysis.comparisons):
        with suppress(ValueError):  # of arms that share no test problem
            counts = Counter(problem["solved"] for problem in compared(result, a, b))
            rows.append([a, b, *(counts[name] for name in SOLVED.values())])
    if not rows or isinstance(record, JoinedStudy):
        return None
    a, b, *_ = max(rows, key=lambda row: row[2] + row[3])
    link = ("link", f"{PAGE} The problems of {a} and {b} one by one, with both arms' completions")
    note = ("note", f"Of two other arms: cohort samples {record.name} A B --out {PAGE}")
    parts = [("lead", _LEAD), ("table", table(["A", "<B", *SOLVED.values()], rows)), link, note]
    write = partial(_write, record, a, b)
    return ReportSection("problems", "Problems that only one arm solves", parts, "Problems", write)


def _write(record: StudyRecord, a: str, b: str, folder: Path) -> None:
    """The page, beside a report in the folder of its study; none where a report is only compared."""
    if (folder.parent / "trials").is_dir():
        try:
            text = page(Result(record, folder.parent, None), a, b, runs=folder.parent.parent.parent)
        except (ValueError, OSError) as error:  # of damaged completions; their report is still written
            return logging.getLogger(__name__).warning("the report has no %s: %s", PAGE, error)
        write_text(folder / PAGE, text, sync=False)
