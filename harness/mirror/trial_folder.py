"""Reads a trial back from the files of its folder, which are authoritative wherever the folder is."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..data import SampleRow
from ..record.events import EVENTS, RunHistory, read_events
from ..record.study import TrialRecord
from .store import SUMMARY, SYSTEM
from .writer import Identity


def read_trial(directory: Path, known: TrialRecord) -> TrialRecord:
    """The trial as its folder records it; `known` unchanged if it has no folder here.

    State, reason and factors are kept from `known`, because the study decides them. ValueError for files that a run
    cannot have written.
    """
    identity, events = Identity.load(directory), read_events(directory / EVENTS)
    if identity is None or not events:
        return known
    history = RunHistory()
    for event in events:
        history.add(event)
    keys = sorted(key for key in history.history if not key.startswith((SUMMARY, SYSTEM)))
    return replace(
        known,
        spec=identity.spec,
        history={key: sorted((step, value) for step, (value, _) in history.history[key].items()) for key in keys},
        summary={k: float(v) for end in history.finish for k, v in end["summary"].items()},
        per_problem=dict(history.per_problem),
        start_per_problem=dict(history.start_per_problem),
        samples=[sample_row(row) for row in history.rows()],
        threads=sorted({attempt.get("threads", "") for attempt in history.attempts} - {""}),
    )


def sample_row(row: Mapping[str, Any]) -> SampleRow:
    """A row of a samples table; those of an earlier version have no `rewards`."""
    rewards = {name: float(value) for name, value in row.get("rewards", {}).items()}
    reward = None if row["reward"] is None else float(row["reward"])
    return SampleRow(**{**row, "reward": reward, "rewards": rewards})
