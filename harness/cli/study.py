"""`cohort study`, `cohort compare` and `cohort report`."""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli import views
from harness.cli.commands import app, command, study_app
from harness.cli.options import (
    RUNS,
    Json,
    Name,
    Runs,
    Seeds,
    Sets,
    Storage,
    Study,
    TrackingUri,
    Workers,
    integers,
    num_workers,
    shell,
    use_store,
)
from harness.console import terminal

if TYPE_CHECKING:
    from harness.spec.study import Dimension, StudySpec
    from harness.study.ray_cluster import Cluster


TINY_COLD_START = 400


@command(
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
    use_store(tracking_uri)
    study = comparison(algorithms, task, model, seeds, steps, sets, name, tune)
    options = {"--algorithms": algorithms, "--task": task, "--model": model, "--seeds": seeds, "--steps": steps}
    command = shell("compare", {**options, "--tune": tune, "--set": sets, "--name": name})
    _run_study(study, runs, num_workers(workers), command, as_json)


@command(
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
    use_store(tracking_uri)
    spec, count = _load_study(study, sets, seeds, name), num_workers(workers)
    cluster = _cluster(launcher, ray_address, ray_cpus, ray_gpus)
    if dry_run:
        return _show_dry_run(spec, runs, count, storage, as_json)
    command = shell(f"study run {shlex.quote(study)}", {"--seeds": seeds, "--set": sets, "--name": name})
    _run_study(spec, runs, count, command, as_json, storage=storage, cluster=cluster)


@command(study_app, "list", "cohort study list", "cohort study list --runs /data/runs --json")
def study_list(runs: Runs = RUNS, as_json: Json = False) -> None:
    """List the shipped studies and those in the runs folder."""
    from harness.spec.errors import SpecError
    from harness.spec.load import shipped_studies
    from harness.spec.raw import read_yaml

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


@command(study_app, "show", "cohort study show quickstart", "cohort study show my_study.yaml --set steps=20 --json")
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
        run = arm.spec
        rollouts = run.steps * run.rollouts_per_step
        budget += rollouts * len(spec.seeds)
        arms.append({"arm": arm.label, "overrides": dict(arm.overrides), "steps": run.steps, "rollouts": rollouts})
    trials = len(arms) * len(spec.seeds)
    for plan in spec.searches():
        run = plan.base.spec
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


@command(study_app, "status", "cohort study status quickstart", "cohort study status quickstart --json")
def study_status(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="Name of a study in the runs folder.")],
    storage: Storage = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Show what each trial of a study has reached, what it has cost and when it may end.

    Exit code 0 only when all trials are complete.
    """
    from harness.study.estimates import cost, remaining_seconds
    from harness.study.runner import study_status

    status = study_status(study, runs, storage)
    spent, remaining = cost(status), remaining_seconds(status)
    if as_json:
        document = {"study": status.name, "question": status.question, "counts": status.counts()}
        estimates = {"cost": spent, "remaining_seconds": remaining}
        terminal.print_json({**document, **estimates, "trials": status.trials})
    else:
        views.show_status(status)
        terminal.say(f"Cost so far: {views.cost_text(spent)}")
        if not status.finished:
            terminal.say(f"Time left with the workers at work: {terminal.duration(remaining)}")
    raise typer.Exit(0 if status.finished and status.all_valid else 1)


@command(app, "report", "cohort report quickstart --open", "cohort report group_size kl_beta")
def report(
    studies: Annotated[list[str], typer.Argument(metavar="STUDY...", help="Names of studies in the runs folder.")],
    browser: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    runs: Runs = RUNS,
    tracking_uri: TrackingUri = None,
) -> None:
    """Write a study's report again, from the MLflow store alone; several studies of one task give one report.

    That of several lies in RUNS/reports, its arms named `study: arm`.
    """
    use_store(tracking_uri)
    files = _write_report(studies[0], runs)[1] if len(studies) == 1 else _write_joined_report(studies, runs)
    terminal.say(files.answer)
    terminal.say(f"Report: {files.html}")
    if browser:
        typer.launch(files.html.resolve().as_uri())


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
    from harness.spec.errors import SpecError
    from harness.spec.raw import parse_overrides, with_overrides
    from harness.spec.run import Optimizer
    from harness.spec.study import parse_study

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
        "seeds": [0, 1, 2] if seeds is None else integers(seeds),
    }
    if tune is not None:
        rate = Optimizer.model_validate(run.get("optimizer", {})).learning_rate
        space = {"optimizer.learning_rate": {"low": rate / 5, "high": rate * 5, "log": True}}
        raw["compare"]["tuning"] = {"space": space, "trials": tune, "seeds": [max(raw["seeds"]) + 1]}
    return parse_study(raw, where="cohort compare")


def _cluster(launcher: str, address: str | None, num_cpus: float, num_gpus: float | None) -> Cluster | None:
    """The Ray cluster that the options name; None for the local launcher. SpecError where Ray is not installed."""
    from harness.spec.errors import SpecError
    from harness.study.ray_cluster import Cluster, check_ray

    if launcher not in ("local", "ray"):
        raise SpecError(f"--launcher must be local or ray, got '{launcher}'")
    if launcher == "local":
        if address is not None:
            raise SpecError("--ray-address names a Ray cluster; add --launcher ray")
        return None
    check_ray()
    return Cluster(address, num_cpus, num_gpus)


def _show_dry_run(study: StudySpec, runs: Path, workers: int | None, storage: str | None, as_json: bool) -> None:
    from harness.study.runner import dry_run

    document = dry_run(study, runs, workers=workers, storage=storage)
    if as_json:
        terminal.print_json({"study": study.name, "question": study.question, **document})
    else:
        views.show_dry_run(study.name, study.question, document)


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
    from harness.console.progress import study_view
    from harness.policy.device import resolve_device
    from harness.study.runner import run_study

    for arm in study.checked_arms():
        resolve_device(arm.spec.device)
    with study_view() as view:
        status = run_study(
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
        views.show_results(record)
        for trial in status.trials:
            if trial.state != "complete":
                reason = f" ({trial.reason})" if trial.reason else ""
                terminal.say(f"{trial.arm} | seed {trial.seed}: {trial.state}{reason}")
        terminal.say(f"\n{files.answer}\n")
        terminal.say(f"Report: {files.html}")
        terminal.say(f"Browse: cohort ui --runs {shlex.quote(str(runs))}")
        terminal.say(f"Reproduce: {command}")
    raise typer.Exit(0 if status.all_valid else 1)


def _write_report(name: str, runs: Path) -> tuple[Any, Any]:
    """(StudyRecord, ReportFiles) of a study; the report is logged to its MLflow run too."""
    from harness.tracking.mlflow_studies import log_report, read_study

    record = read_study(runs, name)
    folder = runs / "studies" / name / "report"
    files = importlib.import_module("reports.render").write_report(record, folder)
    log_report(runs, name, folder, files.answer)
    return record, files


def _write_joined_report(names: Sequence[str], runs: Path) -> Any:
    """The ReportFiles of several studies in one report; ValueError where they measure different things."""
    from harness.tracking.mlflow_studies import read_study

    record = importlib.import_module("reports.join").join([read_study(runs, name) for name in names])
    return importlib.import_module("reports.render").write_report(record, runs / "reports" / "+".join(names))


def _load_study(name: str, sets: list[str] | None, seeds: str | None, rename: str | None = None) -> StudySpec:
    from harness.spec.load import load_study

    overrides = list(sets or ())
    if seeds is not None:
        overrides.append(f"seeds={json.dumps(integers(seeds))}")
    if rename is not None:
        overrides.append(f"name={json.dumps(rename)}")
    return load_study(name, overrides)


def _started_study(name: str, runs: Path, sets: list[str] | None, seeds: str | None) -> StudySpec | None:
    """A study of the runs folder as it was started; None where there is none, or changes are asked for."""
    from harness.files import read_json
    from harness.spec.study import StudySpec, parse_study

    file = runs / "studies" / name / "study.json"
    if sets or seeds or not file.is_file():
        return None
    return parse_study(
        {key: value for key, value in read_json(file).items() if key in StudySpec.model_fields}, str(file)
    )


def _values(dimension: Dimension) -> str:
    if dimension.choices is not None:
        return ", ".join(map(str, dimension.choices))
    step = f", step {dimension.step}" if dimension.step else ""
    return f"{dimension.low} to {dimension.high}" + (", log" if dimension.log else step)
