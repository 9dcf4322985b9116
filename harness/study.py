"""Runs a study: every (arm, seed) exactly once, by worker processes that may die at any moment.

`_queue.py` keeps who runs what and how it ended; `_workers.py` starts the processes. What runs here is checked before
anything is written, and the report is written at the end.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from harness import tracking
from harness._files import file_lock, write_json
from harness._queue import ENDED, Claim, Outcome, Plan, Queue, StudyStatus
from harness._ray import Cluster, RayPool
from harness._storage import Storage, StorageUnavailable, open_storage
from harness._workers import WorkerPool, usable_cores, usable_gpus
from harness.plugins import nearest
from harness.spec import RunSpec, SpecError, StudySpec, parse_study
from harness.types import Split

EXECUTE = "harness.train:train"
ORPHAN_SECONDS = 120.0  # how long a worker whose parent died may take to stop after its current step
POLL_SECONDS = 0.5
MAX_WAIT_SECONDS = 15.0  # between attempts to reach a storage
STORAGE = "COHORT_STORAGE"  # environment variable with the storage's URL

R = TypeVar("R")
log = logging.getLogger(__name__)


def run_study(
    study: StudySpec,
    runs: Path,
    *,
    workers: int | None,
    command: str,
    on_status: Callable[[StudyStatus], None] | None = None,
    report: bool = True,
    execute: str = EXECUTE,
    storage: str | None = None,
    cluster: Cluster | None = None,
) -> StudyStatus:
    """Run what the study still lacks with `workers` processes, write the report, and return what was reached.

    Ctrl-C (or SIGTERM) lets each worker finish its step and write a checkpoint; a second one stops at once. Bad input
    raises ValueError before anything is written. `execute` names the function that runs a trial (`module:function`,
    called as `harness.train.train`), `storage` where the queue lives (`_storage.open_storage`),
    `cluster` the Ray cluster that runs the workers, instead of this machine.
    """
    runs = runs.resolve()
    plan = Plan(study, runs)
    queue = Queue(plan, open_storage(plan.folder, study.name, storage))
    with queue.storage.errors():
        queue.storage.check()
    _validate(study, plan, runs, workers, execute)
    digest = study.digest()
    _check_unchanged(study, digest, queue.storage)
    with _pool(study.name, plan, execute, workers, storage, cluster) as pool:
        with queue.storage.lock():
            _check_unchanged(study, digest, queue.storage)
            parent_run_id = tracking.open_study(runs, study, command)
            document = {"digest": digest, **study.model_dump(mode="json")}
            queue.storage.write_document(document)
            write_json(plan.folder / "study.json", document)  # what is here is listed here, wherever the queue lives
            queue.retry_failed()
        with pool.signals():
            status = _watch(pool, queue, on_status)
    for trial in status.trials:
        if trial.state != "running" and trial.directory.exists():  # other hosts have run the others
            tracking.replay(runs, trial.directory, parent_run_id)
    tracking.close_study(runs, parent_run_id, "complete" if status.finished else "stopped")
    if report:
        _write_report(study.name, runs)
    return status


def study_status(name: str, runs: Path, storage: str | None = None) -> StudyStatus:
    """What the study in the runs folder, or in the storage, has reached. ValueError for an unknown one."""
    return _open_queue(name, runs.resolve(), storage).status()


def dry_run(
    study: StudySpec, runs: Path, *, workers: int | None, execute: str = EXECUTE, storage: str | None = None
) -> dict[str, Any]:
    """What `run_study` would do and need, after all the checks that it makes; writes nothing.

    Adds to `_estimates.budget`: `memory`, the estimate of each arm that can be estimated here; `not_checked`, what only
    the machine that runs the study can say (its GPU, a model or data that are not here yet). SpecError for what no
    machine can run.
    """
    from harness._estimates import budget
    from harness.memory import judge

    runs = runs.resolve()
    plan = Plan(study, runs)
    queue = Queue(plan, open_storage(plan.folder, study.name, storage))
    with queue.storage.errors():
        queue.storage.check()
        _check_unchanged(study, study.digest(), queue.storage)
    specs = {arm: plan.spec((arm, study.seeds[0])) for arm in plan.arms}
    not_checked, memory = _not_here(specs.values()), {}
    if not not_checked:
        _validate(study, plan, runs, workers, execute)
        if execute == EXECUTE:
            memory = {arm: judge(spec) for arm, spec in specs.items() if spec.steps}
    elif not any(words.startswith("data") for words in not_checked):
        _validate(study, plan, runs, workers, execute="")  # all but what needs the model and the device
    return {**budget(plan, workers or default_workers()), "memory": memory, "not_checked": not_checked}


def _not_here(specs: Iterable[RunSpec]) -> list[str]:
    """What of the runs this machine lacks, in words: a device, a model, data, an engine."""
    from harness.model import check_model, resolve_device

    missing: dict[str, None] = {}
    for spec in specs:
        for subject, check in (
            (f"device '{spec.device}'", lambda spec=spec: resolve_device(spec.device)),
            (f"data of task '{spec.task.name}'", lambda spec=spec: spec.task.prompts("train")),
            (f"engine '{spec.engine.name}'", lambda spec=spec: spec.engine.check(spec.sampling_with_limit())),
        ):
            try:
                check()
            except (ValueError, OSError, ImportError) as error:
                missing[f"{subject}: {' '.join(str(error).split())}"] = None
        check_model(spec.model)
        if not _is_local(spec.model):
            missing[f"model '{spec.model}': it is not on this machine, so neither it nor its memory was checked"] = None
    return list(missing)


def _is_local(model: str) -> bool:
    """Whether a model is built in, a folder, or in the Hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    built_in = model == "tiny" or Path(model).expanduser().is_dir()
    return built_in or isinstance(try_to_load_from_cache(model, "config.json"), str)


def worker_main(
    name: str, runs: Path, *, parent: int | None = None, execute: str = EXECUTE, storage: str | None = None
) -> int:
    """Run trials of a started study until none is left or the process is told to stop; the exit status.

    `parent` is the process id of the study's own process: when it dies, the worker stops after its current step. While
    the storage cannot be reached the worker waits for it, also with the result of a trial.
    """
    runs = runs.resolve()
    stop = threading.Event()
    _stop_on_signal(stop)
    if parent is not None:
        threading.Thread(target=_watch_parent, args=(parent, stop), name="parent", daemon=True).start()
    queue = _patiently(lambda: _open_queue(name, runs, storage), stop)
    run_trial = _resolve(execute) if _patiently(queue.unfinished, stop) else None
    if run_trial is not None:
        _ensure_tracked(queue)
    while run_trial is not None and not stop.is_set():
        claim = _patiently(queue.claim, stop)
        if claim is not None:
            _run_claim(claim, queue, queue.plan, run_trial, stop)
        elif not _patiently(queue.unfinished, stop):
            break
        else:
            stop.wait(2 * POLL_SECONDS)  # a trial that another worker runs may still come back to the queue
    return 0


def default_workers() -> int:
    """One worker per GPU, or else one per core."""
    return len(usable_gpus()) or usable_cores()


def _run_claim(claim: Claim, queue: Queue, plan: Plan, run_trial: Callable[..., Any], stop: threading.Event) -> None:
    """Run a claimed trial to its end, whatever that is, and record it."""
    directory, metric = plan.directory(claim.key), plan.study.metric
    ended = tracking.read_result(directory)  # a worker that died just before it could record the end
    if ended is not None and ended["state"] in ("complete", "invalid"):
        metrics = {key: float(value) for key, value in ended["metrics"].items()}
        outcome = Outcome(ended["state"], ended["reason"], ended["summary"], metrics)
        _patiently(lambda: queue.finish(claim, _with_metric(outcome, metric)), stop)
        return
    arm, seed = claim.key
    run_log = tracking.RunLog.open(
        plan.runs,
        directory,
        plan.spec(claim.key),
        experiment=plan.study.name,
        run_name=f"{arm} | seed {seed}",
        parent_run_id=tracking.study_run_id(plan.runs, plan.study.name),
        tags={
            "cohort.kind": "trial",
            "cohort.study": plan.study.name,
            "cohort.arm": arm,
            "cohort.seed": str(seed),
            "cohort.factors": json.dumps(plan.arms[arm].levels),
        },
    )
    try:
        result = run_trial(plan.spec(claim.key), directory, run_log, cache=plan.runs / "cache", should_stop=stop.is_set)
        outcome = Outcome(result.state, result.reason, dict(result.summary), dict(run_log.latest))
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome("failed", traceback.format_exception_only(error)[-1].strip()[:500])
    outcome = _with_metric(outcome, metric)
    run_log.finish(outcome.state, outcome.reason, outcome.summary)  # pyright: ignore[reportArgumentType]
    _patiently(lambda: queue.finish(claim, outcome), stop)


def _patiently(operation: Callable[[], R], stop: threading.Event) -> R:
    """The operation's result, tried until the storage answers; StorageUnavailable only once `stop` is set."""
    wait = POLL_SECONDS
    while True:
        try:
            return operation()
        except StorageUnavailable as error:
            if stop.wait(wait):
                raise
            log.warning("%s; trying again", error)
            wait = min(2 * wait, MAX_WAIT_SECONDS)


def _ensure_tracked(queue: Queue) -> None:
    """Make the study's parent run on a host where only workers run, as a node of a cluster."""
    plan = queue.plan
    try:
        tracking.study_run_id(plan.runs, plan.study.name)
    except FileNotFoundError:
        with file_lock(plan.folder / "tracking.lock"):
            tracking.open_study(plan.runs, plan.study, f"cohort study run {plan.study.name}")


def _with_metric(outcome: Outcome, metric: str) -> Outcome:
    """The same outcome, or a failure where a complete run lacks a finite value of the study's metric."""
    if outcome.state != "complete" or math.isfinite(outcome.metrics.get(metric, math.nan)):
        return outcome
    got = outcome.metrics.get(metric, "nothing")
    reason = f"metric must be a finite number that runs log, '{metric}' was {got}; logged: {', '.join(outcome.metrics)}"
    return Outcome("failed", reason, outcome.summary, outcome.metrics)


@contextmanager
def _pool(
    name: str, plan: Plan, execute: str, workers: int | None, storage: str | None, cluster: Cluster | None
) -> Iterator[WorkerPool | RayPool]:
    """The workers to be, of this machine or of a cluster. The storage's password is in no process's arguments."""
    arguments = [name, "--runs", str(plan.runs), "--parent", "{parent}", "--execute", execute]
    environment = {STORAGE: storage or ""}
    logs = plan.folder / "logs"
    if cluster is None:
        yield WorkerPool("harness.study", arguments, workers or default_workers(), logs, environment)
        return
    pool = RayPool("harness.study", arguments, workers, logs, environment, cluster=cluster)
    with pool.connected():
        if storage is None:
            pool.check_shared(plan.runs)
        yield pool


def _watch(pool: WorkerPool | RayPool, queue: Queue, on_status: Callable[[StudyStatus], None] | None) -> StudyStatus:
    """Keep workers at work and the caller informed until nothing is left to do; what was reached.

    A storage that does not answer stops nothing: the workers go on, and are watched again when it does.
    """
    while True:
        began = time.monotonic()
        try:
            alive, status = pool.collect(queue.num_claims()), queue.status()
        except StorageUnavailable as error:
            if not pool.collect(None) and pool.stopping:
                raise
            log.warning("%s; the workers go on", error)
            time.sleep(MAX_WAIT_SECONDS if not pool.stopping else POLL_SECONDS)
            continue
        unfinished = sum(trial.state not in ENDED for trial in status.trials)
        if on_status is not None:
            on_status(status)
        if not alive and (pool.stopping or not unfinished):
            return queue.status()
        pool.fill(unfinished)
        time.sleep(max(POLL_SECONDS, 9 * (time.monotonic() - began)))  # a large study is watched less often


def _validate(study: StudySpec, plan: Plan, runs: Path, workers: int | None, execute: str) -> None:
    """ValueError for what cannot run; reads no weights and writes nothing."""
    if workers is not None and workers < 1:
        raise SpecError(f"the number of workers must be at least 1, got {workers}")
    tracking.check_runs(runs)
    specs = [plan.spec((arm, study.seeds[0])) for arm in plan.arms]
    splits = {spec.task.model_dump_json(): (spec.task, _splits(spec)) for spec in specs}
    for task, names in splits.values():
        for split in names:
            if not task.prompts(split):
                raise SpecError(f"task '{task.name}' must have problems in its {split} split, it has none")
    cold = {spec.task.model_dump_json(): spec.task for spec in specs if spec.cold_start.steps}
    for task in cold.values():
        if not task.demonstrations():
            raise SpecError(f"task '{task.name}' has no worked solutions; set cold_start.steps to 0")
    if execute == EXECUTE:
        from harness.evaluate import metric_names
        from harness.memory import check_memory
        from harness.model import check_model, resolve_device

        for spec in specs:
            known = [f"{split}/{name}" for split in ("validation", "test") for name in metric_names(spec.evaluation)]
            if study.metric not in known:
                near = nearest(study.metric, known)
                hint = f"did you mean '{near}'? " if near else ""
                raise SpecError(f"metric must be one of an evaluation, got '{study.metric}'; {hint}{', '.join(known)}")
        for device in dict.fromkeys(spec.device for spec in specs):
            resolve_device(device)
        for model in dict.fromkeys(spec.model for spec in specs):
            check_model(model)
        for spec in specs:
            spec.engine.check(spec.sampling_with_limit())
            for reward in spec.rewards.values():
                reward.check()
            if spec.steps:  # without a GPU for each worker all of them share the machine's memory
                trials = len(specs) * len(study.seeds)
                on_gpu = resolve_device(spec.device).type == "cuda"
                check_memory(spec, copies=1 if on_gpu else min(workers or default_workers(), trials))


def _splits(spec: RunSpec) -> Sequence[Split]:
    return ("train", "validation", "test") if spec.steps else ("validation", "test")


def _check_unchanged(study: StudySpec, digest: str, storage: Storage) -> None:
    """SpecError where the study was started with other settings, or with seeds that are missing now."""
    started = storage.read_document()
    if started is None:
        return
    if started["digest"] != digest:
        raise SpecError(
            f"a started study cannot change, for its results would mix: '{study.name}' was started with other settings "
            f"or by another version of Cohort; restore the settings ({storage.document_place} holds those it was "
            f"started with), or choose another name (--name NAME)"
        )
    missing = sorted(set(started["seeds"]) - set(study.seeds))
    if missing:
        raise SpecError(
            f"seeds of a started study may be added, not removed: study '{study.name}' has {started['seeds']}, got "
            f"{study.seeds}; add {missing}, or give this one another name (--name NAME)"
        )


def _open_queue(name: str, runs: Path, url: str | None) -> Queue:
    """The queue of a started study. SpecError for an unknown one."""
    folder = runs / "studies"
    storage = open_storage(folder / name, name, url)
    document = storage.read_document()
    if document is None and url:
        raise SpecError(f"no study '{name}' was started in {storage.place}; start it with: cohort study run {name}")
    if document is None:
        known = sorted(file.parent.name for file in folder.glob("*/study.json"))
        near = nearest(name, known)
        hint = f"did you mean '{near}'? " if near else ""
        raise SpecError(
            f"no study '{name}' was started in '{runs}'; {hint}"
            + (f"there are: {', '.join(known)}" if known else "start one with: cohort study run NAME")
        )
    fields = {key: value for key, value in document.items() if key not in ("format", "digest")}
    return Queue(Plan(parse_study(fields, where=storage.document_place), runs), storage)


def _write_report(name: str, runs: Path) -> None:
    record = tracking.read_study(runs, name)
    if record.trials:
        folder = runs / "studies" / name / "report"
        files = importlib.import_module("reports.render").write_report(record, folder)
        tracking.log_report(runs, name, folder, files.answer)


def _resolve(execute: str) -> Callable[..., Any]:
    module, _, function = execute.partition(":")
    return getattr(importlib.import_module(module), function)


def _stop_on_signal(stop: threading.Event) -> None:
    def handle(number: int, _: object) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)


def _watch_parent(parent: int, stop: threading.Event) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    stop.set()
    time.sleep(ORPHAN_SECONDS)
    os._exit(4)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m harness.study", description="A worker of a started study.")
    parser.add_argument("name")
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--parent", type=int, help="process id of the study's own process")
    parser.add_argument("--execute", default=EXECUTE, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.exit(
        worker_main(
            arguments.name,
            arguments.runs,
            parent=arguments.parent,
            execute=arguments.execute,
            storage=os.environ.get(STORAGE),
        )
    )
