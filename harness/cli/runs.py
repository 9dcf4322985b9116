"""`cohort train` and `evaluate`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from .. import api
from ..console import terminal
from . import options
from .commands import command

EXIT_CODE = {"complete": 0, "stopped": 130}  # by a run's state; 1 for any other


@command(
    "train",
    "cohort train --set task=arithmetic --set algorithm=grpo --set cold_start.steps=400 --set steps=50",
    "cohort train my_run.yaml --set seed=1",
    "cohort train my_7b_run.yaml --set devices=8",
    "torchrun --nproc-per-node 8 -m cohort train my_7b_run.yaml --set devices=8",
    "cohort train my_pipeline.yaml --set stages.polish.steps=20",
)
def train(
    spec: Annotated[Path | None, typer.Argument(metavar="SPEC.yaml", help="Run file; else defaults and --set.")] = None,
    sets: options.Sets = None,
    name: options.Name = None,
    runs: options.Runs = options.RUNS,
    mirror: options.Mirror = None,
    as_json: options.Json = False,
) -> None:
    """Train one run in RUNS/train/NAME; the same command resumes it."""
    ended = api.train(spec, sets or (), name=name, runs=runs, command=sys.argv[1:])
    result = ended.result
    if as_json:
        terminal.print_json({"name": ended.name, "directory": ended.directory, **vars(result)})
        raise typer.Exit(EXIT_CODE.get(result.state, 1))
    rows = [(key, terminal.quantity(key, value)) for key, value in result.summary.items()]
    terminal.show_table("", ["quantity", "value"], rows, numeric=["value"])
    terminal.say(f"{ended.name}: {result.state}" + (f" ({result.reason})" if result.reason else ""))
    terminal.say(f"Files: {ended.directory}")
    raise typer.Exit(EXIT_CODE.get(result.state, 1))


@command(
    "evaluate",
    "cohort evaluate tiny --task arithmetic --set cold_start.steps=400",
    "cohort evaluate runs/train/my-run --task arithmetic --samples 8 --limit 50",
    "cohort evaluate Qwen/Qwen2.5-0.5B --task gsm8k --tests math500,math",
    "cohort evaluate Qwen/Qwen2.5-0.5B --task math500 --path data/math500 --json",
)
def evaluate(
    model: options.Model,
    task: options.Task,
    split: options.Split = "test",
    samples: Annotated[int | None, typer.Option(min=1, metavar="K", help="Samples per problem; 4 by default.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="The first N problems only.")] = None,
    path: Annotated[str | None, typer.Option(metavar="DATA", help="The task's data: a Hub id, file or folder.")] = None,
    tests: Annotated[str, typer.Option(metavar="TASK,...", help="Other tests, by name.")] = "",
    sets: options.Sets = None,
    name: options.Name = None,
    runs: options.Runs = options.RUNS,
    mirror: options.Mirror = None,
    as_json: options.Json = False,
) -> None:
    """Measure held-out accuracy: greedy, mean of K samples, pass@k and majority of K, with 95 % intervals.

    With 16 or more samples, --json has every pass@k and Cover@tau with intervals over the problems. Metrics and the
    first graded completions go to MLflow's experiment `evaluate`; all completions go to RUNS/evaluate/NAME, and the
    same command continues there after a kill. On a GPU, a model other than `tiny` runs with autocast and, if it is
    installed, the engine vllm; a line lists these settings, and --set overrides them. --tests measures the test
    problems of other tasks too; --set evaluation.tests does so with settings of their own.
    """
    found = api.evaluate(
        model, task, split=split, samples=samples, limit=limit, tests=list(filter(None, options.words(tests))),
        settings=[*([] if path is None else [f"task.path={json.dumps(path)}"]), *(sets or ())], name=name, runs=runs,
    )  # fmt: skip
    if as_json:
        return terminal.print_json({"model": model, "task": task, "split": split, **found.document()})
    from ..api.result import intervals, wilson_interval

    result, percent = found.result, terminal.percent
    metrics, count = result.metrics, int(result.metrics["num_prompts"])
    names = {"greedy_accuracy": "greedy", "accuracy": f"mean@{int(metrics['num_samples'])}"}
    rows = [
        [names.get(key, key.replace("_at_", "@")), percent(metrics[key]), f"{percent(low)} to {percent(high)}"]
        for key, (low, high) in intervals(result).items()
    ]
    headers = ["measure", "accuracy", "95 % interval"]
    terminal.show_table(f"{model} on {task} ({split}), {count:,} problems", headers, rows, numeric=["accuracy"])
    shares = {"answered": "answered", "right if the last number counts": "lenient_accuracy", "answer format": "format"}
    shares["cut at the token limit"] = "truncated"
    told = [f"{words} {percent(metrics[key])}" for words, key in shares.items()]
    terminal.say(", ".join([*told, f"{metrics['num_tokens']:.1f} tokens per completion"]))
    for cause in found.causes:
        terminal.say(f"Of the completions, {cause}.")
    tables = {"test": {other: (one.result.metrics, intervals(one.result)["accuracy"])
                       for other, one in found.tests.items()}}  # fmt: skip
    for tag, parts in result.breakdown.items():
        tables[tag] = {value: (part, wilson_interval(part["accuracy"], int(part["num_prompts"])))
                       for value, part in parts.items()}  # fmt: skip
    for tag, parts in tables.items():
        rows = [
            [value, f"{part['num_prompts']:,.0f}", percent(part["greedy_accuracy"]), percent(part["accuracy"]),
             f"{percent(low)} to {percent(high)}"]
            for value, (part, (low, high)) in parts.items()
        ]  # fmt: skip
        headers = [tag, "problems", "greedy", names["accuracy"], "95 % interval"]
        if rows:
            terminal.show_table("", headers, rows, numeric=headers[1:4])
    cut, yes = terminal.shortened, terminal.yes
    some = [(cut(r.prompt), cut(r.completion), r.answer, r.gold, yes(r.correct)) for r in result.samples[:3]]
    terminal.show_table("Samples", ["prompt", "completion", "answer", "gold", "correct"], some)
    terminal.say(f"Files: {found.folder}")
