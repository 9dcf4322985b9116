"""Decides the content of a report: the numbers of every section as text, and its rollouts and figures."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ..harness.data import SampleRow
from . import tables
from .analysis import Analysis
from .capability import Capabilities
from .claims import JudgedClaim
from .figures import curves, outcome
from .figures.style import Drawing, color_of
from .prose import wording
from .prose.answer import answer, progress
from .prose.methods import methods
from .prose.notes import accuracies_reading, interval_method, interval_reading, notes
from .section import ReportSection
from .suites import suite, suite_table
from .trials import setting

_MOST_PROMPTS, _MOST_ARMS = 4, 4
_TABLES = ("comparison", "effects", "search", "components", "controls", "gaps", "exploratory", "costs", "statistics")


def page_drawings(
    analysis: Analysis, capable: Capabilities | None, extra: Sequence[ReportSection], claims: Sequence[JudgedClaim]
) -> dict[str, list[Drawing]]:
    """Section of the page -> its figures, only those that the record can fill."""
    outcomes = outcome.estimates(analysis)
    maps = outcome.heat_maps(analysis) + outcome.importances(analysis)
    num_top = max(2 - len(maps), 0)  # of the outcome beside the heat maps or the importances
    return {
        "top": [*maps, *outcomes[:num_top]],
        "outcome": outcomes[num_top:] + outcome.difficulty_maps(analysis),
        "curves": curves.learning_curves(analysis),
        "capability": curves.capability_curves(analysis, capable),
        "slices": outcome.slices(analysis),
        "dynamics": curves.dynamics(analysis),
        "claims": outcome.claims(claims),
        **{one.id: one.drawings for one in extra},
    }


def page_values(
    analysis: Analysis,
    drawings: Mapping[str, Sequence[Drawing]],
    capable: Capabilities | None,
    extra: Sequence[ReportSection],
    claims: Sequence[JudgedClaim],
) -> dict[str, Any]:
    """The values that the templates read."""
    record = analysis.record
    seeds = f"{'seed' if len(record.seeds) == 1 else 'seeds'} {', '.join(map(str, record.seeds))}"
    facts = [progress(analysis), wording.plural(len(analysis.arms), "arm"), seeds]
    if analysis.controls:
        facts.append(wording.plural(len(analysis.controls), "control arm"))
    for name, path in (("task", "task.name"), ("model", "model")) if record.trials else ():
        facts.append(f"{name} {', '.join(dict.fromkeys(str(setting(t.spec, path, 'unknown')) for t in record.trials))}")
    counts = sorted({number for trial in record.trials for number in trial.threads})
    threads = f"{' or '.join(counts)} {'thread' if counts == ['1'] else 'threads'}"
    threads += " (the number of workers changed)" if len(counts) > 1 else ""
    spec = json.loads(json.dumps(record.spec, default=str))  # only the types that YAML writes without tags
    return {
        "record": record,
        "analysis": analysis,
        "answer": answer(analysis, claims),
        "facts": facts,
        "drawings": drawings,
        "outcome": analysis.outcome.label,
        "metric": wording.spoken(record.metric),
        **{name: getattr(tables, name)(analysis) for name in _TABLES},
        "accuracies": tables.accuracies(analysis, capable),
        "suite": suite_table(suite(analysis), analysis),
        "capability": capable,
        "capabilities": tables.capability(capable),
        "sections": extra,
        "claims": claims,
        "claims_table": tables.claims(claims),
        "accuracies_reading": accuracies_reading(analysis),
        "method": interval_method(analysis),
        "reading": interval_reading(analysis),
        "notes": notes(analysis),
        "methods": methods(analysis),
        "rollouts": sampled_rollouts(analysis),
        "threads": f"A trial had {threads}; with another number its last bits differ." if counts else "",
        "spec_yaml": yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=100).strip(),
    }


def sampled_rollouts(analysis: Analysis) -> dict[str, Any]:
    """The same few prompts answered by the arms side by side, from each arm's first seed with samples."""
    trials = sorted(analysis.record.trials, key=lambda trial: (trial.state != "complete", trial.seed), reverse=True)
    known = {trial.arm: trial for trial in trials if trial.samples}  # complete ones last, by falling seed
    sources = {arm.label: known[arm.label] for arm in analysis.arms if arm.label in known}
    wanted = [*analysis.roles, *sources] if len(sources) > _MOST_ARMS else sources
    chosen = [label for label in dict.fromkeys(wanted) if label in sources][:_MOST_ARMS]
    latest: dict[str, dict[tuple[str, str], SampleRow]] = {label: {} for label in chosen}
    for label, rows in latest.items():
        for row in sources[label].samples:
            key = row.split, row.prompt_id
            rows[key] = max(rows.get(key, row), row, key=lambda one: one.step)
    order = {"test": 0, "validation": 1, "train": 2}

    def interest(key: tuple[str, str]) -> tuple[int, int, bool]:
        shown = [rows[key] for rows in latest.values() if key in rows]
        return (-len(shown), order[key[0]], len({row.correct for row in shown}) == 1)

    groups = []
    for key in sorted(dict.fromkeys(key for rows in latest.values() for key in rows), key=interest)[:_MOST_PROMPTS]:
        answers = [_answer(label, rows.get(key), analysis) for label, rows in latest.items()]
        first = next(rows[key] for rows in latest.values() if key in rows)
        groups.append({"prompt": first.prompt, "gold": first.gold, "split": key[0], "answers": answers})
    return {
        "groups": groups,
        "omitted_arms": len(sources) - len(chosen),
        "seeds": ", ".join(f"'{label}': seed {sources[label].seed}" for label in chosen),
    }


def _answer(label: str, row: SampleRow | None, analysis: Analysis) -> dict[str, Any]:
    facts = []
    if row is not None:
        facts = [
            f"answer {row.answer}" if row.answer is not None else "no answer found",
            *([f"reward {row.reward:.3g}"] if row.reward is not None else []),
            wording.plural(row.num_tokens, "token"),
            "cut off by the token limit" if row.finish_reason == "length" else "stopped by itself",
            f"step {row.step}",
        ]
    return {"label": label, "color": color_of(analysis, label), "row": row, "facts": facts}
