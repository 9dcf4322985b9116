"""The command line `cohort ...`: reads arguments, calls the harness, turns outcomes into text and exit codes.

Exit codes: 0 every trial is valid; 1 some are not; 2 bad input, with a message instead of a traceback (unless
COHORT_TRACEBACK is set); 130 after Ctrl-C. Results go to stdout, progress and errors to stderr. Libraries that are
slow to import are imported inside the commands, so that `cohort --help` answers at once.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from rich.markup import escape

from harness import _terminal as terminal

if TYPE_CHECKING:
    from harness.plugins import Kind
    from harness.spec import StudySpec
    from harness.types import Split

app = typer.Typer(
    name="cohort",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Controlled comparisons of reinforcement-learning algorithms on mathematical reasoning.",
    epilog="Start with [bold]cohort study run quickstart[/]; [bold]cohort doctor[/] checks this machine.",
)
study_app = typer.Typer(no_args_is_help=True, help="Run and inspect studies: a question, its arms, its seeds.")
list_app = typer.Typer(no_args_is_help=True, help="List what can be named in a study file.")
task_app = typer.Typer(no_args_is_help=True, help="Look at the problems of a task as the policy reads them.")
reward_app = typer.Typer(no_args_is_help=True, help="Fit reward models on rollouts that a run has kept.")
app.add_typer(study_app, name="study")
app.add_typer(list_app, name="list")
app.add_typer(task_app, name="task")
app.add_typer(reward_app, name="reward-model")

RUNS = Path("runs")
TINY_COLD_START = 400

Runs = Annotated[
    Path, typer.Option("--runs", envvar="COHORT_RUNS", metavar="DIR", help="Folder of results, caches, MLflow store.")
]
TrackingUri = Annotated[
    str | None,
    typer.Option(
        "--tracking-uri",
        envvar="COHORT_TRACKING_URI",
        metavar="URI",
        callback=lambda uri: _use_tracking_uri(uri),
        help="MLflow store: http://HOST:PORT of an MLflow server or postgresql://...; by default a file in --runs.",
    ),
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override a setting, as steps=20; repeatable.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Seeds = Annotated[str | None, typer.Option(metavar="0,1,2", help="Replicates of each arm.")]
Name = Annotated[str | None, typer.Option(metavar="NAME", help="Keep the results under another name.")]
Workers = Annotated[int | None, typer.Option(min=1, metavar="N", help="Trials at a time; by default from the cores.")]
DataPath = Annotated[
    str | None, typer.Option("--path", metavar="PATH", help="The task's data: a Hub id, a local file or folder.")
]
Study = Annotated[str, typer.Argument(metavar="STUDY", help="Name of a shipped study, or a file.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments (by default those of the process) name; ends with SystemExit."""
    app(args=None if arguments is None else list(arguments), prog_name="cohort")


def _command(group: typer.Typer, name: str, *examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command with examples below its help, and turn its errors into exit codes."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except (ValueError, OSError) as error:  # what the user wrote; a model, disk or network out of reach
                if os.environ.get("COHORT_TRACEBACK"):
                    raise
                terminal.fail(error)
                raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None
            except KeyboardInterrupt:
                terminal.say("Interrupted. The same command continues where it stopped.", stderr=True)
                raise typer.Exit(130) from None

        group.command(name, epilog="\n\n".join(["[bold]Examples[/]", *map(escape, examples)]))(run)
        return function

    return register


@_command(
    app,
    "train",
    "cohort train --set task=arithmetic --set algorithm=grpo --set cold_start.steps=400 --set steps=50",
    "cohort train my_run.yaml --set seed=1",
)
def train(
    spec: Annotated[Path | None, typer.Argument(metavar="SPEC.yaml", help="Run file; without it, --set alone.")] = None,
    sets: Sets = None,
    name: Name = None,
    runs: Runs = RUNS,
    tracking_uri: TrackingUri = None,
    as_json: Json = False,
) -> None:
    """Train once, in RUNS/train/NAME; the same command resumes."""
    from harness.spec import load_run

    run = load_run(None if spec is None else str(spec), sets or ())
    name = _checked_name(name or f"{run.task.name}-{run.algorithm.name}-seed{run.seed}-{run.digest()[:8]}")
    from harness._single import train_once

    directory = runs / "train" / name
    result = train_once(run, runs, name)
    if as_json:
        terminal.print_json({"name": name, "directory": directory, **vars(result)})
    else:
        rows = [(key, terminal.quantity(key, value)) for key, value in result.summary.items()]
        terminal.show_table("", ["quantity", "value"], rows, numeric=["value"])
        terminal.say(f"{name}: {result.state}" + (f" ({result.reason})" if result.reason else ""))
        terminal.say(f"Files: {directory}")
    raise typer.Exit({"complete": 0, "stopped": 130}.get(result.state, 1))


@_command(
    app,
    "compare",
    "cohort compare --algorithms ppo,grpo --task arithmetic --steps 50",
    "cohort compare --algorithms ppo,grpo,grpo_self_consistency --task gsm8k --set task.path=data/gsm8k --steps 5",
    "cohort compare --algorithms grpo,ppo --task gsm8k --model Qwen/Qwen2.5-0.5B --seeds 0,1",
)
def compare(
    algorithms: Annotated[str, typer.Option(metavar="A,B,...", help="Algorithms; the first is the baseline.")],
    task: Annotated[str, typer.Option(help="Task by name.")],
    model: Annotated[str, typer.Option(help="'tiny', a Hub id or a local folder.")] = "tiny",
    seeds: Seeds = None,
    steps: Annotated[int | None, typer.Option(min=0, metavar="N", help="Training steps of each trial.")] = None,
    sets: Sets = None,
    name: Name = None,
    workers: Workers = None,
    runs: Runs = RUNS,
    tracking_uri: TrackingUri = None,
    as_json: Json = False,
) -> None:
    """Run one study with an arm per algorithm and all else equal.

    The model 'tiny' gets a supervised cold start of 400 steps (--set cold_start.steps=N for another).
    """
    study = comparison(algorithms, task, model, seeds, steps, sets, name)
    options = {"--algorithms": algorithms, "--task": task, "--model": model, "--seeds": seeds, "--steps": steps}
    command = _shell("compare", {**options, "--set": sets, "--name": name})
    _run_study(study, runs, workers, command, as_json)


@_command(
    app,
    "evaluate",
    "cohort evaluate tiny --task arithmetic --set cold_start.steps=400",
    "cohort evaluate runs/train/my-run --task arithmetic --samples 8",
    "cohort evaluate Qwen/Qwen2.5-0.5B --task math500 --path data/math500 --json",
)
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="'tiny', a Hub id, a model folder or a checkpoint.")],
    task: Annotated[str, typer.Option(help="Task by name.")],
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    path: DataPath = None,
    samples: Annotated[int | None, typer.Option(min=1, metavar="K", help="Samples of each problem.")] = None,
    sets: Sets = None,
    name: Name = None,
    runs: Runs = RUNS,
    tracking_uri: TrackingUri = None,
    as_json: Json = False,
) -> None:
    """Measure held-out accuracy: greedy, mean of K samples, pass@k and majority of K, with 95 % intervals.

    Metrics and all graded completions go to MLflow's experiment `evaluate` and to RUNS/evaluate/NAME.
    """
    from harness._single import evaluate_once, model_folder
    from harness.spec import SpecError, load_run
    from harness.types import InvalidRun, Split

    if split not in get_args(Split):
        raise SpecError(f"--split must be one of {', '.join(get_args(Split))}, got '{split}'")
    extra = [] if samples is None else [f"evaluation.num_samples={samples}"]
    defaults = {"model": model_folder(model), "task": task, "algorithm": "grpo"}
    spec = load_run(None, [*(sets or ()), *_data_path(path), *extra], defaults)
    name = _checked_name(name or f"{spec.task.name}-{split}-{spec.digest()[:8]}")
    try:
        result = evaluate_once(spec, cast("Split", split), runs, name)
    except InvalidRun as error:
        terminal.fail(error)
        raise typer.Exit(1) from None
    if as_json:
        document = {"model": model, "task": task, "split": split, "spec": spec.model_dump(mode="json")}
        terminal.print_json(
            {
                **document,
                "metrics": result.metrics,
                "intervals": terminal.intervals(result),
                "breakdown": result.breakdown,
                "correct_counts": result.correct_counts,
                "samples": result.samples[:16],
                "directory": runs / "evaluate" / name,
            }
        )
        return
    terminal.show_evaluation(f"{model} on {task} ({split})", result)
    terminal.say(f"Files: {runs / 'evaluate' / name}")


@_command(
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
    from harness.regrade import graders, read_cases, regrade
    from harness.spec import load_run

    spec = load_run(None, sets or (), {"task": task, "algorithm": "grpo"})
    spec.task.use_processes(workers)
    names = list(graders(spec.task)) if grader == "all" else [grader]
    result = regrade(spec.task, read_cases(cases), names, workers)
    if as_json:
        terminal.print_json({"task": task, "cases": cases, **vars(result)})
        return
    terminal.show_grades(f"{cases} as {task}", result, show)


@_command(
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
    from harness.inspect_task import inspect_task
    from harness.spec import SpecError, load_run
    from harness.types import Split

    if split not in get_args(Split):
        raise SpecError(f"--split must be one of {', '.join(get_args(Split))}, got '{split}'")
    spec = load_run(None, [*(sets or ()), *_data_path(path)], {"task": task, "algorithm": "grpo"})
    document = inspect_task(spec.task, cast("Split", split), count, model)
    if as_json:
        terminal.print_json(document)
    else:
        terminal.show_task(document)


@_command(
    reward_app,
    "train",
    "cohort reward-model train runs/train/my-run --model tiny --out models/reward",
    "cohort reward-model train runs/studies/my-study/trials/* --model runs/train/my-run --out reward --by correct",
)
def reward_model_train(
    rollouts: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or files of rollouts.")],
    model: Annotated[str, typer.Option(help="Where the fit starts: 'tiny', a Hub id, a model folder or a run.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder for the reward model.")],
    by: Annotated[str, typer.Option(help="What ranks completions: reward, correct, or one of the rewards.")] = "reward",
    epochs: Annotated[int, typer.Option(min=1, metavar="N", help="Passes over the pairs.")] = 3,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Prompts per optimiser step.")] = 16,
    learning_rate: Annotated[float, typer.Option(min=0.0, metavar="RATE", help="Of AdamW, constant.")] = 1e-4,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Data order and initial head.")] = 0,
    as_json: Json = False,
) -> None:
    """Fit a Bradley-Terry reward model on ranked rollouts (RLHF's second step).

    Use it with --set rewards.reward_model.path=DIR.
    """
    from harness._progress import phase_bar
    from harness._single import model_folder
    from harness.reward_model import train_reward_model

    with phase_bar("reward model") as bar:
        fit = train_reward_model(
            rollouts,
            model_folder(model),
            out,
            by=by,
            epochs=epochs,
            prompts_per_batch=batch,
            learning_rate=learning_rate,
            seed=seed,
            on_progress=lambda done, total: bar("fit", done, total),
        )
    if as_json:
        terminal.print_json({"directory": out, **vars(fit)})
        return
    terminal.show_reward_model(fit)
    terminal.say(f"Use it: --set rewards.reward_model.path={shlex.quote(str(out))}")


@_command(
    study_app,
    "run",
    "cohort study run quickstart",
    "cohort study run my_study.yaml --workers 2 --seeds 0,1,2",
    "cohort study run group_size --set model=Qwen/Qwen2.5-0.5B --set task=gsm8k --name group_size_qwen",
)
def study_run(
    study: Study,
    workers: Workers = None,
    sets: Sets = None,
    seeds: Seeds = None,
    name: Name = None,
    runs: Runs = RUNS,
    tracking_uri: TrackingUri = None,
    as_json: Json = False,
) -> None:
    """Run every arm with every seed, once, then write the report; the same command continues a stopped study."""
    command = _shell(f"study run {shlex.quote(study)}", {"--seeds": seeds, "--set": sets, "--name": name})
    _run_study(_load_study(study, sets, seeds, name), runs, workers, command, as_json)


@_command(study_app, "list", "cohort study list", "cohort study list --runs /data/runs --json")
def study_list(runs: Runs = RUNS, as_json: Json = False) -> None:
    """List the shipped studies and those in the runs folder."""
    from harness.spec import SpecError, read_yaml, shipped_studies

    files = {**shipped_studies(), **{f.parent.name: f for f in sorted((runs / "studies").glob("*/study.json"))}}
    shipped = shipped_studies()
    documents = []
    for name, file in files.items():
        try:
            question = " ".join(str((read_yaml(file) or {}).get("question", "")).split())
        except (SpecError, AttributeError) as error:
            question = f"not readable: {error}"
        where = " and ".join(["shipped"] * (name in shipped) + ["in the runs folder"] * (shipped.get(name) != file))
        documents.append({"name": name, "where": where, "question": question})
    if as_json:
        terminal.print_json(documents)
        return
    rows = [(d["name"], d["where"], d["question"]) for d in documents]
    terminal.show_table("", ["study", "where", "question"], rows)


@_command(study_app, "show", "cohort study show quickstart", "cohort study show my_study.yaml --set steps=20 --json")
def study_show(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A shipped study, a file, or a started study.")],
    sets: Sets = None,
    seeds: Seeds = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Show a study's question, arms, base run and budget without running it."""
    spec = _started_study(study, runs, sets, seeds) or _load_study(study, sets, seeds)
    arms, budget = [], 0
    for arm in spec.design_arms():
        run = spec.run_spec(arm, spec.seeds[0])
        rollouts = run.steps * run.rollouts_per_step
        budget += rollouts * len(spec.seeds)
        arms.append({"arm": arm.label, "overrides": dict(arm.overrides), "steps": run.steps, "rollouts": rollouts})
    trials = len(arms) * len(spec.seeds)
    if as_json:
        document = spec.model_dump(mode="json")
        terminal.print_json({**document, "design_arms": arms, "budget": {"trials": trials, "rollouts": budget}})
        return
    terminal.say(f"{spec.name}: {' '.join(spec.question.split())}\n")
    changes = [", ".join(f"{k}={v}" for k, v in arm["overrides"].items()) or "the base run" for arm in arms]
    rows = [(a["arm"], c, a["steps"], f"{a['rollouts']:,}") for a, c in zip(arms, changes, strict=True)]
    headers = ["arm", "what it changes", "steps", "rollouts per trial"]
    terminal.show_table("", headers, rows, numeric=headers[2:])
    terminal.say(f"\nBase run: {json.dumps(spec.run)}")
    terminal.say(f"Metric: {spec.metric}. Baseline: {spec.baseline or arms[0]['arm']}. Design: {spec.design}.")
    terminal.say(
        f"Budget: arms x seeds = {len(arms)} x {len(spec.seeds)} = {trials} trials; {budget:,} training rollouts."
    )


@_command(study_app, "status", "cohort study status quickstart", "cohort study status quickstart --json")
def study_status(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="Name of a study in the runs folder.")],
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Show what each trial of a study has reached; exit code 0 only when all are complete."""
    from harness import study as runner

    status = runner.study_status(study, runs)
    if as_json:
        document = {"study": status.name, "question": status.question, "counts": status.counts()}
        terminal.print_json({**document, "trials": status.trials})
    else:
        terminal.show_status(status)
    raise typer.Exit(0 if status.finished and status.all_valid else 1)


@_command(app, "report", "cohort report quickstart", "cohort report quickstart --open")
def report(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="Name of a study in the runs folder.")],
    browser: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    runs: Runs = RUNS,
    tracking_uri: TrackingUri = None,
) -> None:
    """Write a study's report again, from the MLflow store alone."""
    _, files = _write_report(study, runs)
    terminal.say(files.answer)
    terminal.say(f"Report: {files.html}")
    if browser:
        typer.launch(files.html.resolve().as_uri())


@_command(app, "ui", "cohort ui", "cohort ui --port 5001 --open")
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1.")] = 5000,
    browser: Annotated[bool, typer.Option("--open", help="Open the newest study's page in a browser.")] = False,
    runs: Runs = RUNS,
    tracking_uri: TrackingUri = None,
) -> None:
    """Serve the MLflow pages of the runs folder on 127.0.0.1 until Ctrl-C.

    With --tracking-uri of an MLflow server, show the addresses of its pages instead: it serves them itself.
    """
    pressed: list[int] = []  # a flag: an exception that a signal raises is lost in a callback of a library

    def note(number: int, _: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    for ending_signal in (signal.SIGINT, signal.SIGTERM):  # a shell's background job inherits SIGINT as ignored
        signal.signal(ending_signal, note)  # so that the server ends with this process
    from harness import tracking

    address = tracking.server_address()
    if address is not None:
        _show_pages(runs, address, browser, lambda: False)
        return
    try:
        with tracking.serve_ui(runs, port, should_stop=lambda: bool(pressed)) as server:
            terminal.say(f"MLflow: {server.url} (Ctrl-C ends it)")
            _show_pages(runs, server.address, browser, lambda: bool(pressed))
            status = server.wait(lambda: bool(pressed))
            ending = f"the MLflow server ended by itself with status {status}"
    except KeyboardInterrupt:
        return
    except RuntimeError as error:
        ending = str(error)
    if pressed:
        return
    terminal.fail(ending)
    raise typer.Exit(1)


@_command(
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
    from harness import doctor as checks
    from harness.spec import SpecError

    if run is not None:
        return _show_estimates(run, sets or (), as_json)
    if sets:
        raise SpecError("--set changes a run: name its file with --run")
    found = checks.check_machine(runs)
    if as_json:
        terminal.print_json(found)
    else:
        rows = [(c.name, terminal.state_text(c.state), c.value, c.advice or "") for c in found]
        terminal.show_table("", ["check", "state", "found", "advice"], rows)
    raise typer.Exit(1 if any(check.state == "problem" for check in found) else 0)


@_command(
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
    from harness._progress import phase_bar
    from harness.memory import as_documents, measure
    from harness.spec import parse_overrides

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
        terminal.show_measured(title, documents)


@_command(list_app, "algorithms", "cohort list algorithms", "cohort list algorithms --json")
def list_algorithms(as_json: Json = False) -> None:
    """List the algorithms: the objective of each, then its settings with defaults and ranges."""
    _show_plugins("algorithm", as_json, facts=("needs_critic", "sees_gold", "min_group_size"), tables=("objective",))


@_command(list_app, "tasks", "cohort list tasks")
def list_tasks(as_json: Json = False) -> None:
    """List the tasks with their settings, defaults and ranges."""
    _show_plugins("task", as_json)


@_command(list_app, "rewards", "cohort list rewards")
def list_rewards(as_json: Json = False) -> None:
    """List the rewards with their settings, defaults and ranges."""
    _show_plugins("reward", as_json, facts=("sees_gold",))


@_command(list_app, "engines", "cohort list engines")
def list_engines(as_json: Json = False) -> None:
    """List the rollout engines with their settings, defaults and ranges."""
    _show_plugins("engine", as_json, facts=("exact_logprobs",))


@_command(list_app, "studies", "cohort list studies")
def list_studies(runs: Runs = RUNS, as_json: Json = False) -> None:
    """List the shipped studies and those in the runs folder (as `cohort study list`)."""
    study_list(runs, as_json)


def comparison(
    algorithms: str,
    task: str,
    model: str,
    seeds: str | None,
    steps: int | None,
    sets: Sequence[str] | None,
    name: str | None,
) -> StudySpec:
    """The study that `cohort compare` runs: one arm for each algorithm, all else equal."""
    from harness.spec import SpecError, parse_overrides, parse_study, with_overrides

    run: dict[str, Any] = {"model": model, "task": task}
    if model == "tiny":
        run["cold_start"] = {"steps": TINY_COLD_START}
    if steps is not None:
        run["steps"] = steps
    names = [word.strip() for word in algorithms.split(",")]
    if len(set(names)) != len(names) or not all(names):
        raise SpecError(f"--algorithms must be distinct names with commas between, as ppo,grpo, got '{algorithms}'")
    raw: dict[str, Any] = {
        "name": name or f"compare-{task}",
        "question": f"Which of {', '.join(names)} learns {task} best from the same start with the same rollouts?",
        "run": with_overrides(run, parse_overrides(sets or ())),
        "arms": {algorithm: {"algorithm.name": algorithm} for algorithm in names},
    }
    if seeds is not None:
        raw["seeds"] = _integers(seeds)
    return parse_study(raw, where="cohort compare")


def _run_study(study: StudySpec, runs: Path, workers: int | None, command: str, as_json: bool) -> None:
    from harness import study as runner
    from harness._progress import study_view
    from harness.model import resolve_device

    for arm in study.design_arms():
        resolve_device(study.run_spec(arm, study.seeds[0]).device)
    with study_view() as view:
        status = runner.run_study(study, runs, workers=workers, command=command, on_status=view.update, report=False)
    if not status.finished:  # asked to stop
        raise KeyboardInterrupt
    record, files = _write_report(study.name, runs)
    if as_json:
        paths = {"report": files.html, "csv": files.csv, "markdown": files.markdown}
        document = {"study": study.name, "answer": files.answer, **paths, "command": command}
        terminal.print_json({**document, "counts": status.counts(), "trials": status.trials})
    else:
        terminal.show_results(record)
        for trial in status.trials:
            if trial.state != "complete":
                reason = f" ({trial.reason})" if trial.reason else ""
                terminal.say(f"{trial.arm} | seed {trial.seed}: {trial.state}{reason}")
        terminal.say(f"\n{files.answer}\n")
        terminal.say(f"Report: {files.html}")
        terminal.say(f"Browse: cohort ui --runs {shlex.quote(str(runs))}")
        terminal.say(f"Reproduce: {command}")
    raise typer.Exit(0 if status.all_valid else 1)


def _show_pages(runs: Path, address: str, browser: bool, should_stop: Callable[[], bool]) -> None:
    """Print the page of every study, the newest last, and open that one (without a study: the start page)."""
    from harness import tracking

    page = address
    for name in tracking.list_studies(runs, by="start"):
        if should_stop():
            return
        page = tracking.study_url(runs, name, address)
        terminal.say(f"{name}: {page}")
    if browser:
        typer.launch(page)


def _use_tracking_uri(uri: str | None) -> str | None:
    """Keep results there, in this process and in its workers, which inherit the variable."""
    if uri:
        os.environ["COHORT_TRACKING_URI"] = uri
    return uri


def _show_estimates(run: str, sets: Sequence[str], as_json: bool) -> None:
    """Print what the runs of a file need; SpecError where one of them cannot fit or cannot be estimated."""
    from harness.memory import judge, runs_of
    from harness.spec import SpecError

    found = [
        {"run": label, "algorithm": spec.algorithm.name, **judge(spec)} for label, spec in runs_of(run, sets).items()
    ]
    if as_json:
        terminal.print_json(found)
    else:
        terminal.show_estimates(run, found)
    for document in found:
        if document["problem"]:
            raise SpecError(f"{document['run']}: {document['problem']}")


def _write_report(name: str, runs: Path) -> tuple[Any, Any]:
    """(StudyRecord, ReportFiles) of a study; the report is logged to its MLflow run too."""
    from harness import tracking

    record = tracking.read_study(runs, name)
    folder = runs / "studies" / name / "report"
    files = importlib.import_module("reports.render").write_report(record, folder)
    tracking.log_report(runs, name, folder, files.answer)
    return record, files


def _load_study(name: str, sets: list[str] | None, seeds: str | None, rename: str | None = None) -> StudySpec:
    from harness.spec import load_study

    overrides = list(sets or ())
    if seeds is not None:
        overrides.append(f"seeds={json.dumps(_integers(seeds))}")
    if rename is not None:
        overrides.append(f"name={json.dumps(rename)}")
    return load_study(name, overrides)


def _started_study(name: str, runs: Path, sets: list[str] | None, seeds: str | None) -> StudySpec | None:
    """A study of the runs folder as it was started; None where there is none, or changes are asked for."""
    from harness._files import read_json
    from harness.spec import StudySpec, parse_study

    file = runs / "studies" / name / "study.json"
    if sets or seeds or not file.is_file():
        return None
    return parse_study(
        {key: value for key, value in read_json(file).items() if key in StudySpec.model_fields}, str(file)
    )


def _show_plugins(kind: Kind, as_json: bool, facts: Sequence[str] = (), tables: Sequence[str] = ()) -> None:
    """`facts` are class attributes for the first table, `tables` mappings that each get a table of their own."""
    from harness._listing import describe_plugins

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


def _checked_name(name: str) -> str:
    from harness.spec import SpecError

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise SpecError(f"--name must be letters, digits, '.', '_' or '-', the first a letter or digit, got '{name}'")
    return name


def _data_path(path: str | None) -> list[str]:
    return [] if path is None else [f"task.path={json.dumps(path)}"]


def _integers(text: str) -> list[int]:
    from harness.spec import SpecError

    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise SpecError(f"--seeds must be integers with commas between, as 0,1,2, got '{text}'") from None


def _shell(command: str, options: Mapping[str, Any]) -> str:
    """The shell command that does this again; a list repeats its option, None leaves it out."""
    words = []
    for option, value in options.items():
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                words += [option, shlex.quote(str(item))]
    return " ".join(["cohort", command, *words])
