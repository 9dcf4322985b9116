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
    from harness._ray import Cluster
    from harness.plugins import Kind
    from harness.spec import Dimension, StudySpec
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
Workers = Annotated[
    str, typer.Option(metavar="N|auto", help="Trials at a time; auto: one per GPU, or else one per core.")
]
Storage = Annotated[
    str | None,
    typer.Option(
        envvar="COHORT_STORAGE", metavar="URL", help="postgresql://... for hosts without a common disk; else files."
    ),
]
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
    "cohort train my_pipeline.yaml --set stages.polish.steps=20",
)
def train(
    spec: Annotated[Path | None, typer.Argument(metavar="SPEC.yaml", help="Run file; without it, --set alone.")] = None,
    sets: Sets = None,
    name: Name = None,
    runs: Runs = RUNS,
    tracking_uri: TrackingUri = None,
    as_json: Json = False,
) -> None:
    """Train once, in RUNS/train/NAME; the same command resumes. A file with `stages` runs them one after another."""
    from harness.spec import load_run

    if spec is not None and _lists_stages(spec):
        return _train_pipeline(spec, sets, name, runs, as_json)
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


def _lists_stages(spec: Path) -> bool:
    from harness.spec import read_yaml

    raw = read_yaml(spec)
    return isinstance(raw, dict) and "stages" in raw


def _train_pipeline(spec: Path, sets: list[str] | None, name: str | None, runs: Path, as_json: bool) -> None:
    """Run a file's stages; exit code as of one run."""
    from harness.pipeline import load_pipeline, pipeline_digest, train_pipeline

    stages = load_pipeline(spec, sets or ())
    name = _checked_name(name or f"{spec.stem}-{pipeline_digest(stages)[:8]}")
    result, ended = train_pipeline(stages, runs, name)
    directory = runs / "train" / name
    if as_json:
        shown = [{"name": s.name, "kind": s.kind, "directory": s.directory, **vars(s.result)} for s in ended]
        terminal.print_json({"name": name, "directory": directory, **vars(result), "stages": shown})
    else:
        keys = ("accuracy_initial", "accuracy_final", "test_accuracy", "rollouts", "seconds")
        rows = [
            (
                s.name,
                s.kind,
                s.result.state,
                *(terminal.quantity(k, v) if (v := s.result.summary.get(k)) is not None else "" for k in keys),
            )
            for s in ended
        ]
        terminal.show_table("", ["stage", "kind", "state", *keys], rows, numeric=keys)
        terminal.say(f"{name}: {result.state}" + (f" ({result.reason})" if result.reason else ""))
        terminal.say(f"Files: {directory}")
    raise typer.Exit({"complete": 0, "stopped": 130}.get(result.state, 1))


@_command(
    app,
    "compare",
    "cohort compare --algorithms ppo,grpo --task arithmetic --steps 50",
    "cohort compare --algorithms ppo,grpo,grpo_self_consistency --task gsm8k --set task.path=data/gsm8k --steps 5",
    "cohort compare --algorithms grpo,ppo --task gsm8k --model Qwen/Qwen2.5-0.5B --seeds 0,1",
    "cohort compare --algorithms grpo,ppo --task arithmetic --tune 6",
)
def compare(
    algorithms: Annotated[str, typer.Option(metavar="A,B,...", help="Algorithms; the first is the baseline.")],
    task: Annotated[str, typer.Option(metavar="A,B,...", help="Tasks by name; every algorithm learns each.")],
    model: Annotated[str, typer.Option(help="'tiny', a Hub id or a local folder.")] = "tiny",
    seeds: Seeds = None,
    steps: Annotated[int | None, typer.Option(min=0, metavar="N", help="Training steps of each trial.")] = None,
    tune: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="First tune each learning rate, with N settings each.")
    ] = None,
    sets: Sets = None,
    name: Name = None,
    workers: Workers = "auto",
    runs: Runs = RUNS,
    tracking_uri: TrackingUri = None,
    as_json: Json = False,
) -> None:
    """Run one study with an arm per algorithm (and task) and all else equal.

    The model 'tiny' gets a supervised cold start of 400 steps (--set cold_start.steps=N for another). With --tune each
    algorithm first gets the same search over its learning rate (a fifth to five times the run's own), judged on the
    validation split with a seed of its own; a study file can search more.
    """
    study = comparison(algorithms, task, model, seeds, steps, sets, name, tune)
    options = {"--algorithms": algorithms, "--task": task, "--model": model, "--seeds": seeds, "--steps": steps}
    command = _shell("compare", {**options, "--tune": tune, "--set": sets, "--name": name})
    _run_study(study, runs, _num_workers(workers), command, as_json)


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
    "cohort study run group_size --dry-run",
    "cohort study run group_size --launcher ray --ray-address 10.0.0.1:6379 --runs /shared/runs",
    "COHORT_STORAGE=postgresql://me:secret@db/cohort cohort study run group_size    (the same on each host)",
)
def study_run(
    study: Study,
    workers: Workers = "auto",
    sets: Sets = None,
    seeds: Seeds = None,
    name: Name = None,
    storage: Storage = None,
    launcher: Annotated[str, typer.Option(metavar="local|ray", help="Where the workers run.")] = "local",
    ray_address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A running cluster; else RAY_ADDRESS, else one made here.")
    ] = None,
    ray_cpus: Annotated[float, typer.Option(min=0, metavar="N", help="Cores of each worker.")] = 1,
    ray_gpus: Annotated[
        float | None, typer.Option(min=0, metavar="N", help="GPUs of each worker; 1 where the cluster has any.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and estimate; run and write nothing.")] = False,
    runs: Runs = RUNS,
    tracking_uri: TrackingUri = None,
    as_json: Json = False,
) -> None:
    """Run every arm with every seed, once, then write the report; the same command continues a stopped study.

    Hosts that share only a database run the same command with the same --storage: each takes trials that no other has.
    A trial whose host died starts anew on another one that has no copy of its folder; it ends the same.
    """
    spec, count = _load_study(study, sets, seeds, name), _num_workers(workers)
    cluster = _cluster(launcher, ray_address, ray_cpus, ray_gpus)
    if dry_run:
        return _show_dry_run(spec, runs, count, storage, as_json)
    command = _shell(f"study run {shlex.quote(study)}", {"--seeds": seeds, "--set": sets, "--name": name})
    _run_study(spec, runs, count, command, as_json, storage=storage, cluster=cluster)


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
    for plan in spec.searches():
        run = spec.run_spec(plan.base, spec.seeds[0])
        count = plan.search.trials * len(plan.seeds) + len(plan.final_seeds)
        trials += count
        budget += count * run.steps * run.rollouts_per_step
    if as_json:
        document = spec.model_dump(mode="json")
        terminal.print_json({**document, "design_arms": arms, "budget": {"trials": trials, "rollouts": budget}})
        return
    terminal.say(f"{spec.name}: {' '.join(spec.question.split())}\n")
    for plan in spec.searches():
        search = plan.search
        rows = [(path, _values(dimension)) for path, dimension in search.space.items()]
        title = f"{plan.name or 'search'}: {search.sampler}, {search.trials} arms, pruner {search.pruner}"
        terminal.show_table(title, ["searched", "values"], rows)
    changes = [", ".join(f"{k}={v}" for k, v in arm["overrides"].items()) or "the base run" for arm in arms]
    rows = [(a["arm"], c, a["steps"], f"{a['rollouts']:,}") for a, c in zip(arms, changes, strict=True)]
    headers = ["arm", "what it changes", "steps", "rollouts per trial"]
    if arms:
        terminal.show_table("", headers, rows, numeric=headers[2:])
    terminal.say(f"\nBase run: {json.dumps(spec.run)}")
    baseline = spec.baseline or next(iter(spec.arm_labels()), "none beforehand")
    terminal.say(f"Metric: {spec.metric}. Baseline: {baseline}. Design: {spec.design}.")
    product = f"arms x seeds = {len(arms)} x {len(spec.seeds)} = " if arms else "at most "
    terminal.say(f"Budget: {product}{trials} trials; {budget:,} training rollouts.")


@_command(study_app, "status", "cohort study status quickstart", "cohort study status quickstart --json")
def study_status(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="Name of a study in the runs folder.")],
    storage: Storage = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Show what each trial of a study has reached, what it has cost and when it may end.

    Exit code 0 only when all trials are complete.
    """
    from harness import study as runner
    from harness._estimates import cost, remaining_seconds

    status = runner.study_status(study, runs, storage)
    spent, remaining = cost(status), remaining_seconds(status)
    if as_json:
        document = {"study": status.name, "question": status.question, "counts": status.counts()}
        estimates = {"cost": spent, "remaining_seconds": remaining}
        terminal.print_json({**document, **estimates, "trials": status.trials})
    else:
        terminal.show_status(status)
        terminal.say(f"Cost so far: {terminal.cost_text(spent)}")
        if not status.finished:
            terminal.say(f"Time left with the workers at work: {terminal.duration(remaining)}")
    raise typer.Exit(0 if status.finished and status.all_valid else 1)


@_command(app, "report", "cohort report quickstart --open", "cohort report group_size kl_beta")
def report(
    studies: Annotated[list[str], typer.Argument(metavar="STUDY...", help="Names of studies in the runs folder.")],
    browser: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    runs: Runs = RUNS,
    tracking_uri: TrackingUri = None,
) -> None:
    """Write a study's report again, from the MLflow store alone; several studies of one task give one report.

    That of several lies in RUNS/reports, its arms named `study: arm`.
    """
    files = _write_report(studies[0], runs)[1] if len(studies) == 1 else _write_joined_report(studies, runs)
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
    tune: int | None = None,
) -> StudySpec:
    """The study that `cohort compare` runs: one arm for each algorithm and task, all else equal."""
    from harness.spec import Optimizer, SpecError, parse_overrides, parse_study, with_overrides

    run: dict[str, Any] = {"model": model}
    if model == "tiny":
        run["cold_start"] = {"steps": TINY_COLD_START}
    if steps is not None:
        run["steps"] = steps
    names = [word.strip() for word in algorithms.split(",")]
    if len(set(names)) != len(names) or not all(names):
        raise SpecError(f"--algorithms must be distinct names with commas between, as ppo,grpo, got '{algorithms}'")
    tasks = [word.strip() for word in task.split(",")]
    if len(set(tasks)) != len(tasks) or not all(tasks):
        raise SpecError(f"--task must be distinct names with commas between, as gsm8k,svamp, got '{task}'")
    run = with_overrides(run, parse_overrides(sets or ()))
    raw: dict[str, Any] = {
        "name": name or f"compare-{'-'.join(tasks)}",
        "question": f"Which of {', '.join(names)} learns {' and '.join(tasks)} best from the same start with the same "
        "rollouts?",
        "run": run,
        "design": "compare",
        "compare": {"algorithms": names, "tasks": tasks},
        "seeds": [0, 1, 2] if seeds is None else _integers(seeds),
    }
    if tune is not None:
        rate = Optimizer.model_validate(run.get("optimizer", {})).learning_rate
        space = {"optimizer.learning_rate": {"low": rate / 5, "high": rate * 5, "log": True}}
        raw["compare"]["tuning"] = {"space": space, "trials": tune, "seeds": [max(raw["seeds"]) + 1]}
    return parse_study(raw, where="cohort compare")


def _num_workers(text: str) -> int | None:
    """The number that --workers gives; None for auto."""
    from harness.spec import SpecError

    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise SpecError(f"--workers must be a number from 1 on, or auto, got '{text}'")
    return int(text)


def _cluster(launcher: str, address: str | None, num_cpus: float, num_gpus: float | None) -> Cluster | None:
    """The Ray cluster that the options name; None for the local launcher. SpecError where Ray is not installed."""
    from harness._ray import Cluster, check_ray
    from harness.spec import SpecError

    if launcher not in ("local", "ray"):
        raise SpecError(f"--launcher must be local or ray, got '{launcher}'")
    if launcher == "local":
        if address is not None:
            raise SpecError("--ray-address names a Ray cluster; add --launcher ray")
        return None
    check_ray()
    return Cluster(address, num_cpus, num_gpus)


def _show_dry_run(study: StudySpec, runs: Path, workers: int | None, storage: str | None, as_json: bool) -> None:
    from harness import study as runner

    document = runner.dry_run(study, runs, workers=workers, storage=storage)
    if as_json:
        terminal.print_json({"study": study.name, "question": study.question, **document})
    else:
        terminal.show_dry_run(study.name, study.question, document)


def _run_study(
    study: StudySpec,
    runs: Path,
    workers: int | None,
    command: str,
    as_json: bool,
    *,
    storage: str | None = None,
    cluster: Cluster | None = None,
) -> None:
    from harness import study as runner
    from harness._progress import study_view
    from harness.model import resolve_device

    for arm in study.checked_arms():
        resolve_device(study.run_spec(arm, study.seeds[0]).device)
    with study_view() as view:
        status = runner.run_study(
            study,
            runs,
            workers=workers,
            command=command,
            on_status=view.update,
            report=False,
            storage=storage,
            cluster=cluster,
        )
    if not status.finished:  # asked to stop
        raise KeyboardInterrupt
    record, files = _write_report(study.name, runs)
    if len(record.trials) < len(status.trials):
        terminal.say(
            f"This host's MLflow store has {len(record.trials)} of {len(status.trials)} trials, and so has its report: "
            "other hosts ran the rest. `cohort study status` shows all of them.",
            stderr=True,
        )
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


def _write_joined_report(names: Sequence[str], runs: Path) -> Any:
    """The ReportFiles of several studies in one report; ValueError where they measure different things."""
    from harness import tracking

    record = importlib.import_module("reports.join").join([tracking.read_study(runs, name) for name in names])
    return importlib.import_module("reports.render").write_report(record, runs / "reports" / "+".join(names))


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


def _values(dimension: Dimension) -> str:
    if dimension.choices is not None:
        return ", ".join(map(str, dimension.choices))
    step = f", step {dimension.step}" if dimension.step else ""
    return f"{dimension.low} to {dimension.high}" + (", log" if dimension.log else step)


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
