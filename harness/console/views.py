"""Prints studies on a terminal: plan, budget, status, accuracies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .terminal import duration, mebibytes, percent, say, show_table, state_text

if TYPE_CHECKING:
    from ..record.status import StudyStatus
    from ..record.study import StudyRecord
    from ..settings.search import Dimension
    from ..settings.study import StudySpec


def show_study(study: StudySpec, document: Mapping[str, Any]) -> None:
    """Print a study's question, searches, arms, one run with every setting, and budget, from `harness.api.show`."""
    import yaml

    run, arms = dict(document["resolved_run"]), document["design_arms"]
    trials, rollouts = document["budget"]["trials"], document["budget"]["rollouts"]
    run.pop("seed")
    say(f"{study.name}: {' '.join(study.question.split())}\n")
    for plan in study.searches():
        search = plan.search
        rows = [(path, _values(dimension)) for path, dimension in search.space.items()]
        title = f"{plan.name or 'search'}: {search.sampler}, {search.trials} arms, pruner {search.pruner}"
        show_table(title, ["searched", "values"], rows)
    if arms:
        rows = [(arm["arm"], _changes(arm), arm["steps"], f"{arm['rollouts']:,}") for arm in arms]
        headers = ["arm", "what it changes", "steps", "rollouts per trial"]
        show_table("", headers, rows, numeric=headers[2:])
    whose = f" of arm '{arms[0]['arm']}'" if arms else ""
    say(f"\nThe run{whose}, with every setting:")
    say(yaml.safe_dump(run, sort_keys=False, width=110).rstrip() + "\n")
    baseline = study.baseline or next(iter(study.arm_labels()), "none beforehand")
    if references := study.references():
        baseline = ", ".join(f"'{before}' of '{arm}'" for arm, before in references.items())
    say(f"Metric: {study.metric}. Baseline: {baseline}. Design: {study.design}.")
    product = f"arms x seeds = {len(arms)} x {len(study.seeds)} = " if arms else "at most "
    say(f"Budget: {product}{trials:,} trials; {rollouts:,} training rollouts.")


def show_results(record: StudyRecord) -> None:
    """Print the accuracy of each arm: the mean over its complete seeds, with the lowest and highest seed."""
    keys = ("accuracy_initial", "accuracy_final", "test_accuracy")
    headers = ["arm", "valid seeds", "validation, start", "validation, end", "test"]
    rows = []
    for arm in record.arms:
        trials = [t for t in record.trials if t.arm == arm and t.state == "complete"]
        label = f"{arm} (baseline)" if arm == record.baseline else arm
        accuracies = [_over_seeds([t.summary[key] for t in trials if key in t.summary]) for key in keys]
        rows.append([label, f"{len(trials)}/{len(record.seeds)}", *accuracies])
    show_table("Accuracy: mean (lowest-highest seed)", headers, rows, numeric=headers[1:])


def show_status(status: StudyStatus, runs: Path) -> None:
    """Print the progress of each trial of a study, and where the tracebacks are."""
    headers = ["arm", "seed", "state", "phase", "done", "accuracy", "time", "note"]
    rows = [
        [t.arm, t.seed, state_text(t.state), t.phase, f"{t.done}/{t.total}" if t.total else "", percent(t.accuracy),
         duration(t.seconds), t.reason]
        for t in status.trials
    ]  # fmt: skip
    show_table(f"{status.name}: {status.question}", headers, rows, numeric=["seed", "done", "accuracy", "time"])
    counts = {**status.counts(), "to come": status.to_come}
    say(", ".join(f"{count} {state}" for state, count in counts.items() if count))
    if "failed" in counts:
        say(f"Tracebacks of failed trials: {runs / 'studies' / status.name / 'logs'}/worker-*.log")


def time_left(seconds: float, workers: int, measured: int) -> str:
    """The seconds until a study's report in words."""
    if not seconds:
        return "none, for all trials have ended"
    if not math.isfinite(seconds):
        return "unknown, because no trial of this model ran here, and its shape or its device is not here"
    return f"about {duration(seconds)} to the report with {workers} worker{'s' * (workers > 1)}, {source_of(measured)}"


def source_of(measured: int, what: str = "trial") -> str:
    """Words that say whence an estimate of time is."""
    found = f"from {measured} {what}{'s' * (measured > 1)}"
    return found if measured else f"by arithmetic, for no such {what} ran here"


def show_dry_run(name: str, question: str, document: Mapping[str, Any]) -> None:
    """Print a study's plan and budget, from `harness.study.runner.dry_run`."""
    memory = document["memory"]
    rows = []
    for arm in document["arms"]:
        needed = memory.get(arm["arm"], {}).get("peak_bytes")
        size = "-" if needed is None else mebibytes(needed)
        counts = [arm["trials"], arm["steps"], f"{arm['rollouts']:,}", f"{arm['generated_tokens_bound']:,}"]
        rows.append([arm["arm"], _changes(arm), *counts, size, duration(arm["seconds"])])
    headers = ["arm", "what it changes", "trials", "steps", "rollouts", "tokens, at most", "memory, MiB", "time"]
    show_table(f"{name}: {' '.join(question.split())}", headers, rows, numeric=headers[2:])
    trials, tokens = document["trials"], document["generated_tokens_bound"]
    ended = f" ({document['ended']} have ended)" if document["ended"] else ""
    amounts = f"{document['steps']:,} steps, {document['rollouts']:,} rollouts, at most {tokens:,} generated tokens"
    say(f"{trials} trials{ended} with seeds {document['seeds']}: {amounts} of training.")
    say(f"Time: {time_left(document['seconds'], document['workers'], document['measured'])}.")
    if (disk := document["disk"]) is not None:
        needed, free = mebibytes(disk["needed"]), mebibytes(disk["free"])
        say(f"Disk: about {needed} MiB for checkpoints, cold starts and kept weights; {free} MiB are free.")
    for words in document["not_checked"]:
        say(f"Not checked here: {words}")
    for model, limit in document["limits"].items():
        cut = f"most are cut at {limit:,} tokens (sampling.max_tokens, sampling.stop)"
        form = "mark no answer (task.shots, prompt.format, task.template)"
        say(f"If few answers of {model} count at first, {cut} or {form}: `cohort evaluate` tells.")
    say("Nothing was run or written.")


def _changes(arm: Mapping[str, Any]) -> str:
    names = {"stages": [stage["name"] for stage in arm["overrides"].get("stages", ())]}
    shown = {key: ", ".join(names[key]) or "none" if key in names else v for key, v in arm["overrides"].items()}
    return ", ".join(f"{key}={value}" for key, value in shown.items()) or "the base run"


def _values(dimension: Dimension) -> str:
    if dimension.choices is not None:
        return ", ".join(map(str, dimension.choices))
    return f"{dimension.low} to {dimension.high}" + (", log" if dimension.log else "")


def _over_seeds(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean = percent(sum(values) / len(values))
    return mean if len(values) == 1 else f"{mean} ({100 * min(values):.1f}-{100 * max(values):.1f})"
