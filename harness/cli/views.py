"""How results look in a terminal: tables and text on stdout, errors on stderr, foreign text made harmless."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.console.terminal import duration, mebibytes, percent, say, show_table, state_text

if TYPE_CHECKING:
    from harness.cli.regrade import Regraded
    from harness.policy.bradley_terry import RewardModelFit
    from harness.study.status import StudyStatus
    from harness.types import EvaluationResult, SampleRow, StudyRecord


SHOWN_CHARACTERS = 400


def wilson_interval(fraction: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a proportion observed on `count` problems (Wilson 1927, eq. for the score interval).

    For a mean of values in [0, 1] that are not all 0 or 1 it is wider than needed, never narrower.
    """
    z2 = 1.959964**2
    centre = (fraction + z2 / (2 * count)) / (1 + z2 / count)
    spread = math.sqrt(z2 * (fraction * (1 - fraction) / count + z2 / (4 * count**2))) / (1 + z2 / count)
    return max(0.0, centre - spread), min(1.0, centre + spread)


def intervals(result: EvaluationResult) -> dict[str, tuple[float, float]]:
    """The 95 % interval of each accuracy of an evaluation, problems being the sample."""
    keys = ["greedy_accuracy", "accuracy", *(key for key in result.metrics if "_at_" in key)]
    count = int(result.metrics["num_prompts"])
    return {key: wilson_interval(result.metrics[key], count) for key in keys}


def show_results(record: StudyRecord) -> None:
    """Accuracy of each arm: the mean over its complete seeds, with the lowest and highest seed."""
    keys = ("accuracy_initial", "accuracy_final", "test_accuracy")
    headers = ["arm", "valid seeds", "validation, start", "validation, end", "test"]
    rows = []
    for arm in record.arms:
        trials = [t for t in record.trials if t.arm == arm and t.state == "complete"]
        label = f"{arm} (baseline)" if arm == record.baseline else arm
        accuracies = [_over_seeds([t.summary[key] for t in trials if key in t.summary]) for key in keys]
        rows.append([label, f"{len(trials)}/{len(record.seeds)}", *accuracies])
    show_table("Accuracy: mean (lowest-highest seed)", headers, rows, numeric=headers[1:])


def show_status(status: StudyStatus) -> None:
    """What each trial of a study has reached."""
    headers = ["arm", "seed", "state", "phase", "done", "accuracy", "time", "note"]
    rows = []
    for t in status.trials:
        done = f"{t.done}/{t.total}" if t.total else ""
        rows.append(
            [t.arm, t.seed, state_text(t.state), t.phase, done, percent(t.accuracy), duration(t.seconds), t.reason]
        )
    show_table(f"{status.name}: {status.question}", headers, rows, numeric=["seed", "done", "accuracy", "time"])
    counts = {**status.counts(), "to come": status.to_come}
    say(", ".join(f"{count} {state}" for state, count in counts.items() if count))


def cost_text(cost: Mapping[str, float]) -> str:
    """Time of trials and of GPUs, and generated tokens, in one line."""
    gpu = f", {duration(cost['gpu_seconds'])} of them with a GPU" if cost["gpu_seconds"] else ""
    return f"{duration(cost['trial_seconds'])} of trials{gpu}; {cost['generated_tokens']:,.0f} tokens in ended trials"


def show_dry_run(name: str, question: str, document: Mapping[str, Any]) -> None:
    """What a study would do and need, as `harness.study.runner.dry_run` says it."""
    memory = document["memory"]
    rows = []
    for arm in document["arms"]:
        needed = memory.get(arm["arm"], {}).get("peak_bytes")
        rows.append(
            [
                arm["arm"],
                ", ".join(f"{key}={value}" for key, value in arm["overrides"].items()) or "the base run",
                arm["trials"],
                arm["steps"],
                f"{arm['rollouts']:,}",
                f"{arm['generated_tokens_bound']:,}",
                "-" if needed is None else mebibytes(needed),
                duration(arm["seconds"]),
            ]
        )
    headers = ["arm", "what it changes", "trials", "steps", "rollouts", "tokens, at most", "memory, MiB", "time"]
    show_table(f"{name}: {' '.join(question.split())}", headers, rows, numeric=headers[2:])
    trials, tokens = document["trials"], document["generated_tokens_bound"]
    say(
        f"{trials} trials with seeds {document['seeds']}: {document['steps']:,} steps, "
        f"{document['rollouts']:,} rollouts, at most {tokens:,} generated tokens of training."
    )
    if document["seconds"] is None:
        say("Time: unknown, for this runs folder has no complete trial of the same shape for every arm.")
    else:
        took, workers = duration(document["seconds"]), document["workers"]
        say(f"Time: about {took} with {workers} workers, from {document['measured']} trials of the same shape.")
    for words in document["not_checked"]:
        say(f"Not checked here: {words}")
    say("Nothing was run or written.")


def show_evaluation(title: str, result: EvaluationResult) -> None:
    """Held-out accuracies with their intervals, then a few of the completions."""
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
    for tag, rows in result.breakdown.items():
        headers = [tag, "problems", "greedy", names["accuracy"], "95 % interval"]
        show_table("", headers, [_breakdown_row(*item) for item in rows.items()], numeric=headers[1:4])
    show_samples(result.samples[:3])


def show_grades(title: str, result: Regraded, count: int) -> None:
    """A summary per grader, then the first verdicts, those on which graders disagree before the others."""
    labelled = any(summary.agreement is not None for summary in result.summaries.values())
    headers = ["grader", "correct", "answered", "rows/s"]
    headers[3:3] = ["agrees with labels", "wrongly right", "wrongly wrong"] if labelled else []
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
    """A task's settings, sizes, problems and one worked solution, line breaks kept."""
    show_table(
        f"Task {document['task']}", ["setting", "value"], [(k, repr(v)) for k, v in document["settings"].items()]
    )
    show_table("", ["split", "problems"], list(document["sizes"].items()))
    say(f"Completion limit: {document['max_completion_tokens']} tokens")
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
    """What runs will need: bytes by component, and the most at one time."""
    told = [d for d in documents if d["components"] is not None]
    if not told:
        return
    names = [name for name in told[0]["components"] if any(d["components"][name] for d in told)]
    rows = [[d["run"], *(mebibytes(d["components"][n]) for n in names), mebibytes(d["peak_bytes"])] for d in told]
    headers = ["run", *names, "peak"]
    show_table(f"{title}: estimated memory, MiB", headers, rows, numeric=headers[1:])
    size = mebibytes(told[0]["device_bytes"])
    say(f"The device has {size} MiB. Sampling and learning take turns, so the peak is less than the sum.")


def show_measured(title: str, documents: Sequence[Mapping[str, Any]]) -> None:
    """Measured next to estimated memory, the seconds of a step by phase, and ratios to the first algorithm."""
    first = documents[0]["algorithm"]
    headers = ["algorithm", "peak MiB", "estimate MiB", f"memory / {first}", "s per step", f"time / {first}"]
    rows = [
        [
            d["algorithm"], mebibytes(d["peak_bytes"]), mebibytes(d["estimate_bytes"]), f"{d['memory_ratio']:.2f}",
            f"{d['seconds']['step']:.3g}", f"{d['time_ratio']:.2f}",
        ]
        for d in documents
    ]  # fmt: skip
    show_table(title, headers, rows, numeric=headers[1:])
    parts = [name for name in documents[0]["estimate"] if any(d["estimate"][name] for d in documents)]
    rows = [[d["algorithm"], *(mebibytes(d["estimate"][name]) for name in parts)] for d in documents]
    show_table("Estimate by component, MiB", ["algorithm", *parts], rows, numeric=parts)
    phases = [name for name in documents[0]["seconds"] if name != "step"]
    rows = [[d["algorithm"], *(f"{d['seconds'][name]:.3g}" for name in phases)] for d in documents]
    show_table("Seconds by phase", ["algorithm", *phases], rows, numeric=phases)


def show_reward_model(fit: RewardModelFit) -> None:
    """What a reward model was fitted on, and how often it ranks a pair rightly."""
    rows = [
        ["fitted", f"{fit.num_prompts:,}", f"{fit.num_pairs:,}", percent(fit.accuracy)],
        ["held out", f"{fit.held_out_prompts:,}", f"{fit.held_out_pairs:,}", percent(fit.held_out_accuracy)],
    ]
    headers = ["prompts", "number", "pairs", "ranked rightly"]
    show_table("Bradley-Terry reward model", headers, rows, numeric=headers[1:])
    say(f"{fit.dropped_prompts:,} groups of rollouts rank nothing and were left out; last mean loss {fit.loss:.4f}")


def show_samples(rows: Sequence[SampleRow]) -> None:
    """Completions as a model wrote them, shortened and harmless."""
    cells = [
        (_shortened(r.prompt), _shortened(r.completion), r.answer, r.gold, "yes" if r.correct else "no") for r in rows
    ]
    show_table("Samples", ["prompt", "completion", "answer", "gold", "correct"], cells)


def _breakdown_row(value: str, row: Mapping[str, float]) -> list[object]:
    count = int(row["num_prompts"])
    low, high = wilson_interval(row["accuracy"], count)
    return [value, f"{count:,}", percent(row["greedy_accuracy"]), percent(row["accuracy"]),
            f"{percent(low)} to {percent(high)}"]  # fmt: skip


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _shortened(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    return text if len(text) <= limit else text[:limit] + " ..."


def _over_seeds(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean = percent(sum(values) / len(values))
    return mean if len(values) == 1 else f"{mean} ({100 * min(values):.1f}-{100 * max(values):.1f})"
