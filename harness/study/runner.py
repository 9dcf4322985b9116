"""Runs a study: every (arm, seed) exactly once, in worker processes that may die at any moment.

`queue.py` records who runs which trial and how it ended; `workers.py` starts the workers. A study is checked before
it writes anything.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..base.files import write_json
from ..base.inputs import Inputs, check_same, expecting
from ..base.machine import default_workers
from ..checks.preflight import missing_here, run_inputs
from ..mirror.address import TRACKING_URI, remote_uri
from ..mirror.follow import mirrored
from ..record.provenance import write_diff
from ..record.status import StudyStatus
from ..record.study import SEARCH, read_trial, study_document, write_status
from ..settings.study import StudySpec
from .plan import Plan
from .pool import supervise
from .preflight import auto_workers, check_room, check_study, check_unchanged
from .queue import Queue, open_storage
from .worker import EXECUTE, STORAGE
from .workers import WorkerPool


def run_study(
    study: StudySpec,
    runs: Path,
    *,
    workers: int | None,
    command: str,
    on_status: Callable[[StudyStatus], None] | None = None,
    execute: str = EXECUTE,
    storage: str | None = None,
) -> StudyStatus:
    """Run the study's missing trials with `workers` processes; returns the study's progress.

    Ctrl-C (or SIGTERM) lets each worker finish its step and write a checkpoint; a second one stops at once. Bad input
    raises ValueError before anything is written. `execute` names the function that runs a trial (`module:function`,
    called as `harness.run.loop.train`), `storage` the place of the queue (see `open_storage`).
    """
    queue = _reachable_queue(study, runs, storage)
    plan, runs = queue.plan, queue.plan.runs
    inputs = _checked(queue, workers, execute, here=True)

    def show(status: StudyStatus) -> None:
        with suppress(OSError):  # a full disk ends the workers, and they say so
            write_status(plan.folder, status, _failed(plan, status), ended=False)
        if on_status is not None:
            on_status(status)

    options = {"name": study.name, "runs": str(runs), "execute": execute, "checked": True}
    secret = {STORAGE: storage or "", TRACKING_URI: remote_uri() or ""}  # no process has a password in its arguments
    size = workers or default_workers(study.devices)
    pool = WorkerPool(options, size, plan.folder / "logs", secret, study.devices)
    with pool.running():
        _opened(queue, command, inputs)
        with mirrored(runs, plan.folder):
            status = supervise(pool, queue, show)
            if study.search is not None:
                write_json(plan.folder / SEARCH, queue.search_record())
            write_status(plan.folder, status, _failed(plan, status, ended=True), ended=True)
    return status


def start_study(
    study: StudySpec, runs: Path, *, command: str, execute: str = EXECUTE, storage: str | None = None
) -> None:
    """Set the study up like `run_study`, with the same checks, for workers that others start (`work.py`)."""
    queue = _reachable_queue(study, runs, storage)
    _opened(queue, command, _checked(queue, None, execute, here=False))


def _checked(queue: Queue, workers: int | None, execute: str, *, here: bool) -> Inputs:
    """The study's inputs; ValueError for a study that cannot run."""
    study, runs = queue.plan.study, queue.plan.runs
    known = check_unchanged(study, queue.storage)
    with expecting(known):
        check_study(study, runs, workers, execute, here=here)
        if execute == EXECUTE:
            check_room(queue, workers, here=here)
        return {**known, **run_inputs([arm.spec for arm in study.checked_arms()], runs / "cache")}


def _opened(queue: Queue, command: str, inputs: Inputs) -> None:
    """Write the study to the storage and to its folder, and let failed trials be claimed again."""
    plan = queue.plan
    with queue.storage.lock():
        check_same(check_unchanged(plan.study, queue.storage), inputs)
        queue.keep(study_document(plan.study, command, inputs, queue.storage.read_document()))
        write_diff(plan.folder)
        queue.retry_failed()


def _failed(plan: Plan, status: StudyStatus, *, ended: bool = False) -> list[dict[str, Any]]:
    """The trials that failed; once the study has ended, also trials with files here that cannot be read."""
    found = []
    for trial in status.trials:
        reason = trial.reason if trial.state == "failed" else None
        if ended and reason is None and trial.state != "running" and trial.directory.exists():
            try:
                read_trial(trial.directory)
            except ValueError as error:
                reason = str(error)
        if reason is not None or trial.state == "failed":
            own = {"trial": trial.directory.name, "arm": trial.arm, "seed": trial.seed}
            found.append({**own, "factors": dict(plan.arms[trial.arm].levels), "reason": reason or ""})
    return found


def dry_run(
    study: StudySpec, runs: Path, *, workers: int | None, execute: str = EXECUTE, storage: str | None = None
) -> dict[str, Any]:
    """The budget of `run_study`, after the same checks; writes nothing.

    Adds to `estimates.budget`: `memory`, the estimate of each arm that can be estimated here; `disk`, the bytes that
    are still needed and free; `not_checked`, everything that only the machine that runs the study can check (its GPU, a
    model or data that are not here yet); `limits`, the tokens of a completion by model that is not built in. SpecError
    for a study that no machine can run.
    """
    from ..checks.memory import judge, run_sizes
    from .estimates import budget

    queue = _reachable_queue(study, runs, storage)
    runs = queue.plan.runs
    known = check_unchanged(study, queue.storage)
    specs = {arm.label: arm.spec for arm in study.checked_arms()}
    memory, disk = {}, None
    not_checked = missing_here(list(specs.values()))
    if not not_checked:
        with expecting(known):
            workers = auto_workers(study) if workers is None and execute == EXECUTE else workers
            check_study(study, runs, workers, execute)
            if known:
                run_inputs(list(specs.values()), runs / "cache")
            if execute == EXECUTE:
                queue.plan.sizes = {arm: run_sizes(spec) for arm, spec in specs.items()}
                memory = {arm: judge(spec) for arm, spec in specs.items() if spec.steps}
                disk = check_room(queue, workers)
    elif not any(words.startswith("data") for words in not_checked):
        check_study(study, runs, workers, execute="")  # without the checks of the model and the device
    return {
        **budget(queue.plan, queue.status(workers or default_workers(study.devices)), queue.coming()),
        "memory": memory,
        "disk": disk,
        "not_checked": not_checked,
        "limits": {s.model: s.max_tokens for s in specs.values() if s.model != "tiny" and not s.cold_start.steps},
    }


def _reachable_queue(study: StudySpec, runs: Path, storage: str | None) -> Queue:
    """The queue of a study, started or not; StorageUnavailable if its storage does not answer."""
    plan = Plan(study, runs.resolve())
    queue = Queue(plan, open_storage(plan.folder, study.name, storage))
    queue.storage.check()
    return queue
