"""Writes the parts of a study's live page: with the figures, the words and the escaping of a report."""

from functools import cache
from typing import Any

from jinja2 import Environment

from ..harness.record.study import StudyRecord
from .analysis import analysed
from .figures import curves, outcome
from .page import sampled_rollouts
from .prose.answer import answer
from .render import html_environment, visible
from .tables import table


@cache
def _environment() -> Environment:
    environment = html_environment()
    environment.globals["table_of"] = table
    return environment


def written(part: str, **values: Any) -> str:
    """The HTML of a part of the page, a macro of `live.html`; text in `values` is escaped."""
    macro = getattr(_environment().get_template("live.html").module, part)
    return str(macro(**{key: visible(value) for key, value in values.items()}))


def record_parts(record: StudyRecord) -> dict[str, str]:
    """Part of the page -> its HTML, from the record of a study that may still run."""
    record = visible(record)
    analysis = analysed(record)
    drawings = [*outcome.estimates(analysis), *curves.learning_curves(analysis, ["steps"])]
    rollouts = sampled_rollouts(analysis)
    return {
        "results": written("results", answer=answer(analysis), drawings=drawings),
        "rollouts": written("rollouts", rollouts=rollouts),
    }
