"""The section of a report with the probes of the models that its trials start from."""

from typing import Any

from ....reports.analysis import Analysis
from ....reports.prose.wording import shorten
from ....reports.section import ReportSection
from ....reports.tables import table
from .findings import LEVEL, summary

_LEAD = (
    "Tests whether a model that this study starts from knows the probed problems better than a reference: it "
    "completes questions from their first part, and its log-probs of each question are compared with variants with "
    "other numbers. Mean scores, one-sided permutation tests over problems, Holm-adjusted over the tests of a probe; "
    f"an adjusted p below {LEVEL} flags the model."
)


def section(analysis: Analysis) -> ReportSection | None:
    """The probes of the record, if there are any."""
    parts: list[Any] = [("lead", _LEAD)]
    for one in map(summary, analysis.record.extras.get("contamination", ())):
        look = "strong" if one["is_flagged"] else "plain"
        parts += [("heading", one["title"]), (look, f"{one['verdict']} {one['exact']}")]
        parts.append(("table", table(["Test", *one["headers"][1:]], one["rows"])))
        for example in one["examples"]:
            parts += [("code", shorten(example["start"]))]
            parts += [("plain", "The model's own continuation, word for word as in the question:")]
            parts += [("code", shorten(example["continuation"]))]
    return ReportSection("contamination", "Contamination", parts) if len(parts) > 1 else None
