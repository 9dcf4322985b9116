"""`cohort study`."""

from __future__ import annotations

import dataclasses
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import api
from ..console import terminal
from . import options
from .commands import command, study_app, uncollected
from .views import studies

if TYPE_CHECKING:
    from ..study.launchers.ray import Cluster
    from ..study.launchers.slurm import Slurm

AGAIN = 75  # exit code of a worker that its scheduler should start again: EX_TEMPFAIL of sysexits.h


@command(
    study_app,
    "run",
    "cohort study run quickstart",
    "cohort study run my_study.yaml --workers 2 --seeds 0,1,2",
    "cohort study run group_size --set model=Qwen/Qwen2.5-0.5B --set task=gsm8k --name group_size_qwen",
    "cohort study run group_size --dry-run",
    "RAY_ADDRESS=10.0.0.1:6379 cohort study run group_size --launcher ray --runs /shared/runs",
    "cohort study run group_size --launcher slurm --workers 4 --slurm-set partition=gpu --runs /shared/runs",
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
    storage: options.Storage = None,
    launcher: Annotated[
        str,
        typer.Option(
            metavar="local|ray|slurm", help="Where the workers run; ray: the cluster of RAY_ADDRESS, or a new one here."
        ),
    ] = "local",
    cpus: Annotated[float | None, typer.Option(min=0, metavar="N", help="Cores per worker on Ray or SLURM.")] = None,
    gpus: Annotated[
        float | None,
        typer.Option(min=0, metavar="N", help="GPUs per worker on Ray or SLURM; by default as many as a trial has."),
    ] = None,
    slurm_set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Option of sbatch: partition=gpu, account=lab, time=4:00:00 (the default), ...; repeatable.",
        ),
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

    Without --set, --seeds and --name, a study in the runs folder continues with the settings that it was started with;
    --set interleave=STEPS alone may change it.

    Hosts that share only a database run the same command with the same --storage; each takes waiting trials. If a host
    dies, another host starts its trial from the beginning (it has no copy of the folder); the result is the same.
    """
    terminal.say_if_slow("Checking the study's settings, models, data, memory and disk ...")
    options.use_store(tracking_uri)
    found = api.study_of(study, options.of_study(sets, seeds, name), runs)
    if not found.command:
        terminal.say(f"Continuing '{study}' of {runs} with the settings that it was started with.", stderr=True)
    count = None if workers == "0" else options.num_workers(workers)
    cluster = api.launcher(launcher, found, cpus, gpus, slurm_set or ())
    if cluster and workers == "0":
        raise ValueError("--workers 0 starts no worker, so --launcher has nothing to do; leave one of them out")
    if dry_run:
        return show_dry_run(found, runs, count, as_json, storage, together)
    if found.command:
        placed = {"--launcher": launcher, "--cpus": cpus, "--gpus": gpus, "--slurm-set": slurm_set} if cluster else {}
        how = {None: "", True: " --together", False: " --apart"}[together]
        found = dataclasses.replace(found, command=options.shell(found.command, placed) + how)
    if workers != "0":
        return run_and_show(found, runs, count, as_json, storage, cluster, together)
    work = api.start(found, runs, storage)
    if as_json:
        terminal.print_json({"study": found.name, "work": work})
    else:
        terminal.say(f"'{found.name}' is set up. Start any number of workers with: {work}")


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

    options.use_store(tracking_uri)
    with study_view() as view:
        done = api.work(study, runs, storage=options.with_password(storage), on_status=view.update)
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
    documents = api.list_studies(runs)
    if as_json:
        return terminal.print_json(documents)
    rows = [(d["name"], d["where"], d["question"]) for d in documents]
    terminal.show_table("", ["study", "where", "question"], rows)


@command(study_app, "show", "cohort study show quickstart", "cohort study show my_study.yaml --set steps=20 --json")
def study_show(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A shipped study, a study file, or a started study.")],
    sets: options.Sets = None,
    runs: options.Runs = options.RUNS,
    as_json: options.Json = False,
) -> None:
    """Show a study's question, arms, resolved run (defaults included) and budget without running it."""
    found = api.study_of(study, sets or (), runs)
    document = api.show(found)
    if as_json:
        terminal.print_json(document)
    else:
        studies.show_study(found.spec, document)


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
    status = api.study_status(study, runs, options.with_password(storage))
    spent, remaining = api.cost(status), api.remaining_seconds(status)
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

    queue = api.open_queue(study, runs.resolve(), options.with_password(storage))
    with suppress(KeyboardInterrupt):
        watch(queue.status, queue.plan.study.metric)


@command(study_app, "stop", "cohort study stop compare_algorithms dapo", "cohort study stop group_size group_size=2")
def study_stop(
    study: options.Started, arm: options.Arm, storage: options.Storage = None, runs: options.Runs = options.RUNS
) -> None:
    """Stop an arm while its study runs: each of its trials finishes its step and writes a checkpoint.

    The trials then wait for `cohort study resume`, and the study ends without them.
    """
    new = api.stop_arm(study, runs, arm, options.with_password(storage))
    words = "stops: its trials finish their step and write a checkpoint." if new else "is already stopped."
    terminal.say(f"{arm} {words} To continue it: cohort study resume {shlex.quote(study)} {shlex.quote(arm)}")


@command(study_app, "resume", "cohort study resume compare_algorithms dapo")
def study_resume(
    study: options.Started, arm: options.Arm, storage: options.Storage = None, runs: options.Runs = options.RUNS
) -> None:
    """Continue a stopped arm as if it had never stopped; start the study again if it has ended."""
    new = api.resume_arm(study, runs, arm, options.with_password(storage))
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

    changes = parse_overrides(sets or ())
    clone = api.clone_arm(study, runs, arm, changes, warm=warm, storage=options.with_password(storage))
    left = ", ".join(f"seed {seed} from step {step}" for seed, step in zip(clone.seeds, clone.steps, strict=True))
    terminal.say(f"New arm: {clone.label}{f' ({left})' if warm else ''}")
    terminal.say("It runs as soon as a worker is free. If the study has ended, run its command again.")


def run_and_show(
    study: api.Study,
    runs: Path,
    workers: int | None,
    as_json: bool,
    storage: str | None = None,
    cluster: Cluster | Slurm | None = None,
    together: bool | None = None,
) -> None:
    """Run a study and show its report; the exit code says whether all trials are valid."""
    storage = options.with_password(storage)
    ended = api.run_to_report(study, runs, workers, storage=storage, cluster=cluster, together=together)
    status, record, files = ended.status, ended.record, ended.files
    if ended.elsewhere:
        terminal.say(
            f"This host's report lacks {ended.elsewhere} of {len(status.trials)} trials, because other "
            "hosts ran them. `cohort study status` shows all trials.",
            stderr=True,
        )
    if as_json:
        paths = {"report": files.html, "csv": files.csv, "markdown": files.markdown}
        document = {"study": study.name, "answer": files.answer, **paths, "command": record.command}
        terminal.print_json({**document, "counts": status.counts(), "trials": status.trials})
    else:
        studies.show_results(record)
        api.say_without_result(status, runs)
        terminal.say(f"\n{files.answer}\n")
        terminal.say(f"Report: {files.html}")
        terminal.say(f"Browse: cohort ui --runs {shlex.quote(str(runs))}")
        terminal.say(f"Reproduce: {record.command}")
        if len(threads := {number for trial in record.trials for number in trial.threads}) > 1:
            terminal.say(f"The number of workers changed: a trial had {' or '.join(sorted(threads))} threads.")
    raise typer.Exit(0 if ended.all_valid else 1)


@uncollected()
def show_dry_run(
    study: api.Study,
    runs: Path,
    workers: int | None,
    as_json: bool,
    storage: str | None = None,
    together: bool | None = None,
) -> None:
    document = api.dry_run(study, runs, workers, options.with_password(storage), together)
    if as_json:
        terminal.print_json({"study": study.name, "question": study.question, **document})
    else:
        studies.show_dry_run(study.name, study.question, document)
