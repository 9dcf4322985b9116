"""`cohort study`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..console import terminal
from . import options
from .commands import command, study_app, uncollected
from .views import studies

if TYPE_CHECKING:
    from ..record.status import StudyStatus
    from ..record.study import StudyRecord
    from ..spec.study import StudySpec
    from ..study.launchers.ray import Cluster
    from ..study.launchers.slurm import Slurm

REPORTING = "reading the results and drawing the figures"


AGAIN = 75  # exit code of a worker that its scheduler should start again: EX_TEMPFAIL of sysexits.h


@command(
    study_app,
    "run",
    "cohort study run quickstart",
    "cohort study run my_study.yaml --workers 2 --seeds 0,1,2",
    "cohort study run group_size --set model=Qwen/Qwen2.5-0.5B --set task=gsm8k --name group_size_qwen",
    "cohort study run group_size --dry-run",
    "cohort study run group_size --launcher ray --ray-address 10.0.0.1:6379 --runs /shared/runs",
    "cohort study run group_size --launcher slurm --workers 4 --slurm-partition gpu --runs /shared/runs",
    "COHORT_STORAGE=postgresql://me:secret@db/cohort cohort study run group_size    (the same on each host)",
)
def study_run(
    study: options.Study,
    workers: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Trials at a time; auto: one per GPU, or else one per core. 0: only set up the study.",
        ),
    ] = "auto",
    sets: options.Sets = None,
    seeds: options.Seeds = None,
    name: options.Name = None,
    interleave: options.Interleave = None,
    storage: options.Storage = None,
    launcher: Annotated[str, typer.Option(metavar="local|ray|slurm", help="Where the workers run.")] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address of a running cluster; by default RAY_ADDRESS, or else a new one on this machine.",
        ),
    ] = None,
    ray_cpus: Annotated[float, typer.Option(min=0, metavar="N", help="Cores per worker.")] = 1,
    ray_gpus: Annotated[
        float | None, typer.Option(min=0, metavar="N", help="GPUs per worker; by default 1 if the cluster has any.")
    ] = None,
    slurm_partition: Annotated[str | None, typer.Option(metavar="NAME", help="SLURM partition of the jobs.")] = None,
    slurm_time: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time limit of a job, after which it is queued again; by default 4:00:00."),
    ] = None,
    slurm_cpus: Annotated[int | None, typer.Option(min=1, metavar="N", help="Cores per job.")] = None,
    slurm_gpus: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="GPUs per job; by default as many as a trial has.")
    ] = None,
    slurm_set: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Another option of sbatch, such as account=lab; repeatable."),
    ] = None,
    together: Annotated[
        bool | None,
        typer.Option("--together/--apart", help="Let LoRA trials share one model in memory; by default if possible."),
    ] = None,
    dry_run: options.DryRun = False,
    runs: options.Runs = options.RUNS,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Run every arm once with every seed, then write the report; the same command continues a stopped study.

    Without --set, --seeds and --name, a study in the runs folder continues with the settings that it was started with.

    Hosts that share only a database run the same command with the same --storage; each takes waiting trials. If a host
    dies, another host starts its trial from the beginning (it has no copy of the folder); the result is the same.
    """
    terminal.say_if_slow("Checking the study's settings, models, data, memory and disk ...")
    options.use_store(tracking_uri)
    started = None if name or sets or seeds else started_study(study, runs, interleave)
    if started is not None:
        terminal.say(f"Continuing '{study}' of {runs} with the settings that it was started with.", stderr=True)
    spec = started or _load_study(study, sets, seeds, name, interleave)
    count = None if workers == "0" else options.num_workers(workers)
    on_ray = {"--ray-cpus": f"{ray_cpus:g}", "--ray-gpus": ray_gpus}
    on_slurm = {"--slurm-partition": slurm_partition, "--slurm-time": slurm_time, "--slurm-cpus": slurm_cpus,
                "--slurm-gpus": slurm_gpus, "--slurm-set": slurm_set}  # fmt: skip
    if launcher != "slurm" and (odd := next((key for key, value in on_slurm.items() if value is not None), None)):
        raise ValueError(f"{odd} is an option for SLURM jobs; add --launcher slurm")
    cluster = _slurm(spec, on_slurm) if launcher == "slurm" else _cluster(launcher, ray_address, ray_cpus, ray_gpus)
    if cluster and workers == "0":
        raise ValueError("--workers 0 starts no worker, so --launcher has nothing to do; leave one of them out")
    storage = options.with_password(storage)
    if dry_run:
        return show_dry_run(spec, runs, count, storage, together, as_json)
    placed = {"--launcher": launcher, **(on_slurm if launcher == "slurm" else on_ray)} if cluster else {}
    given = {"--seeds": seeds, "--set": sets, "--name": name, "--interleave": interleave, **placed}
    how = {None: "", True: " --together", False: " --apart"}[together]
    command = "" if started else options.shell(f"study run {shlex.quote(study)}", given) + how
    if workers == "0":
        return start_for_others(spec, runs, command, storage, as_json)
    run_and_report(spec, runs, count, command, as_json, storage=storage, cluster=cluster, together=together)


@command(
    study_app,
    "work",
    "cohort study work group_size --runs /shared/runs",
    "COHORT_STORAGE=postgresql://me:secret@db/cohort cohort study work group_size    (in a job of a scheduler)",
    "srun torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m cohort study work s",
)
def study_work(
    study: options.Started,
    storage: options.Storage = None,
    runs: options.Runs = options.RUNS,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Run trials of a started study, one at a time, until none is left: one worker, for your own scheduler.

    `cohort study run STUDY --workers 0` sets up a study without running trials; without --workers the command writes
    the report at the end. On SIGINT, SIGTERM, SIGUSR1 or SIGUSR2 the worker finishes its step, writes a checkpoint and
    returns the trial to the queue.

    Exit code 0 when no trial is left, 75 after SIGUSR1 or SIGUSR2 (the scheduler should start it again), 130 after the
    other two.
    """
    from ..console.progress import study_view
    from ..ground.stop import LEAVE
    from ..study.work import work

    options.use_store(tracking_uri)
    with study_view() as view:
        done = work(study, runs, storage=options.with_password(storage), on_status=view.update)
    status, counts = done.status, done.status.counts()
    if as_json:
        terminal.print_json({"study": status.name, "finished": status.finished, "counts": counts})
    else:
        ended = ", ".join(f"{count} {state}" for state, count in counts.items())
        if status.finished:
            how = f"cohort study run {shlex.quote(study)} --runs {shlex.quote(str(runs))}"
            terminal.say(f"No trial of '{study}' is left: {ended}. To write its report: {how}")
        elif done.signals:
            terminal.say(f"Stopped on request; another worker can continue its trial. '{study}': {ended}.")
        else:
            terminal.say(f"No trial of '{study}' is left for this worker; others run the rest: {ended}.")
    if done.signals and not status.finished:
        raise typer.Exit(AGAIN if set(done.signals) & set(LEAVE) else 130)


@command(study_app, "list", "cohort study list", "cohort study list --runs /data/runs --json")
def study_list(runs: options.Runs = options.RUNS, as_json: options.Json = False) -> None:
    """List the shipped studies and those in the runs folder."""
    from ..spec.load import shipped_studies
    from ..spec.raw import read_yaml

    shipped = shipped_studies()
    started = {file.parent.name: file for file in sorted((runs / "studies").glob("*/study.json"))}
    documents = []
    for name, file in {**shipped, **started}.items():
        try:
            question = " ".join(str((read_yaml(file) or {}).get("question", "")).split())
        except (ValueError, AttributeError) as error:
            question = f"not readable: {error}"
        places = {"shipped": shipped, "in the runs folder": started}
        where = " and ".join(place for place, names in places.items() if name in names)
        documents.append({"name": name, "where": where, "question": question})
    if as_json:
        terminal.print_json(documents)
        return
    rows = [(d["name"], d["where"], d["question"]) for d in documents]
    terminal.show_table("", ["study", "where", "question"], rows)


@command(study_app, "show", "cohort study show quickstart", "cohort study show my_study.yaml --set steps=20 --json")
def study_show(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A shipped study, a study file, or a started study.")],
    sets: options.Sets = None,
    seeds: options.Seeds = None,
    runs: options.Runs = options.RUNS,
    as_json: options.Json = False,
) -> None:
    """Show a study's question, arms, resolved run (defaults included) and budget without running it."""
    from ..study.estimates import planned

    spec = (None if sets or seeds else started_study(study, runs)) or _load_study(study, sets, seeds)
    arms = []
    for arm in spec.design_arms():
        run = arm.spec
        rollouts = run.steps * run.rollouts_per_step
        arms.append({"arm": arm.label, "overrides": dict(arm.overrides), "steps": run.steps, "rollouts": rollouts})
    base = spec.checked_arms()[0].spec
    trials = sum(count for _, count in planned(spec))
    budget = sum(count * arm.spec.steps * arm.spec.rollouts_per_step for arm, count in planned(spec))
    if as_json:
        document = spec.model_dump(mode="json")
        resolved = base.model_dump(mode="json")
        total = {"trials": trials, "rollouts": budget}
        terminal.print_json({**document, "resolved_run": resolved, "design_arms": arms, "budget": total})
    else:
        studies.show_study(spec, base, arms, trials, budget)


@command(study_app, "status", "cohort study status quickstart", "cohort study status quickstart --json")
def study_status(
    study: options.Started,
    storage: options.Storage = None,
    runs: options.Runs = options.RUNS,
    as_json: options.Json = False,
) -> None:
    """Show the progress of each trial of a study, its cost so far and the time left.

    Exit code 0 only if all trials are complete, except those of stopped arms.
    """
    from ..study.estimates import cost, remaining_seconds
    from ..study.queue import open_queue

    status = open_queue(study, runs.resolve(), options.with_password(storage)).status()
    spent, remaining = cost(status), remaining_seconds(status)
    if as_json:
        document = {"study": status.name, "question": status.question, "counts": status.counts()}
        estimates = {"cost": spent, "remaining_seconds": remaining}
        terminal.print_json({**document, **estimates, "trials": status.trials})
    else:
        studies.show_status(status)
        studies.show_logs(status, runs)
        terminal.say(f"Cost so far: {studies.cost_text(spent)}")
        if not status.finished:
            terminal.say(f"Time left with the current workers: {terminal.duration(remaining)}")
    raise typer.Exit(0 if status.finished and status.all_valid else 1)


@command(study_app, "watch", "cohort study watch quickstart", "cohort study watch group_size --runs /data/runs")
def study_watch(study: options.Started, storage: options.Storage = None, runs: options.Runs = options.RUNS) -> None:
    """Show a running study, one line per arm, until Ctrl-C. It changes nothing.

    Prints only once if stdout is not a terminal or nothing is left to run.
    """
    from ..console.watch import watch
    from ..study.queue import open_queue

    queue = open_queue(study, runs.resolve(), options.with_password(storage))
    with suppress(KeyboardInterrupt):
        watch(queue.status, queue.plan.study.metric)


@command(study_app, "stop", "cohort study stop compare_algorithms dapo", "cohort study stop group_size group_size=2")
def study_stop(
    study: options.Started, arm: options.Arm, storage: options.Storage = None, runs: options.Runs = options.RUNS
) -> None:
    """Stop an arm while its study runs: each of its trials finishes its step and writes a checkpoint.

    The trials then wait for `cohort study resume`, and the study ends without them.
    """
    from ..study.control import stop_arm

    new = stop_arm(study, runs, arm, options.with_password(storage))
    words = (
        "stops: its trials finish their step and write a checkpoint. To continue it"
        if new
        else "is already stopped. To continue it"
    )
    terminal.say(f"{arm} {words}: cohort study resume {shlex.quote(study)} {shlex.quote(arm)}")


@command(study_app, "resume", "cohort study resume compare_algorithms dapo")
def study_resume(
    study: options.Started, arm: options.Arm, storage: options.Storage = None, runs: options.Runs = options.RUNS
) -> None:
    """Continue a stopped arm as if it had never stopped; start the study again if it has ended."""
    from ..study.control import resume_arm

    new = resume_arm(study, runs, arm, options.with_password(storage))
    words = "continues as soon as a worker is free" if new else "was not stopped, so nothing changed"
    terminal.say(f"{arm} {words}. If the study has ended, run its command again.")


@command(
    study_app,
    "clone",
    "cohort study clone compare_algorithms grpo --set algorithm.kl_beta=0.1",
    "cohort study clone compare_algorithms grpo --set optimizer.learning_rate=3e-4 --warm",
)
def study_clone(
    study: options.Started,
    arm: options.Arm,
    sets: options.Sets = None,
    warm: Annotated[
        bool, typer.Option("--warm", help="Start from the newest checkpoints of the arm, not from the beginning.")
    ] = False,
    storage: options.Storage = None,
    runs: options.Runs = options.RUNS,
) -> None:
    """Add an exploratory arm to a study while it runs: another arm with other settings, and all its seeds.

    It was chosen after seeing results, so the report shows it separately, and no comparison or test includes it.
    """
    from ..spec.raw import parse_overrides
    from ..study.control import clone_arm

    clone = clone_arm(study, runs, arm, parse_overrides(sets or ()), warm=warm, storage=options.with_password(storage))
    left = ", ".join(f"seed {seed} from step {step}" for seed, step in zip(clone.seeds, clone.steps, strict=True))
    terminal.say(f"New arm: {clone.label}{f' ({left})' if warm else ''}")
    terminal.say("It runs as soon as a worker is free. If the study has ended, run its command again.")


def start_for_others(study: StudySpec, runs: Path, command: str, storage: str | None, as_json: bool) -> None:
    """Set up a study whose trials the workers of other commands run."""
    from ..study.runner import start_study

    start_study(study, runs, command=command, storage=storage)
    how = f"cohort study work {shlex.quote(study.name)} --runs {shlex.quote(str(runs))}"
    if as_json:
        terminal.print_json({"study": study.name, "work": how})
    else:
        terminal.say(f"'{study.name}' is set up. Start any number of workers with: {how}")


def run_to_report(
    study: StudySpec,
    runs: Path,
    workers: int | None,
    command: str,
    *,
    storage: str | None = None,
    cluster: Cluster | Slurm | None = None,
    together: bool | None = None,
) -> tuple[StudyStatus, StudyRecord, Any]:
    """Run a study and show its progress; returns its status, its record and its ReportFiles.

    The recorded command includes the number of workers, because it sets their threads, which affect the last bits of
    results. An empty command keeps the recorded one. KeyboardInterrupt if the study was asked to stop.
    """
    from ..api.report import Refresher, write_report
    from ..console.progress import phase_bar, study_view
    from ..devices.device import resolve_device
    from ..study.launchers.local import default_workers
    from ..study.runner import run_study

    if workers is None and cluster is None:
        workers = default_workers(study.devices)
    if workers is not None and command:
        command = f"{command} --workers {workers}"
    if cluster is None:
        for arm in study.checked_arms():
            resolve_device(arm.spec.device)
    with study_view() as view, Refresher(study.name, runs) as refresher:

        def show(status: StudyStatus) -> None:
            view.update(status)
            refresher.tick()

        status = run_study(
            study,
            runs,
            workers=workers,
            command=command,
            on_status=show,
            storage=storage,
            cluster=cluster,
            together=together,
        )
    if not status.finished:  # asked to stop
        raise KeyboardInterrupt
    with phase_bar(f"report of {study.name}", REPORTING):
        return status, *write_report(study.name, runs)


def run_and_report(
    study: StudySpec,
    runs: Path,
    workers: int | None,
    command: str,
    as_json: bool,
    *,
    storage: str | None = None,
    cluster: Cluster | Slurm | None = None,
    together: bool | None = None,
) -> None:
    """Run a study, write its report and show both; the exit code says whether all trials are valid."""
    status, record, files = run_to_report(
        study, runs, workers, command, storage=storage, cluster=cluster, together=together
    )
    elsewhere = ran_elsewhere(study, status, record)
    if elsewhere:
        terminal.say(
            f"This host's report lacks {elsewhere} of {len(status.trials)} trials, because other "
            "hosts ran them. `cohort study status` shows all trials.",
            stderr=True,
        )
    if as_json:
        paths = {"report": files.html, "csv": files.csv, "markdown": files.markdown}
        document = {"study": study.name, "answer": files.answer, **paths, "command": record.command}
        terminal.print_json({**document, "counts": status.counts(), "trials": status.trials})
    else:
        studies.show_results(record)
        say_without_result(status, runs)
        terminal.say(f"\n{files.answer}\n")
        terminal.say(f"Report: {files.html}")
        terminal.say(f"Browse: cohort ui --runs {shlex.quote(str(runs))}")
        terminal.say(f"Reproduce: {record.command}")
        if len(threads := {number for trial in record.trials for number in trial.threads}) > 1:
            terminal.say(f"The number of workers changed: a trial had {' or '.join(sorted(threads))} threads.")
    unreadable = any(trial.state == "failed" for trial in record.trials)  # although the queue may count it as complete
    raise typer.Exit(0 if status.all_valid and not unreadable else 1)


def say_without_result(status: StudyStatus, runs: Path) -> None:
    """Print every trial that is not complete, with the reason and its logs."""
    for trial in status.trials:
        if trial.state != "complete":
            reason = f" ({trial.reason})" if trial.reason else ""
            terminal.say(f"{trial.arm} | seed {trial.seed}: {trial.state}{reason}")
    studies.show_logs(status, runs)


def ran_elsewhere(study: StudySpec, status: StudyStatus, record: StudyRecord) -> int:
    """Number of compared trials that are neither in the record nor in a folder here, and were not stopped; tuning
    trials do not count."""
    compared, known = study.arm_labels(), {(trial.arm, trial.seed) for trial in record.trials}
    return len(
        [
            trial
            for trial in status.trials
            if not trial.held
            and (not compared or trial.arm in compared)
            and (trial.arm, trial.seed) not in known
            and not trial.directory.exists()
        ]
    )


def started_study(name: str, runs: Path, interleave: int | None = None) -> StudySpec | None:
    """A study of the runs folder with the settings that it was started with; None without one."""
    from ..ground.files import read_json
    from ..record.study import study_settings
    from ..spec.study import parse_study

    file = runs / "studies" / name / "study.json"
    if not file.is_file():
        return None
    raw = study_settings(read_json(file))
    return parse_study(raw if interleave is None else {**raw, "interleave": interleave}, str(file))


def _cluster(launcher: str, address: str | None, num_cpus: float, num_gpus: float | None) -> Cluster | None:
    """The Ray cluster that the options name; None for the local launcher. ValueError if Ray is not installed."""
    from ..study.launchers.ray import Cluster, check_ray

    if launcher not in ("local", "ray"):
        raise ValueError(f"--launcher must be local, ray or slurm, got '{launcher}'")
    if launcher == "local":
        if address is not None:
            raise ValueError("--ray-address names a Ray cluster; add --launcher ray")
        return None
    check_ray()
    return Cluster(address, num_cpus, num_gpus)


def _slurm(study: StudySpec, given: Mapping[str, Any]) -> Slurm:
    """The resources of a study's jobs. ValueError for options that sbatch would refuse, or without submitit."""
    from ..study.launchers.slurm import Slurm, check_submitit, sbatch_parameters, time_limit

    check_submitit()
    gpus = given["--slurm-gpus"]
    if gpus is None:
        gpus = max((arm.spec.devices for arm in study.checked_arms() if arm.spec.device != "cpu"), default=0)
    return Slurm(
        partition=given["--slurm-partition"],
        minutes=time_limit(given["--slurm-time"] or "4:00:00"),
        num_cpus=given["--slurm-cpus"],
        num_gpus=gpus,
        parameters=sbatch_parameters(given["--slurm-set"] or []),
    )


@uncollected()
def show_dry_run(
    study: StudySpec, runs: Path, workers: int | None, storage: str | None, together: bool | None, as_json: bool
) -> None:
    from ..console.progress import phase_bar

    with phase_bar(f"dry run of {study.name}", "settings, models, data, memory and disk"):
        from ..study.runner import dry_run

        document = dry_run(study, runs, workers=workers, storage=storage, together=together)
    if as_json:
        terminal.print_json({"study": study.name, "question": study.question, **document})
    else:
        studies.show_dry_run(study.name, study.question, document)


def _load_study(
    name: str, sets: list[str] | None, seeds: str | None, rename: str | None = None, interleave: int | None = None
) -> StudySpec:
    from ..spec.load import load_study

    overrides = list(sets or ())
    if seeds is not None:
        overrides.append(f"seeds={json.dumps(options.integers(seeds))}")
    if rename is not None:
        overrides.append(f"name={json.dumps(rename)}")
    if interleave is not None:
        overrides.append(f"interleave={interleave}")
    return load_study(name, overrides)
