"""`cohort list`, `task`, `grade`, `doctor`, `memory` and `ui`: what looks and does not train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from harness.cli import views
from harness.cli.commands import app, command, list_app, task_app
from harness.cli.options import RUNS, DataPath, Json, Runs, Sets, TrackingUri, data_path
from harness.cli.study import study_list
from harness.console import terminal

if TYPE_CHECKING:
    from harness.plugins import Kind
    from harness.types import Split


@command(
    app,
    "grade",
    "cohort grade --task gsm8k --cases answers.jsonl",
    "cohort grade --task math --cases runs/train/my-run/rollouts/step-000041.jsonl --grader all",
)
def grade(
    task: Annotated[str, typer.Option(help="Task by name: its equality decides.")],
    cases: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="Rows with gold, completion, optionally label.")],
    grader: Annotated[str, typer.Option(help="strict (what rewards use), lenient, math_verify, or all.")] = "strict",
    show: Annotated[int, typer.Option(min=0, metavar="N", help="Verdicts shown; disagreements come first.")] = 20,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Processes for symbolic comparison.")] = 1,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Grade stored completions: verdict and extracted answer of each row, agreement with labels, rows per second."""
    from harness.cli.regrade import graders, read_cases, regrade
    from harness.spec.load import load_run

    spec = load_run(None, sets or (), {"task": task, "algorithm": "grpo"})
    spec.task.use_processes(workers)
    names = list(graders(spec.task)) if grader == "all" else [grader]
    result = regrade(spec.task, read_cases(cases), names, workers)
    if as_json:
        terminal.print_json({"task": task, "cases": cases, **vars(result)})
        return
    views.show_grades(f"{cases} as {task}", result, show)


@command(
    task_app,
    "show",
    "cohort task show arithmetic",
    "cohort task show gsm8k -n 3 --path data/gsm8k --set task.answer_format=think_answer --set task.shots=2",
    "cohort task show gsm8k --path data/gsm8k --model Qwen/Qwen2.5-0.5B-Instruct",
)
def task_show(
    task: Annotated[str, typer.Argument(help="Task by name.")],
    count: Annotated[int, typer.Option("-n", min=0, metavar="N", help="Problems shown.")] = 3,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    path: DataPath = None,
    model: Annotated[str | None, typer.Option(help="Show prompts through this model's chat template.")] = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Show a task's settings, sizes and problems exactly as a policy reads them."""
    from harness.cli.inspect_task import inspect_task
    from harness.spec.errors import SpecError
    from harness.spec.load import load_run
    from harness.types import Split

    if split not in get_args(Split):
        raise SpecError(f"--split must be one of {', '.join(get_args(Split))}, got '{split}'")
    spec = load_run(None, [*(sets or ()), *data_path(path)], {"task": task, "algorithm": "grpo"})
    document = inspect_task(spec.task, cast("Split", split), count, model)
    if as_json:
        terminal.print_json(document)
    else:
        views.show_task(document)


@command(app, "ui", "cohort ui", "cohort ui --port 5001 --open")
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1.")] = 5000,
    browser: Annotated[bool, typer.Option("--open", help="Open the newest study's page in a browser.")] = False,
    runs: Runs = RUNS,
    tracking_uri: TrackingUri = None,
) -> None:
    """Serve the MLflow pages of the runs folder on 127.0.0.1 until Ctrl-C.

    With --tracking-uri of an MLflow server, show the addresses of its pages instead: it serves them itself.
    """
    from harness.stop import stop_on_signals

    with stop_on_signals() as should_stop:  # a flag: an exception that a signal raises is lost in a library's callback
        ending = _serve_pages(runs, port, browser, should_stop)
    if ending is not None and not should_stop():
        terminal.fail(ending)
        raise typer.Exit(1)


@command(
    app,
    "doctor",
    "cohort doctor",
    "cohort doctor --json",
    "cohort doctor --run my_run.yaml --set model=Qwen/Qwen2.5-0.5B --set optimizer.tokens_per_microbatch=4096",
)
def doctor(
    run: Annotated[
        str | None, typer.Option("--run", metavar="SPEC.yaml", help="Estimate the memory of a run, or a study's arms.")
    ] = None,
    sets: Sets = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Check versions, device, cores, threads and the runs folder; exit code 1 on a problem.

    With --run, estimate instead what that run, or each arm of that study, needs; exit code 2 where it cannot fit.
    """
    from harness.cli import doctor
    from harness.spec.errors import SpecError

    if run is not None:
        return _show_estimates(run, sets or (), as_json)
    if sets:
        raise SpecError("--set changes a run: name its file with --run")
    found = doctor.check_machine(runs)
    if as_json:
        terminal.print_json(found)
    else:
        rows = [(c.name, terminal.state_text(c.state), c.value, c.advice or "") for c in found]
        terminal.show_table("", ["check", "state", "found", "advice"], rows)
    raise typer.Exit(1 if any(check.state == "problem" for check in found) else 0)


@command(
    app,
    "memory",
    "cohort memory --model-config Qwen2.5-0.5B --algorithms ppo,grpo",
    "cohort memory --model-config tiny --algorithms ppo,grpo --rollouts 64 --set algorithm.kl_beta=0 --json",
)
def memory(
    config: Annotated[
        str,
        typer.Option("--model-config", metavar="NAME", help="'tiny', Qwen2.5-0.5B, ..., or a folder with config.json."),
    ],
    algorithms: Annotated[str, typer.Option(metavar="A,B,...", help="Algorithms; ratios are to the first.")],
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Training steps; the first is not timed.")] = 3,
    rollouts: Annotated[int, typer.Option(min=1, metavar="N", help="Completions per step.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of each prompt.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of each completion.")] = 128,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of weights and optimiser too.")] = "float32",
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Measure memory and time of training steps on a random model of a known shape; nothing is downloaded.

    Each algorithm runs in a process of its own, on completions of equal length.
    """
    from harness.cli.measure_memory import as_documents, measure
    from harness.console.progress import phase_bar
    from harness.spec.raw import parse_overrides

    with phase_bar(f"memory of {config}") as show:
        results = measure(
            config,
            [word.strip() for word in algorithms.split(",")],
            steps=steps,
            rollouts=rollouts,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            dtype=dtype,
            overrides=parse_overrides(sets or ()),
            on_progress=show,
        )
    documents = as_documents(results)
    if as_json:
        terminal.print_json({"model_config": config, "dtype": dtype, "measured": documents})
    else:
        title = f"{config}, {dtype}, {rollouts} rollouts of {prompt_tokens}+{max_tokens} tokens"
        views.show_measured(title, documents)


@command(list_app, "algorithms", "cohort list algorithms", "cohort list algorithms --json")
def list_algorithms(as_json: Json = False) -> None:
    """List the algorithms: the objective of each, then its settings with defaults and ranges."""
    _show_plugins("algorithm", as_json, facts=("needs_critic", "sees_gold", "min_group_size"), tables=("objective",))


@command(list_app, "tasks", "cohort list tasks")
def list_tasks(as_json: Json = False) -> None:
    """List the tasks with their settings, defaults and ranges."""
    _show_plugins("task", as_json)


@command(list_app, "rewards", "cohort list rewards")
def list_rewards(as_json: Json = False) -> None:
    """List the rewards with their settings, defaults and ranges."""
    _show_plugins("reward", as_json, facts=("sees_gold",))


@command(list_app, "engines", "cohort list engines")
def list_engines(as_json: Json = False) -> None:
    """List the rollout engines with their settings, defaults and ranges."""
    _show_plugins("engine", as_json, facts=("exact_logprobs",))


@command(list_app, "studies", "cohort list studies")
def list_studies(runs: Runs = RUNS, as_json: Json = False) -> None:
    """List the shipped studies and those in the runs folder (as `cohort study list`)."""
    study_list(runs, as_json)


def _serve_pages(runs: Path, port: int, browser: bool, should_stop: Callable[[], bool]) -> str | None:
    """Serve the pages until `should_stop()`; why they ended before, or None."""
    from harness.tracking.mlflow_address import server_address
    from harness.tracking.mlflow_ui import serve_ui

    address = server_address()
    if address is not None:
        _show_pages(runs, address, browser, lambda: False)
        return None
    try:
        with serve_ui(runs, port, should_stop=should_stop) as server:
            terminal.say(f"MLflow: {server.url} (Ctrl-C ends it)")
            _show_pages(runs, server.address, browser, should_stop)
            return f"the MLflow server ended by itself with status {server.wait(should_stop)}"
    except KeyboardInterrupt:
        return None
    except RuntimeError as error:
        return str(error)


def _show_pages(runs: Path, address: str, browser: bool, should_stop: Callable[[], bool]) -> None:
    """Print the page of every study, the newest last, and open that one (without a study: the start page)."""
    from harness.tracking.mlflow_studies import list_studies, study_url

    page = address
    for name in list_studies(runs, by="start"):
        if should_stop():
            return
        page = study_url(runs, name, address)
        terminal.say(f"{name}: {page}")
    if browser:
        typer.launch(page)


def _show_estimates(run: str, sets: Sequence[str], as_json: bool) -> None:
    """Print what the runs of a file need; SpecError where one of them cannot fit or cannot be estimated."""
    from harness.memory.fit import judge
    from harness.spec.errors import SpecError
    from harness.spec.load import runs_of

    found = [
        {"run": label, "algorithm": spec.algorithm.name, **asdict(judge(spec))}
        for label, spec in runs_of(run, sets).items()
    ]
    if as_json:
        terminal.print_json(found)
    else:
        views.show_estimates(run, found)
    for document in found:
        if document["problem"]:
            raise SpecError(f"{document['run']}: {document['problem']}")


def _show_plugins(kind: Kind, as_json: bool, facts: Sequence[str] = (), tables: Sequence[str] = ()) -> None:
    """`facts` are class attributes for the first table, `tables` mappings that each get a table of their own."""
    from harness.cli.listing import describe_plugins

    documents = describe_plugins(kind, [*facts, *tables])
    if as_json:
        terminal.print_json(documents)
        return
    rows = [(d["name"], *(str(d[fact]) for fact in facts), d["summary"]) for d in documents]
    terminal.show_table("", [kind, *facts, "summary"], rows)
    for table in tables:
        columns = list(dict.fromkeys(key for document in documents for key in document[table]))
        cells = [(d["name"], *(d[table].get(column, "") for column in columns)) for d in documents]
        terminal.show_table(table.capitalize(), [kind, *columns], cells)
    keys = ("name", "default", "range", "description")
    settings = [
        (document["name"] if i == 0 else "", *(str(field[key]) for key in keys))
        for document in documents
        for i, field in enumerate(document["settings"])
    ]
    terminal.show_table("Settings", [kind, "setting", "default", "range", "meaning"], settings)
