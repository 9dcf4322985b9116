"""`cohort study` and `cohort compare`."""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path
from typing import Annotated

import typer

from .. import api
from ..console import terminal, views
from . import options
from .commands import command

AGAIN = 75  # exit code of a worker that its scheduler should start again: EX_TEMPFAIL of sysexits.h


@command(
    "study run",
    "cohort study run quickstart",
    "cohort study run my_study.yaml --workers 2 --seeds 0,1,2",
    "cohort study run group_size --set model=Qwen/Qwen2.5-0.5B --set task=gsm8k --name group_size_qwen",
    "cohort study run group_size --dry-run",
)
def study_run(
    study: options.Study,
    workers: options.Workers = "auto",
    sets: options.Sets = None,
    seeds: options.Seeds = None,
    name: options.Name = None,
    storage: options.Storage = None,
    dry_run: options.DryRun = False,
    runs: options.Runs = options.RUNS,
    mirror: options.Mirror = None,
    as_json: options.Json = False,
) -> None:
    """Run every arm once with every seed, then write the report; the same command continues a stopped study.

    Without --set, --seeds and --name, a study in the runs folder continues with the settings that it was started with.
    --workers 0 only sets up the study.

    Hosts that share only a database run the same command with the same --storage; each takes waiting trials. If a host
    dies, another host starts its trial from the beginning (it has no copy of the folder); the result is the same.
    """
    given = list(sets or ())
    given += [] if seeds is None else [f"seeds={options.integers(seeds)}"]
    found = api.study_of(study, given + ([] if name is None else [f"name={json.dumps(name)}"]), runs)
    if not found.command:
        terminal.say(f"Continuing '{study}' of {runs} with the settings that it was started with.", stderr=True)
    count = None if workers == "0" else options.num_workers(workers)
    terminal.say("Checking the study's settings, models, data, memory and disk ...", stderr=True)
    if dry_run or workers != "0":
        return _run(found, runs, count, as_json, dry_run, storage)
    work = api.start(found, runs, storage)
    if as_json:
        terminal.print_json({"study": found.name, "work": work})
    else:
        terminal.say(f"'{found.name}' is set up. Start any number of workers with: {work}")


@command(
    "study work",
    "cohort study work group_size --runs /shared/runs",
    "cohort study work group_size --storage URL",
    "srun torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m cohort study work s",
)
def study_work(
    study: options.Started,
    storage: options.Storage = None,
    runs: options.Runs = options.RUNS,
    mirror: options.Mirror = None,
    as_json: options.Json = False,
) -> None:
    """Run trials of a started study, one at a time, until none is left: one worker, for your own scheduler.

    `cohort study run STUDY --workers 0` sets up a study without running trials; without --workers the command writes
    the report at the end. On SIGINT, SIGTERM, SIGUSR1 or SIGUSR2 the worker finishes its step, writes a checkpoint and
    returns the trial to the queue.

    Exit code 0 when no trial is left, 75 after SIGUSR1 or SIGUSR2 (the scheduler should start it again), 130 after the
    other two, 2 if this machine cannot run the study.
    """
    from ..console.progress import study_view

    with study_view() as view:
        status, signals = api.work(study, runs, storage=storage, on_status=view)
    counts = status.counts()
    if as_json:
        terminal.print_json({"study": status.name, "finished": status.finished, "counts": counts})
    else:
        ended = ", ".join(f"{count} {state}" for state, count in counts.items())
        if status.finished:
            how = f"cohort study run {shlex.quote(study)} --runs {shlex.quote(str(runs))}"
            terminal.say(f"No trial of '{study}' is left: {ended}. To write its report: {how}")
        elif signals:
            terminal.say(f"Stopped on request; another worker can continue its trial. '{study}': {ended}.")
        else:
            terminal.say(f"No trial of '{study}' is left for this worker; others run the rest: {ended}.")
    if signals and not status.finished:
        raise typer.Exit(AGAIN if {signal.SIGUSR1, signal.SIGUSR2} & {*signals} else 130)


@command(
    "study show",
    "cohort study show quickstart",
    "cohort study show my_study.yaml --set @a100.yaml --json",
)
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
        views.show_study(found.spec, document)


@command("study status", "cohort study status quickstart --json", "cohort study status group_size --watch")
def study_status(
    study: options.Started,
    watch: Annotated[bool, typer.Option("--watch", help="Follow it, one line per arm, until Ctrl-C.")] = False,
    storage: options.Storage = None,
    runs: options.Runs = options.RUNS,
    as_json: options.Json = False,
) -> None:
    """Show the progress of each trial of a study, its cost so far and the time left.

    Exit code 0 only if all trials are complete; trials of stopped arms do not count. --watch prints only once if stdout
    is not a terminal or nothing is left to run.
    """
    if watch:
        return api.watch(study, runs, storage)
    status = api.study_status(study, runs, storage)
    spent = api.cost(status)
    if as_json:
        document = {"study": status.name, "question": status.question, "counts": status.counts()}
        estimates = {"cost": spent, "remaining_seconds": status.left}
        terminal.print_json({**document, **estimates, "trials": status.trials})
    else:
        views.show_status(status, runs)
        gpu = f", {terminal.duration(spent['gpu_seconds'])} of them with a GPU" if spent["gpu_seconds"] else ""
        tokens = f"{spent['generated_tokens']:,.0f} tokens in ended trials"
        terminal.say(f"Cost so far: {terminal.duration(spent['trial_seconds'])} of trials{gpu}; {tokens}")
        if not status.finished:
            terminal.say(f"Time left: {views.time_left(status.left, status.workers, status.measured)}")
    raise typer.Exit(0 if status.finished and status.all_valid else 1)


@command("study stop", "cohort study stop compare_algorithms dapo", "cohort study stop group_size group_size=2")
def study_stop(
    study: options.Started, arm: options.Arm, storage: options.Storage = None, runs: options.Runs = options.RUNS
) -> None:
    """Stop an arm while its study runs: each of its trials finishes its step and writes a checkpoint.

    The trials then wait for `cohort study resume`, and the study ends without them.
    """
    new = api.hold_arm(study, runs, arm, held=True, storage=storage)
    words = "stops: its trials finish their step and write a checkpoint." if new else "is already stopped."
    terminal.say(f"{arm} {words} To continue it: cohort study resume {shlex.quote(study)} {shlex.quote(arm)}")


@command("study resume", "cohort study resume compare_algorithms dapo")
def study_resume(
    study: options.Started, arm: options.Arm, storage: options.Storage = None, runs: options.Runs = options.RUNS
) -> None:
    """Continue a stopped arm as if it had never stopped; start the study again if it has ended."""
    new = api.hold_arm(study, runs, arm, held=False, storage=storage)
    words = "continues as soon as a worker is free" if new else "was not stopped, so nothing changed"
    terminal.say(f"{arm} {words}. If the study has ended, run its command again.")


@command(
    "study rm",
    "cohort study rm quickstart --yes",
    "cohort study rm compare_algorithms 'clone 1 of grpo: algorithm.kl_beta=0.1'",
)
def study_rm(
    study: options.Started,
    arm: Annotated[str | None, typer.Argument(metavar="[ARM]", help="Take back only this arm or clone.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    storage: options.Storage = None,
    runs: options.Runs = options.RUNS,
) -> None:
    """Delete a study: its trials, checkpoints and report, and its runs in MLflow. It cannot be brought back.

    With ARM, take back a clone or an arm that has not begun; the study's record and report say so.
    """
    if arm is not None:
        new = api.drop_arm(study, runs, arm, storage)
        words = "is taken back: none of its trials will run" if new else "was already taken back"
        return terminal.say(f"{arm} {words}.")
    counts = ", ".join(f"{n} {state}" for state, n in api.study_status(study, runs, storage).counts().items())
    if yes or typer.confirm(f"Delete '{study}' of {runs} for good ({counts})?"):
        api.remove_study(study, runs, storage)
        terminal.say(f"'{study}' is deleted.")
    else:
        terminal.say("Nothing was deleted.")


@command(
    "study clone",
    "cohort study clone compare_algorithms grpo --set algorithm.kl_beta=0.1",
    "cohort study clone compare_algorithms grpo --set optimizer.learning_rate=3e-4 --warm",
)
def study_clone(
    study: options.Started,
    arm: options.Arm,
    sets: options.Sets = None,
    warm: Annotated[bool, typer.Option("--warm", help="From the arm's newest checkpoints, not the beginning.")] = False,
    storage: options.Storage = None,
    runs: options.Runs = options.RUNS,
) -> None:
    """Add an exploratory arm to a study while it runs: another arm with other settings, and all its seeds.

    It was chosen after seeing results, so the report shows it separately, and no comparison or test includes it.
    """
    from ..settings.raw import parse_overrides

    clone = api.clone_arm(study, runs, arm, parse_overrides(sets or ()), warm=warm, storage=storage)
    steps = ", ".join(f"seed {seed} from step {step}" for seed, step in zip(clone.seeds, clone.steps, strict=True))
    terminal.say(f"New arm: {clone.label}{f' ({steps})' if warm else ''}")
    terminal.say("It runs as soon as a worker is free. If the study has ended, run its command again.")


@command(
    "compare",
    "cohort compare --algorithms ppo,grpo --task arithmetic --set steps=50",
    "cohort compare --algorithms ppo,grpo --task gsm8k --set task.path=data/gsm8k --set steps=5 --dry-run",
    "cohort compare --algorithms grpo,ppo --task gsm8k --model Qwen/Qwen2.5-0.5B --seeds 0,1",
    "cohort compare --algorithms grpo,ppo --task arithmetic --tune 6",
    "cohort compare --algorithms grpo,dapo --task arithmetic --controls random,frozen",
)
def compare(
    algorithms: Annotated[str, typer.Option(metavar="A,B,...", help="Algorithms; the first is the baseline.")],
    task: Annotated[str, typer.Option(metavar="A,B,...", help="Tasks by name; every algorithm trains on each.")],
    model: Annotated[str, typer.Option(help="'tiny', a Hub id or a local folder.")] = "tiny",
    seeds: options.Seeds = None,
    tune: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="First tune each algorithm's learning rate over N settings.")
    ] = None,
    controls: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Control arms: random, format_only, inverted, shuffled_gold, frozen."),
    ] = None,
    sets: options.Sets = None,
    name: options.Name = None,
    workers: options.Workers = "auto",
    dry_run: options.DryRun = False,
    runs: options.Runs = options.RUNS,
    mirror: options.Mirror = None,
    as_json: options.Json = False,
) -> None:
    """Run one study with an arm per algorithm (and task) and all else equal.

    The model 'tiny' gets a supervised cold start of 400 steps (--set cold_start.steps=N for another). With --tune each
    algorithm first gets the same search over its learning rate (a fifth to five times the run's own), judged on the
    validation split with a separate seed; a study file can search more settings. --controls adds arms of the first
    algorithm with another reward (or no learning: frozen), and the report says which gains they reproduce.

    Any other model gets lower learning rates (1e-6; 1e-5 with --set lora.rank=N and for a critic) and, on a GPU,
    autocast and the engine vllm if it is installed. A line lists these settings before the run; --set overrides them.
    """
    count = options.num_workers(workers)
    study = api.comparison(
        options.words(algorithms), options.words(task), model, seeds=options.integers(seeds or "0,1,2"), tune=tune,
        controls=options.words(controls), settings=sets or (), name=name,
    )  # fmt: skip
    _run(study, runs, count, as_json, dry_run)


def _run(
    study: api.Study,
    runs: Path,
    workers: int | None,
    as_json: bool,
    dry_run: bool,
    storage: str | None = None,
) -> None:
    """Run a study and show its report (the exit code says whether all trials are valid), or with `dry_run` its cost."""
    if dry_run:
        document = api.dry_run(study, runs, workers, storage)
        if as_json:
            return terminal.print_json({"study": study.name, "question": study.question, **document})
        return views.show_dry_run(study.name, study.question, document)
    ended = api.run_to_report(study, runs, workers, storage=storage)
    status, record, files = ended.status, ended.record, ended.files
    if as_json:
        paths = {"report": files.html, "csv": files.csv, "markdown": files.markdown}
        document = {"study": study.name, "answer": files.answer, **paths, "command": record.command}
        terminal.print_json({**document, "counts": status.counts(), "trials": status.trials})
    else:
        views.show_results(record)
        api.say_without_result(status, runs)
        terminal.say(f"\n{files.answer}\n")
        terminal.say(f"Report: {files.html}")
        terminal.say(f"Browse: cohort ui --runs {shlex.quote(str(runs))}")
        terminal.say(f"Reproduce: {record.command}")
        if len(threads := {number for trial in record.trials for number in trial.threads}) > 1:
            terminal.say(f"The number of workers changed: a trial had {' or '.join(sorted(threads))} threads.")
    raise typer.Exit(0 if ended.all_valid else 1)
