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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from harness import tracking
from harness._checks import check_inputs
from harness._files import file_lock, write_json
from harness._mlflow_address import TRACKING_URI
from harness._queue import ENDED, Claim, Outcome, Plan, Queue, StudyStatus
from harness._ray import Cluster, RayPool
from harness._stop import StopRequest
from harness._storage import Storage, StorageUnavailable, open_storage
from harness._workers import WorkerPool, usable_cores, usable_gpus
from harness.interfaces import RunLogger
from harness.plugins import nearest
from harness.spec import RunSpec, SpecError, StudySpec, parse_study

EXECUTE = "harness.train:train"
ORPHAN_SECONDS = 120.0  # how long a worker whose parent died may take to stop after its current step
POLL_SECONDS = 0.5
COSTS = (
    "train/generated_tokens", "completion/length", "seconds/total", "throughput/tokens_per_second", "memory/peak_bytes"
)  # fmt: skip
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
    _validate(study, runs, workers, execute)
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
    _write_search(queue, runs, parent_run_id)
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
    specs = {arm.label: study.run_spec(arm, study.seeds[0]) for arm in study.checked_arms()}
    not_checked, memory = _not_here(specs.values()), {}
    if not not_checked:
        _validate(study, runs, workers, execute)
        if execute == EXECUTE:
            memory = {arm: judge(spec) for arm, spec in specs.items() if spec.steps}
    elif not any(words.startswith("data") for words in not_checked):
        _validate(study, runs, workers, execute="")  # all but what needs the model and the device
    return {**budget(plan, workers or default_workers()), "memory": memory, "not_checked": not_checked}


def _not_here(specs: Iterable[RunSpec]) -> list[str]:
    """What of the runs this machine lacks, in words: a device, a model, data, an engine."""
    from harness.model import check_model, resolve_device

    missing: dict[str, None] = {}
    tried: set[tuple[str, str]] = set()  # what arms share is asked once: a Hub out of reach takes seconds to say so
    for spec in specs:
        for subject, settings, check in (
            (f"device '{spec.device}'", "", lambda spec=spec: resolve_device(spec.device)),
            (f"data of task '{spec.task.name}'", repr(spec.task), lambda spec=spec: spec.task.prompts("train")),
            (f"engine '{spec.engine.name}'", repr(spec.engine),
             lambda spec=spec: spec.engine.check(spec.sampling_with_limit())),
        ):  # fmt: skip
            if (subject, settings) in tried:
                continue
            tried.add((subject, settings))
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
    stop = StopRequest()
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


def _run_claim(claim: Claim, queue: Queue, plan: Plan, run_trial: Callable[..., Any], stop: StopRequest) -> None:
    """Run a claimed trial to its end, whatever that is, and record it."""
    directory, objectives = plan.directory(claim.key), list(plan.study.objectives())
    ended = tracking.read_result(directory)  # a worker that died just before it could record the end
    if ended is not None and ended["state"] in ("complete", "invalid", "pruned"):
        metrics = {key: float(value) for key, value in ended["metrics"].items()}
        outcome = Outcome(ended["state"], ended["reason"], ended["summary"], metrics)
        _patiently(lambda: queue.finish(claim, _with_metrics(outcome, objectives)), stop)
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
            "cohort.phase": plan.arms[arm].phase,
        },
    )
    judged = _JudgedLog(run_log, plan.study.metric, queue, claim, stop) if queue.prunes else None

    def should_stop() -> bool:
        return stop.is_set() or (judged is not None and judged.is_behind())

    try:
        cache = plan.runs / "cache"
        result = run_trial(plan.spec(claim.key), directory, judged or run_log, cache=cache, should_stop=should_stop)
        outcome = Outcome(result.state, result.reason, dict(result.summary), dict(run_log.latest))
        if outcome.state == "stopped" and judged is not None and judged.reason is not None:
            outcome = replace(outcome, state="pruned", reason=judged.reason)
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome("failed", traceback.format_exception_only(error)[-1].strip()[:500])
    outcome = _with_metrics(outcome, objectives)
    run_log.finish(outcome.state, outcome.reason, outcome.summary)  # pyright: ignore[reportArgumentType]
    _patiently(lambda: queue.finish(claim, outcome), stop)


def _patiently(operation: Callable[[], R], stop: StopRequest) -> R:
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


class _JudgedLog:
    """A run's log that shows the search every validation after training has begun: a `RunLogger` around another."""

    def __init__(self, log: RunLogger, metric: str, queue: Queue, claim: Claim, stop: StopRequest) -> None:
        self._log, self._metric, self._queue, self._claim, self._stop = log, metric, queue, claim, stop
        self._new: tuple[int, float] | None = None
        self.reason: str | None = None  # why the arm is given up
        self.resume, self.progress = log.resume, log.progress
        self.samples, self.per_problem = log.samples, log.per_problem

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._log.metrics(step, values)
        if step and math.isfinite(values.get(self._metric, math.nan)):
            self._new = (step, float(values[self._metric]))

    def is_behind(self) -> bool:
        new, self._new = self._new, None
        if new is not None:
            self.reason = _patiently(lambda: self._queue.report(self._claim.key, *new), self._stop)
        return self.reason is not None


def _with_metrics(outcome: Outcome, objectives: Sequence[str]) -> Outcome:
    """The same outcome, or a failure where a complete run lacks a finite value of what decides the study."""
    lacking = [name for name in objectives if not math.isfinite(outcome.metrics.get(name, math.nan))]
    if outcome.state != "complete" or not lacking:
        return outcome
    metric, got = lacking[0], outcome.metrics.get(lacking[0], "nothing")
    reason = f"metric must be a finite number that runs log, '{metric}' was {got}; logged: {', '.join(outcome.metrics)}"
    return Outcome("failed", reason, outcome.summary, outcome.metrics)


@contextmanager
def _pool(
    name: str, plan: Plan, execute: str, workers: int | None, storage: str | None, cluster: Cluster | None
) -> Iterator[WorkerPool | RayPool]:
    """The workers to be, of this machine or of a cluster. The storage's password is in no process's arguments."""
    arguments = [name, "--runs", str(plan.runs), "--parent", "{parent}", "--execute", execute]
    environment = {STORAGE: storage or "", TRACKING_URI: os.environ.get(TRACKING_URI, "")}
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
        unfinished = sum(trial.state not in ENDED for trial in status.trials) + status.to_come
        if on_status is not None:
            on_status(status)
        if not alive and (pool.stopping or not unfinished):
            return queue.status()
        pool.fill(unfinished)
        time.sleep(max(POLL_SECONDS, 9 * (time.monotonic() - began)))  # a large study is watched less often


def _validate(study: StudySpec, runs: Path, workers: int | None, execute: str) -> None:
    """ValueError for what cannot run; reads no weights and writes nothing."""
    if workers is not None and workers < 1:
        raise SpecError(f"the number of workers must be at least 1, got {workers}")
    specs = [study.run_spec(arm, study.seeds[0]) for arm in study.checked_arms()]
    check_inputs(specs, runs, models=execute == EXECUTE)
    if execute == EXECUTE:
        from harness.memory import check_memory
        from harness.model import resolve_device

        _check_metrics(study, specs)
        for spec in specs:
            if spec.steps:  # without a GPU for each worker all of them share the machine's memory
                trials = len(specs) * len(study.seeds)
                on_gpu = resolve_device(spec.device).type == "cuda"
                check_memory(spec, copies=1 if on_gpu else min(workers or default_workers(), trials))


def _check_metrics(study: StudySpec, specs: Sequence[RunSpec]) -> None:
    """SpecError for a metric that no evaluation gives, or an objective of a search that no run logs."""
    from harness.evaluate import metric_names

    for spec in specs:
        known = [f"{split}/{name}" for split in ("validation", "test") for name in metric_names(spec.evaluation)]
        for metric in study.objectives():
            if metric in known or (metric != study.metric and metric in COSTS):
                continue
            near = nearest(metric, known)
            hint = f"did you mean '{near}'? " if near else ""
            if metric == study.metric:
                raise SpecError(f"metric must be one of an evaluation, got '{metric}'; {hint}{', '.join(known)}")
            raise SpecError(f"search.objectives must be metrics that runs log, got '{metric}'; {hint}"
                            f"{', '.join([*known, *COSTS])}")  # fmt: skip


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


def _write_search(queue: Queue, runs: Path, parent_run_id: str) -> None:
    """Keep what the study's searches have found beside `study.json`, and with the parent run."""
    if queue.plan.study.searches():
        found = queue.search_record()
        write_json(queue.plan.folder / "search.json", found)
        tracking.log_search(runs, parent_run_id, found)


def _write_report(name: str, runs: Path) -> None:
    record = tracking.read_study(runs, name)
    if record.trials:
        folder = runs / "studies" / name / "report"
        files = importlib.import_module("reports.render").write_report(record, folder)
        tracking.log_report(runs, name, folder, files.answer)


def _resolve(execute: str) -> Callable[..., Any]:
    module, _, function = execute.partition(":")
    return getattr(importlib.import_module(module), function)


def _stop_on_signal(stop: StopRequest) -> None:
    def handle(number: int, _: object) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)


def _watch_parent(parent: int, stop: StopRequest) -> None:
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
