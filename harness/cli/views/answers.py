"""Prints what commands without a study find: tasks, evaluations, grades, samples, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...console.terminal import mebibytes, percent, say, show_table

if TYPE_CHECKING:
    from ...api.regrade import Regraded
    from ...data import EvaluationResult, SampleRow

SHOWN_CHARACTERS = 400


def show_evaluation(title: str, result: EvaluationResult) -> None:
    """Print held-out accuracies with their intervals, then a few of the completions."""
    from ...run.evaluate import intervals, wilson_interval

    metrics, count = result.metrics, int(result.metrics["num_prompts"])
    names = {"greedy_accuracy": "greedy", "accuracy": f"mean@{int(metrics['num_samples'])}"}
    rows = [
        [names.get(key, key.replace("_at_", "@")), percent(metrics[key]), f"{percent(low)} to {percent(high)}"]
        for key, (low, high) in intervals(result).items()
    ]
    show_table(f"{title}, {count:,} problems", ["measure", "accuracy", "95 % interval"], rows, numeric=["accuracy"])
    say(
        f"answered {percent(metrics['answered'])}, answer format {percent(metrics['format'])}, "
        f"cut at the token limit {percent(metrics['truncated'])}, {metrics['num_tokens']:.1f} tokens per completion"
    )
    for tag, parts in result.breakdown.items():
        headers = [tag, "problems", "greedy", names["accuracy"], "95 % interval"]
        rows = []
        for value, part in parts.items():
            count = int(part["num_prompts"])
            low, high = wilson_interval(part["accuracy"], count)
            accuracies = [percent(part["greedy_accuracy"]), percent(part["accuracy"])]
            rows.append([value, f"{count:,}", *accuracies, f"{percent(low)} to {percent(high)}"])
        show_table("", headers, rows, numeric=headers[1:4])
    show_samples(result.samples[:3])


def show_grades(title: str, result: Regraded, count: int) -> None:
    """Print a summary per grader, then `count` verdicts; those on which graders disagree come first."""
    labelled = any(summary.agreement is not None for summary in result.summaries.values())
    compared = ["agrees with labels", "wrongly right", "wrongly wrong"] if labelled else []
    headers = ["grader", "correct", "answered", *compared, "rows/s"]
    rows = []
    for name, s in result.summaries.items():
        against = [percent(s.agreement), s.false_positives, s.false_negatives] if labelled else []
        rows.append([name, percent(s.correct), percent(s.answered), *against, f"{s.rows_per_second:,.0f}"])
    show_table(f"{title}: {len(result.verdicts):,} rows", headers, rows, numeric=headers[1:])
    graders = list(result.summaries)
    if len(graders) > 1:
        say(f"Graders disagree on {len(result.disagreements):,} of {len(result.verdicts):,} rows.")
    suspicious = set(result.disagreements)
    wrong = {v.row for v in result.verdicts if v.label is not None and set(v.correct.values()) != {v.label}}
    order = sorted(result.verdicts, key=lambda v: (v.row not in suspicious, v.row not in wrong, v.row))
    cells = [
        [v.row, _shortened(v.gold), "" if v.label is None else _yes(v.label)]
        + [part for g in graders for part in (_shortened(v.answers[g] or "-"), _yes(v.correct[g]))]
        for v in order[:count]
    ]
    columns = [part for g in graders for part in (f"{g} answer", f"{g} right")]
    if cells:
        show_table("Verdicts", ["row", "gold", "label", *columns], cells, numeric=["row"])
    if len(order) > count:
        say(f"{len(order) - count:,} more rows; --show N or --json shows them")


def show_task(document: Mapping[str, Any]) -> None:
    """Print a task's settings, sizes, problems and one worked solution, with their line breaks."""
    show_table(
        f"Task {document['task']}", ["setting", "value"], [(k, repr(v)) for k, v in document["settings"].items()]
    )
    show_table("", ["split", "problems"], list(document["sizes"].items()))
    say(f"Completion limit: {document['max_completion_tokens']} tokens")
    if "completion_ends" in document:
        say(f"A completion ends at {' or '.join(document['completion_ends'])}")
    if document["skipped_rows"]:
        say(f"Bad rows skipped in the {document['split']} split: {document['skipped_rows']:,}", style="yellow")
    for number, problem in enumerate(document["problems"], start=1):
        tokens = f", {problem['prompt_tokens']} tokens" if "prompt_tokens" in problem else ""
        tags = "".join(f", {name} {value}" for name, value in problem["tags"].items())
        say(f"\nProblem {number} ({document['split']}{tags}{tokens})", style="bold")
        say(_shortened(problem["prompt"], 4000))
        say(f"gold: {problem['gold']}", style="green")
    if document["worked_solution"]:
        say("\nA worked solution (cold start)", style="bold")
        say(document["worked_solution"]["prompt"] + document["worked_solution"]["completion"])


def show_estimates(title: str, documents: Sequence[Mapping[str, Any]]) -> None:
    """Print the memory of runs: bytes by component, and the peak."""
    told = [d for d in documents if d["components"] is not None]
    if not told:
        return
    names = [name for name in told[0]["components"] if any(d["components"][name] for d in told)]
    parts = [[mebibytes(d["components"][name]) for name in names] for d in told]
    rows = [[d["run"], *part, mebibytes(d["peak_bytes"])] for d, part in zip(told, parts, strict=True)]
    headers = ["run", *names, "peak"]
    show_table(f"{title}: estimated memory, MiB", headers, rows, numeric=headers[1:])
    size = mebibytes(told[0]["device_bytes"])
    say(f"The device has {size} MiB. Sampling and learning take turns, so the peak is less than the sum.")
    disks = [f"{d['run']} {mebibytes(d['disk']['running'])}" for d in told if d["disk"]]
    say(f"Largest disk use of a run's checkpoints, MiB: {', '.join(disks)}.")


def show_samples(rows: Sequence[SampleRow]) -> None:
    """Print completions as a model wrote them, shortened and without control characters."""
    cells = [(_shortened(r.prompt), _shortened(r.completion), r.answer, r.gold, _yes(r.correct)) for r in rows]
    show_table("Samples", ["prompt", "completion", "answer", "gold", "correct"], cells)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _shortened(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    return text if len(text) <= limit else text[:limit] + " ..."
