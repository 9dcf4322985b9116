"""One worker process of a study: it claims trials, runs each to its end and records it."""

import json
import logging
import math
import os
import pkgutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tenacity import Retrying, retry_if_exception_type, wait_exponential

from ..base.disk import EXIT_STATUS, UNFIT, disk_full
from ..base.inputs import expecting
from ..base.machine import in_group
from ..base.stop import StopRequest, stop_on_signals
from ..data import FINAL, TrialState
from ..plugins import raised_by
from ..record.run import RunLog, drop_checkpoints, final_result
from ..settings.errors import SpecError
from .plan import Key
from .queue import HELD, ClaimedTrial, Queue, TrialOutcome, open_queue
from .storage.base import StorageUnavailable

EXECUTE = "cohort.harness.run.loop:train"
ORPHAN_SECONDS = 120.0  # how long a worker whose parent died may take to stop after its current step
POLL_SECONDS = 0.5
MAX_WAIT_SECONDS = 15.0  # between attempts to reach a storage
SLOW_SECONDS = 0.2  # an answer of a storage that takes longer
UNREACHED_SECONDS = 60.0  # how long a run continues before it asks a storage again that did not answer
STORAGE = "COHORT_STORAGE"  # environment variable with the storage's URL
R = TypeVar("R")
log = logging.getLogger(__name__)


class Unfit(SpecError):
    """This machine cannot run the trials of a study."""


def worker_main(
    name: str,
    runs: Path,
    *,
    parent: int | None = None,
    execute: str = EXECUTE,
    storage: str | None = None,
    patience: float = math.inf,
    checked: bool = False,
) -> int:
    """Run trials of a started study until none is left or a signal asks to stop; the exit status.

    Unless the study was `checked` on this machine: Unfit if it cannot run the trials.

    A worker of a pool that has used a GPU ends after its trial, and the pool starts another. A worker also ends if all
    trials have been taken for `patience` seconds and no more can come.

    `parent` is the id of the study's own process: when that dies, the worker stops after its current step. The worker
    waits for a storage that it cannot reach, also with the result of a trial.
    """
    runs = runs.resolve()
    group = None
    if in_group():  # torch is not for every worker
        from ..devices.group import enter

        group = enter()
        if group is not None and group.rank:
            group.follow(pkgutil.resolve_name(execute))
            return 0
    words = "Stopping: the run finishes its step and writes a checkpoint."  # no one presses keys here
    with stop_on_signals(on_second=lambda number: os._exit(128 + number), words=words, scheduled=True) as stop:
        if parent is not None and group is None:  # a process of a group ends with its agent
            threading.Thread(target=_watch_parent, args=(parent, stop.set), name="parent", daemon=True).start()
        try:
            queue = _patiently(lambda: open_queue(name, runs, storage), stop)
            if (_patiently(queue.storage.read_document, stop) or {}).get("digest") != queue.plan.study.digest():
                raise Unfit(f"study '{name}' was started by another version of Cohort, and the versions differ in "
                            "its settings; install the same on all hosts")  # fmt: skip
            run_trial = pkgutil.resolve_name(execute) if _patiently(queue.unfinished, stop) else None
            if run_trial is not None and execute == EXECUTE and not checked:
                _check(queue)
            idle_since = time.monotonic()
            while run_trial is not None and not stop.is_set():
                claim = _patiently(queue.claim, stop)
                if claim is None:
                    is_patient = time.monotonic() < idle_since + patience
                    if not _patiently(queue.unfinished if is_patient else queue.coming, stop):
                        break
                    stop.wait(2 * POLL_SECONDS)  # the trial of another worker may still come back to the queue
                    continue
                _run_claim(claim, queue, run_trial, stop)
                torch = sys.modules.get("torch")  # torch is never imported for this
                if (parent is not None or group is None) and torch is not None and torch.cuda.is_initialized():
                    break  # what a trial leaves there, a full memory or a broken context, ends with its process
                if group is not None and group.is_broken:
                    group.end()
                idle_since = time.monotonic()
        except Exception as error:
            if disk_full(error, runs) is None:
                raise
            os._exit(EXIT_STATUS)  # at once: an orderly exit would write what it has in its buffers
    return 0


def _check(queue: Queue) -> None:
    """Unfit if this machine cannot run the study's trials."""
    from ..checks.preflight import check_capacity

    specs = [arm.spec for arm in queue.plan.study.checked_arms()]
    try:
        check_capacity(specs, [spec for spec in specs if spec.steps])
    except ValueError as error:
        raise Unfit(" ".join(str(error).split())) from None


def _run_claim(
    claim: ClaimedTrial, queue: Queue, run_trial: Callable[..., Any], stop: StopRequest, told: "_TrialLog | None" = None
) -> None:
    """Run a claimed trial to its end, even a failure, and record it. With the log of a trial that runs, `run_trial` is
    told how it ended."""
    execute = run_trial
    if queue.plan.study.devices > 1 and told is None:
        from ..devices.group import lead

        def execute(spec: Any, directory: Path, log: _TrialLog, **how: Any) -> Any:
            how["when_stuck"] = lambda tell: _run_claim(claim, queue, tell, stop, log)
            return lead(run_trial, spec, directory, log, **how)

    try:
        outcome = _outcome(claim, queue, execute, stop, told)
    except Exception as error:  # most often a file of the trial's folder: the other trials can do without it
        if (full := disk_full(error, queue.plan.runs)) is not None:  # not the arm's fault
            with suppress(OSError):  # without this record the trial counts as lost, which is repeated too
                queue.finish(claim, TrialOutcome("stopped", str(full)))
            raise full from None
        outcome = _failure(error)
    if outcome.state in FINAL:  # its result is on disk; a worker that dies here leaves the trial to one that ends here
        drop_checkpoints(queue.plan.directory(claim.key), queue.plan.spec(claim.key).checkpoints.finished or "nothing")
    _patiently(lambda: queue.finish(claim, outcome), stop)


def _outcome(
    claim: ClaimedTrial, queue: Queue, run_trial: Callable[..., Any], stop: StopRequest, told: "_TrialLog | None"
) -> TrialOutcome:
    """The outcome of a trial: run now, or read if its last worker ended it and died before recording the outcome."""
    plan = queue.plan
    directory, metric = plan.directory(claim.key), plan.study.metric
    if (ended := final_result(directory)) is not None:
        return _with_metric(TrialOutcome(**ended), metric)
    run_log = told or _TrialLog(queue, claim.key, stop)
    try:
        spec, cache = plan.spec(claim.key), plan.runs / "cache"
        with expecting(plan.inputs):
            result = run_trial(spec, directory, run_log, cache=cache, should_stop=run_log.must_stop)
        outcome = TrialOutcome(result.state, result.reason, dict(result.summary), dict(run_log.latest))
        if outcome.state == "stopped":
            summary = {**outcome.summary, "step": run_log.step}
            outcome = replace(outcome, state=run_log.state, reason=run_log.reason, summary=summary)
    except ChildProcessError as error:  # one of the trial's processes: lost, as if this one had died
        raise SystemExit(str(error)) from None
    except Exception as error:
        if disk_full(error, plan.runs) is not None:
            raise
        outcome = _failure(error)
    outcome = _with_metric(outcome, metric)
    try:
        run_log.finish(outcome.state, outcome.reason, outcome.summary)  # pyright: ignore[reportArgumentType]
    except Exception:
        if outcome.state != "failed":  # else what came first says why
            raise
        traceback.print_exc()
    return outcome


def _failure(error: Exception) -> TrialOutcome:
    traceback.print_exception(error)
    words = raised_by(error) or traceback.format_exception_only(error)[-1].strip()
    return TrialOutcome("failed", words[:500])


def _patiently(operation: Callable[[], R], stop: StopRequest) -> R:
    """The operation's result, tried until the storage answers; StorageUnavailable only once `stop` is set."""
    retrying = Retrying(
        retry=retry_if_exception_type(StorageUnavailable),
        wait=wait_exponential(multiplier=POLL_SECONDS, max=MAX_WAIT_SECONDS),
        stop=lambda state: stop.wait(state.upcoming_sleep),  # the wait itself: a request ends it at once
        sleep=lambda seconds: None,
        before_sleep=lambda state: log.warning("%s; trying again", state.outcome and state.outcome.exception()),
        reraise=True,
    )
    return retrying(operation)


class _TrialLog(RunLog):
    """The log of a claimed trial, which also decides whether the trial must stop after its step; `state` and `reason`
    record the stop."""

    def __init__(self, queue: Queue, key: Key, stop: StopRequest) -> None:
        plan = queue.plan
        super().__init__(
            plan.runs, plan.directory(key), plan.spec(key), experiment=plan.study.name, run_name=plan.run_name(key),
            tags=plan.tags(key),
        )  # fmt: skip
        self._queue, self._key, self._stop = queue, key, stop
        clone = plan.clones.get(key[0])
        self._least = 0 if clone is None else clone.left_at(key[1])
        self._validation: tuple[int, float] | None = None  # after training has begun, not yet shown to the search
        self._unreached = -math.inf  # when the storage last gave no answer
        self._rests_until = -math.inf  # after a slow answer, so that a run waits for it at most 5 % of its time
        self.state: TrialState = "stopped"
        self.reason: str | None = None

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        super().metrics(step, values)
        value = float(values.get(self._queue.plan.study.metric, math.nan))
        if step and math.isfinite(value):
            self._validation = (step, value)

    def must_stop(self) -> bool:
        if self.resumed_at < self._least:
            rule = f"a warm clone must start from the checkpoint of step {self._least}"
            fix = "copy it there from the host that made the clone, or clone without `warm`"
            raise ValueError(f"{rule}, which is missing from '{self.directory}': {fix}")
        new, self._validation = self._validation, None
        self.state, self.reason = "stopped", None  # a search that gives the arm up after its last step changes nothing
        if new is not None:
            with suppress(StorageUnavailable):  # asked to stop meanwhile
                self.reason = _patiently(lambda: self._queue.report(self._key, *new), self._stop)
        if self.reason is not None:  # the search gives the arm up
            self.state = "pruned"
        elif self._stop.is_set():
            return True
        elif self._asks(lambda: self._queue.is_held(self._key[0])):
            self.reason = HELD
        else:
            return False
        return True

    def _asks(self, question: Callable[[], bool]) -> bool:
        """The storage's answer; False while it gives none, because a run never waits for it."""
        if time.monotonic() < max(self._unreached + UNREACHED_SECONDS, self._rests_until):
            return False
        asked = time.monotonic()
        try:
            return question()
        except StorageUnavailable as error:
            log.warning("%s; the run continues", error)
            self._unreached = time.monotonic()
            return False
        finally:
            if (waited := time.monotonic() - asked) > SLOW_SECONDS:
                self._rests_until = time.monotonic() + 19 * waited


def _with_metric(outcome: TrialOutcome, metric: str) -> TrialOutcome:
    """The same outcome, or a failure if a complete run lacks a finite value of the metric."""
    if outcome.state != "complete" or math.isfinite(outcome.metrics.get(metric, math.nan)):
        return outcome
    got = outcome.metrics.get(metric, "nothing")
    reason = f"metric must be a finite number that runs log, '{metric}' was {got}; logged: {', '.join(outcome.metrics)}"
    return TrialOutcome("failed", reason, outcome.summary, outcome.metrics)


def _watch_parent(parent: int, ask_to_stop: Callable[[], object]) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    ask_to_stop()
    time.sleep(ORPHAN_SECONDS)
    os._exit(4)


if __name__ == "__main__":
    options = json.loads(sys.argv[1])  # of `worker_main`, from `workers.start_worker`
    options["runs"], devices = Path(options["runs"]), options.pop("devices")
    if not in_group() and devices > 1:
        from ..devices.group import launch

        arguments = (options["parent"], partial(os.kill, os.getpid(), signal.SIGTERM))
        threading.Thread(target=_watch_parent, args=arguments, daemon=True).start()
        sys.exit(launch(["-P", "-m", __spec__.name, *sys.argv[1:]], devices, when_stopped=0))
    try:
        sys.exit(worker_main(**options, storage=os.environ.get(STORAGE)))
    except Unfit as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(UNFIT)
